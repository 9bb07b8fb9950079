"""Sequences to train on, with what the target makes of them: read from disk, or computed when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from specdec.training.states import Batch, States, target_states


@runtime_checkable
class Source(Protocol):
    """Sequences and what the target makes of them: ``States``, ``Live``, or an object with the same two methods."""

    def __len__(self) -> int: ...

    def take(self, which: Sequence[int]) -> Batch: ...


class Live:
    """Batches whose target states are computed when they are asked for.

    Args:
        target: a transformers causal LM, or ``None`` when only tokens are needed.
        sequences: ``[N, L + 1]`` ids. layers: whose inputs are wanted.
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


def check_ids(name: str, data: Any, vocab_size: int) -> None:
    """Refuse sequences that are no ids of the target's."""
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
    """Data as a ``Source`` that has the target's inputs of ``layers``."""
    if isinstance(data, Source) and not isinstance(data, Tensor):
        if target is not None and isinstance(data, States):
            States(data.folder, target)  # raises when they are another target's
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
    """Numbers of the sequences of a step: without repetition until all were seen, then in another order."""
    at = np.arange(step * batch, (step + 1) * batch)
    turns = {
        turn: np.random.default_rng((seed, int(turn))).permutation(count) for turn in np.unique(at // count)
    }
    return np.array([turns[i // count][i % count] for i in at])
