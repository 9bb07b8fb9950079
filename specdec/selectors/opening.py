"""Arms for the rows of one batch, in which every arm in use has costs that its rows share: the least seconds for all rows together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from specdec.arguments import at_least
from specdec.selectors.joint import together
from specdec.selectors.matching import assign, checked
from specdec.selectors.statistics import PULLS, SECONDS, TOKENS

MOST = 10  # arms, all sets of which are compared


@dataclass(frozen=True)
class Opening:
    """By how much an arm that is in use makes a batch's round longer, however few rows have it.

    Attributes:
        seconds: by arm, in the unit of the feedback's seconds. batch: rows of the batches for which a row's round is charged; an equal share of
            these seconds is part of the charge (``cost.ArmCosts``, ``lab.selection.RoundTimes.alone``).
    Raises:
        ValueError: no arm or more than 10, negative seconds, or a batch below 1.
    """

    seconds: tuple[float, ...]
    batch: int

    def __post_init__(self) -> None:
        at_least(1, "batch", self.batch, "give the rows of the batches for which rounds are charged")
        if not 1 <= len(self.seconds) <= MOST or min(self.seconds) < 0:
            raise ValueError(
                f"seconds is {self.seconds}: give 1 to {MOST} arms (all sets of them are compared), none with negative seconds"
            )

    @cached_property
    def _sets(self) -> np.ndarray:
        """``[sets, arms]``: all that may be in use."""
        return np.array([one for one in product((False, True), repeat=len(self.seconds)) if any(one)])

    def assign(self, sums: np.ndarray, capacities: np.ndarray) -> np.ndarray:
        """The arms with the least seconds for a token of every row (``joint.together``), over all sets of arms in use.

        A row pays its charge without the share of its arm's ``seconds`` in it, and an equal share of the ``seconds`` of all arms in use. Where capacities
        bind, rows are matched to arms by what they pay, with all of the ``seconds`` of an arm outside of the best set.

        Args:
            sums: ``[B, arms, 4]`` observations (``statistics.Table``). capacities: ``[arms]``, their sum at least B.
        Returns:
            ``[B]`` int64.
        Raises:
            ValueError: sums of another number of arms, or capacities that serve fewer than B rows.
        """
        B, arms = sums.shape[:2]
        if arms != len(self.seconds):
            raise ValueError(f"opening has seconds of {len(self.seconds)} arms: give those of all {arms}")
        room, fixed = checked(capacities, arms, B), np.array(self.seconds)
        if not B:
            return np.zeros(0, dtype=np.int64)
        known, pulls = sums[..., TOKENS] > 0, np.maximum(sums[..., PULLS], 1)
        # An arm never tried is the worst.
        slow = np.where(known, pulls / np.maximum(sums[..., TOKENS], 1e-9), 1e3)
        own = np.maximum(sums[..., SECONDS] / pulls - fixed / self.batch, 1e-9 * sums[..., SECONDS].max())
        own = np.where(known, own, own.max())
        sets = self._sets
        _, best = together(slow, np.where(sets[:, None], own, np.inf), sets @ fixed)
        if (np.bincount(best, minlength=arms) <= room).all():
            return best
        closed = ~np.isin(np.arange(arms), best)
        return assign(-slow * (own + fixed[~closed].sum() / B + closed * fixed), room)
