"""Training sequences with the target's states on them: read from disk, or computed on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from specdec.training.states import Batch, States, target_states


@runtime_checkable
class Source(Protocol):
    """Sequences and the target's states on them: ``States``, ``Live``, or an object with the same two methods."""

    def __len__(self) -> int: ...

    def take(self, which: Sequence[int]) -> Batch: ...


class Live:
    """Batches whose target states are computed on demand.

    Args:
        target: a transformers causal LM, or ``None`` if only tokens are needed.
        sequences: ``[N, L + 1]`` ids. layers: the layers whose inputs to compute.
    """

    def __init__(self, target: Any, sequences: Tensor, layers: Sequence[int]):
        self.target, self.sequences, self.layers = target, sequences, layers

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, which: Sequence[int]) -> Batch:
        tokens = self.sequences[torch.as_tensor(which)]
        if self.target is None:
            return Batch(tokens, {}, torch.empty(0))
        return target_states(self.target, tokens, self.layers)


@dataclass(frozen=True, eq=False)
class Masked:
    """Sequences of which a draft learns to predict some tokens only, such as the assistant's in chats.

    A block counts up to its first token outside of the mask, and ``forward.Blocks`` begins blocks at tokens of the mask.

    Args:
        data: as ``train`` takes it: ``States``, or sequences ``[N, L + 1]``. mask: ``[N, L + 1]`` bool, the tokens to predict.
    Raises:
        ValueError: a mask of another shape or of other numbers; in ``take``: of another length.
    """

    data: Any
    mask: Tensor

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool or self.mask.dim() != 2 or len(self.mask) != len(self.data):
            raise ValueError(
                f"mask is {list(self.mask.shape)} {self.mask.dtype}: give a bool for each token of the {len(self.data)} sequences, [N, L + 1]"
            )

    def __len__(self) -> int:
        return len(self.data)

    def take(self, which: Sequence[int]) -> Batch:
        """The sequences of these numbers, with their mask; ``data`` is a ``Source`` here, as ``source_of`` makes it."""
        batch: Batch = self.data.take(which)
        mask = self.mask[torch.as_tensor(which)]
        if mask.shape != batch.tokens.shape:
            raise ValueError(
                f"mask has {mask.shape[1]} tokens a sequence, and the data {batch.tokens.shape[1]}: give one for each"
            )
        return batch._replace(mask=mask)


def check_ids(name: str, data: Any, vocab_size: int) -> None:
    """Refuse sequences that are not ids of the target's vocabulary."""
    if isinstance(data, Masked):
        data = data.data
    if data is None or (isinstance(data, Source) and not isinstance(data, Tensor)):
        return
    try:
        ids = torch.as_tensor(data)
    except (TypeError, ValueError) as error:  # texts, or rows of different lengths
        raise ValueError(
            f"{name} must be States, or sequences of equally many ids [N, L + 1]: read texts by the tokenizer, and cut their ids into "
            f"rows ({error})"
        ) from error
    if ids.is_floating_point():
        raise TypeError(f"{name} holds {ids.dtype} numbers: give ids, which are whole numbers")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"{name} has ids from {int(ids.min())} to {int(ids.max())} and the target a vocabulary of {vocab_size}: was it made with "
            "another tokenizer?"
        )


def source_of(data: Any, target: Any, layers: Sequence[int]) -> Any:
    """``data`` as a ``Source`` that has the target's inputs of ``layers``."""
    if isinstance(data, Masked):
        return Masked(source_of(data.data, target, layers), data.mask)
    if isinstance(data, Source) and not isinstance(data, Tensor):
        if target is not None and isinstance(data, States):
            States(data.folder, target)  # raises for another target's states
        held = data.layers if isinstance(data, States) else layers
        lacking = [layer for layer in layers if layer not in held]
        if lacking:
            raise ValueError(
                f"data holds the target's inputs of layers {held}, and the draft needs layer {lacking[0]} too"
            )
        if not len(data):
            raise ValueError("data holds no sequences")
        return data
    sequences = torch.as_tensor(data)
    if sequences.dim() != 2 or not len(sequences):
        raise ValueError("data must be States, or sequences of equally many ids [N, L + 1]")
    return Live(target, sequences, layers)


def order(count: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Indices of the sequences of a step: all sequences once, then again in another order."""
    at = np.arange(step * batch, (step + 1) * batch)
    turns = {
        turn: np.random.default_rng((seed, int(turn))).permutation(count) for turn in np.unique(at // count)
    }
    return np.array([turns[i // count][i % count] for i in at])
