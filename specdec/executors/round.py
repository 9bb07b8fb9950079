"""A lane: rows that go through their rounds together. Every executor is a way to run lanes.

A round has two halves. DraftRunner needs the text and the draft's state (``DraftRunner``); verification needs the text, a proposal, and the
target's cache (``MicroBatch``). Both halves can run in different places, because the committed tokens are all that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specdec import tree
from specdec.arm_policy import ArmAssignment, Choice
from specdec.kernels.device import DeferredChecks, defer
from specdec.protocols import proposed
from specdec.rng import Rng
from specdec.types import Context, Proposal, Round, Verdict

if TYPE_CHECKING:
    from specdec.decoder import Decoder
    from specdec.stop_rules import StopRules


class Drafted(NamedTuple):
    """A proposal, its ``seconds``, those of each arm (``None`` without arms), and checks of it that are left to whoever verifies."""

    proposal: Proposal
    seconds: float
    spent: tuple[float, ...] | None
    later: DeferredChecks | None = None


class DraftRunner:
    """The drafting half of a lane: the draft's state."""

    def __init__(self, decoder: Decoder):
        self.draft, self.verifier, self.state = decoder.draft, decoder.verifier, None
        self.vocab_size, self.started = decoder.target.vocab_size, False
        self.most: int = getattr(decoder.draft, "nodes", lambda length: length)(decoder.length)
        self.proposal: Proposal | None = None

    def start(self, context: Context, target_cache: Any) -> None:
        """After the target's prefill: the draft's own."""
        self.state, self.started = self.draft.init(context, target_cache), True

    def observe(self, round: Round) -> None:
        """The last round; its proposal may have been copied on its way, and a draft knows its own."""
        if self.proposal is not None and self.proposal is not round.proposal:
            round = replace(round, proposal=self.proposal)
        self.state, self.proposal = self.draft.observe(self.state, round), None

    def select(self, stay: Tensor, target_cache: Any) -> None:
        """Only these rows go on."""
        self.state = self.draft.select(self.state, stay)
        if hasattr(self.draft, "follow"):
            self.state = self.draft.follow(self.state, target_cache)

    def propose(
        self, context: Context, budget: Tensor, rng: Rng, arm: Tensor | None = None, settle: bool = True
    ) -> Drafted:
        """A proposal for the next round, checked. ``settle=False``: checks that would wait for the device are left to ``MicroBatch.verify``."""
        began, draft = perf_counter(), self.draft
        if arm is not None:
            self.state = draft.assign(self.state, arm)  # type: ignore[attr-defined]
        with DeferredChecks() as later:
            answer = draft.propose(self.state, context, budget, self.verifier.for_draft(rng))
            proposal, self.state = proposed(draft, answer)
            check(proposal, budget, self.vocab_size, self.most)
        self.verifier.check(proposal)
        self.proposal = proposal
        if settle:
            later.settle()
        elif not proposal.tokens.is_cpu:
            # Until the checks are made, what is no token must not index anything.
            proposal = replace(proposal, tokens=proposal.tokens.clamp(0, self.vocab_size - 1))
        spent = getattr(self.state, "seconds", None)
        return Drafted(proposal, perf_counter() - began, spent, None if settle else later)

    def prepare(self, context: Context, arm: Tensor) -> None:
        """Let the arms that are wanted next read their rows."""
        if hasattr(self.draft, "prepare"):
            self.state = self.draft.prepare(self.state, context, arm)


class MicroBatch:
    """The verifying half: text, decisions and the target's cache of some rows.

    Attributes:
        choice: arms of the round at hand, and ``wish``: of the one after, where they are chosen a round ahead.
    """

    def __init__(self, decoder: Decoder, context: Context, rng: Rng, selection: ArmAssignment | None = None):
        self.decoder, self.context, self.rng, self.selection = decoder, context, rng, selection
        self.cache = decoder.target.cache(context.batch, context.tokens.shape[1])
        self.number = 0
        self.choice: Choice | None = None
        self.wish: Choice | None = None
        self.spent: Sequence[float] | None = None
        taps = getattr(decoder.draft, "taps", ())
        self.wanted: dict[str, Any] = {"taps": taps} if taps else {}

    def __bool__(self) -> bool:
        return self.context.batch > 0

    def choose(self, ahead: bool = False) -> None:
        """Arms for the next round; ``ahead``: those that were chosen a round ago, and new ones for the round after."""
        if self.selection is None:
            return
        if not ahead:
            self.choice = self.selection.choose(self.context, self.rng)
            return
        if self.wish is None:  # the first arms serve two rounds, so that other lanes know who is where
            self.choice = self.wish = self.selection.choose(self.context, self.rng)
        else:
            self.choice, self.wish = self.wish, self.selection.choose(self.context, self.rng)

    def lengths(self) -> Tensor:
        """``[B]`` the longest path that each row's draft proposes when nothing limits it."""
        if self.choice is not None:
            return self.choice.length
        reach = getattr(self.decoder.draft, "reach", lambda length: length)(self.decoder.length)
        return torch.full((self.context.batch,), reach)

    def budget(self, limits: StopRules) -> Tensor:
        """``[B]`` the longest path that each row may be drafted now."""
        longest = self.decoder.length if self.choice is None else self.choice.length
        return (limits.room(self.context) - 1).clamp(max=longest)

    def prefill(self, limits: StopRules) -> Round:
        """Round 0: one token from the target, without a draft."""
        nothing = Proposal.none(self.context.batch)
        return self.verify(limits, Drafted(nothing, 0.0, None), torch.zeros_like(self.context.length))

    def verify(self, limits: StopRules, drafted: Drafted, budget: Tensor) -> Round:
        """Score, verify, commit; rows that are finished leave."""
        decoder, context, proposal = self.decoder, self.context, drafted.proposal
        target, device = decoder.target, getattr(decoder.target, "device", None)
        clock = [perf_counter()]
        if proposal.nodes and device is not None and proposal.tokens.device != device:
            proposal = proposal.to(device)
        scores = target.score(self.cache, context, proposal if proposal.nodes else None, **self.wanted)
        clock.append(perf_counter())
        if proposal.tokens.device != scores.logits.device:  # drafts without a model work on the host
            proposal = proposal.to(scores.logits.device)
        verifier, probs, tops = decoder.verifier, None, None
        fused = getattr(verifier, "from_logits", None) if decoder.sampling.only_temperature else None
        with drafted.later or DeferredChecks() as later:  # the verdict is all that is waited for
            if decoder.sampling.greedy and compares(verifier):
                tops = decoder.sampling.argmax(scores.logits, context, proposal)
                verdict = verifier.greedy(proposal, tops)  # type: ignore[attr-defined]
            elif fused is not None:
                verdict = fused(proposal, scores.logits, decoder.sampling, context, self.rng)
            else:
                probs = decoder.sampling(scores.logits, context, proposal)
                verdict = verifier(proposal, probs, context, self.rng)
        later.settle()
        _check_verdict(verdict, verifier, target.vocab_size)
        self.cache.commit(context, verdict)
        kept, finished = limits.apply(context, verdict)
        clock.append(perf_counter())
        t, v = (b - a for a, b in pairwise(clock))
        short = (limits.room(context) - 1 < self.lengths()) if self.number else torch.zeros_like(finished)
        choice = self.choice
        round = Round(
            context=context,
            proposal=proposal,
            scores=scores,
            probs=probs,
            tops=tops,
            verdict=verdict,
            kept=kept,
            finished=finished,
            budget=budget,
            cut=(kept <= verdict.accepted) | short,
            arm=torch.zeros_like(kept) if choice is None else choice.arm,
            arm_prob=torch.ones(context.batch) if choice is None else choice.prob,
            number=self.number,
            seconds={"draft": drafted.seconds, "target": t, "verify": v}
            if self.number
            else {"prefill": t + v},
        )
        self.spent = drafted.spent
        return round

    def settle(self, round: Round) -> Tensor | None:
        """Take a round's tokens; rows that are finished leave. Returns those that stay, ``None`` when all do."""
        if self.selection is not None and self.number:
            self.selection.learn(round, self.spent)
        self.context = self.context.append(round.verdict.tokens, round.kept)
        self.number += 1
        if not bool(round.finished.any()):
            return None
        stay = staying(round.finished)
        self.context, self.rng = self.context.select(stay), self.rng.select(stay)
        if self.wish is not None:
            self.wish = self.wish.select(stay)
        if len(stay):
            self.cache = self.cache.select(stay)
        return stay


def compares(verifier: object) -> bool:
    """Whether a verifier compares tokens at temperature 0; a subclass that verifies in its own way has to say how it does that, too."""
    ways = ("__call__", "from_logits")
    owner = next((kind for kind in type(verifier).__mro__ if any(way in vars(kind) for way in ways)), object)
    return callable(vars(owner).get("greedy"))


def staying(finished: Tensor) -> Tensor:
    """The rows that go on, gaps filled from the end: a cache then has to move the fillers only."""
    left = len(finished) - int(finished.sum())
    stay = torch.arange(left)
    stay[finished[:left]] = left + (~finished[left:]).nonzero()[:, 0]
    return stay


def check(proposal: Proposal, budget: Tensor, vocab_size: int, most: int | None = None) -> None:
    """Raise ValueError for a proposal that breaks the contract: too long, malformed, or tokens that do not exist.

    Args:
        most: nodes that a row may have, as many as there are slots for.
    """
    _check_form(proposal, len(budget))
    if not proposal.nodes:
        return
    B, N = proposal.tokens.shape
    live = torch.arange(N) < proposal.size[:, None]
    if tree.is_chain(proposal.parents):
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
            f"the draft proposed {int(proposal.size.max())} nodes in a row, and there is room for {most}: define nodes(length), the most "
            "nodes of a proposal whose longest path is length (without it, length itself)"
        )
    tokens, probs = proposal.tokens, proposal.probs
    wrong = [(tokens < 0) | (tokens >= vocab_size)]
    if probs is not None:
        if probs.shape != (B, N, vocab_size):
            raise ValueError(
                f"the draft's probs have shape {list(probs.shape)}: expected {[B, N, vocab_size]}"
            )
        total = probs.sum(-1, dtype=torch.float32)
        drawn = probs.gather(2, tokens.clamp(0, vocab_size - 1)[..., None])[..., 0]
        wrong += [~((total - 1).abs() < 1e-3), drawn <= 0]  # NaN is off too

    def judge(wrong: Tensor) -> None:
        outside, *unlike = wrong & live
        if bool(outside.any()):
            raise ValueError(
                f"the draft proposed a token outside the target's vocabulary of {vocab_size}: pad or cut its logits (a captured draft "
                "says -1 where its logits are not finite)"
            )
        if not unlike:
            return
        off, never = unlike
        if bool(off.any()):
            b, n = off.nonzero()[0].tolist()
            raise ValueError(
                f"the draft's probs of row {b}, node {n} sum to {float(total[b, n]):.4g}: give probabilities that sum to 1 "
                "(logits need a softmax)"
            )
        if bool(never.any()):
            b, n = never.nonzero()[0].tolist()
            raise ValueError(
                f"the draft's probs give probability {float(drawn[b, n]):.3g} to the token of row {b}, node {n}: it cannot have been "
                "drawn from them"
            )

    defer(torch.stack(wrong), judge)


def _check_form(proposal: Proposal, batch: int) -> None:
    """Raise ValueError unless shapes and types are those of a proposal for ``batch`` rows, and its structure is on the host."""
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


def _check_verdict(verdict: Any, verifier: Any, vocab_size: int) -> None:
    """Raise unless a verifier returned a ``Verdict`` (``Verdict.of`` checks its path) with a bonus token that exists."""
    name = getattr(verifier, "name", type(verifier).__name__)
    if not isinstance(verdict, Verdict):
        raise TypeError(
            f"verifier {name!r} returned a {type(verdict).__name__}: return Verdict.of(proposal, path, accepted, bonus)"
        )
    bonus = verdict.bonus.numpy()
    if bonus.min() < 0 or bonus.max() >= vocab_size:
        raise ValueError(
            f"verifier {name!r} gave the bonus tokens {bonus.tolist()}: the target's vocabulary has {vocab_size}"
        )
