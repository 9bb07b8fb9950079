"""Adversarial drafts within the rules: their proposals depend on everything that a draft may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec import tree
from specdec.drafts.stateless import Stateless
from specdec.rng import SELECT, Key, Rng
from specdec.types import Context, Feedback, Proposal, Round

MENU = torch.tensor(
    [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0, 0.5, 0.5], [0.1, 0.9, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1]],
    dtype=torch.float64,
)


class Seen(NamedTuple):
    """``memory [B]``: a hash of everything observed of a row so far, dropped nodes and verdicts included."""

    memory: Tensor


@dataclass(frozen=True, eq=False)
class Adversary:
    """Length, shape, and the distribution of every node are pseudo-random functions of the whole past and of the nodes drawn so far.

    The one rule it keeps is that every drawn node is submitted.

    Args:
        distributions: ``[M, V]`` each node's distribution is one of these (disjoint supports, zeros and one-hot distributions are allowed).
        nodes: the largest tree. trees: several candidates per node, or chains only. salt: selects the function of the past.
        replacement: draw siblings independently, or else without the tokens of earlier siblings.
        point: choose the tokens instead of drawing them, and declare point masses.
        stops: 1 in ``stops`` nodes is the last of its tree (0: only the budget ends it).
    """

    distributions: Tensor
    limit: int = 3
    trees: bool = True
    salt: int = 0
    replacement: bool = True
    point: bool = False
    stops: int = 4
    name = "adversary"

    def nodes(self, length: int) -> int:
        return self.limit

    def init(self, context: Context, target_cache: Any) -> Seen:
        memory = torch.full((context.batch,), 0x5EED + self.salt)
        for column in range(int(context.length.max())):
            memory = mix(memory, context.tokens[:, column], column < context.length)
        return Seen(memory)

    def propose(self, state: Seen, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Seen]:
        B, N, V = context.batch, self.limit, self.distributions.shape[-1]
        rows = torch.arange(B)
        tokens, parents = torch.zeros(B, N, dtype=torch.long), torch.full((B, N), -1)
        depth, size = torch.zeros(B, N, dtype=torch.long), torch.zeros(B, dtype=torch.long)
        probs = torch.zeros(B, N, V, dtype=self.distributions.dtype)
        memory, nothing = (
            state.memory,
            torch.zeros(V, dtype=self.distributions.dtype).index_fill(0, torch.tensor(0), 1),
        )
        for n in range(N):
            # -1 or any node above the budget's end may be the parent; in a chain only the last one.
            above = torch.cat([torch.full((B, 1), -1), depth[:, :n]], 1)
            fits = (above + 1 < budget[:, None]) & ((torch.arange(n + 1) == n) | self.trees)
            go = (size == n) & fits.any(1)
            if self.stops:
                go &= choose(memory, 3 * n, self.stops) != 0
            nth = choose(memory, 3 * n + 1, fits.sum(1).clamp(min=1))
            place = (fits.long().cumsum(1) > nth[:, None]).int().argmax(1)
            parents[:, n], depth[:, n] = (
                torch.where(go, place - 1, -1),
                torch.where(go, above[rows, place] + 1, 0),
            )
            q = self.distributions[choose(memory, 3 * n + 2, len(self.distributions))]
            if not self.replacement:
                elder = (parents[:, :n] == parents[:, n : n + 1]) & go[:, None]
                taken = torch.zeros(B, V, dtype=q.dtype).scatter_add(1, tokens[:, :n], elder.to(q))
                q = torch.where(taken > 0, 0, q)
                go = go & (q.sum(1) > 0)  # if every token was tried, nothing is drawn, so nothing is dropped
                q = q / q.sum(1, keepdim=True)
            q = torch.where(go[:, None], q, nothing)
            sibling = (depth[:, :n] == depth[:, n : n + 1]).sum(1)
            if self.point:
                token = choose(memory, 3 * n + 2, V)
            else:
                token = rng.categorical(q, Key(context.length, depth[:, n], sibling))
            tokens[:, n], probs[:, n] = torch.where(go, token, 0), q
            size += go
            memory = mix(memory, token * (N + 1) + parents[:, n] + 1, go)
        if self.point:
            return Proposal(tokens, parents, size), state
        return Proposal(tokens, parents, size, probs, "sampled"), state

    def observe(self, state: Seen, round: Round) -> Seen:
        memory, proposal, verdict = state.memory, round.proposal, round.verdict
        memory = mix(memory, proposal.size * 64 + verdict.accepted)
        for n in range(proposal.nodes):  # a row must not depend on the width of the others
            memory = mix(
                memory, proposal.tokens[:, n].cpu() * 64 + proposal.parents[:, n] + 1, n < proposal.size
            )
        for n in range(verdict.tokens.shape[1]):
            memory = mix(memory, verdict.tokens[:, n], n < round.committed)
        return Seen(memory)

    def select(self, state: Seen, rows: Tensor) -> Seen:
        return Seen(state.memory[rows])


@dataclass(frozen=True, eq=False)
class Hindsight(Adversary):
    """An adversary that also remembers its draws for predicted texts that did not come (``executors.Optimistic``)."""

    trees: bool = False
    name = "hindsight"
    revocable = True

    def propose(self, state: Seen, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Seen]:
        proposal, state = super().propose(state, context, budget, rng)
        memory = state.memory
        for n in range(proposal.nodes):
            memory = mix(memory, proposal.tokens[:, n] + 1, n < proposal.size)
        return proposal, Seen(memory)


class Dropped(NamedTuple):
    """``token [B]``: the last node that was proposed and dropped without being tried, -1 if none was."""

    token: Tensor


@dataclass(frozen=True, eq=False)
class Remembers:
    """A chain of two from ``distribution [V]``, or nothing if the token that was dropped untried last time is in ``unwanted``.

    It is unbiased if every draw has its own key. If draws are keyed by position alone, it has already seen its next draw.
    """

    distribution: Tensor
    unwanted: Sequence[int]
    name = "remembers"

    def init(self, context: Context, target_cache: Any) -> Dropped:
        return Dropped(torch.full((context.batch,), -1))

    def propose(self, state: Dropped, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Dropped]:
        bad = torch.isin(state.token, torch.tensor(self.unwanted))
        size = torch.where(bad, 0, budget.clamp(max=2))
        q = self.distribution.expand(context.batch, 2, -1)
        tokens = rng.categorical(q, Key(context.length[:, None], torch.arange(2).expand(context.batch, 2)))
        return Proposal.chain(tokens, size, q, "sampled"), state

    def observe(self, state: Dropped, round: Round) -> Dropped:
        untried = (round.proposal.size == 2) & (round.verdict.accepted == 0)
        second = round.proposal.tokens[:, 1] if round.proposal.nodes > 1 else torch.zeros_like(untried).long()
        return Dropped(torch.where(untried, second, -1))

    def select(self, state: Dropped, rows: Tensor) -> Dropped:
        return Dropped(state.token[rows])


@dataclass(frozen=True, eq=False)
class TwoChains(Stateless):
    """Two chains of two, drawn from different tables ``[V, V]`` (distributions after each token), merged into one tree."""

    one: Tensor
    two: Tensor
    name = "two chains"
    trees = True

    def nodes(self, length: int) -> int:
        return 4

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        last = context.tokens[torch.arange(context.batch), context.length - 1]
        chains = [
            self._chain(table, last, n, context, budget, rng) for n, table in enumerate((self.one, self.two))
        ]
        return tree.merge(*chains), None

    def _chain(
        self, table: Tensor, last: Tensor, sibling: int, context: Context, budget: Tensor, rng: Rng
    ) -> Proposal:
        first = table[last]
        a = rng.categorical(first, Key(context.length, 0, sibling))
        # Certain beyond the budget, so that no drawn token is dropped.
        second = torch.where((budget > 1)[:, None], table[a], torch.tensor([1.0, 0.0, 0.0]))
        b = rng.categorical(second, Key(context.length, 1, sibling))
        distributions = torch.stack([first, second], 1)
        return Proposal.chain(torch.stack([a, b], 1), budget.clamp(max=2), distributions, "sampled")


@dataclass(frozen=True)
class Everything(Stateless):
    """Every tree of up to ``limit`` nodes over ``vocab_size`` tokens, by free choices that the certifier enumerates."""

    vocab_size: int
    limit: int = 3
    name = "everything"
    trees = True

    def nodes(self, length: int) -> int:
        return self.limit

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        B, N = context.batch, self.limit
        rows = torch.arange(B)
        one = torch.ones(B, dtype=torch.long)
        size = self._choice(rng, context, 0, torch.where(budget > 0, N + 1, 1))
        tokens, parents = torch.zeros(B, N, dtype=torch.long), torch.full((B, N), -1)
        depth = torch.zeros(B, N, dtype=torch.long)
        for n in range(N):
            live = n < size
            above = torch.cat([torch.full((B, 1), -1), depth[:, :n]], 1)
            fits = above + 1 < budget[:, None]
            nth = self._choice(rng, context, 2 * n + 1, torch.where(live, fits.sum(1), one))
            place = (fits.long().cumsum(1) > nth[:, None]).int().argmax(1)
            parents[:, n] = torch.where(live, place - 1, -1)
            depth[:, n] = torch.where(live, above[rows, place] + 1, 0)
            tokens[:, n] = self._choice(rng, context, 2 * n + 2, torch.where(live, self.vocab_size, one))
        return Proposal(tokens, parents, size), None

    def _choice(self, rng: Rng, context: Context, what: int, options: Tensor) -> Tensor:
        """``[B]`` below ``options [B]``. ``accept`` reaches the walk under every verifier; draws may be the verifier's own."""
        answer = torch.full_like(options, -1)
        for option in range(int(options.max())):
            prob = torch.where(
                (answer < 0) & (option < options), 1 / (options - option).clamp(min=1).double(), 0
            )
            answer[rng.accept(prob, Key(context.length, what, option, SELECT))] = option
        return answer


@dataclass(frozen=True)
class AdversarialSelector:
    """Arms are pseudo-random functions of the row's whole text and of all feedback on it; with ``dropped`` as reward also of dropped nodes.

    Args:
        salt: selects the function.
    """

    salt: int = 0

    def init(self, arms: int) -> tuple[int, Tensor]:
        return arms, torch.zeros(0, dtype=torch.long)

    def select(
        self, state: tuple[int, Tensor], context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, tuple[int, Tensor]]:
        arms, memory = state
        new = max(int(context.request.max()) + 1 - len(memory), 0)
        memory = torch.cat([memory, torch.full((new,), 0x5EED + self.salt)])
        seen = memory[context.request]
        for column in range(int(context.length.max())):
            seen = mix(seen, context.tokens[:, column], column < context.length)
        arm, left = choose(seen, 0, arms), capacities.clone()
        for b in range(context.batch):  # unless a capacity is below the batch, rows are independent
            arm[b] = next(a for step in range(arms) if left[a := (int(arm[b]) + step) % arms] > 0)
            left[arm[b]] -= 1
        return arm, torch.ones(context.batch), (arms, memory)

    def update(self, state: tuple[int, Tensor], feedback: Feedback) -> tuple[int, Tensor]:
        arms, memory = state
        told = memory[feedback.request]
        for part in (feedback.arm, feedback.tokens, feedback.drafted, (feedback.reward * 2**30).long()):
            told = mix(told, part)
        return arms, memory.index_copy(0, feedback.request, told)


def dropped(round: Round) -> Tensor:
    """A reward ``[B]`` in [0, 1] that is a hash of the proposal's tokens, so that feedback reveals dropped nodes to a selector."""
    memory = round.verdict.accepted + 0x5EED
    for n in range(round.proposal.nodes):
        memory = mix(memory, round.proposal.tokens[:, n].cpu(), n < round.proposal.size)
    return ((memory >> 33) % 1024).double() / 1024


def mix(memory: Tensor, value: Tensor, where: Tensor | bool = True) -> Tensor:
    """Fold ``value [B]`` into ``memory [B]`` for some rows (a multiply and xor-shift hash; products wrap)."""
    h = (memory ^ (value + 0x9E3779B9)) * -7046029254386353131
    h = (h ^ ((h >> 31) & 0x1FFFFFFFF)) * -4658895280553007687
    return torch.where(torch.as_tensor(where), h ^ ((h >> 29) & 0x7FFFFFFFF), memory)


def choose(memory: Tensor, what: int, options: Tensor | int) -> Tensor:
    """``[B]`` a number below ``options`` that depends on all of ``memory``."""
    return (mix(memory, torch.full_like(memory, what)) >> 33) % options
