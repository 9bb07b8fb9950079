"""Static trees: which chances their nodes have along a text.

A node counts only if its parent is on the text, so the distributions at the text's own positions are enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.audit.rounds import depths
from specdec.audit.siblings import distinct_chances, sibling_chances


def shape(widths: Sequence[int]) -> list[int]:
    """The parents of the nodes of ``drafts.Tree(model, widths)``, where every node at depth d has ``widths[d]`` children."""
    parents: list[int] = []
    level = [-1]
    for width in widths:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return parents


def tree_chances(
    p: Tensor, q: Tensor, tokens: Tensor, parents: Sequence[int], replacement: bool = True
) -> Tensor:
    """``accept [C, n, N]``, for ``efficiency(..., parents=parents)``, of a static tree under ``verifiers.Rejection``.

    Where every node at a depth has as many children, and only depths are of interest, a chain of depths is enough:
    ``accept[..., j] = sibling_chances(...).sum(-1)`` of that depth's children.

    Args:
        p: ``[C, n, K, V]``: the target's distribution of token ``s + j`` of each text, in a round that starts after s tokens. q: the
            draft's, from which all children of the node there are drawn. tokens: ``[C, n, K]``, the text's.
        parents: of the N nodes, as for ``efficiency``; K is at least their depth.
        replacement: siblings are drawn independently, or else without their elder siblings' tokens.
    Raises:
        ValueError: the tree has more than K depths.
    """
    deep, K = depths(parents, len(parents)), tokens.shape[2]
    if max(deep) >= K:
        raise ValueError(f"the tree has {max(deep) + 1} depths: there are distributions for {K}")
    number: list[int] = []  # of each node among its parent's children
    seen: Counter[int] = Counter()
    for parent in parents:
        number.append(seen[parent])
        seen[parent] += 1
    nodes: list[Tensor] = [torch.empty(0)] * len(parents)
    for d in range(max(deep) + 1):
        level = [v for v, at in enumerate(deep) if at == d]
        m = 1 + max(number[v] for v in level)
        if replacement:
            each = q[:, :, d, None].expand(*tokens.shape[:2], m, -1)
            made = sibling_chances(p[:, :, d], each, tokens[:, :, d])
        else:
            made = distinct_chances(p[:, :, d], q[:, :, d], tokens[:, :, d], m)
        for v in level:
            nodes[v] = made[..., number[v]]
    return torch.stack(nodes, -1)
