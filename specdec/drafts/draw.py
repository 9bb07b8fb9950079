"""Drawing nodes and recording their distributions, which every draft with a model does after a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.drafts.stops import Drafted, Stops, When, as_stops, ends
from specdec.kernels.device import to_device
from specdec.rng import Key, Rng
from specdec.sampling import Sampling, fit, logits_of, widened
from specdec.types import Context, Proposal


def with_distributions(
    nodes: Proposal, distributions: Sequence[Tensor], source: Tensor | None = None
) -> Proposal:
    """``nodes`` with the ``distributions`` (each ``[B, n, V]``) that they were drawn from; without distributions they are point masses.

    Args:
        source: ``[B, N]`` which distribution each node was drawn from; ``None``: node ``n`` from distribution ``n``.
    """
    if not distributions:
        return nodes
    return replace(nodes, probs=torch.cat(list(distributions), 1), provenance="sampled", source=source)


LOWEST = -1e4
"""The logit of tokens that a draft lacks, under a grammar: a probability of 0, unless the grammar allows no others."""


def fitted(logits: Tensor, vocab_size: int | None, sampling: Sampling) -> Tensor:
    """A draft's logits over the target's vocabulary. Under a grammar, which may forbid all that the draft has, none is -inf."""
    logits = fit(logits, vocab_size)
    return logits if sampling.grammar is None else logits.clamp(min=LOWEST)


class ChainDraw:
    """Draws chains of ``budget [B]`` tokens; at temperature 0 each token is the most probable one.

    Args:
        sampling: how tokens are drawn. vocab_size: the target's, where the logits may have another. stop: what ends chains (``drafts.stops``).
    Attributes:
        count: tokens drawn so far in every row. length: of the longest chain.
    """

    def __init__(
        self,
        context: Context,
        budget: Tensor,
        sampling: Sampling,
        vocab_size: int | None = None,
        stop: Stops = (),
    ):
        self.context, self.budget, self.sampling, self.vocab_size = context, budget, sampling, vocab_size
        self.count, self.length = 0, int(budget.max())
        self.stops, self.seen = as_stops(stop), Drafted(*[torch.zeros(context.batch, 0)] * 4)
        self.tokens = torch.zeros(context.batch, self.length, dtype=torch.long)
        self.distributions: list[Tensor] = []

    @property
    def sofar(self) -> Proposal | None:
        """The nodes drawn so far, as point masses."""
        if not self.count:
            return None
        return Proposal.chain(self.tokens[:, : self.count], self.budget.clamp(max=self.count))

    def end(self, rows: Tensor) -> None:
        """The chains of ``rows [B]`` (bool) end before the next token. Which do may depend on the tokens drawn so far, and on no later one."""
        self.budget = self.budget.clamp(max=self.count).where(rows.cpu(), self.budget)

    @property
    def rows(self) -> Tensor | None:
        """The rows that get another token; ``None`` for all."""
        more = self.budget > self.count
        return None if bool(more.all()) else more.nonzero()[:, 0]

    @property
    def done(self) -> bool:
        """Whether every chain has all its tokens."""
        return self.count >= int(self.budget.max())

    def draw(self, logits: Tensor, rng: Rng) -> Tensor:
        """The next token of every row, ``[B]``, from ``logits [B, V]``; tokens of rows beyond their budget are ignored.

        If rules end all chains before it, none is drawn, and it is 0.
        """
        n, sampling = self.count, self.sampling
        logits = fitted(logits, self.vocab_size, sampling)[:, None]
        before = self.sofar if sampling.reads_text else None
        with logits_of("a draft's "):
            q = None if sampling.greedy else sampling(logits, self.context, before, first=n - 1)
            if self.stops:
                law = self._law(logits, q, before)
                self.seen = self.seen.grown(most=law.amax(-1), entropy=torch.special.entr(law).sum(-1))
                self._ask("before")
                if self.done:
                    return torch.zeros(len(logits), dtype=torch.long, device=logits.device)
            if q is None:
                token = sampling.argmax(logits, self.context, before, first=n - 1)[:, 0]
            else:
                token = rng.categorical(q[:, 0], Key(self.context.length, n))
                self.distributions.append(q)
        if not n and logits.device != self.tokens.device:
            # All zeros: made on the device instead of copied.
            self.tokens = torch.zeros_like(self.tokens, device=logits.device)
        self.tokens[:, n] = token
        self.count += 1
        if self.stops:
            self.seen = self.seen.grown(token=token, own=law.gather(-1, token[:, None])[:, 0])
            self._ask("after")
        return token

    def draw_all(self, logits: Tensor, rng: Rng) -> None:
        """All tokens, from ``logits [B, length, V]`` that no drawn token changes: those that ``draw`` would draw one after another."""
        if self.stops or self.sampling.reads_text:
            while not self.done:
                self.draw(logits[:, self.count], rng)
            return
        logits = fitted(logits, self.vocab_size, self.sampling)
        with logits_of("a draft's "):
            if self.sampling.greedy:
                self.tokens = self.sampling.argmax(logits, self.context)
            else:
                q = self.sampling(logits, self.context)
                depth = torch.arange(self.length).expand(len(q), -1)
                self.tokens = rng.categorical(q, Key(self.context.length[:, None].expand_as(depth), depth))
                self.distributions.append(q)
        self.count = self.length

    def _ask(self, when: When) -> None:
        """End the chains that rules end now."""
        if any(stop.when == when for stop in self.stops):
            self.end(ends(self.stops, when, self.seen))

    def _law(self, logits: Tensor, q: Tensor | None, before: Proposal | None) -> Tensor:
        """``[B, V]`` what rules look at: ``q [B, 1, V]``, and in greedy rows the softmax of the scores whose largest one is taken."""
        sampling, first = self.sampling, self.count - 1
        greedy = sampling.greedy_rows(self.context)
        if sampling.overridden or not bool(greedy.any()):  # an overridden one may have no scores
            return (sampling(logits, self.context, before, first=first) if q is None else q)[:, 0]
        soft = sampling.constrained(widened(logits), self.context, before, first)[:, 0].softmax(-1)
        return soft if q is None else soft.where(to_device(greedy, soft.device)[:, None], q[:, 0])

    def proposal(self) -> Proposal:
        """The drawn chains with their distributions."""
        nodes = self.sofar
        return (
            Proposal.none(self.context.batch)
            if nodes is None
            else with_distributions(nodes, self.distributions)
        )
