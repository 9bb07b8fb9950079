"""A finite automaton over token ids, as a table: the simplest grammar, and the reference of tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.arguments import whole


@dataclass(frozen=True)
class Table:
    """State ``s`` goes to ``rows[s][token]``, and forbids tokens with -1; the first state is 0.

    Args:
        rows: the next states, one row for each state with one entry for each token. An entry of an end token is only compared with -1.
        end_ids: tokens that end a text.
    Raises:
        TypeError: an entry or an end token is no whole number. ValueError: there are no rows, they differ in length, or a state does not exist.
    """

    rows: tuple[tuple[int, ...], ...]
    end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.rows, Iterable) or not all(isinstance(row, Iterable) for row in self.rows):
            raise TypeError(f"rows is {self.rows!r}: give a row of next states for each state")
        rows = tuple(map(tuple, self.rows))
        object.__setattr__(self, "rows", rows)
        ends = self.end_ids if isinstance(self.end_ids, Iterable) else (self.end_ids,)
        object.__setattr__(self, "end_ids", tuple(ends))
        for token in self.end_ids:
            whole("end_ids, of one,", token)
        if not rows or len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"rows has lengths {[len(row) for row in rows]}: give at least one state, and one entry for each token in every row"
            )
        for state, row in enumerate(rows):
            for token, to in enumerate(row):
                whole(f"rows[{state}][{token}]", to)
                if not -1 <= to < len(rows):
                    raise ValueError(
                        f"rows[{state}][{token}] is {to}: give a state from 0 to {len(rows) - 1}, or -1 for a token that is forbidden"
                    )

    @cached_property
    def _allowed(self) -> Tensor:
        return torch.tensor(self.rows) >= 0

    def start(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return self.rows[state][token]

    def allowed(self, state: int) -> Tensor:
        return self._allowed[state]
