"""The target's activations at committed positions, kept until their rows are drafted and keys and values are computed.

In a pool, other drafts may serve a row for many rounds. Each costs a copy of the activations; when the row is drafted again, only what fits a ring is read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Committed(NamedTuple):
    """Positions of committed text: ``row [T]``, -1 where the row has left, ``position [T]``, and each layer's activations ``[T, E]``."""

    row: np.ndarray
    position: np.ndarray
    activations: list[Tensor]


class Unread(NamedTuple):
    """What the last rounds committed.

    Attributes:
        rounds: the oldest first. number: of the next round. since: ``[B]`` number of each row's first round that is not read.
    """

    rounds: tuple[Committed, ...]
    number: int
    since: np.ndarray

    @staticmethod
    def none(batch: int) -> Unread:
        return Unread((), 0, np.zeros(batch, dtype=np.int64))

    def add(self, round: Committed, kept: int) -> Unread:
        """Adds what a round committed and keeps the last ``kept`` rounds: each commits at least one token of every row, so a ring of ``kept`` positions holds nothing
        older."""
        return Unread((*self.rounds, round)[-kept:], self.number + 1, self.since)

    def take(self, rows: np.ndarray) -> tuple[Committed | None, Unread]:
        """What was not read of ``rows``, the oldest first, and the rest."""
        first = self.number - len(self.rounds)
        wanted = np.full(len(self.since) + 1, self.number)  # the last one is of rows that have left
        wanted[rows] = self.since[rows]
        found = []
        for number in range(max(int(wanted.min()), first), self.number):
            row, position, activations = self.rounds[number - first]
            mine = np.flatnonzero(wanted[row] <= number)
            if len(mine) < len(row):
                at = torch.from_numpy(mine).to(activations[0].device)
                row, position, activations = row[mine], position[mine], [x[at] for x in activations]
            if len(row):
                found.append(Committed(row, position, activations))
        since = self.since.copy()
        since[rows] = self.number
        left = Unread(self.rounds, self.number, since)._pruned()
        if not found:
            return None, left
        every = list(zip(*found))
        layers = [torch.cat(layer) if len(found) > 1 else layer[0] for layer in zip(*every[2])]
        return Committed(np.concatenate(every[0]), np.concatenate(every[1]), layers), left

    def select(self, rows: np.ndarray) -> Unread:
        """Only ``rows``, in this order."""
        place = np.full(len(self.since) + 1, -1)
        place[rows] = np.arange(len(rows))
        left = self._replace(since=self.since[rows])._pruned()
        return left._replace(rounds=tuple(r._replace(row=place[r.row]) for r in left.rounds))

    def join(self, rows: int) -> Unread:
        """With ``rows`` more, of which everything is read."""
        return self._replace(since=np.concatenate([self.since, np.full(rows, self.number)]))

    def _pruned(self) -> Unread:
        """Without the rounds that all rows have read."""
        unread = self.number - int(self.since.min(initial=self.number))
        return self._replace(rounds=self.rounds[len(self.rounds) - min(unread, len(self.rounds)) :])
