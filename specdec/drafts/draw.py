"""Drawing nodes and recording their distributions, which every draft with a model does after a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.rng import Key, Rng
from specdec.sampling import Sampling, fit, logits_of
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
        sampling: how tokens are drawn. vocab_size: the target's, where the logits may have another.
    Attributes:
        count: tokens drawn so far in every row. length: of the longest chain.
    """

    def __init__(self, context: Context, budget: Tensor, sampling: Sampling, vocab_size: int | None = None):
        self.context, self.budget, self.sampling, self.vocab_size = context, budget, sampling, vocab_size
        self.count, self.length = 0, int(budget.max())
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
    def done(self) -> bool:
        """Whether every chain has all its tokens."""
        return self.count >= int(self.budget.max())

    def draw(self, logits: Tensor, rng: Rng) -> Tensor:
        """The next token of every row, ``[B]``, from ``logits [B, V]``; tokens of rows beyond their budget are ignored."""
        n, sampling = self.count, self.sampling
        logits = fitted(logits, self.vocab_size, sampling)[:, None]
        before = self.sofar if sampling.reads_text else None
        with logits_of("a draft's "):
            if sampling.greedy:
                token = sampling.argmax(logits, self.context, before, first=n - 1)[:, 0]
            else:
                q = sampling(logits, self.context, before, first=n - 1)
                token = rng.categorical(q[:, 0], Key(self.context.length, n))
                self.distributions.append(q)
        if not n and logits.device != self.tokens.device:
            # All zeros: made on the device instead of copied.
            self.tokens = torch.zeros_like(self.tokens, device=logits.device)
        self.tokens[:, n] = token
        self.count += 1
        return token

    def proposal(self) -> Proposal:
        """The drawn chains with their distributions."""
        nodes = self.sofar
        return (
            Proposal.none(self.context.batch)
            if nodes is None
            else with_distributions(nodes, self.distributions)
        )
