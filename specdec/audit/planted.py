"""Planted biases: mistakes of real decoders, each as one small wrong part that the certifier must catch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec import tree
from specdec.audit.lengths import before
from specdec.drafts.model import Model
from specdec.drafts.stateless import Stateless
from specdec.drafts.stops import Drafted
from specdec.executors.serial import Serial
from specdec.rng import ACCEPT, BONUS, DRAFT, Key, Rekeyed, Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round, Verdict
from specdec.verifiers.block import BlockVerification
from specdec.verifiers.coupled import Coupled
from specdec.verifiers.rejection import Rejection, residual, verify_chain


@dataclass(frozen=True, eq=False)
class DeclaredArgmax(Stateless):
    """Proposes the most probable token of ``distribution [V]`` and declares that it was drawn from ``distribution``."""

    distribution: Tensor
    name = "argmax declared as a sample"

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        q = self.distribution.expand(context.batch, 1, -1)
        return Proposal.chain(q.argmax(-1), budget.clamp(max=1), q, "declared"), None


@dataclass(frozen=True, eq=False)
class LooksThenDrops(Stateless):
    """Draws one token from ``distribution [V]`` and does not submit it when it is ``unwanted``."""

    distribution: Tensor
    unwanted: int
    name = "drops a node after looking"

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        q = self.distribution.expand(context.batch, -1)
        token = rng.categorical(q, Key(context.length))
        size = torch.where(token == self.unwanted, 0, budget.clamp(max=1))
        return Proposal.chain(token[:, None], size, q[:, None], "sampled"), None


class DropsUnsure(Model):
    """Draws a chain, and drops the first token whose own probability is below 0.5, with all after it."""

    def propose(self, state: Any, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Any]:
        made, state = super().propose(state, context, budget, rng)
        if made.probs is not None:
            own = Drafted.of(made.probs, made.tokens).own
            made = replace(made, size=before(own > 0.5).minimum(made.size))
        return made, state


@dataclass(frozen=True, eq=False)
class DrawnElsewhere(Stateless):
    """Draws ``width`` tokens from ``drawn [V]`` and declares ``said [V]``: another temperature, a distribution before truncation, ...

    With ``replacement=False`` siblings are drawn without the tokens of earlier ones, which ``said`` does not reflect.
    """

    drawn: Tensor
    said: Tensor
    width: int = 1
    replacement: bool = True
    name = "drawn from another distribution than declared"
    trees = True

    def nodes(self, length: int) -> int:
        return self.width

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        B, q = context.batch, self.drawn.expand(context.batch, -1)
        tokens = torch.zeros(B, self.width, dtype=torch.long)
        for n in range(self.width):
            tokens[:, n] = rng.categorical(q, Key(context.length, 0, n))
            if not self.replacement:
                q = q.scatter(1, tokens[:, n : n + 1], 0)
        size = torch.where(budget > 0, self.width, 0)
        said = self.said.expand(B, self.width, -1)
        return Proposal(tokens, torch.full((B, self.width), -1), size, said, "declared"), None


class PositionKeyed(Rekeyed):
    """Draws keyed by (position, stream) alone: after a rejection, a draft reuses a number that has been seen."""

    def rekeyed(self, key: Key) -> Key:
        return Key(torch.as_tensor(key.at) + key.depth, 0, key.sibling, key.stream)


class SiblingsShare(Rekeyed):
    """Siblings share one random number, so that all candidates are the same token."""

    def rekeyed(self, key: Key) -> Key:
        return Key(key.at, key.depth, 0 * torch.as_tensor(key.sibling), key.stream, key.attempt)


class StreamsShare(Rekeyed):
    """Drawing a token and accepting it share one random number."""

    def rekeyed(self, key: Key) -> Key:
        return key._replace(stream=DRAFT) if key.stream == ACCEPT else key


@dataclass(frozen=True)
class BonusFromTarget(Rejection):
    """After a rejection the next token comes from p instead of the residual."""

    trust_declared: bool = True

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        rows = torch.arange(context.batch)
        path, accepted, _ = verify_chain(proposal, probs, context, rng)
        bonus = rng.categorical(probs[rows, accepted], Key(context.length, accepted, 0, BONUS))
        return Verdict.of(proposal, path, accepted, bonus)


@dataclass(frozen=True)
class GreedyAcceptance(Rejection):
    """A node is accepted iff it is the target's most probable token, although tokens are sampled."""

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B, N = proposal.tokens.shape
        accepts = (proposal.tokens == probs[:, :N].argmax(-1)) & (torch.arange(N) < proposal.size[:, None])
        accepted = accepts.long().cumprod(1).sum(1)
        path = torch.where(torch.arange(N) < accepted[:, None], torch.arange(N), -1)
        bonus = rng.categorical(probs[torch.arange(B), accepted], Key(context.length, accepted, 0, BONUS))
        return Verdict.of(proposal, path, accepted, bonus)


@dataclass(frozen=True)
class SiblingsForgetResidual(Rejection):
    """Each sibling is tried against p instead of the residual of earlier siblings."""

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        if proposal.nodes == 0:
            return super().__call__(proposal, probs, context, rng)
        assert proposal.probs is not None
        B, rows = context.batch, torch.arange(context.batch)
        number = tree.sibling_numbers(proposal.parents)
        distribution, taken = probs[:, 0], torch.full((B,), -1)
        for n in range(proposal.nodes):
            x, q = proposal.tokens[:, n], proposal.q(n)
            asked = (taken < 0) & (n < proposal.size)
            ratio = torch.where(asked, probs[rows, 0, x] / q[rows, x], 0)
            yes = asked & rng.accept(ratio, Key(context.length, 0, number[:, n], ACCEPT))
            distribution = torch.where((asked & ~yes)[:, None], residual(distribution, q), distribution)
            distribution = torch.where(yes[:, None], probs[:, n + 1], distribution)
            taken = torch.where(yes, n, taken)
        accepted = (taken >= 0).long()
        path = torch.full_like(proposal.tokens, -1)
        path[:, 0] = taken
        return Verdict.of(
            proposal, path, accepted, rng.categorical(distribution, Key(context.length, accepted, 0, BONUS))
        )


@dataclass(frozen=True)
class BlockByThePaper(BlockVerification):
    """Block verification with the paper's independent tests, one for each prefix. It is exact, or makes one of the field's mistakes.

    Args:
        mistake: ``"product"``: a_i is the whole product of p / q, capped only at its end. ``"residual"``: the next token comes
            from norm(max(p - q, 0)), without a_i. ``"first"``: the tests end at the first failure. ``"behind"``: the sum in a test
            takes the distributions that its last token came from, instead of those after it.
    """

    mistake: str = ""

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B, N = proposal.tokens.shape
        if N == 0:
            return super().__call__(proposal, probs, context, rng)
        rows, nodes = torch.arange(B), torch.arange(N)
        live = nodes < proposal.size[:, None]
        q, x = proposal.distributions(), torch.where(live, proposal.tokens, 0)
        ratio = (probs[:, :N] / q).gather(2, x[..., None])[..., 0]
        weight = [torch.ones(B, dtype=probs.dtype)]
        for n in range(N):
            weight.append((weight[-1] * ratio[:, n]).clamp(max=1))
        if self.mistake == "product":
            weight[1:] = ratio.cumprod(1).clamp(max=1).unbind(1)
        tests = []
        for n in range(N):
            a, at = weight[n + 1], n if self.mistake == "behind" else min(n + 1, N - 1)
            left = (a[:, None] * probs[:, at] - q[:, at]).clamp(min=0).sum(1)
            part = torch.where(left + (1 - a) > 0, left / (left + (1 - a)), 1)
            tests.append(torch.where(n + 1 < proposal.size, part, a))
        passed = live & rng.accept(torch.stack(tests, 1), Key(context.length[:, None], nodes, 0, ACCEPT))
        accepted = (passed * (nodes + 1)).amax(1)
        if self.mistake == "first":
            accepted = passed.long().cumprod(1).sum(1)
        p, drawn = probs[rows, accepted], q[rows, accepted.clamp(max=N - 1)]
        a = torch.stack(weight, 1)[rows, accepted, None]
        left = residual(p if self.mistake == "residual" else a * p, drawn)
        p = torch.where((accepted < proposal.size)[:, None], left, p)
        bonus = rng.categorical(p, Key(context.length, accepted, 0, BONUS))
        return Verdict.of(proposal, torch.where(nodes < accepted[:, None], nodes, -1), accepted, bonus)


@dataclass(frozen=True)
class StandsStill(Coupled):
    """The target's draw is keyed by the start of the block instead of the position: one draw for all its tokens."""

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        return super().__call__(proposal, probs, context, _AtStart(rng, context.length))  # type: ignore[arg-type]


class _AtStart:
    def __init__(self, rng: Rng, start: Tensor):
        self.rng, self.start = rng, start

    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        return self.rng.race(probs, self.start[:, None].expand_as(position), streams)


@dataclass(frozen=True)
class ForgetsNodes(Sampling):
    """Processors see the committed prefix at every node, without the node's ancestors."""

    def constrained(self, logits: Tensor, context: Context, proposal: Proposal | None, first: int) -> Tensor:
        rows = [
            super(ForgetsNodes, self).constrained(row[:, None], context, None, -1) for row in logits.unbind(1)
        ]
        return torch.cat(rows, 1)


@dataclass(frozen=True)
class AdvancedBySiblings(Sampling):
    """A grammar's state after a node is advanced by the node stored before it, whether or not that is its parent. What is committed is not checked."""

    def constrained(self, logits: Tensor, context: Context, proposal: Proposal | None, first: int) -> Tensor:
        if proposal is not None:
            N = proposal.nodes
            proposal = replace(proposal, parents=torch.arange(-1, N - 1).expand(proposal.parents.shape))
        return super().constrained(logits, context, proposal, first)

    def check_committed(self, context: Context, tokens: Tensor, count: Tensor, verifier: str) -> None:
        pass


@dataclass(frozen=True)
class LateStops(Serial):
    """An end of sequence inside an accepted block is missed: only the last token of a block can end a row."""

    def run(self, decoder: Any, context: Context, rng: Rng, limits: Any) -> Iterator[Round]:
        return super().run(decoder, context, rng, _Late(limits))  # type: ignore[arg-type]


class _Late:
    def __init__(self, limits: Any):
        self.limits = limits
        self.room = limits.room

    def apply(self, context: Context, verdict: Verdict) -> tuple[Tensor, Tensor]:
        kept, finished = replace(self.limits, eos=(), reasons=self.limits.reasons).apply(context, verdict)
        last = verdict.tokens.gather(1, kept[:, None] - 1)[:, 0]
        ended = torch.isin(last, torch.tensor(self.limits.eos, dtype=torch.long))
        for row in context.request[ended].tolist():
            self.limits.reasons[row] = "eos"
        return kept, finished | ended
