"""Activations of texts that are being decoded, which a prefix cache needs in order to keep answers for drafts that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.device import to_device
from specdec.types import Fed, Round

ROUNDS = 16  # after so many, a row's activations get memory of their own
Layers = Mapping[int, Tensor]


class Noted(NamedTuple):
    """Activations at the positions from ``first`` to ``end - 1`` of one row. It never changes, so rows may share it.

    Attributes:
        own: parts ``layer -> [n, E]`` in memory of their own, each longer than the next. recent: the parts after them, which keep the memory of whole rounds.
    """

    first: int
    end: int
    own: tuple[Layers, ...]
    recent: tuple[Layers, ...]

    def grown(self, layers: Layers) -> Noted:
        """With activations at the positions from ``end`` on."""
        end, recent = self.end + _length(layers), (*self.recent, layers)
        if len(recent) < ROUNDS:
            return Noted(self.first, end, self.own, recent)
        own = [*self.own, _joined(recent)]
        while len(own) > 1 and _length(own[-1]) >= _length(own[-2]):
            own[-2:] = [_joined(own[-2:])]
        return Noted(self.first, end, tuple(own), ())

    def until(self, end: int) -> Noted | None:
        """What it has below position ``end``."""
        if end <= self.first:
            return None
        layers = {tap: x[: end - self.first] for tap, x in self.layers.items()}
        return Noted(self.first, end, (), (layers,))

    @property
    def layers(self) -> Layers:
        """layer -> ``[end - first, E]``."""
        return _joined((*self.own, *self.recent))

    @property
    def bytes(self) -> int:
        part = (*self.own, *self.recent)[0]
        return (self.end - self.first) * sum(x.nbytes for x in part.values()) // max(_length(part), 1)


def committed(fed: Fed, round: Round) -> np.ndarray:
    """``[F']`` which of the fed positions hold committed text: tokens that were in the context, and accepted nodes."""
    row, node = fed.row.numpy(), fed.node.numpy()
    accepted, path = round.verdict.accepted.numpy(), round.verdict.path.numpy()
    on_path = (path[row] == node[:, None]) & (np.arange(path.shape[1]) < accepted[row, None])
    return np.flatnonzero((node < 0) | on_path.any(1))


def noted(before: Sequence[Noted | None], round: Round, begin: Sequence[int]) -> list[Noted | None]:
    """What is known of each row after a round whose scores have activations.

    Args:
        before: of each row. begin: of each row the first position that is wanted if nothing is known.
    Returns:
        what was fed again in place of what was known; what was fed last alone, where positions before it were left out; ``None``, where some between were.
    """
    fed = round.scores.fed
    assert fed is not None
    index = committed(fed, round)
    row, position = fed.row.numpy()[index], fed.position.numpy()[index]
    wanted = position >= np.array([first if one is None else 0 for one, first in zip(before, begin)])[row]
    order = np.lexsort((position[wanted], row[wanted]))
    index, row, position = (x[wanted][order] for x in (index, row, position))
    at = {
        device: to_device(torch.from_numpy(index), device)
        for device in {x.device for x in fed.layers.values()}
    }
    layers = {tap: x[at[x.device]] for tap, x in fed.layers.items()}
    after = list[Noted | None]()
    for one, (start, end) in zip(before, pairwise(np.searchsorted(row, np.arange(len(before) + 1)).tolist())):
        if start == end:
            after.append(one)
            continue
        first, new = int(position[start]), {tap: x[start:end] for tap, x in layers.items()}
        if (position[start:end] != first + np.arange(end - start)).any():
            after.append(None)
            continue
        if one is not None and first != one.end:
            one = one.until(first) if first < one.end else None
        after.append((one or Noted(first, first, (), ())).grown(new))
    return after


def _length(layers: Layers) -> int:
    return len(next(iter(layers.values())))


def _joined(parts: Sequence[Layers]) -> Layers:
    if len(parts) == 1:
        return parts[0]
    return {tap: torch.cat([part[tap] for part in parts]) for tap in parts[0]}
