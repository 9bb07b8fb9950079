"""Several drafts in one decoder: each row is drafted by the arm that was chosen for it (SPIN, arXiv 2503.15921, section 4).

All drafts keep a state for all rows. Drafts that can wait read a row's text when the row is first assigned to them: in ``propose``,
or earlier in ``prepare``, while another draft still drafts for the row. A model's cache is made when a row first uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.capabilities import DraftInfo, DraftPart
from specdec.drafts.one_model import OneModel, Unused, late
from specdec.kernels.device import DeferredChecks, to_device
from specdec.protocols import Draft, LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


class Teams(NamedTuple):
    """The rows ``[R]`` of each draft in use, and for each arm its share of the rows of its draft."""

    rows: dict[int, Tensor]
    share: tuple[float, ...]


class PoolState(NamedTuple):
    """``states`` of all drafts, ``arm [B]`` and its ``teams``, the ``proposals`` of this round by draft, and the ``seconds`` that each arm spent drafting."""

    states: tuple[Any, ...]
    arm: Tensor
    teams: Teams
    proposals: tuple[Proposal | None, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Pool:
    """Drafts behind arms. ``arms[a]`` is the number of arm a's draft (-1: none), and ``members[a]`` its member where that draft is ``Stacked``.

    Without ``assign`` every row is on arm 0.

    Args:
        timed: the seconds of arms are asked for, so each draft must have finished on its device before the next one begins.
    Raises:
        ValueError: there are no arms, or an arm names a draft that does not exist.
    """

    drafts: tuple[Draft[Any], ...]
    arms: tuple[int, ...] = (0,)
    members: tuple[int, ...] | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("arms is empty: give at least one arm")
        if any(not -1 <= d < len(self.drafts) for d in self.arms):
            raise ValueError(
                f"arms are drafts {self.arms} of {len(self.drafts)}: give numbers of drafts, or -1 for 'do not speculate'"
            )

    @staticmethod
    def example(model: LanguageModel) -> Pool:
        """A model and an n-gram draft, and an arm without a draft (for the contract tests)."""
        from specdec.drafts.model import Model
        from specdec.drafts.ngram import NGram

        return Pool((Model(model), NGram()), (0, 1, -1))

    @cached_property
    def parts(self) -> tuple[DraftPart, ...]:
        """The drafts with their capabilities."""
        return tuple(map(DraftPart.of, self.drafts))

    @cached_property
    def late(self) -> tuple[OneModel | None, ...]:
        """The drafts whose states are made when a row first uses them."""
        return tuple(map(late, self.drafts))

    @cached_property
    def info(self) -> DraftInfo:
        infos = [part.info for part in self.parts]
        return DraftInfo(
            "pool",
            trees=any(i.trees for i in infos),
            nodes=self._nodes,
            taps=tuple(sorted({tap for i in infos for tap in i.taps})),
            revocable=all(i.revocable for i in infos),
            drafts=self.drafts,
        )

    def _nodes(self, length: int) -> int:
        return max((part.info.nodes(length) for part in self.parts), default=0)

    def bind(self, target: LanguageModel, sampling: Sampling) -> Pool:
        return replace(self, drafts=tuple(part.bound(target, sampling) for part in self.parts))

    def init(self, context: Context, target_cache: Any) -> PoolState:
        unused = Unused(context.batch, context.tokens.shape[1])
        self._check_room(self.late, unused)
        states = tuple(
            unused
            if late is not None
            else part.draft.init(context, target_cache)
            if part.waits is None
            else part.waits.empty(context)
            for part, late in zip(self.parts, self.late)
        )
        arm = torch.zeros(context.batch, dtype=torch.long)
        return PoolState(states, arm, self._teams(arm), (None,) * len(states), (0.0,) * len(self.arms))

    def _check_room(self, drafts: Iterable[OneModel | None], unused: Unused) -> None:
        """Raise MemoryError, or RuntimeError, for late drafts whose caches could not all be made."""
        taken: list[Any] = []
        for draft in drafts:
            if draft is not None:
                taken = draft.check_room(unused, taken)

    def _made(self, d: int, state: Any) -> Any:
        """The state of draft ``d``, which is about to be used."""
        draft = self.late[d]
        return draft.made(state) if draft is not None and isinstance(state, Unused) else state

    def assign(self, state: PoolState, arm: Tensor) -> PoolState:
        """Row b is drafted by ``arm[b]`` from now on."""
        if arm is state.arm:
            return state
        state = self._assigned(state, arm, torch.ones_like(arm, dtype=torch.bool))
        return state._replace(arm=arm, teams=self._teams(arm))

    def _assigned(self, state: PoolState, arm: Tensor, here: Tensor) -> PoolState:
        """Tell stacked drafts which member drafts each row of ``here [B]``."""
        if self.members is None:
            return state
        draft, member = torch.tensor(self.arms)[arm], torch.tensor(self.members)[arm]
        states = tuple(
            s if p.stacks is None else p.stacks.assign(s, torch.where(here & (draft == i), member, -1))
            for i, (p, s) in enumerate(zip(self.parts, state.states))
        )
        return state._replace(states=states)

    def prepare(self, state: PoolState, context: Context, arm: Tensor) -> PoolState:
        """Let the drafts of ``arm [B]`` read the unread tokens of their rows.

        A row that is being drafted and only changes its member of a stack is read into a separate cache, because both members would write
        to the same one.
        """
        arms = torch.tensor(self.arms)
        busy = torch.tensor([p is not None for p in state.proposals] + [False])[arms[state.arm]]
        stays = busy & (arms[arm] == arms[state.arm]) & (arm != state.arm)
        state = self._assigned(state, arm, ~stays)
        states = list(state.states)
        for d, rows in self._teams(arm).rows.items():
            waits, stacks = self.parts[d].waits, self.parts[d].stacks
            ahead = rows[:0] if stacks is None else rows[stays[rows]]
            if len(ahead):
                rows = rows[~stays[rows]]
            if waits is not None and len(rows):
                states[d] = waits.prepare(self._made(d, states[d]), context, rows)
            if stacks is not None and len(ahead):
                member = torch.tensor(self.members)[arm[ahead]]
                states[d] = stacks.read_ahead(states[d], context, ahead, member)
        return state._replace(states=tuple(states))

    def _teams(self, arm: Tensor) -> Teams:
        arms = arm.tolist()
        rows: dict[int, list[int]] = {}
        for b, a in enumerate(arms):
            if (d := self.arms[a]) >= 0:
                rows.setdefault(d, []).append(b)
        share = (arms.count(a) / len(rows[d]) if d in rows else 0.0 for a, d in enumerate(self.arms))
        return Teams({d: torch.tensor(mine) for d, mine in sorted(rows.items())}, tuple(share))

    def propose(
        self, state: PoolState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, PoolState]:
        states, teams = list(state.states), state.teams
        made: list[Proposal | None] = [None] * len(states)
        if not budget.numpy().any():
            seconds = (0.0,) * len(self.arms)
            return Proposal.none(context.batch), state._replace(proposals=tuple(made), seconds=seconds)
        spent = [0.0] * len(self.drafts)
        for d, rows in teams.rows.items():
            mine = budget
            if len(rows) < context.batch:
                mine = torch.zeros_like(budget).index_copy_(0, rows, budget[rows])
            if mine.numpy().any():
                ready, began = self._made(d, states[d]), perf_counter()
                with DeferredChecks() as later:
                    drafted, states[d] = self.parts[d].propose(ready, context, mine, rng)
                made[d] = drafted
                later.settle(*([drafted.tokens] if self.timed else []))
                spent[d] = perf_counter() - began
        seconds = tuple(spent[d] * share if share else 0.0 for d, share in zip(self.arms, teams.share))
        parts = [(p, rows) for d, rows in teams.rows.items() if (p := made[d]) is not None]
        proposal = merged(parts, context.batch)
        return proposal, PoolState(tuple(states), state.arm, teams, tuple(made), seconds)

    def forget(self, state: PoolState) -> PoolState:
        return state._replace(proposals=(None,) * len(state.proposals))

    def spent(self, state: PoolState) -> tuple[float, ...]:
        return state.seconds

    def observe(self, state: PoolState, round: Round) -> PoolState:
        """Every draft observes the round with its own proposal, which is empty in rows of other drafts.

        What a draft observes of a row must not depend on the arms of other rows.
        """

        def own(proposal: Proposal | None) -> Round:
            if proposal is round.proposal or (proposal is None and not round.proposal.nodes):
                return round
            return replace(round, proposal=proposal or Proposal.none(round.context.batch))

        states = tuple(
            s if isinstance(s, Unused) else d.observe(s, own(p))
            for d, s, p in zip(self.drafts, state.states, state.proposals)
        )
        return state._replace(states=states, proposals=(None,) * len(states))

    def select(self, state: PoolState, rows: Tensor) -> PoolState:
        states = tuple(
            s._replace(batch=len(rows)) if isinstance(s, Unused) else d.select(s, rows)
            for d, s in zip(self.drafts, state.states)
        )
        arm = state.arm[rows]
        return state._replace(states=states, arm=arm, teams=self._teams(arm), proposals=(None,) * len(states))

    def follow(self, state: PoolState, target_cache: Any) -> PoolState:
        states = tuple(
            s if isinstance(s, Unused) else part.follow(s, target_cache)
            for part, s in zip(self.parts, state.states)
        )
        return state._replace(states=states)

    def join(self, state: PoolState, other: PoolState) -> PoolState:
        states = tuple(self._joined(d, *both) for d, both in enumerate(zip(state.states, other.states)))
        arm = torch.cat([state.arm, other.arm])
        return state._replace(states=states, arm=arm, teams=self._teams(arm), proposals=(None,) * len(states))

    def _joined(self, d: int, mine: Any, theirs: Any) -> Any:
        if isinstance(mine, Unused) and isinstance(theirs, Unused):
            both = Unused(mine.batch + theirs.batch, max(mine.width, theirs.width))
            self._check_room([self.late[d]], both)
            return both
        joins: Any = self.parts[d].joins  # ``serving.check``
        return joins.join(self._made(d, mine), self._made(d, theirs))


def merged(parts: Sequence[tuple[Proposal, Tensor]], batch: int) -> Proposal:
    """One proposal of ``batch`` rows from ``(proposal, rows)`` pairs: each proposal has ``batch`` rows, of which only ``rows`` are used.

    Point masses among sampled nodes become distributions with all mass on one token.
    """
    if not parts:
        return Proposal.none(batch)
    if len(parts) == 1:
        return parts[0][0]
    device = next((p.tokens.device for p, _ in parts if not p.tokens.is_cpu), parts[0][0].tokens.device)
    N = max(p.nodes for p, _ in parts)
    Q = max(p.nodes if p.probs is None else p.probs.shape[1] for p, _ in parts)
    tokens = torch.zeros(batch, N, dtype=torch.long, device=device)
    parents = torch.arange(-1, N - 1).repeat(batch, 1)
    size = torch.zeros(batch, dtype=torch.long)
    distributions = [p.probs for p, _ in parts if p.probs is not None]
    # The widest dtype, so that no distribution is rounded after its tokens were drawn.
    kind = max(
        (distribution.dtype for distribution in distributions),
        key=lambda dtype: dtype.itemsize,
        default=torch.float32,
    )
    probs = (
        None
        if not distributions
        else torch.zeros(batch, Q, distributions[0].shape[-1], dtype=kind, device=device)
    )
    source = torch.arange(N).repeat(batch, 1) if any(p.source is not None for p, _ in parts) else None
    for p, rows in parts:
        here, n = to_device(rows, device), p.nodes
        if n == 0:
            continue
        at = to_device(rows, p.tokens.device)
        tokens[here, :n] = p.tokens[at].to(device)
        parents[rows, :n] = p.parents[rows]
        size[rows] = p.size[rows]
        if probs is not None:
            if p.probs is None:
                there = to_device(torch.arange(n) < size[rows, None], device)  # other tokens may be anything
                one = torch.where(there, tokens[here, :n], 0)
                probs[here[:, None], torch.arange(n, device=device), one] = 1
            else:
                probs[:, : p.probs.shape[1]].index_copy_(0, here, p.probs.index_select(0, at).to(probs))
        if source is not None:
            source[rows, :n] = p.sources()[rows]
    if probs is None:
        return Proposal(tokens, parents, size)
    declared = any(p.provenance == "declared" for p, _ in parts)
    return Proposal(tokens, parents, size, probs, "declared" if declared else "sampled", source)
