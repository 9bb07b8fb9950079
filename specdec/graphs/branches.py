"""The shape of a tree that is drafted in a captured step: the same nodes in every round, numbered depth by depth."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.device import to_device


class TreeShape(NamedTuple):
    """Every node at depth d has ``widths[d]`` children, which ``siblings`` draws as for ``drafts.Tree``: ``apiece`` from distributions of their own, or
    all from one."""

    widths: tuple[int, ...]
    siblings: Callable[..., Any]
    apiece: bool

    @property
    def counts(self) -> list[int]:
        """Nodes of each depth."""
        return list(accumulate(self.widths, int.__mul__))

    def nodes(self, longest: int) -> int:
        """Nodes on paths of at most ``longest``."""
        return sum(self.counts[:longest])

    @property
    def parents(self) -> list[int]:
        """Of each node, -1 for the last committed token."""
        above: list[int] = [-1]
        found: list[int] = []
        for width in self.widths:
            level = [node for node in above for _ in range(width)]
            above = list(range(len(found), len(found) + len(level)))
            found += level
        return found


class Nodes(NamedTuple):
    """Consecutive nodes that are fed, or the last committed token and all nodes.

    Attributes:
        depth: ``[n]`` int64, of each; -1 for the last committed token. at: ``[n]`` int64 their slots after the text's end. words: ``[n]`` int64 and
            depths: ``[R, N]`` int32, of all nodes, as in ``Lowered``.
    """

    depth: Tensor
    at: Tensor
    words: Tensor
    depths: Tensor


class Branches:
    """The tensors of a tree on a device, for ``rows`` rows.

    Attributes:
        depth, sibling, law: ``[N]`` int64, of each node: its depth, its number among the nodes of its depth, and the distribution that it was
            drawn from, if every distribution is kept.
        children: ``[N + 1, widest]`` of the last committed token and of each node; -1 where there are no more.
        levels: the nodes of each depth. all: the last committed token and all nodes.
    """

    def __init__(self, shape: TreeShape, rows: int, device: torch.device):
        self.shape, parents, counts = shape, shape.parents, shape.counts
        N, ends = len(parents), list(accumulate(counts, initial=0))
        depth = [d for d, count in enumerate(counts) for _ in range(count)]
        words: list[int] = []
        children = [[-1] * max(shape.widths) for _ in range(N + 1)]
        for n, up in enumerate(parents):
            words.append(1 << n | (words[up] if up >= 0 else 0))
            row = children[up + 1]
            row[row.index(-1)] = n
        signed = [word - (1 << 64) if word >> 63 else word for word in words]

        def long(numbers: list[Any]) -> Tensor:
            return to_device(torch.tensor(numbers, dtype=torch.long), device)

        with torch.inference_mode(False):
            self.depth, self.children = long(depth), long(children)
            self.sibling = long([n - ends[d] for n, d in enumerate(depth)])
            self.law = long(list(range(N)) if shape.apiece else [up + 1 for up in parents])
            depths = self.depth.int().expand(rows, N).contiguous()
            self.all = Nodes(long([-1, *depth]), long(list(range(-1, N))), long([0, *signed]), depths)
            self.levels = [
                Nodes(long(depth[a:b]), long(list(range(a, b))), long(signed[a:b]), depths)
                for a, b in pairwise(ends)
            ]
