"""DDTree (arXiv 2604.12989): of a head's marginal distributions, the most probable continuations within a budget of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import SlotAnchors
from specdec.drafts.heads.within import check_marginal, marginals
from specdec.kernels.device import to_device
from specdec.kernels.topk import topk
from specdec.rng import Rng
from specdec.sampling import Sampling, check_finite, logits_of
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class DDTree:
    """The ``total`` most probable prefixes under a product of marginal distributions, at temperature 1, as point masses.

    A prefix is never more probable than the one it continues, so these prefixes are a tree, and a heap finds them best first.

    Args:
        total: nodes of the tree.
    Raises:
        ValueError: a number below 1.
    """

    total: int = 59
    trees = True
    longest = None

    def __post_init__(self) -> None:
        at_least(1, "total", self.total, "give at least 1")

    def check(self, head: HeadModel) -> None:
        """As ``Grower.check``."""
        check_marginal("DDTree", head)

    def nodes(self, length: int) -> int:
        return self.total if length > 0 else 0

    def grow(
        self,
        head: HeadModel,
        at: SlotAnchors,
        memo: Any,
        given: Tensor,
        context: Context,
        budget: Tensor,
        sampling: Sampling,
        rng: Rng,
    ) -> Proposal:
        """As ``Grower.grow``."""
        each = list(marginals(head, at, memo, given, context, int(budget.max()), sampling))
        return self.of(each, budget, head.ids)

    def of(self, each: Sequence[Tensor], budget: Tensor, ids: Tensor | None = None) -> Proposal:
        """The trees of marginal distributions.

        Args:
            each: logits ``[R, K]`` of every depth. budget: ``[R]``, at least 1. ids: ``[K]`` the id of each logit; ``None``: its number.
        """
        found = [topk(logits.log_softmax(-1), min(self.total, logits.shape[-1])) for logits in each]
        values = torch.stack([one.values for one in found], 1)  # [R, depth, K]
        with logits_of("a draft's "):
            check_finite(values[..., 0])
        scores = values.tolist()
        best = torch.stack([one.indices for one in found], 1)
        ids = best if ids is None else ids[best]
        nodes = [self._best(row[:depth]) for row, depth in zip(scores, budget.tolist())]
        size = torch.tensor([len(row) for row in nodes])
        filled = [row + [(n - 1, 0, 0) for n in range(len(row), int(size.max()))] for row in nodes]
        parent, depth, rank = torch.tensor(filled).unbind(-1)
        rows = torch.arange(len(nodes), device=ids.device)[:, None]
        return Proposal(ids[rows, to_device(depth, ids.device), to_device(rank, ids.device)], parent, size)

    def _best(self, scores: list[list[float]]) -> list[tuple[int, int, int]]:
        """Nodes ``(parent, depth, rank)``, the most probable first; ``scores``: depth -> log-probabilities, descending."""
        nodes: list[tuple[int, int, int]] = []
        heap = [(-scores[0][0], -1, 0, 0, 0.0)]  # minus the score, parent, depth, rank, the parent's score
        while heap and len(nodes) < self.total:
            score, parent, depth, rank, above = heapq.heappop(heap)
            if rank + 1 < len(scores[depth]):
                heapq.heappush(heap, (above - scores[depth][rank + 1], parent, depth, rank + 1, above))
            if depth + 1 < len(scores):
                heapq.heappush(heap, (score - scores[depth + 1][0], len(nodes), depth + 1, 0, score))
            nodes.append((parent, depth, rank))
        return nodes
