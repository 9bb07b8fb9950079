"""A model proposes a tree with several candidates at each node (SpecInfer, Miao et al., arXiv 2305.09781).

Candidates are drawn independently, or as ``siblings`` says; at temperature 0, also of a row among others, they are the most probable tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.capabilities import DraftInfo
from specdec.drafts.coerce import as_model
from specdec.drafts.draw import fitted, with_distributions
from specdec.drafts.one_model import ModelState, OneModel, readable
from specdec.drafts.siblings import Drawing, Independent
from specdec.kernels.topk import topk
from specdec.protocols import LanguageModel
from specdec.rng import Key, Rng
from specdec.sampling import Sampling, check_finite, logits_of
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class Tree(OneModel):
    """Every node at depth d gets ``widths[d]`` children. There is one forward for each level.

    Args:
        model, sampling: as for ``Model``.
        widths: children of each node, by depth: ``(3, 2, 1)`` has 3 + 6 + 6 nodes.
        siblings: how children are drawn: ``siblings.Independent()``, ``siblings.Distinct()``, ``siblings.TopAndOne()``. At temperature 0
            they are the most probable tokens.
    """

    model: LanguageModel
    widths: tuple[int, ...] = (2, 2, 1)
    sampling: Sampling | None = None
    vocab_size: int | None = None
    siblings: Drawing = Independent()

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", as_model(self.model, "model"))
        if isinstance(self.widths, str) or not isinstance(self.widths, Iterable):
            raise TypeError(
                f"widths is {self.widths!r}: give the children of a node by depth, such as (3, 2, 1)"
            )
        object.__setattr__(self, "widths", tuple(self.widths))
        for width in self.widths:
            whole("widths, of a depth,", width)
        if not self.widths or min(self.widths) < 1:
            raise ValueError(
                f"widths is {self.widths}: give at least one depth, with at least one child for each node"
            )

    @property
    def info(self) -> DraftInfo:
        return DraftInfo(
            "tree",
            trees=max(self.widths) > 1,
            nodes=self.nodes,
            longest=len(self.widths),
            revocable=True,
            siblings=self.siblings.kind,
            model=self.model,
            sampling=self.sampling,
        )

    def bind(self, target: LanguageModel, sampling: Sampling) -> Tree:
        if max(self.widths) > target.vocab_size:
            raise ValueError(
                f"widths is {self.widths}: a node has at most as many children as the vocabulary has ids ({target.vocab_size})"
            )
        return replace(self, sampling=sampling.for_draft(self.sampling), vocab_size=target.vocab_size)

    def nodes(self, length: int) -> int:
        """Nodes of a tree whose longest path is ``length``."""
        return sum(prod(self.widths[: d + 1]) for d in range(min(length, len(self.widths))))

    def propose(
        self, state: ModelState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, ModelState]:
        sampling = self.sampling or Sampling()
        cold = sampling.greedy_rows(context)
        points, some = bool(cold.all()), bool(cold.any())
        largest = sampling.coldest if some else sampling
        text = readable(context, self.model)
        B = context.batch
        upto = torch.tensor([self.nodes(d) for d in range(len(self.widths) + 1)])
        size = upto[budget.clamp(max=len(self.widths))]
        depth = int(budget.clamp(max=len(self.widths)).max())
        if depth == 0:
            return Proposal.none(B), ModelState(state.cache, None)
        tokens = torch.zeros(B, 0, dtype=torch.long)
        parents = torch.zeros(B, 0, dtype=torch.long)
        distributions: list[Tensor] = []
        sources: list[Tensor] = []  # which distribution each node was drawn from
        level = torch.tensor([-1])  # the nodes whose children come next
        sofar: Proposal | None = None
        for d in range(depth):
            rows = (budget > d).nonzero()[:, 0]
            start = int(level[0]) if d else None
            logits = self.model.score(state.cache, text, sofar, start=start, rows=rows).logits
            logits = fitted(logits, self.vocab_size, sampling)
            width, first = self.widths[d], int(level[0])
            if some:
                with logits_of("a draft's "):
                    best = topk(largest.scores(logits, context, sofar, first=first), width)
                    check_finite(best.values[..., 0])
                    top = best.indices
            if points:
                children = top.reshape(B, -1)
            else:
                with logits_of("a draft's "):
                    q = sampling(logits, context, sofar, first=first)
                sibling = torch.arange(len(level) * width).view(len(level), width)
                key = Key(context.length[:, None, None], d, sibling.expand(B, -1, -1))
                drawn = self.siblings(q, width, key, rng)
                if some:
                    drawn = drawn.with_points(cold, top)
                children = drawn.tokens.reshape(B, -1)
                sources.append(
                    drawn.source.expand(drawn.tokens.shape).reshape(B, -1)
                    + sum(law.shape[1] for law in distributions)
                )
                distributions.append(drawn.distributions)
            tokens = torch.cat([tokens, children], 1) if d else children
            parents = torch.cat([parents, level.repeat_interleave(width).expand(B, -1)], 1)
            level = torch.arange(tokens.shape[1] - children.shape[1], tokens.shape[1])
            sofar = Proposal(tokens, parents, size.clamp(max=tokens.shape[1]))
        assert sofar is not None
        source = torch.cat(sources, 1) if sources else None
        proposal = with_distributions(sofar, distributions, source)
        return proposal, ModelState(state.cache, proposal)
