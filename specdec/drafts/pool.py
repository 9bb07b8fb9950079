"""Several drafts at once: every row is drafted by the arm that was chosen for it (SPIN, arXiv 2503.15921, section 4).

All drafts keep a state for all rows. Drafts that can wait read a row's text when it is first given to them: at once in ``propose``,
or beforehand in ``prepare``, while another draft still works for the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.device import DeferredChecks, to_device
from specdec.protocols import Draft, LanguageModel, proposed
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


class PoolState(NamedTuple):
    """``states`` of all drafts, ``arm [B]``, the ``proposals`` of this round by draft, and the ``seconds`` that each arm drafted."""

    states: tuple[Any, ...]
    arm: Tensor
    proposals: tuple[Proposal | None, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Pool:
    """Drafts behind arms; ``arms[a]`` is the number of arm a's draft, -1 for none, and ``members[a]`` its member of a ``Stacked`` one.

    Without ``assign`` every row is on arm 0.

    Raises:
        ValueError: no drafts, or an arm of a draft that is not there.
    """

    drafts: tuple[Draft[Any], ...]
    arms: tuple[int, ...] = (0,)
    members: tuple[int, ...] | None = None
    name = "pool"

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("arms is empty: give at least one arm")
        if any(not -1 <= d < len(self.drafts) for d in self.arms):
            raise ValueError(
                f"arms are drafts {self.arms} of {len(self.drafts)}: give numbers of drafts, or -1 for 'do not speculate'"
            )

    @staticmethod
    def example(model: LanguageModel) -> Pool:
        """Two drafts, the first of which works (for the contract tests)."""
        from specdec.drafts.model import Model
        from specdec.drafts.ngram import NGram

        return Pool((Model(model), NGram()), (0, 1, -1))

    @property
    def trees(self) -> bool:
        return any(getattr(d, "trees", False) for d in self.drafts)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted({tap for d in self.drafts for tap in getattr(d, "taps", ())}))

    @property
    def revocable(self) -> bool:
        return all(getattr(d, "revocable", False) for d in self.drafts)

    def nodes(self, length: int) -> int:
        """The most nodes of any draft."""
        return max((getattr(d, "nodes", lambda n: n)(length) for d in self.drafts), default=0)

    def bind(self, target: LanguageModel, sampling: Sampling) -> Pool:
        return replace(
            self, drafts=tuple(d.bind(target, sampling) if hasattr(d, "bind") else d for d in self.drafts)
        )

    def init(self, context: Context, target_cache: Any) -> PoolState:
        states = tuple(
            d.empty(context) if hasattr(d, "empty") else d.init(context, target_cache) for d in self.drafts
        )
        arm = torch.zeros(context.batch, dtype=torch.long)
        return PoolState(states, arm, (None,) * len(states), (0.0,) * len(self.arms))

    def assign(self, state: PoolState, arm: Tensor) -> PoolState:
        """Row b is drafted by ``arm[b]`` from now on."""
        return self._seated(state, arm, torch.ones_like(arm, dtype=torch.bool))._replace(arm=arm)

    def _seated(self, state: PoolState, arm: Tensor, here: Tensor) -> PoolState:
        """Tell drafts with members which one drafts each row of ``here [B]``."""
        if self.members is None:
            return state
        draft, member = torch.tensor(self.arms)[arm], torch.tensor(self.members)[arm]
        states = tuple(
            d.assign(s, torch.where(here & (draft == i), member, -1)) if hasattr(d, "assign") else s
            for i, (d, s) in enumerate(zip(self.drafts, state.states))
        )
        return state._replace(states=states)

    def prepare(self, state: PoolState, context: Context, arm: Tensor) -> PoolState:
        """Let the drafts of ``arm [B]`` read what they have not read of their rows.

        A row that is being drafted and only changes its member of a stack is read into a cache of its own: both members would write to one.
        """
        arms = torch.tensor(self.arms)
        busy = torch.tensor([p is not None for p in state.proposals] + [False])[arms[state.arm]]
        stays = busy & (arms[arm] == arms[state.arm]) & (arm != state.arm)
        state = self._seated(state, arm, ~stays)
        states = list(state.states)
        for d, rows in self._groups(arm):
            draft: Any = self.drafts[d]
            ahead = rows[stays[rows]] if hasattr(draft, "read_ahead") else rows[:0]
            if len(ahead):
                rows = rows[~stays[rows]]
            if hasattr(draft, "prepare") and len(rows):
                states[d] = draft.prepare(states[d], context, rows)
            if len(ahead):
                member = torch.tensor(self.members)[arm[ahead]]
                states[d] = draft.read_ahead(states[d], context, ahead, member)
        return state._replace(states=tuple(states))

    def _groups(self, arm: Tensor) -> list[tuple[int, Tensor]]:
        """The drafts in use and their rows."""
        draft = torch.tensor(self.arms)[arm]
        return [(d, (draft == d).nonzero()[:, 0]) for d in draft.unique().tolist() if d >= 0]

    def propose(
        self, state: PoolState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, PoolState]:
        states = list(state.states)
        made: list[Proposal | None] = [None] * len(states)
        groups = self._groups(state.arm)
        spent = [0.0] * len(self.drafts)
        for d, rows in groups:
            began = perf_counter()
            mine = torch.zeros_like(budget).index_copy_(0, rows, budget[rows])
            if bool(mine.any()):
                with DeferredChecks() as later:
                    answer = self.drafts[d].propose(states[d], context, mine, rng)
                    made[d], states[d] = proposed(self.drafts[d], answer)
                later.settle()  # seconds of an arm are those of its device, too
            spent[d] = perf_counter() - began
        seconds = self._by_arm(state.arm, spent)
        parts = [(p, rows) for d, rows in groups if (p := made[d]) is not None]
        proposal = merged(parts, context.batch)
        return proposal, PoolState(tuple(states), state.arm, tuple(made), seconds)

    def _by_arm(self, arm: Tensor, spent: Sequence[float]) -> tuple[float, ...]:
        """Seconds of each arm: arms of one draft share its seconds by their rows."""
        rows = torch.bincount(arm, minlength=len(self.arms)).tolist()
        of = [0] * len(self.drafts)
        for d, n in zip(self.arms, rows):
            if d >= 0:
                of[d] += n
        return tuple(spent[d] * n / of[d] if d >= 0 and of[d] else 0.0 for d, n in zip(self.arms, rows))

    def observe(self, state: PoolState, round: Round) -> PoolState:
        """Every draft sees the round, with what it proposed itself: in rows of other drafts, nothing.

        Whether batch mates are on a draft must not show in what it sees of a row.
        """
        nothing = Proposal.none(round.context.batch)
        states = tuple(
            d.observe(s, replace(round, proposal=nothing if p is None else p))
            for d, s, p in zip(self.drafts, state.states, state.proposals)
        )
        return state._replace(states=states, proposals=(None,) * len(states))

    def select(self, state: PoolState, rows: Tensor) -> PoolState:
        states = tuple(d.select(s, rows) for d, s in zip(self.drafts, state.states))
        return state._replace(states=states, arm=state.arm[rows], proposals=(None,) * len(states))

    def follow(self, state: PoolState, target_cache: Any) -> PoolState:
        states = tuple(
            d.follow(s, target_cache) if hasattr(d, "follow") else s
            for d, s in zip(self.drafts, state.states)
        )
        return state._replace(states=states)

    def join(self, state: PoolState, other: PoolState) -> PoolState:
        states = tuple(d.join(a, b) for d, a, b in zip(self.drafts, state.states, other.states))  # type: ignore[attr-defined]
        return state._replace(
            states=states, arm=torch.cat([state.arm, other.arm]), proposals=(None,) * len(states)
        )


def merged(parts: Sequence[tuple[Proposal, Tensor]], batch: int) -> Proposal:
    """One proposal of ``batch`` rows from proposals of as many rows, of each of which only ``rows`` count.

    Point masses among sampled nodes become distributions with all mass on one token.
    """
    if not parts:
        return Proposal.none(batch)
    if len(parts) == 1:
        return parts[0][0]
    device = parts[0][0].tokens.device
    N = max(p.nodes for p, _ in parts)
    tokens = torch.zeros(batch, N, dtype=torch.long, device=device)
    parents = torch.arange(-1, N - 1).repeat(batch, 1)
    size = torch.zeros(batch, dtype=torch.long)
    laws = [p.probs for p, _ in parts if p.probs is not None]
    # The widest type: no law is rounded after its tokens were drawn.
    kind = max((law.dtype for law in laws), key=lambda dtype: dtype.itemsize, default=torch.float32)
    probs = None if not laws else torch.zeros(batch, N, laws[0].shape[-1], dtype=kind, device=device)
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
                one = torch.zeros(len(rows), n, probs.shape[-1], dtype=probs.dtype, device=device)
                probs[here, :n] = one.scatter_(2, tokens[here, :n, None], 1)
            else:
                probs[here, :n] = p.probs[at].to(probs)
    if probs is None:
        return Proposal(tokens, parents, size)
    declared = any(p.provenance == "declared" for p, _ in parts)
    return Proposal(tokens, parents, size, probs, "declared" if declared else "sampled")
