"""SPIN's selection: epochs that explore, then exploit a maximum-weight matching for 2^k rounds (arXiv 2503.15921, section 4).

No code was published. docs/selectors.md says what the paper leaves open and how it is filled in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import at_least, numbers
from specdec.rng import Rng
from specdec.selectors.matching import assign, checked, scatter, within
from specdec.selectors.opening import Opening
from specdec.selectors.statistics import PULLS, Index, Pending, Pool, Table, goodput, poolable, room, seen
from specdec.types import Context, Feedback

LONGEST = 2**40  # slots of an exploitation phase: a cap against overflow


class Phases(NamedTuple):
    """Where each request is in its own epochs; arrays are indexed by the rows of ``requests``.

    Attributes:
        epoch: ``[R]`` 1, 2, ...; 0 before the first. explore, exploit: ``[R]`` slots left of this epoch. plan: ``[R]`` arm of the
            exploitation phase, -1 before its matching. weight: ``[R, arms]`` the estimates used in that matching.
    """

    requests: Index
    epoch: np.ndarray
    explore: np.ndarray
    exploit: np.ndarray
    plan: np.ndarray
    weight: np.ndarray

    @staticmethod
    def empty(arms: int) -> Phases:
        index = Index.empty()
        zero = np.zeros(index.size, dtype=np.int64)
        return Phases(index, zero, zero, zero, zero, np.zeros((index.size, arms)))

    def enter(self, requests: list[int]) -> tuple[np.ndarray, Phases]:
        """Rows of the requests, and a copy that may be written to."""
        rows, index = self.requests.enter(requests)
        return rows, Phases(index, *(room(a, index.size).copy() for a in self[1:]))

    def leave(self, requests: list[int]) -> Phases:
        rows, index = self.requests.drop(requests)
        arrays = [a.copy() for a in self[1:]]
        for a in arrays:
            a[rows] = 0
        return Phases(index, *arrays)


class State(NamedTuple):
    """``own``: the observations behind estimates; ``shared``: the prior's observations; ``pending``: 1 for exploratory choices."""

    own: Table
    shared: Table
    phases: Phases
    pending: Pending


@dataclass(frozen=True)
class Spin:
    """Epoch k of a request: ``exploration`` slots on random arms, then ``growth^k`` slots on the arm of a matching.

    A slot is one round of the request. The matching maximises the sum of estimated goodputs (tokens over seconds, a ratio of sums; 0
    for an arm never tried) under the capacities, over all exploiting rows. It is computed when a row begins to exploit. Rows that began
    earlier keep the estimates that they had when they began, so they move only if capacities require it. Exploring rows choose first,
    from all arms with room; an exploiting row that they displace gets its next best arm for that slot. A row without any
    observation at the end of its exploration continues to explore.

    With an ``opening``, which the paper has no use for (each of its drafts has a device of its own), the matching gives way to the arms that take the
    least seconds for all exploiting rows together, and rows that began earlier may move when another one begins.

    Attributes:
        exploration: slots per epoch, at least 1. growth: at least 1; 2 in the paper.
        pool: which rows share statistics: None (each request has its own, as in the paper), "global", or a function from a context
            to a hashable key per row. With a ``prior``: which rows share the prior (None: all).
        prior: the weight of an arm's pooled estimate, in rounds of the request's own; 0 (the paper): no prior.
        warm: number of pooled observations of every arm from which on an epoch begins without exploration. None (the paper):
            always explore. Needs a ``pool`` or a ``prior``.
        learn: "exploration" (the paper: estimates use exploration slots) or "always" (all slots).
        opening: what an arm in use costs a batch on one device, whatever its rows; None (the paper): nothing.
    """

    exploration: int = 5
    growth: float = 2.0
    pool: Pool = None
    prior: float = 0.0
    warm: int | None = None
    learn: Literal["exploration", "always"] = "exploration"
    opening: Opening | None = None

    def __post_init__(self) -> None:
        poolable(self.pool)
        remedy = "give at least one slot per epoch (to skip exploration, set warm)"
        at_least(1, "exploration", self.exploration, remedy)
        numbers(self, "growth", "prior")
        if self.growth < 1:
            raise ValueError(f"growth is {self.growth}: exploitation phases must not shrink, give at least 1")
        if self.prior < 0:
            raise ValueError(f"prior is {self.prior}: give a number of rounds, 0 for none")
        if self.warm is not None and self.pool is None and not self.prior:
            raise ValueError("warm counts pooled observations: give a pool, or a prior above 0")
        if self.learn not in ("exploration", "always"):
            raise ValueError(f'learn is {self.learn!r}: give "exploration" or "always"')

    @property
    def joint(self) -> bool:
        """Whether a row's arm depends on what others have seen (``SelectorInfo.joint``)."""
        return self.pool is not None or self.prior > 0 or self.opening is not None

    def init(self, arms: int) -> State:
        table = Table.empty(arms)
        return State(table, table, Phases.empty(arms), Pending({}))

    def select(
        self, state: State, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, State]:
        B, arms = context.batch, state.own.arms
        free = checked(capacities, arms, B)
        requests = context.request.tolist()
        own, own_row, shared, shared_row = self._seat(state, context)
        r, phases = state.phases.enter(requests)

        begin = (phases.explore[r] == 0) & (phases.exploit[r] == 0)
        if begin.any():
            new = r[begin]
            phases.epoch[new] += 1
            phases.plan[new] = -1
            phases.exploit[new] = np.minimum(self.growth ** np.minimum(phases.epoch[new], 256), LONGEST)
            phases.explore[new] = self.exploration
            if self.warm is not None:
                pooled = shared.sums[shared_row[begin]] if self.prior else own.sums[own_row[begin]]
                phases.explore[new[pooled[..., PULLS].min(1) >= self.warm]] = 0
        explore = phases.explore[r] > 0
        phases.explore[r[explore]] -= 1

        starts = ~explore & (phases.plan[r] < 0)
        if starts.any():
            sums = self._sums(own.sums[own_row], shared.sums[shared_row])
            phases.weight[r[starts]] = goodput(sums)[starts]
            blind = starts & ~phases.weight[r].any(1)
            explore, starts = explore | blind, starts & ~blind
        go = ~explore
        phases.exploit[r[go]] -= 1
        if starts.any():
            opening = self.opening
            plan = assign(phases.weight[r[go]], free) if opening is None else opening.assign(sums[go], free)
            phases.plan[r[go]] = plan

        arm, prob = np.zeros(B, dtype=np.int64), np.ones(B)
        if explore.any():
            those = explore.nonzero()[0]
            at = torch.from_numpy(those)
            arm[those], prob[those] = scatter(free, rng.select(at), context.length[at])
            free = free - np.bincount(arm[those], minlength=arms)
        if go.any():
            arm[go] = within(phases.plan[r[go]], phases.weight[r[go]], free)
        pending = state.pending
        if self.learn == "exploration":
            pending = pending.remember(requests, arm, explore.astype(float))
        return (torch.from_numpy(arm), torch.from_numpy(prob).float(), State(own, shared, phases, pending))

    def update(self, state: State, feedback: Feedback) -> State:
        arm, columns = seen(feedback, state.own.arms, seconds=True)
        own, shared, pending, why = state.own, state.shared, state.pending, None
        if self.learn == "exploration":
            why, pending = pending.recall(feedback.request.tolist(), arm)
            if not (why == 1).any():
                return state._replace(pending=pending)

        def counted(rows: np.ndarray) -> np.ndarray:
            return rows if why is None else np.where(why == 1, rows, -1)

        own = own.add(counted(own.rows(self._pool, feedback)), arm, columns)
        if self.prior:
            shared = shared.add(counted(shared.rows(self._prior, feedback)), arm, columns)
        return State(own, shared, state.phases, pending)

    def leave(self, state: State, requests: Tensor) -> State:
        gone = requests.tolist()
        return State(
            state.own.leave(self._pool, gone),
            state.shared.leave(self._prior, gone),
            state.phases.leave(gone),
            state.pending.leave(gone),
        )

    @property
    def _pool(self) -> Pool:
        """The pool of a request's own observations."""
        return None if self.prior else self.pool

    @property
    def _prior(self) -> Pool:
        return "global" if self.pool is None else self.pool

    def _seat(self, state: State, context: Context) -> tuple[Table, np.ndarray, Table, np.ndarray]:
        own_row, own = state.own.seat(self._pool, context)
        if not self.prior:
            return own, own_row, state.shared, np.zeros_like(own_row)
        shared_row, shared = state.shared.seat(self._prior, context)
        return own, own_row, shared, shared_row

    def _sums(self, own: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """``[B, arms, 4]``: the pooled sums, scaled down to ``prior`` pulls, are added to the request's own."""
        if self.prior:
            pulls = shared[..., PULLS : PULLS + 1]
            own = own + shared * np.minimum(1, self.prior / np.maximum(pulls, 1))
        return own
