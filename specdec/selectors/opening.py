"""Arms for the rows of one batch, in which every arm in use has costs that its rows share: the least seconds for all rows together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from specdec.arguments import at_least
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

    def assign(self, sums: np.ndarray, capacities: np.ndarray) -> np.ndarray:
        """The arms of the set with the least seconds until every row has a token.

        In a set of arms, a row takes the one with the least seconds of its own: its charge for ``pulls / tokens`` rounds, without the share of
        ``seconds``. An arm's ``seconds`` are paid for the rounds of its slowest row. Where capacities bind, rows are matched to the arms with the least seconds
        of their own, as if each paid for an arm outside of the set alone.

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
        tokens = np.maximum(sums[..., TOKENS], 1e-300)
        rounds = sums[..., PULLS] / tokens
        own = np.maximum(sums[..., SECONDS] - sums[..., PULLS] * fixed / self.batch, 0.0) / tokens
        known = sums[..., TOKENS] > 0  # an arm never tried is the worst
        own = np.where(known, own, 1 + 1e3 * own.max(initial=0.0, where=known))
        sets = np.array([one for one in product((False, True), repeat=arms) if any(one)])[:, None]
        closed = np.where(sets, own, np.inf)  # [sets, B, arms]
        chosen = closed.argmin(2)[..., None] == np.arange(arms)
        used = np.where(chosen, rounds, 0.0).max(1, initial=0.0)
        total = closed.min(2).sum(1) + used @ fixed
        best = sets[total.argmin()]
        return assign(-np.where(best, own, own + fixed * rounds), room)
