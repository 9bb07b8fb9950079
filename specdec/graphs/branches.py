"""Trees that are drafted in a captured step: what a draft returns, and how it is fed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.graphs.row_sampling import RowSampling
from specdec.kernels.device import to_device
from specdec.kernels.philox.reference import Key
from specdec.sampling import Sampling


class TreeShape(NamedTuple):
    """What a step's trees are captured for: the largest number of ``nodes``, and ``kind``, which identifies how they grow."""

    nodes: int
    kind: Hashable


class Numbers(Protocol):
    """Draws as by the ``Rng`` that the verifier gives to drafts."""

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        """Tokens from ``probs [R, ..., V]``; ``key.depth`` is an int, and ``key.sibling [1, ...]`` on the device. It has the numbers of all nodes of the depth, as a
        tensor of its own, or is a view of some of them. A view with an offset does not contain node 0."""
        ...


class Growing(NamedTuple):
    """What a draft grows a tree with.

    Attributes:
        state: ``[R, 3]`` the texts' ends, as for chains. budget: ``[R]`` the most nodes of a path. sampling: the draft's. vocab_size: the target's. rng: for its draws.
    """

    state: Tensor
    budget: Tensor
    sampling: Sampling | RowSampling
    vocab_size: int
    rng: Numbers


class Nodes(NamedTuple):
    """Consecutive nodes that are fed, or the last committed token and all nodes.

    Attributes:
        depth: ``[n]`` or ``[R, n]`` int64, of each; -1 for the last committed token. at: ``[n]`` int64 their slots after the text's end. words: ``[n]`` or
            ``[R, n]`` int64 and depths: ``[R, N]`` int32, of all nodes, as in ``Lowered``.
    """

    depth: Tensor
    at: Tensor
    words: Tensor
    depths: Tensor


class Grown(NamedTuple):
    """A tree of N nodes for every row: those that exist come first, depth by depth, each after its parent.

    Attributes:
        tokens: ``[R, N]``. exists: ``[R, N]`` bool. parents: ``[R, N]``, -1 for the last committed token. finite: ``[R, N]`` bool, whether
            the logits that a node was drawn from have a distribution. depth, sibling: ``[N]`` or ``[R, N]``, each node's depth, and its number among the nodes of
            that depth.
        nodes: the last committed token and all nodes. fan: for each depth, the most children of one parent.
        laws: ``[R, Q, V]``, the distributions that nodes were drawn from. law: ``[N]``, the index of each node's. Both are ``None`` for point masses, whose siblings
            are distinct tokens.
    """

    tokens: Tensor
    exists: Tensor
    parents: Tensor
    finite: Tensor
    depth: Tensor
    sibling: Tensor
    nodes: Nodes
    fan: Sequence[int]
    laws: Tensor | None = None
    law: Tensor | None = None


class Branches:
    """A tree of the same shape in every round, as tensors on a device.

    Args:
        above: the parent of each node, -1 for the last committed token; nodes are ordered by depth. apiece: every node is drawn from a distribution of its own;
            otherwise siblings share one, and there is one after the last committed token and after every node, in order.
    Attributes:
        parents, depth, sibling, law: ``[N]`` int64, as in ``Grown``. fan: as there.
        all: the last committed token and all nodes. levels: the nodes of each depth.
    """

    def __init__(self, above: Sequence[int], apiece: bool, rows: int, device: torch.device):
        depth: list[int] = []
        words: list[int] = []
        for n, up in enumerate(above):
            depth.append(0 if up < 0 else depth[up] + 1)
            words.append(1 << n | (0 if up < 0 else words[up]))
        signed = [word - (1 << 64) if word >> 63 else word for word in words]
        ends = [bisect_left(depth, d) for d in range(depth[-1] + 2)]
        children = Counter(above)
        self.fan = [max(children[up] for up in above[a:b]) for a, b in pairwise(ends)]

        def long(numbers: list[int]) -> Tensor:
            return to_device(torch.tensor(numbers, dtype=torch.long), device)

        with torch.inference_mode(False):
            self.parents, self.depth = long(list(above)), long(depth)
            self.sibling = long([n - ends[d] for n, d in enumerate(depth)])
            self.law = long(list(range(len(above))) if apiece else [up + 1 for up in above])
            depths = self.depth.int().expand(rows, -1).contiguous()
            self.all = Nodes(
                long([-1, *depth]), long(list(range(-1, len(above)))), long([0, *signed]), depths
            )
            self.levels = [
                Nodes(long(depth[a:b]), long(list(range(a, b))), long(signed[a:b]), depths)
                for a, b in pairwise(ends)
            ]

    def grown(self, tokens: Tensor, budget: Tensor, finite: Tensor, laws: Tensor | None = None) -> Grown:
        """The tree with ``tokens [R, N]``, and the other arguments as in ``Growing`` and ``Grown``."""
        fixed = self.depth, self.sibling, self.all, self.fan
        parents, law = self.parents.expand_as(tokens), None if laws is None else self.law
        return Grown(tokens, self.depth < budget[:, None], parents, finite, *fixed, laws, law)


def grown(
    tokens: Tensor, exists: Tensor, parents: Tensor, depth: Tensor, finite: Tensor, fan: Sequence[int]
) -> Grown:
    """A tree of point masses whose shape varies from round to round. All are ``[R, N]``. Nodes that do not exist come last and are at least as deep as the others."""
    (R, N), device = tokens.shape, tokens.device
    number = torch.arange(N, device=device)
    own = (torch.ones_like(number) << number).expand(R, N)
    up, words = parents.clamp(min=0), own
    for _ in fan:  # each turn adds an ancestor
        words = own | torch.where(parents < 0, 0, words.gather(1, up))
    before = (depth[:, None] < depth[:, :, None]).sum(2)
    root = torch.zeros_like(depth[:, :1])
    nodes = Nodes(
        torch.cat([root - 1, depth], 1),
        torch.arange(-1, N, device=device),
        torch.cat([root, words], 1),
        depth.int().contiguous(),
    )
    return Grown(tokens, exists, parents, finite, depth, number - before, nodes, fan)
