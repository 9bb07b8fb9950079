"""What a head reads of its target: the activations at committed positions, the token there, and the token after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.noted import committed
from specdec.kernels.device import to_device
from specdec.types import Round

Tap = int | Literal["final"]
"""A layer of the target: 0 is the input of the first block, ``l`` the output of block ``l`` counted from 1 (for the last block before the
final norm), and ``"final"`` the output of the final norm, which the target's output matrix reads."""


class Features(NamedTuple):
    """Committed positions and the target's activations there.

    Attributes:
        layers: tap -> ``[..., E]``. tokens: ``[...]`` the token at each position. following: ``[...]`` the token after it, which is
            committed, too.
    """

    layers: Mapping[Tap, Tensor]
    tokens: Tensor
    following: Tensor

    def at(self, at: Any) -> Features:
        """The features of the positions with index ``at``."""
        return Features({tap: x[at] for tap, x in self.layers.items()}, self.tokens[at], self.following[at])


class Fresh(NamedTuple):
    """Positions that a round committed and that had not been read before, row after row, each row's in order.

    Attributes:
        fed: ``[F]`` their index in ``Scores.fed``. row, position: ``[F]``, on the host. tokens, following: as in ``Features``.
    """

    fed: np.ndarray
    row: np.ndarray
    position: np.ndarray
    tokens: np.ndarray
    following: np.ndarray

    def features(self, layers: Mapping[Tap, Tensor], device: torch.device, dtype: torch.dtype) -> Features:
        """Their features on ``device``; ``layers``: tap -> ``[F, E]`` at the fed positions ``fed``."""
        tokens, following = (to_device(torch.from_numpy(t), device) for t in (self.tokens, self.following))
        of = {tap: x.to(device, dtype) for tap, x in layers.items()}
        if (self.fed < 0).any():
            there = to_device(torch.from_numpy(self.fed >= 0), device)[:, None]
            of = {tap: x.where(there, 0) for tap, x in of.items()}
        return Features(of, tokens, following)

    def led(self) -> Fresh:
        """These, one position higher, and before each text's first position another: it has no activations (``fed`` is -1), and the first token follows it."""
        first = np.flatnonzero(self.position == 0)
        made = [np.insert(x, first, x[first]) for x in self]
        at = first + np.arange(len(first))
        fed, row, position, tokens, following = made
        fed[at], following[at], position = -1, tokens[at], position + 1
        position[at] = 0
        return Fresh(fed, row, position, tokens, following)


def fresh(round: Round, known: Tensor) -> Fresh:
    """The positions that a round has newly committed, of those rows that go on after it.

    Args:
        known: ``[B]`` how many positions of each row were read before. A position counts once the token after it is committed.
    Raises:
        ValueError: the round has no activations, or those of some positions were left out.
    """
    fed = round.scores.fed
    if fed is None:
        raise ValueError(
            "the round has no activations: the executor must score with the taps that DraftInfo declares"
        )
    length, read = round.context.length.numpy(), known.numpy()
    end = length + round.committed.numpy() - 1  # the last committed token has no activations
    index = committed(fed, round)
    row, position = fed.row.numpy()[index], fed.position.numpy()[index]
    on = ~round.finished.numpy()
    new = (position >= read[row]) & (position < end[row]) & on[row]
    index, row, position = index[new], row[new], position[new]
    lacking = np.flatnonzero((np.bincount(row, minlength=len(read)) != end - read) & on)
    if len(lacking):
        b = int(lacking[0])
        raise ValueError(
            f"the target returned activations of {int((row == b).sum())} of the {int(end[b] - read[b])} new positions of row {b}: a head "
            "must observe every round, and the target must score its whole prompt"
        )
    text, more = round.context.tokens.numpy(), round.verdict.tokens.numpy()

    def token(at: np.ndarray) -> np.ndarray:
        past = np.minimum(at, text.shape[1] - 1)
        ahead = np.clip(at - length[row], 0, more.shape[1] - 1)
        return np.where(at < length[row], text[row, past], more[row, ahead])

    return Fresh(index, row, position, token(position), token(position + 1))
