"""Seconds of whole rounds, measured for some batch sizes: plain ones, and such in which all rows use an arm (a draft and a length).

The table reproduces what was measured. A batch whose rows use several arms takes a plain round, what each arm in use costs once, and what each row adds.
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
        draft_once, verify_once: by arm, what a round takes as soon as any row uses the arm, however many do, by size. ``draft`` includes the first, ``verify``
            excludes the second. Several arms in use add theirs, as in measured rounds. Empty: drafting is linear from one row to the whole batch, and
            verification costs nothing once.
    Raises:
        ValueError: sizes that do not ascend, a table of another length, or seconds that are negative or not finite.
    """

    sizes: tuple[int, ...]
    plain: tuple[float, ...]
    draft: tuple[tuple[float, ...], ...]
    verify: tuple[tuple[float, ...], ...]
    read: tuple[float, ...]
    idle: tuple[tuple[tuple[float, ...], ...], ...] = ()
    draft_once: tuple[tuple[float, ...], ...] = ()
    verify_once: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"sizes is {sizes}: give batch sizes from 1 on, ascending")
        parts = {"draft": self.draft, "verify": self.verify} | {
            f"idle[{kind}]": tables for kind, tables in enumerate(self.idle)
        }
        once = {"draft_once": self.draft_once, "verify_once": self.verify_once}
        tables = {f"{name}[{a}]": t for name, part in (parts | once).items() for a, t in enumerate(part)}
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
        if not len(self.draft_once) == len(self.verify_once) in (0, len(self.draft)):
            raise ValueError(
                f"draft_once has {len(self.draft_once)} arms, verify_once {len(self.verify_once)} and draft {len(self.draft)}: give both for every arm, or none"
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
        """Seconds of drafting for all of ``rows`` rows on ``arm``, elementwise; linear between sizes, those of the smallest size below it."""
        return self._by_rows[arm, rows]

    def using(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """``[arms]`` each: seconds that a round of ``batch`` rows takes once if any row uses the arm, and those that each row adds to drafting. A lone row's
        share of verification is all in ``verifying``, since in a round without a proposal it takes nothing."""
        arms = np.arange(len(self.draft))
        whole, rows = self.drafting(arms, batch), max(batch, 1)
        if not self.draft_once:
            each = (whole - self.drafting(arms, 1)) / max(batch - 1, 1)
            return np.maximum(self.drafting(arms, 1) - each, 0.0), each
        once = np.array([np.interp(batch, self.sizes, seconds) for seconds in self.draft_once])
        more = self._verified_once(batch) if batch > 1 else 0.0
        return once + more, np.maximum(whole - once, 0.0) / rows

    def verifying(self, batch: int) -> np.ndarray:
        """``[arms]``: seconds that a row with a proposal adds to a round of ``batch`` rows, beside drafting; of one row, also what is taken once."""
        each = np.array([np.interp(batch, self.sizes, seconds) for seconds in self.verify])
        return each + self._verified_once(batch) if batch == 1 else each

    def _verified_once(self, batch: int) -> np.ndarray:
        parts = self.verify_once or ((0.0,) * len(self.sizes),) * len(self.draft)
        return np.array([np.interp(batch, self.sizes, seconds) for seconds in parts])

    def idling(self, batch: int) -> np.ndarray:
        """``[kinds, arms]``: seconds that a round of ``batch`` rows, all of the kind and on the arm, costs later: nothing for one row."""
        sizes, first = ((1, *self.sizes), (0.0,)) if self.sizes[0] > 1 else (self.sizes, ())
        return np.array([[np.interp(batch, sizes, (*first, *arm)) for arm in kind] for kind in self.idle])

    def plainly(self, batch: int) -> float:
        """Seconds of a plain round."""
        return float(np.interp(batch, self.sizes, self.plain))
