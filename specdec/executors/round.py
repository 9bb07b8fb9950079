"""A micro-batch: rows that go through their rounds together. An executor is a way to run micro-batches.

A round has two halves. Drafting needs the text and the draft's state (``DraftRunner``); verification needs the text, a proposal, and the
target's cache (``MicroBatch``). The halves share nothing but the committed tokens, so they can run in different threads or processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specdec import tree
from specdec.arm_policy import ArmAssignment, Choice
from specdec.composition import Composition
from specdec.kernels.device import DeferredChecks, defer
from specdec.protocols import ComparesTokens, TakesLogits
from specdec.rng import Rng
from specdec.stop_rules import StopRules
from specdec.types import Context, Proposal, Round, Verdict


class Drafted(NamedTuple):
    """A proposal, the ``seconds`` it took, those ``spent`` by each arm (``None`` without arms), and the checks ``later`` that verification makes."""

    proposal: Proposal
    seconds: float
    spent: tuple[float, ...] | None
    later: DeferredChecks | None = None


class DraftRunner:
    """The drafting half of a micro-batch: the draft and its state."""

    def __init__(self, composition: Composition):
        self.part, self.draft, self.state = composition.drafting, composition.draft, None
        self.verifier, self.vocab_size = composition.verifier, composition.target.vocab_size
        self.most, self.started = composition.nodes, False
        self.proposal: Proposal | None = None

    def start(self, context: Context, target_cache: Any) -> None:
        """The draft's own prefill, after the target's."""
        self.state, self.started = self.draft.init(context, target_cache), True

    def observe(self, round: Round) -> None:
        """Pass the last round to the draft, with the proposal object that the draft returned (``round`` may hold a copy)."""
        if self.proposal is not None and self.proposal is not round.proposal:
            round = replace(round, proposal=self.proposal)
        self.state, self.proposal = self.draft.observe(self.state, round), None

    def forget(self) -> None:
        """The latest proposal is not that of the next round to be observed."""
        self.proposal = None
        if self.part.forgets is not None:
            self.state = self.part.forgets.forget(self.state)

    def select(self, stay: Tensor, target_cache: Any) -> None:
        """Keep only the rows ``stay``."""
        self.state = self.part.follow(self.draft.select(self.state, stay), target_cache)

    def propose(
        self, context: Context, budget: Tensor, rng: Rng, arm: Tensor | None = None, settle: bool = True
    ) -> Drafted:
        """A checked proposal for the next round. ``settle=False`` leaves checks that would wait for the device to ``MicroBatch.verify``."""
        began, arms = perf_counter(), self.part.arms
        if arm is not None and arms is not None:
            self.state = arms.assign(self.state, arm)
        with DeferredChecks() as later:
            proposal, self.state = self.part.propose(
                self.state, context, budget, self.verifier.for_draft(rng)
            )
            check(proposal, budget, self.vocab_size, self.most)
        self.verifier.check(proposal)
        self.proposal = proposal
        if settle:
            later.settle(proposal.tokens)
        elif not proposal.tokens.is_cpu:
            # Until the checks are made, invalid ids must not index anything.
            proposal = replace(proposal, tokens=proposal.tokens.clamp(0, self.vocab_size - 1))
        spent = None if arms is None else arms.spent(self.state)
        return Drafted(proposal, perf_counter() - began, spent, None if settle else later)

    def prepare(self, context: Context, arm: Tensor) -> None:
        """Let the arms of the next round read their rows."""
        if self.part.arms is not None:
            self.state = self.part.arms.prepare(self.state, context, arm)


class MicroBatch:
    """The verifying half: text, decisions and the target's cache of some rows.

    Attributes:
        choice: arms of this round. next_arms: those of the next, where arms are chosen a round ahead.
    """

    def __init__(
        self, composition: Composition, context: Context, rng: Rng, selection: ArmAssignment | None = None
    ):
        self.composition, self.context, self.rng, self.selection = composition, context, rng, selection
        self.cache = composition.target.cache(context.batch, context.tokens.shape[1])
        self.number = 0
        self.choice: Choice | None = None
        self.next_arms: Choice | None = None
        self.spent: Sequence[float] | None = None
        taps = composition.drafting.info.taps
        self.wanted: dict[str, Any] = {"taps": taps} if taps else {}

    def __bool__(self) -> bool:
        return self.context.batch > 0

    def choose(self, ahead: bool = False) -> None:
        """Choose arms for the next round. ``ahead``: take those that were chosen a round ago, and choose for the round after."""
        if self.selection is None:
            return
        if not ahead:
            self.choice = self.selection.choose(self.context, self.rng)
            return
        # The first arms serve two rounds, so that capacities hold across micro-batches.
        if self.next_arms is None:
            self.choice = self.next_arms = self.selection.choose(self.context, self.rng)
        else:
            self.choice, self.next_arms = self.next_arms, self.selection.choose(self.context, self.rng)

    def lengths(self) -> Tensor:
        """``[B]`` the longest path that each row's draft proposes when nothing limits it."""
        if self.choice is not None:
            return self.choice.length
        length, longest = self.composition.length, self.composition.drafting.info.longest
        return torch.full((self.context.batch,), length if longest is None else min(length, longest))

    def budget(self, limits: StopRules) -> Tensor:
        """``[B]`` the longest path that may be drafted for each row now."""
        longest = self.composition.length if self.choice is None else self.choice.length
        return (limits.room(self.context) - 1).clamp(max=longest)

    def prefill(self, limits: StopRules) -> Round:
        """Round 0: one token from the target, without a draft."""
        nothing = Proposal.none(self.context.batch)
        round = self.verify(limits, Drafted(nothing, 0.0, None), torch.zeros_like(self.context.length))
        if self.selection is not None:
            longest = self.context.length + limits.room(self.context)
            self.selection.enter(self.context.request[~round.finished], longest[~round.finished])
        return round

    def verify(self, limits: StopRules, drafted: Drafted, budget: Tensor) -> Round:
        """Score and verify a proposal, and commit it to the target's cache."""
        parts, context, proposal = self.composition, self.context, drafted.proposal
        target, device, sampling = parts.target, parts.device, parts.sampling
        clock = [perf_counter()]
        if proposal.nodes and device is not None and proposal.tokens.device != device:
            proposal = proposal.to(device)
        sampling.fetch(context, proposal)
        scores = target.score(self.cache, context, proposal if proposal.nodes else None, **self.wanted)
        clock.append(perf_counter())
        if proposal.tokens.device != scores.logits.device:  # drafts without a model work on the host
            proposal = proposal.to(scores.logits.device)
        verifier, able, probs, target_argmax = parts.verifier, parts.verifying, None, None
        with drafted.later or DeferredChecks() as later:  # the host waits for the verdict only
            if sampling.greedy and able.compares_tokens:
                target_argmax = sampling.argmax(scores.logits, context, proposal)
                verdict = cast(ComparesTokens, verifier).greedy(proposal, target_argmax)
            elif sampling.only_temperature and able.takes_logits:
                quick = cast(TakesLogits, verifier)
                verdict = quick.from_logits(proposal, scores.logits, sampling, context, self.rng)
            else:
                probs = sampling(scores.logits, context, proposal)
                verdict = verifier(proposal, probs, context, self.rng)
        later.settle()
        _check_verdict(verdict, able.name, target.vocab_size)
        self.cache.commit(context, verdict)
        committed, finished = limits.apply(context, verdict)
        sampling.check_committed(context, verdict.tokens, committed, able.name)
        clock.append(perf_counter())
        t, v = (b - a for a, b in pairwise(clock))
        short = (limits.room(context) - 1 < self.lengths()) if self.number else torch.zeros_like(finished)
        choice = self.choice
        round = Round.of(
            context,
            proposal,
            scores,
            verdict,
            committed,
            budget,
            finished,
            short,
            probs,
            arm=None if choice is None else choice.arm,
            arm_prob=None if choice is None else choice.prob,
            target_argmax=target_argmax,
            number=self.number,
            lossless=able.lossless,
            seconds={"draft": drafted.seconds, "target": t, "verify": v}
            if self.number
            else {"prefill": t + v},
        )
        self.spent = drafted.spent
        return round

    def settle(self, round: Round) -> Tensor | None:
        """Append a round's tokens and drop the finished rows. Returns the rows that stay, or ``None`` when all do."""
        if self.selection is not None and self.number:
            self.selection.learn(round, self.spent)
        if self.composition.notes is not None:
            self.composition.notes.note(self.cache, round)
        self.context = self.context.append(round.verdict.tokens, round.committed)
        self.number += 1
        if not bool(round.finished.any()):
            return None
        if self.composition.keeps is not None:
            ended = round.finished.nonzero()[:, 0]
            self.composition.keeps.keep_texts(self.cache, self.context.select(ended), ended.tolist())
        stay = staying(round.finished)
        self.context, self.rng = self.context.select(stay), self.rng.select(stay)
        if self.next_arms is not None:
            self.next_arms = self.next_arms.select(stay)
        if len(stay):
            self.cache = self.cache.select(stay)
        return stay


def staying(finished: Tensor) -> Tensor:
    """The unfinished rows, with gaps filled from the end, so that a cache moves only the rows that fill them."""
    left = len(finished) - int(finished.sum())
    stay = torch.arange(left)
    stay[finished[:left]] = left + (~finished[left:]).nonzero()[:, 0]
    return stay


def check(proposal: Proposal, budget: Tensor, vocab_size: int, most: int | None = None) -> None:
    """Raise ValueError for a proposal that breaks the contract: too long, malformed, or with tokens outside the vocabulary.

    Args:
        most: nodes that a row has slots for.
    """
    _check_form(proposal, len(budget))
    if not proposal.nodes:
        return
    N = proposal.nodes
    live = torch.arange(N) < proposal.size[:, None]
    if bool(tree.is_chain(proposal.parents, proposal.size).all()):
        longest = proposal.size
    else:
        tree.check(proposal.parents, proposal.size)
        longest = ((tree.depths(proposal.parents) + 1) * live).amax(1)
    if bool((longest > budget).any()) or int(proposal.size.max()) > N:
        b = int((longest - budget).argmax())
        raise ValueError(
            f"the draft proposed a path of {int(longest[b])} tokens in row {b}, more than its budget of {int(budget[b])}: "
            "propose() must respect budget[b]"
        )
    if most is not None and int(proposal.size.max()) > most:
        raise ValueError(
            f"the draft proposed {int(proposal.size.max())} nodes in a row, and there is room for {most}: declare the maximum "
            "for each length, info = DraftInfo(..., nodes=lambda length: ...) (the default is length itself)"
        )
    tokens, probs = proposal.tokens, proposal.probs
    wrong = [(tokens < 0) | (tokens >= vocab_size)]
    dtype = None if probs is None else probs.dtype
    if probs is not None:
        _check_source(proposal, live, vocab_size)
        total = probs.sum(-1, dtype=torch.float32).gather(1, proposal.sources(probs.device))
        drawn = proposal.q_of(tokens.clamp(0, vocab_size - 1))
        # Tokens are drawn from probs over their sum, and verifiers divide by probs: what the sum is off by is a bias.
        near = 1e-4 if dtype in (torch.float32, torch.float64) else 1e-5
        wrong += [~((total - 1).abs() < near), drawn <= 0]  # NaN fails too

    def refuse(wrong: Tensor) -> None:
        outside, *unlike = wrong & live
        if bool(outside.any()):
            raise ValueError(
                f"the draft proposed a token outside the target's vocabulary of {vocab_size}: pad or trim its logits (a captured draft "
                "proposes -1 where its logits are not finite)"
            )
        if not unlike:
            return
        off, never = unlike
        if bool(off.any()):
            b, n = off.nonzero()[0].tolist()
            raise ValueError(
                f"the draft's probs of row {b}, node {n} sum to {float(total[b, n]):.6g} in {str(dtype).removeprefix('torch.')}: give "
                "probabilities that sum to 1 (logits need a softmax; half precision needs float() and a division by the sum before the "
                "tokens are drawn)"
            )
        if bool(never.any()):
            b, n = never.nonzero()[0].tolist()
            raise ValueError(
                f"the draft's probs give probability {float(drawn[b, n]):.3g} to the token of row {b}, node {n}: it cannot have been "
                "drawn from them"
            )

    defer(torch.stack(wrong), refuse)


def _check_form(proposal: Proposal, batch: int) -> None:
    """Raise ValueError unless shapes and types are those of a proposal for ``batch`` rows, with its structure on the host."""
    tokens, parents, size = proposal.tokens, proposal.parents, proposal.size
    whole = tokens.dtype == parents.dtype == size.dtype == torch.long
    shapes = (
        tokens.dim() == 2
        and len(tokens) == batch
        and tokens.shape == parents.shape
        and size.shape == (batch,)
    )
    if not (whole and shapes and parents.is_cpu and size.is_cpu):
        found = ", ".join(
            f"{name} {list(t.shape)} {t.dtype} on {t.device}"
            for name, t in (("tokens", tokens), ("parents", parents), ("size", size))
        )
        raise ValueError(
            f"the draft proposed {found} for {batch} rows: give tokens [{batch}, N], and parents [{batch}, N] and size [{batch}] on the "
            "CPU, all of them torch.int64"
        )


def _check_source(proposal: Proposal, live: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless every node that exists has a distribution over the vocabulary."""
    probs, source, (B, N) = proposal.probs, proposal.source, proposal.tokens.shape
    assert probs is not None
    Q = N if source is None or probs.dim() != 3 else max(probs.shape[1], 1)
    if probs.shape != (B, Q, vocab_size):
        raise ValueError(
            f"the draft's probs have shape {list(probs.shape)}: expected {[B, Q, vocab_size]}, one distribution "
            + ("a node (fewer with source)" if source is None else "or more, which source assigns to nodes")
        )
    if source is None:
        return
    if source.shape != (B, N) or source.dtype != torch.long or not source.is_cpu:
        raise ValueError(
            f"the draft's source is {list(source.shape)} {source.dtype} on {source.device}: give {[B, N]}, torch.int64, on the CPU"
        )
    wrong = ((source < 0) | (source >= Q)) & live
    if bool(wrong.any()):
        b, n = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"the draft's source of row {b}, node {n} is {int(source[b, n])} and probs has {Q} distributions a row: give 0 to {Q - 1}"
        )


def _check_verdict(verdict: Any, name: str, vocab_size: int) -> None:
    """Raise unless a verifier returned a ``Verdict`` (``Verdict.of`` checks its path) with a bonus token that exists."""
    if not isinstance(verdict, Verdict):
        raise TypeError(
            f"verifier {name!r} returned a {type(verdict).__name__}: return Verdict.of(proposal, path, accepted, bonus)"
        )
    bonus = verdict.bonus.numpy()
    if bonus.min() < 0 or bonus.max() >= vocab_size:
        raise ValueError(
            f"verifier {name!r} gave the bonus tokens {bonus.tolist()}: the target's vocabulary has {vocab_size}"
        )
