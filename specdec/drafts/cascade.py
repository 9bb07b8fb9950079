"""A draft model that is itself sped up by a draft (Cascade Speculative Drafting, Chen et al., arXiv 2312.11462; TriForce, Sun et al., arXiv 2404.11912).

An inner draft guesses what the model will draft, and the model reads the guesses in one forward. Every token is the model's own draw under the key that
it has without guesses, so the chain is that of ``Model``, token for token, whatever is guessed; guesses only save forwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.capabilities import DraftInfo, DraftPart, ModelInfo
from specdec.drafts.coerce import as_model
from specdec.drafts.draw import fitted
from specdec.drafts.model import as_draft
from specdec.drafts.one_model import readable
from specdec.kernels.device import to_device, to_host
from specdec.protocols import Draft, LanguageModel
from specdec.rng import Attempt, Key, Rng
from specdec.sampling import Sampling, logits_of
from specdec.types import Context, Proposal, Round, Verdict


class CascadeState(NamedTuple):
    """The model's ``cache`` and the ``inner`` draft's state."""

    cache: Any
    inner: Any


@dataclass(frozen=True)
class Cascade:
    """Draws the chain of ``Model(model)``, in fewer forwards where ``inner`` guesses it.

    A forward of the model reads up to ``ahead`` guesses and gives as many tokens as were guessed right, and one more. A guess is right with probability
    q(guess), so ``inner`` is bound to temperature 0: its most probable tokens are the best guesses.

    Args:
        model, sampling: as for ``Model``.
        inner: any draft that may be called for a text that is never committed (``DraftInfo.revocable``), such as ``NGram()``, ``Suffix()`` or
            another ``Model``, also a ``Tree``; or a model.
        ahead: the longest path that ``inner`` proposes for a forward.
    Raises:
        TypeError: ``ahead`` is no whole number, or ``inner`` neither a draft nor a model. ValueError: ``ahead`` is below 1, or ``inner`` cannot guess: it is a
            pool, reads activations or a cache, is not revocable, or proposes trees for a model that takes chains only.
    """

    model: LanguageModel
    inner: Draft[Any]
    ahead: int = 4
    sampling: Sampling | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", as_model(self.model, "model"))
        at_least(1, "ahead", self.ahead, "give the most tokens that inner guesses for a forward of the model")
        object.__setattr__(self, "inner", as_draft(self.inner, "inner"))
        part = self.part
        if part.arms is not None or part.reads_target or not part.info.revocable:
            raise ValueError(
                f"inner is {part.info.name!r}, which cannot guess inside a block (it is a pool, reads activations or a cache, or is not revocable): give "
                "NGram(), Suffix(), Model(...), Tree(...), or a draft that declares DraftInfo(..., revocable=True)"
            )
        if part.info.trees and not self.model.supports_trees:
            raise ValueError(
                f"inner is {part.info.name!r}, which proposes trees, and the cascade's model takes chains only: give NGram() or Model(...)"
            )

    @staticmethod
    def example(model: LanguageModel) -> Cascade:
        """Lookups before a model (for the contract tests)."""
        from specdec.drafts.ngram import NGram

        return Cascade(model, NGram(), 2)

    @cached_property
    def part(self) -> DraftPart:
        """The inner draft with its capabilities."""
        return DraftPart.of(self.inner)

    @property
    def info(self) -> DraftInfo:
        return DraftInfo(
            "cascade",
            nodes=self._nodes,
            revocable=True,
            model=self.model,
            inner=self.inner,
            sampling=self.sampling,
        )

    def _nodes(self, length: int) -> int:
        """The most slots that a row needs: its chain so far, and a tree of guesses."""
        guessed = (n + self.part.info.nodes(min(self.ahead, length - n - 1)) for n in range(length))
        return max((length, *guessed))

    def bind(self, target: LanguageModel, sampling: Sampling) -> Cascade:
        mine = sampling.for_draft(self.sampling)
        inner = self.part.bound(
            target, Sampling(temperature=0.0, processors=mine.processors, grammar=mine.grammar)
        )
        return replace(self, inner=inner, sampling=mine, vocab_size=target.vocab_size)

    def init(self, context: Context, target_cache: Any) -> CascadeState:
        return self.prepare(self.empty(context), context, None)

    def empty(self, context: Context) -> CascadeState:
        """A state of which the model has read nothing."""
        cache, waits = self.model.cache(context.batch, context.tokens.shape[1]), self.part.waits
        return CascadeState(cache, self.inner.init(context, cache) if waits is None else waits.empty(context))

    def prepare(self, state: CascadeState, context: Context, rows: Tensor | None) -> CascadeState:
        """Feed unread tokens of ``rows`` (``None``: all)."""
        self.model.prefill(state.cache, readable(context, self.model), rows)
        waits = self.part.waits
        return state if waits is None else state._replace(inner=waits.prepare(state.inner, context, rows))

    def propose(
        self, state: CascadeState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, CascadeState]:
        cache, inner = state.cache, state.inner
        # Guesses change no token, so they may share the numbers of draws.
        guessing = rng if isinstance(rng, Attempt) else Attempt(rng, 1)
        drawn, grown = _Drawn(context, budget, rng), context
        sampling, device = self.sampling or Sampling(), ModelInfo.of(self.model).device
        while bool((left := budget - drawn.count).any()):
            text = readable(grown, self.model)
            guess, inner = self._guess(inner, grown, (left - 1).clamp(0, self.ahead), guessing)
            rows = None if bool(left.all()) else left.nonzero()[:, 0]
            known = replace(guess, tokens=guess.tokens.clamp(0, self.model.vocab_size - 1))
            known = known if device is None else known.to(device)
            scores = self.model.score(cache, text, known if guess.nodes else None, rows=rows)
            logits = fitted(scores.logits, self.vocab_size, sampling)
            there = guess.to(logits.device)  # lookups propose on the host
            with logits_of("a draft's "):
                if sampling.greedy:
                    verdict = drawn.follow(guess, sampling.argmax(logits, grown, there), None)
                else:
                    verdict = drawn.follow(guess, None, sampling(logits, grown, there))
            cache.commit(text, verdict)
            committed = (verdict.accepted + 1).where(left > 0, 0)
            # What the inner draft observes is a round in which the model was the target.
            inner = self.inner.observe(inner, Round.of(grown, guess, scores, verdict, committed, left))
            grown = grown.append(verdict.tokens, committed)
        return drawn.proposal(), CascadeState(cache, inner)

    def _guess(self, inner: Any, text: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Any]:
        """What the inner draft proposes; raises ValueError for more than there is room for."""
        guess, inner = self.part.propose(inner, text, budget, rng)
        most, room = int(guess.size.max()), self.part.info.nodes(int(budget.max()))
        if most > room:
            raise ValueError(
                f"inner {self.part.info.name!r} proposed {most} nodes in a row, and there is room for {room}: propose() must respect budget[b]"
            )
        return guess, inner

    def observe(self, state: CascadeState, round: Round) -> CascadeState:
        return state  # the caches follow the text

    def select(self, state: CascadeState, rows: Tensor) -> CascadeState:
        return CascadeState(state.cache.select(rows), self.inner.select(state.inner, rows))

    def join(self, state: CascadeState, other: CascadeState) -> CascadeState:
        joins = self.part.joins
        if joins is None:
            raise ValueError(f"inner is {self.part.info.name!r}, which cannot take in rows (it has no join)")
        return CascadeState(state.cache.join(other.cache), joins.join(state.inner, other.inner))


class _Drawn:
    """The chains so far: ``count [B]`` tokens of each, ``tokens [B, K]``, and ``laws``, the distributions ``[B, K, V]`` that they were drawn from."""

    def __init__(self, context: Context, budget: Tensor, rng: Rng):
        self.start, self.budget, self.rng = context.length, budget, rng
        self.count = torch.zeros_like(budget)
        self.tokens = torch.zeros(context.batch, int(budget.max()), dtype=torch.long)
        self.laws: Tensor | None = None

    def follow(self, guess: Proposal, largest: Tensor | None, probs: Tensor | None) -> Verdict:
        """Draw the next token of every unfinished row, and go on where it was guessed.

        Args:
            largest: ``[B, N + 1]`` the most probable tokens, at temperature 0. probs: ``[B, N + 1, V]`` distributions otherwise.
        """
        B, N = guess.tokens.shape
        if probs is not None and self.laws is None:
            self.laws = probs.new_zeros(B, self.tokens.shape[1], probs.shape[-1])
        guessed, *top = to_host(guess.tokens, *(() if largest is None else (largest,)))
        live = torch.arange(N) < guess.size[:, None]
        path, here = torch.full((B, N), -1), torch.full((B,), -1)
        accepted, bonus = torch.zeros_like(self.count), torch.zeros_like(self.count)
        rows = (self.count < self.budget).nonzero()[:, 0]
        while len(rows):
            n, at = self.count[rows], here[rows] + 1
            token = top[0][rows, at] if probs is None else self._draw(probs, rows, at, n)
            self.tokens[rows, n] = bonus[rows] = token
            self.count[rows] = n + 1
            right = (guess.parents[rows] == here[rows, None]) & (guessed[rows] == token[:, None]) & live[rows]
            hit = right.any(1)
            rows, node = rows[hit], right[hit].int().argmax(1) if N else here[:0]
            path[rows, accepted[rows]] = here[rows] = node
            accepted[rows] += 1
        return Verdict.of(guess, path, accepted, bonus, checked=True)

    def _draw(self, probs: Tensor, rows: Tensor, at: Tensor, n: Tensor) -> Tensor:
        """A token of each of ``rows``, from its entry ``at``, as token ``n`` of its chain."""
        assert self.laws is not None
        every, device = len(rows) == len(probs), probs.device
        here = to_device(rows, device)
        q = probs[here, to_device(at, device)]
        self.laws[here, to_device(n, device)] = q
        rng = self.rng if every else self.rng.select(rows)
        return to_host(rng.categorical(q, Key(self.start[rows], n)))[0]

    def proposal(self) -> Proposal:
        """The chains with their distributions."""
        if not self.tokens.shape[1]:
            return Proposal.none(len(self.budget))
        tokens = self.tokens if self.laws is None else to_device(self.tokens, self.laws.device)
        return Proposal.chain(
            tokens, self.budget.clone(), self.laws, None if self.laws is None else "sampled"
        )
