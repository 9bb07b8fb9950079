"""Seconds of whole rounds, measured for some batch sizes: plain ones, and such in which all rows use an arm (a draft and a length).

The table reproduces what was measured. For a batch whose rows use several arms it adds the drafts' own seconds and one verification.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class RoundTable:
    """Seconds of rounds of B rows.

    Attributes:
        sizes: measured batches, ascending. plain: of a plain round, by size. draft: by arm, of drafting for all rows, by size. verify: by arm, what
            a row that has a proposal adds to a round beside drafting, by size. read: by arm, for each token of a row's text that its draft has not read.
            All zeros for an arm that does not speculate. idle: by kind of request and arm, what a round of a batch that is not refilled costs later, when rows that have
            ended are missing, if all rows are of the kind and use the arm, by size; empty: nothing.
    Raises:
        ValueError: sizes that do not ascend, a table of another length, or seconds that are negative or not finite.
    """

    sizes: tuple[int, ...]
    plain: tuple[float, ...]
    draft: tuple[tuple[float, ...], ...]
    verify: tuple[tuple[float, ...], ...]
    read: tuple[float, ...]
    idle: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"sizes is {sizes}: give batch sizes from 1 on, ascending")
        parts = {"draft": self.draft, "verify": self.verify} | {
            f"idle[{kind}]": tables for kind, tables in enumerate(self.idle)
        }
        tables = {f"{name}[{a}]": t for name, part in parts.items() for a, t in enumerate(part)}
        tables["plain"] = self.plain
        for name, table in tables.items():
            if len(table) != len(sizes):
                raise ValueError(
                    f"{name} has {len(table)} entries and there are {len(sizes)} sizes: give one for each size"
                )
        for name, part in {**parts, "read": self.read}.items():
            if len(part) != len(self.draft):
                raise ValueError(
                    f"{name} has {len(part)} arms and draft has {len(self.draft)}: give seconds for every arm, or no idle"
                )
        flat = [*self.read, *(x for table in tables.values() for x in table)]
        if not (np.isfinite(flat).all() and min(flat) >= 0 and min(self.plain) > 0):
            raise ValueError(
                "seconds are negative or not finite, or a plain round takes none: give measured seconds"
            )

    @cached_property
    def _by_rows(self) -> np.ndarray:
        """``[arms, largest + 1]``: seconds of drafting for 0, 1, ... rows."""
        rows = np.arange(self.sizes[-1] + 1)
        table = np.stack([np.interp(rows, self.sizes, seconds) for seconds in self.draft])
        table[:, 0] = 0.0
        return table

    def drafting(self, arm: np.ndarray, rows: np.ndarray | int) -> np.ndarray:
        """Seconds of drafting for ``rows`` rows on ``arm``, elementwise; linear between sizes, those of the smallest size below it."""
        return self._by_rows[arm, rows]

    def verifying(self, batch: int) -> np.ndarray:
        """``[arms]``: seconds that a row with a proposal adds to a round of ``batch`` rows, beside drafting."""
        return np.array([np.interp(batch, self.sizes, seconds) for seconds in self.verify])

    def idling(self, batch: int) -> np.ndarray:
        """``[kinds, arms]``: seconds that a round of ``batch`` rows, all of the kind and on the arm, costs later: nothing for one row."""
        sizes, first = ((1, *self.sizes), (0.0,)) if self.sizes[0] > 1 else (self.sizes, ())
        return np.array([[np.interp(batch, sizes, (*first, *arm)) for arm in kind] for kind in self.idle])

    def plainly(self, batch: int) -> float:
        """Seconds of a plain round."""
        return float(np.interp(batch, self.sizes, self.plain))
