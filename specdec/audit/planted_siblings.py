"""Planted biases of several candidates: mistakes of real verifiers and drafts of trees, which the certifier must catch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import Siblings
from specdec.drafts.stateless import Stateless
from specdec.rng import ACCEPT, Key, Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.acceptance import kseq_scale
from specdec.verifiers.distinct import DistinctTransport, Plan, flow, plan, rule
from specdec.verifiers.kseq import KSeq, tests
from specdec.verifiers.levels import descend
from specdec.verifiers.rejection import draw_bonus
from specdec.verifiers.transport import OptimalTransport
from specdec.verifiers.transport import rule as transport
from specdec.verifiers.traversal import Traversal


@dataclass(frozen=True, eq=False)
class LooksAtSiblings(Stateless):
    """Draws two siblings from ``distribution [V]``, and then looks at them. It is exact, or makes one of the field's mistakes.

    Args:
        mistake: ``"sorted"``: the more probable one is tried first, as if it had been drawn first. ``"duplicate"``: the second is dropped if it
            is equal to the first. ``"value"``: the second is dropped if it is token 1. ``"number"``: the second is drawn only if the first is
            token 1, which is exact where siblings are taken in turn, but was not settled before.
        replacement: the second may be equal to the first. declares: what it says of its siblings.
    """

    distribution: Tensor
    mistake: str = ""
    replacement: bool = True
    declares: Siblings = "in turn"
    name = "looks at siblings"
    trees = True

    @property
    def siblings(self) -> Siblings:
        return self.declares

    def nodes(self, length: int) -> int:
        return 2

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        q = self.distribution.expand(context.batch, -1)
        first = rng.categorical(q, Key(context.length, 0, 0))
        drawn = (first == 1) | (self.mistake != "number")
        certain = torch.nn.functional.one_hot(first, q.shape[1]).to(q)  # of what is not drawn
        law = torch.where(drawn[:, None], self._after(first), certain)
        tokens = torch.stack([first, rng.categorical(law, Key(context.length, 0, 1))], 1)
        keep = {"duplicate": tokens[:, 1] != first, "value": tokens[:, 1] != 1}.get(self.mistake, drawn)
        if self.mistake == "sorted":
            tokens = tokens.gather(1, q.gather(1, tokens).argsort(dim=1, descending=True, stable=True))
        said, source = (
            torch.stack([q, self._after(tokens[:, 0])], 1),
            torch.tensor([0, int(not self.replacement)]),
        )
        size = torch.where(budget > 0, 1 + keep.long(), 0)
        parents = torch.full_like(tokens, -1)
        return Proposal(tokens, parents, size, said, "sampled", source.expand(tokens.shape)), None

    def _after(self, token: Tensor) -> Tensor:
        """``[B, V]`` what is drawn from after ``token [B]``."""
        q = self.distribution.expand(len(token), -1)
        left = q if self.replacement else q.scatter(1, token[:, None], 0)
        return left / left.sum(1, keepdim=True)


@dataclass(frozen=True)
class TraversalByThePaper(Traversal):
    """Traversal verification as the paper's recursion, row by row. It is exact, or makes a mistake.

    Args:
        mistake: ``"weight"``: a node keeps its a after a child was rejected. ``"residual"``: P becomes norm(max(P - q, 0)), without a.
            ``"uncapped"``: a is capped only in the test. ``"siblings"``: siblings are tried against p instead of P.
    """

    mistake: str = ""

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B, N = proposal.tokens.shape
        if N == 0:
            return super().__call__(proposal, probs, context, rng)
        chance, left = torch.zeros(B, N + 1, dtype=torch.float64), probs.clone()
        for b in range(B):
            self._visit(-1, 1.0, 1.0, proposal.select(torch.tensor([b])), probs[b], chance[b], left[b])
        last = rng.categorical(chance, Key(context.length, 0, 0, ACCEPT))
        path, accepted = tree.path_to(proposal.parents, last - 1)
        bonus = draw_bonus(left[torch.arange(B), last], accepted, context, rng, N)
        return Verdict.of(proposal, path, accepted, bonus)

    def _visit(
        self, v: int, a: float, turn: float, row: Proposal, p: Tensor, chance: Tensor, left: Tensor
    ) -> float:
        """The probability that v and all below it are rejected, if it is reached with probability ``turn``."""
        for c in range(int(row.size)):
            if int(row.parents[0, c]) != v:
                continue
            x, P = int(row.tokens[0, c]), p[v + 1] if self.mistake == "siblings" else left[v + 1]
            q = torch.nn.functional.one_hot(row.tokens[0, c], len(P)) if row.probs is None else row.q(c)[0]
            own = a * float(P[x]) / float(q[x])
            turn = self._visit(
                c, own if self.mistake == "uncapped" else min(1, own), turn, row, p, chance, left
            )
            P = left[v + 1]
            rest = ((1 if self.mistake == "residual" else min(a, 1)) * P - q).clamp(min=0)
            R = float(rest.sum())
            left[v + 1] = rest / R if R > 0 else P
            if self.mistake != "weight":
                a = R / (R + (1 - min(a, 1))) if R + (1 - min(a, 1)) > 0 else 1.0
        a = 1.0 if v < 0 else min(a, 1)
        chance[v + 1] = turn * a
        return turn * (1 - a)


@dataclass(frozen=True)
class KSeqByHand(KSeq):
    """k-SEQ with a mistake.

    Args:
        mistake: ``"rho"``: ρ is 1, and the residual's negative part is clipped. ``"count"``: at every level, k is the number of the root's
            candidates.
    """

    mistake: str = ""

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        live = torch.arange(proposal.nodes) < proposal.size[:, None]
        count = ((proposal.parents < 0) & live).sum(1).clamp(min=1)

        def rule(p: Tensor, q: Tensor, tokens: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
            k = count if self.mistake == "count" else asked.sum(1).clamp(min=1)
            rho = torch.ones_like(p[:, 0]) if self.mistake == "rho" else kseq_scale(p, q, k)
            return tests(p, q, tokens, asked, k, rho)

        return descend(proposal, probs, context, rng, rule, merge=True)


@dataclass(frozen=True)
class TransportUnmoved(OptimalTransport):
    """The candidate with the largest p / q is chosen, and accepted as if it had been chosen by the optimal law."""

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        return descend(proposal, probs, context, rng, partial(transport, move=_stays), merge=True)


def _stays(place: Tensor, q: Tensor, *rest: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(place, q.shape[1]).to(q)


@dataclass(frozen=True)
class UnorderedTransport(DistinctTransport):
    """A set of distinct tokens is taken to be as probable as the product of their q, normalised, as if the order of draws did not matter."""

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        wrong = partial(rule, most=self.most, planned=_unordered)
        return descend(proposal, probs, context, rng, wrong, merge=False)


def _unordered(p: np.ndarray, q: np.ndarray, k: int, most: int) -> Plan:
    sets, mass, _ = plan(p, q, k, most)
    mass = q[sets].prod(1) / q[sets].prod(1).sum()
    return sets, mass, flow(p, sets, mass)


@dataclass(frozen=True)
class TopAndWhole(Stateless):
    """Proposes the most probable token and one that is drawn from the rest, and declares that it was drawn from all of ``distribution [V]``."""

    distribution: Tensor
    name = "top and whole"
    trees = True

    def nodes(self, length: int) -> int:
        return 2

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        B, q = context.batch, self.distribution
        top = torch.nn.functional.one_hot(q.argmax(), len(q)).to(q)
        rest = torch.where(top > 0, 0, q)
        first = rng.categorical((rest / rest.sum()).expand(B, -1), Key(context.length))
        tokens = torch.stack([first, q.argmax().expand(B)], 1)
        said = torch.stack([q, top]).expand(B, -1, -1)
        size = torch.where(budget > 0, 2, 0)
        return Proposal(tokens, torch.full((B, 2), -1), size, said, "sampled"), None
