"""A tree of one shape for every round, filled with the best tokens of marginal distributions (Medusa, arXiv 2401.10774, section 2.3.3)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import at_least, whole
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import SlotAnchors
from specdec.drafts.heads.within import check_marginal, marginals
from specdec.kernels.topk import topk
from specdec.rng import Rng
from specdec.sampling import Sampling, check_finite, logits_of
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class StaticTree:
    """A tree of point masses of a fixed shape. A node is named by the ranks on its path: ``(0, 2)`` is the third best token of the second
    depth after the best token of the first.

    Args:
        paths: the nodes, in any order, each after every prefix of it that is a node, too.
    Raises:
        ValueError: no nodes, a node twice, a negative rank, or a node whose parent is missing. TypeError: ranks that are no whole numbers.
    """

    paths: tuple[tuple[int, ...], ...]

    @property
    def trees(self) -> bool:
        """Whether it is more than a chain."""
        return len(self.paths) > max(map(len, self.paths))

    def __post_init__(self) -> None:
        try:
            paths = [tuple(path) for path in self.paths]
        except TypeError:
            raise TypeError(
                f"paths is {self.paths!r}: give the ranks on each node's path, such as ((0,), (1,), (0, 0)), or use StaticTree.of_widths((2, 1))"
            ) from None
        for path in paths:
            for rank in path:
                whole("paths, a rank,", rank)
        known = set(paths)
        if not known or len(known) < len(paths) or () in known or any(min(path) < 0 for path in paths):
            raise ValueError("paths: give at least one node, each once, by ranks counted from 0")
        for path in paths:
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"paths has {path} without its parent {path[:-1]}: add the parent")
        object.__setattr__(self, "paths", tuple(sorted(paths, key=lambda path: (len(path), path))))

    @classmethod
    def of_widths(cls, widths: Iterable[int]) -> StaticTree:
        """Every node at depth d has ``widths[d]`` children: ``(3, 2, 1)`` has 3 + 6 + 6 nodes.

        Raises:
            ValueError: no depths, or a width below 1. TypeError: widths that are no whole numbers, or a single number.
        """
        if isinstance(widths, str) or not isinstance(widths, Iterable):
            raise TypeError(f"widths is {widths!r}: give the children of a node by depth, such as (3, 2, 1)")
        sizes = tuple(widths)
        if not sizes:
            raise ValueError("widths is empty: give the children of a node by depth, such as (3, 2, 1)")
        for width in sizes:
            at_least(1, "widths, of a depth,", width, "each node has at least 1 child")
        return cls(tuple(path for d in range(len(sizes)) for path in product(*map(range, sizes[: d + 1]))))

    @classmethod
    def of_accuracies(cls, accuracies: Sequence[Sequence[float]], total: int) -> StaticTree:
        """Medusa's tree of ``total`` nodes, or of all there are: those whose whole path is most often right, if the depths were independent.

        Args:
            accuracies: depth -> rank -> how often the token of this rank is the right one.
        Raises:
            ValueError: no accuracies at the first depth, one that is no probability, or a total below 1. TypeError: they are no numbers.
        """
        at_least(1, "total", total, "give at least 1")
        if not len(accuracies) or not len(accuracies[0]):
            raise ValueError("accuracies is empty: give those of at least one depth and one rank")
        shares = [list(map(float, each)) for each in accuracies]
        for share in chain.from_iterable(shares):
            if not 0 <= share <= 1:
                raise ValueError(
                    f"accuracies has {share}: give how often the token of each rank is the right one, from 0 to 1"
                )
        found: list[tuple[int, ...]] = []
        heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while heap and len(found) <= total:
            score, path = heapq.heappop(heap)
            found.append(path)
            for rank, share in enumerate(shares[len(path)] if len(path) < len(shares) else ()):
                heapq.heappush(heap, (score * share, (*path, rank)))
        return cls(tuple(found[1:]))

    @property
    def longest(self) -> int:
        return len(self.paths[-1])

    def check(self, head: HeadModel) -> None:
        """As ``Grower.check``."""
        check_marginal("StaticTree", head)
        if self.ranks > head.outputs:
            raise ValueError(
                f"paths has a rank of {self.ranks - 1}, and this {type(head).__name__} proposes {head.outputs} ids: give ranks below that"
            )

    @property
    def ranks(self) -> int:
        """How many of the best tokens there are nodes for."""
        return 1 + max(map(max, self.paths))

    def nodes(self, length: int) -> int:
        return sum(len(path) <= length for path in self.paths)

    def shape(self, length: int) -> tuple[list[int], list[int], list[int]]:
        """The parent, the depth and the rank of each node whose path is no longer than ``length``."""
        paths = self.paths[: self.nodes(length)]
        place = {path: node for node, path in enumerate(paths)}
        parents = [place.get(path[:-1], -1) for path in paths]
        return parents, [len(path) - 1 for path in paths], [path[-1] for path in paths]

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
        deepest = min(int(budget.max()), self.longest)
        return self.of(list(marginals(head, at, memo, given, context, deepest, sampling)), budget, head.ids)

    def of(self, each: Sequence[Tensor], budget: Tensor, ids: Tensor | None = None) -> Proposal:
        """As ``DDTree.of``."""
        deepest = min(int(budget.max()), self.longest)
        found = [topk(logits, self.ranks) for logits in each[:deepest]]
        with logits_of("a draft's "):
            check_finite(torch.stack([one.values[:, 0] for one in found], 1))
        best = torch.stack([one.indices for one in found], 1)  # [R, depth, rank]
        ids = best if ids is None else ids[best]
        parents, depth, rank = self.shape(deepest)
        upto = torch.tensor([self.nodes(length) for length in range(deepest + 1)])
        above = torch.tensor(parents).expand(len(ids), -1)
        return Proposal(ids[:, depth, rank], above, upto[budget.clamp(max=deepest)])
