"""Committed positions whose keys and values are not computed yet, with the target's activations there, until their rows are drafted.

In a pool other drafts serve a row for rounds on end. A row that is not drafted costs nothing then, and of a row that is drafted again only what a ring holds is read.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Committed(NamedTuple):
    """Positions of committed text: ``row [T]``, -1 where the row has left, ``position [T]``, and each layer's activations ``[T, E]``."""

    row: np.ndarray
    position: np.ndarray
    activations: list[Tensor]


class Unread:
    """What the last ``kept`` rounds committed of each row.

    Args:
        kept: the positions that are read later, at most, counted from the latest: every round commits one or more of each row.
    """

    def __init__(self, batch: int, kept: int):
        self.rounds: deque[Committed] = deque(maxlen=kept)
        self.number = 0  # of the next round
        self.since = np.zeros(batch, dtype=np.int64)  # [B] number of each row's first round that is not read

    def add(self, round: Committed) -> None:
        """Keep what a round committed."""
        self.rounds.append(round)
        self.number += 1

    def take(self, rows: np.ndarray) -> Committed | None:
        """What was not read of ``rows``, the oldest first; from now on it is."""
        first = self.number - len(self.rounds)
        oldest = max(int(self.since[rows].min(initial=self.number)), first)
        wanted = np.full(len(self.since) + 1, self.number)  # the last one is of rows that have left
        wanted[rows] = self.since[rows]
        found = []
        for number in range(oldest, self.number):
            row, position, activations = self.rounds[number - first]
            mine = np.flatnonzero(wanted[row] <= number)
            if len(mine) < len(row):
                at = torch.from_numpy(mine).to(activations[0].device)
                row, position, activations = row[mine], position[mine], [x[at] for x in activations]
            if len(row):
                found.append(Committed(row, position, activations))
        self.since[rows] = self.number
        if not found:
            return None
        every = list(zip(*found))
        layers = [torch.cat(layer) if len(found) > 1 else layer[0] for layer in zip(*every[2])]
        return Committed(np.concatenate(every[0]), np.concatenate(every[1]), layers)

    def select(self, rows: np.ndarray) -> None:
        """Keep only ``rows``, in this order."""
        place = np.full(len(self.since) + 1, -1)
        place[rows] = np.arange(len(rows))
        self.rounds = deque((r._replace(row=place[r.row]) for r in self.rounds), maxlen=self.rounds.maxlen)
        self.since = self.since[rows]

    def join(self, rows: int) -> None:
        """Append ``rows`` of which everything is read."""
        self.since = np.concatenate([self.since, np.full(rows, self.number)])
