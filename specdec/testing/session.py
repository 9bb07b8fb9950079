"""A draft with a target and a verifier, played a round at a time; the check sets every budget and every random decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.capabilities import DraftPart
from specdec.protocols import LanguageModel
from specdec.rng import Philox, seeds
from specdec.sampling import Sampling
from specdec.testing.draft_rules import KEYS, STATE, contract
from specdec.testing.recorder import Decision, Recorder, Swap
from specdec.testing.states import changed, no_global_draws, snapshot
from specdec.types import Context, Proposal, Round
from specdec.verifiers import Rejection

BUDGETS = ((4, 4, 4, 4), (3, 0, 1, 2), (0, 0, 0, 0), (1, 5, 2, 0), (2, 2, 2, 2))  # a line is a round
_TEXTS = ((1,), (2, 3, 2, 3, 2), (5, 4, 3, 2, 1, 0, 5, 4), (0, 0, 0))


def prompts(vocab_size: int) -> list[list[int]]:
    """Four ragged prompts within a vocabulary."""
    return [[token % vocab_size for token in text] for text in _TEXTS]


class Session:
    """Rows of ``prompts``, decoded with a draft, a target and ``Rejection``.

    Args:
        rows: indices of the prompts, which are also the numbers of the requests. seed: of the decisions. swap: decisions to replace.
    Attributes:
        log: the decisions of the last ``propose``.
    """

    def __init__(
        self,
        draft: Any,
        target: LanguageModel,
        sampling: Sampling,
        rows: Sequence[int] = (0, 1, 2, 3),
        seed: int = 0,
        swap: Swap | None = None,
    ):
        self.sampling, self.target = sampling, target
        texts = prompts(target.vocab_size)
        self.draft = DraftPart.of(draft).bound(target, sampling)
        self.part = DraftPart.of(self.draft)
        self.context = Context.of([texts[b] for b in rows], capacity=64, request=torch.tensor(rows))
        self.cache = target.cache(len(rows), 64)
        self.rng = Philox(seeds(seed, len(texts))[list(rows)])
        self.log: list[tuple[int, Decision]] = []
        self.swap = swap or {}
        self.state: Any = None
        self.number = 0
        self.round([0] * len(texts))  # the prefill

    @property
    def requests(self) -> list[int]:
        return self.context.request.tolist()

    @torch.inference_mode()  # as the decoder does
    def round(self, budgets: Sequence[int], foreign: bool = False) -> Round:
        """Draft, verify, commit. ``budgets``: by request. ``foreign``: the round's proposal is from another draft."""
        budget = torch.tensor([budgets[b] for b in self.requests])
        self.log.clear()
        proposal = Proposal.none(self.context.batch)
        if self.number and not foreign:
            proposal = self._propose(budget)
        return self._finish(proposal, budget)

    def _propose(self, budget: Tensor) -> Proposal:
        recorder = Recorder(self.rng, self.requests, KEYS, log=self.log, swap=self.swap)
        given = (self.context.tokens, self.context.length, budget)
        copies = [t.clone() for t in given]
        proposal, self.state = self._called(
            "propose", self.part.propose, self.state, self.context, budget, recorder
        )
        STATE.require(
            all(map(torch.equal, copies, given)), "propose() changed the context or the budget in place"
        )
        contract(self.part.info, proposal, budget, self.target.vocab_size)
        return proposal

    def _called(self, name: str, method: Any, state: Any, *arguments: Any) -> Any:
        """Call a method of the draft and return its result; the method must not change the state or the global generators."""
        before = snapshot(state)
        with no_global_draws(KEYS, f"{name}()"):
            answer = method(state, *arguments)
        other = changed(before, snapshot(state))
        STATE.require(
            not other, f"{name}() changed {', '.join(other)} of the state that it was given in place"
        )
        return answer

    def _finish(self, proposal: Proposal, budget: Tensor) -> Round:
        context = self.context
        taps: dict[str, Any] = {"taps": self.part.info.taps} if self.part.info.taps else {}
        scores = self.target.score(self.cache, context, proposal if proposal.nodes else None, **taps)
        probs = self.sampling(scores.logits, context, proposal)
        verdict = Rejection(trust_declared=True)(proposal, probs, context, self.rng)
        if not self.number:
            with no_global_draws(KEYS, "init()"):
                self.state = self.draft.init(context, self.cache)
        self.cache.commit(context, verdict)
        committed = verdict.accepted + 1
        round = Round.of(
            context, proposal, scores, verdict, committed, budget, probs=probs, number=self.number
        )
        self.state = self._called("observe", self.draft.observe, self.state, round)
        self.context = context.append(verdict.tokens, committed)
        self.number += 1
        return round

    @torch.inference_mode()
    def keep(self, requests: Sequence[int]) -> None:
        """Rows leave, and the others may change their order."""
        at = torch.tensor([self.requests.index(b) for b in requests])
        self.context, self.rng = self.context.select(at), self.rng.select(at)
        self.cache, self.state = (
            self.cache.select(at),
            self._called("select", self.draft.select, self.state, at),
        )
        self.state = self.part.follow(self.state, self.cache)

    @torch.inference_mode()
    def join(self, other: Session) -> None:
        """Append the rows of another session with the same draft."""
        mine, theirs = self.context, other.context
        wide = max(mine.tokens.shape[1], theirs.tokens.shape[1])
        parts = [
            (
                torch.nn.functional.pad(c.tokens, (0, wide - c.tokens.shape[1])),
                c.length,
                c.prompt_length,
                c.request,
            )
            for c in (mine, theirs)
        ]
        self.context = Context(*(torch.cat(pair) for pair in zip(*parts)))
        self.rng = Philox(torch.cat([self.rng.seed, other.rng.seed]))
        self.cache = self.cache.join(other.cache)
        assert self.part.joins is not None
        self.state = self.part.follow(self.part.joins.join(self.state, other.state), self.cache)


class Seen(NamedTuple):
    """The proposal of one row in one round and the tokens that it committed, without the batch's padding."""

    tokens: list[int]
    parents: list[int]
    probs: Tensor | None
    committed: list[int]

    def like(self, other: Seen) -> bool:
        """Whether both are the same, up to the rounding of probabilities."""
        exact = (
            self.tokens == other.tokens
            and self.parents == other.parents
            and self.committed == other.committed
        )
        if not exact or self.probs is None or other.probs is None:
            return exact and (self.probs is None) == (other.probs is None)
        near = 1e-9 if self.probs.dtype == torch.float64 else 1e-4
        return torch.allclose(self.probs.double(), other.probs.double(), rtol=0, atol=near)


def seen(round: Round) -> dict[int, Seen]:
    """Request -> what its row proposed and committed."""
    proposal, out = round.proposal, {}
    for b, request in enumerate(round.context.request.tolist()):
        n = int(proposal.size[b])
        probs = None if proposal.probs is None or not n else proposal.distributions()[b, :n]
        out[request] = Seen(
            proposal.tokens[b, :n].tolist(),
            proposal.parents[b, :n].tolist(),
            probs,
            round.verdict.tokens[b, : int(round.committed[b])].tolist(),
        )
    return out


def differs(found: Mapping[int, Seen], expected: Mapping[int, Seen]) -> str:
    """How the rows of ``found`` differ from the same rows of ``expected``; empty if they do not."""
    for request, mine in found.items():
        theirs = expected[request]
        if not mine.like(theirs):
            what = "the probabilities of" if mine.tokens == theirs.tokens else f"{theirs.tokens} and then"
            return f"row {request} got {what} {mine.tokens}"
    return ""
