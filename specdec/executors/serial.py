"""One round after another: draft, score, verify, commit. The executor that the others must equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec import tree
from specdec.rng import Rng
from specdec.types import Context, Proposal, Round

if TYPE_CHECKING:
    from specdec.decoder import Decoder
    from specdec.limits import Limits


@dataclass(frozen=True)
class Serial:
    """All rows draft, then all rows verify; rows that finish leave the batch."""

    def run(self, decoder: Decoder, context: Context, rng: Rng, limits: Limits) -> Iterator[Round]:
        target, draft, verifier = decoder.target, decoder.draft, decoder.verifier
        cache = target.cache(context.batch, context.tokens.shape[1])
        reach = getattr(draft, "reach", lambda length: length)(decoder.length)
        taps = getattr(draft, "taps", ())
        wanted: dict[str, Any] = {"taps": taps} if taps else {}
        state = None
        number = 0
        while context.batch:
            clock = [perf_counter()]
            room = limits.room(context)
            budget = (room - 1).clamp(max=decoder.length) if number else torch.zeros_like(room)
            if number:
                proposal, state = draft.propose(state, context, budget, verifier.for_draft(rng))
                check(proposal, budget, target.vocab_size)
                verifier.check(proposal)
            else:
                proposal = Proposal.none(context.batch)
            clock.append(perf_counter())
            scores = target.score(cache, context, proposal if proposal.nodes else None, **wanted)
            clock.append(perf_counter())
            if proposal.tokens.device != scores.logits.device:  # drafts without a model work on the host
                proposal = proposal.to(scores.logits.device)
            probs = decoder.sampling(scores.logits, context, proposal)
            verdict = verifier(proposal, probs, context, rng)
            clock.append(perf_counter())
            if not number:
                state = draft.init(context, cache)
            clock.append(perf_counter())
            cache.commit(context, verdict)
            kept, finished = limits.apply(context, verdict)
            short = budget < reach if number else torch.zeros_like(finished)
            d, t, v, i = (b - a for a, b in pairwise(clock))
            round = Round(
                context=context,
                proposal=proposal,
                scores=scores,
                probs=probs,
                verdict=verdict,
                kept=kept,
                finished=finished,
                budget=budget,
                cut=(kept <= verdict.accepted) | short,
                arm=torch.zeros_like(kept),
                arm_prob=torch.ones(context.batch),
                number=number,
                seconds={"draft": d, "target": t, "verify": v} if number else {"prefill": d + t + v + i},
            )
            state = draft.observe(state, round)
            context = context.append(verdict.tokens, kept)
            if bool(finished.any()):
                stay = staying(finished)
                context, rng = context.select(stay), rng.select(stay)
                if len(stay):
                    cache, state = cache.select(stay), draft.select(state, stay)
                    if hasattr(draft, "follow"):
                        state = draft.follow(state, cache)
            round.seconds["total"] = perf_counter() - clock[0]  # type: ignore[index]
            number += 1
            yield round


def staying(finished: Tensor) -> Tensor:
    """The rows that go on, gaps filled from the end: a cache then has to move the fillers only."""
    left = len(finished) - int(finished.sum())
    stay = torch.arange(left)
    stay[finished[:left]] = left + (~finished[left:]).nonzero()[:, 0]
    return stay


def check(proposal: Proposal, budget: Tensor, vocab_size: int) -> None:
    """Raise ValueError for a proposal that breaks the contract: too long, malformed, or tokens that do not exist."""
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
    tokens = proposal.tokens.cpu()
    if bool(((tokens < 0) | (tokens >= vocab_size))[live].any()):
        raise ValueError(
            f"the draft proposed a token outside the target's vocabulary of {vocab_size}: pad or cut its logits"
        )
    if proposal.probs is not None:
        if proposal.probs.shape != (B, N, vocab_size):
            raise ValueError(
                f"the draft's probs have shape {list(proposal.probs.shape)}: expected {[B, N, vocab_size]}"
            )
        total = proposal.probs.sum(-1, dtype=torch.float32).cpu()
        off = ~((total - 1).abs() < 1e-3) & live  # NaN is off too
        if bool(off.any()):
            b, n = off.nonzero()[0].tolist()
            raise ValueError(
                f"the draft's probs of row {b}, node {n} sum to {float(total[b, n]):.4g}: give probabilities that sum to 1 "
                "(logits need a softmax)"
            )
        drawn = proposal.probs.gather(2, proposal.tokens.clamp(0, vocab_size - 1)[..., None])[..., 0].cpu()
        if bool(((drawn <= 0) & live).any()):
            b, n = ((drawn <= 0) & live).nonzero()[0].tolist()
            raise ValueError(
                f"the draft's probs give probability {float(drawn[b, n]):.3g} to the token of row {b}, node {n}: it cannot have been "
                "drawn from them"
            )
