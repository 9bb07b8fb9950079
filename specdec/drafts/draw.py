"""Drawing nodes, and recording the distributions that they were drawn from: what every draft of a model does after a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.rng import Key, Rng
from specdec.sampling import Sampling, fit
from specdec.types import Context, Proposal


def with_distributions(
    nodes: Proposal, distributions: Sequence[Tensor], source: Tensor | None = None
) -> Proposal:
    """``nodes`` that were drawn from ``distributions``, each ``[B, some distributions, V]``; without distributions they are point masses.

    Args:
        source: ``[B, N]`` which distribution each node was drawn from, where that is not its own.
    """
    if not distributions:
        return nodes
    return replace(nodes, probs=torch.cat(list(distributions), 1), provenance="sampled", source=source)


class ChainDraw:
    """A chain of ``budget [B]`` tokens that is being drawn; at temperature 0 each is the most probable one.

    Args:
        sampling: how tokens are drawn. vocab_size: the target's, where it may differ from that of the logits.
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
        """The nodes that were drawn, as point masses."""
        if not self.count:
            return None
        return Proposal.chain(self.tokens[:, : self.count], self.budget.clamp(max=self.count))

    def draw(self, logits: Tensor, rng: Rng) -> Tensor:
        """The next token of every row, ``[B]``, from ``logits [B, V]``; what it is in rows that are through does not matter."""
        n, sampling = self.count, self.sampling
        logits = fit(logits, self.vocab_size)[:, None]
        before = self.sofar if sampling.processors else None  # nothing else looks at the text
        if sampling.greedy:
            token = sampling.argmax(logits, self.context, before, first=n - 1)[:, 0]
        else:
            q = sampling(logits, self.context, before, first=n - 1)
            token = rng.categorical(q[:, 0], Key(self.context.length, n))
            self.distributions.append(q)
        if not n and logits.device != self.tokens.device:
            self.tokens = torch.zeros_like(
                self.tokens, device=logits.device
            )  # nothing to copy, nothing to wait for
        self.tokens[:, n] = token
        self.count += 1
        return token

    def proposal(self) -> Proposal:
        """All that was drawn, with its distributions."""
        nodes = self.sofar
        return (
            Proposal.none(self.context.batch)
            if nodes is None
            else with_distributions(nodes, self.distributions)
        )
