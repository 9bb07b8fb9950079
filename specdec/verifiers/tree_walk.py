"""Recursive rejection on trees (SpecInfer, arXiv 2305.09781, section 4.3), depth by depth.

At each depth, only children of a row's last accepted node are tested, in order, against the residual of the rejected ones: drawn siblings in turn, point masses
at once. Nothing here waits for a device, so ``graphs.tree_round`` captures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """A tree of N nodes for every row.

    Attributes:
        tokens: ``[R, N]``, valid ids where there is no node. exists: ``[R, N]`` bool. parents: ``[R, N]``, -1 for the last committed token. fan: for each
            depth, the most children of one parent.
        laws: ``[R, Q, V]``, the distributions that nodes were drawn from. law: ``[N]`` or ``[R, N]``, the index of each node's. Both are ``None`` for point
            masses, whose siblings are distinct tokens.
    """

    tokens: Tensor
    exists: Tensor
    parents: Tensor
    fan: Sequence[int]
    laws: Tensor | None
    law: Tensor | None


Accept = Callable[[Tensor, int, Tensor], Tensor]
"""``(chance, depth, node)`` -> which nodes are accepted, all ``[R, n]``. Numbers of at least N are of no node, and their chance is 0. No number comes twice at a
depth, so that random numbers keyed by depth and node decide once."""


def walk(tree: Candidates, p: Tensor, accept: Accept, wait: bool = False) -> tuple[Tensor, Tensor]:
    """The accepted nodes of each row, ``[R, depths]``, then -1, and the distribution ``[R, V]`` of the token after them.

    Args:
        p: ``[R, N + 1, V]``, the target's distributions after the last committed token and after each node.
        wait: whether to end as soon as every row has ended; a captured step cannot, and a device would have to be waited for.
    """
    rows = torch.arange(len(p), device=p.device)
    here, going = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    law, path = p[:, 0], torch.full((len(p), len(tree.fan)), -1, device=p.device)
    for depth, width in enumerate(tree.fan):
        node = _numbers(children(tree.exists, tree.parents, here) & going[:, None], width)
        if tree.laws is None:
            yes = accept(_chances(tree, law, node), depth, node)
            going, first = yes.any(1), yes.int().argmax(1)
        else:
            going, first, law = _in_turn(tree, law, node, depth, accept, wait)
        taken = node.gather(1, first[:, None])[:, 0]
        path[:, depth] = torch.where(going, taken, -1)
        here = torch.where(going, taken + 1, here)
        law = torch.where(going[:, None], p[rows, here], law)
        if wait and not bool(going.any()):
            break
    return path, _left(tree, law, here) if tree.laws is None else law


def keyed(numbers: Tensor) -> Accept:
    """Decisions by uniform ``numbers [R, N]``, one of each node."""

    def accept(chance: Tensor, depth: int, node: Tensor) -> Tensor:
        return numbers.gather(1, node.clamp(max=numbers.shape[1] - 1)) < chance

    return accept


def _numbers(some: Tensor, width: int) -> Tensor:
    """``[R, width]`` the numbers of ``some [R, N]`` nodes of each row, ascending, and then numbers from N on."""
    R, N = some.shape
    number = torch.arange(N + width + 1, device=some.device).expand(R, -1)
    column = torch.where(some, some.cumsum(1) - 1, width)
    return number[:, N:].scatter(1, column, number[:, :N])[:, :width]


def _chances(tree: Candidates, law: Tensor, node: Tensor) -> Tensor:
    """``[R, W]`` the chances of point masses ``node [R, W]``, siblings in order: the probability of the token in ``law [R, V]``, divided by what its elder siblings
    leave."""
    N = tree.tokens.shape[1]
    token = tree.tokens.gather(1, node.clamp(max=N - 1))
    mass = torch.where(node < N, law.gather(1, token).double(), 0)
    rest = law.sum(1, keepdim=True, dtype=torch.float64) - (mass.cumsum(1) - mass)
    rest[:, 0] = 1
    return torch.where(mass > 0, mass / torch.maximum(rest, mass), 0)


def _left(tree: Candidates, law: Tensor, here: Tensor) -> Tensor:
    """``law [R, V]`` without the tokens of all children of ``here [R]``, which are point masses and were rejected; ``law`` itself if nothing is left (with a
    probability of about 0)."""
    (R, V), rejected = law.shape, children(tree.exists, tree.parents, here)
    gone = torch.zeros(R, V + 1, dtype=torch.bool, device=law.device)
    gone.scatter_(1, torch.where(rejected, tree.tokens, V), True)
    left = law.masked_fill(gone[:, :V], 0)
    total = left.sum(1, keepdim=True)
    return torch.where(rejected.any(1, keepdim=True) & (total > 0), left / total, law)


def _in_turn(
    tree: Candidates, law: Tensor, node: Tensor, depth: int, accept: Accept, wait: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of drawn siblings ``node [R, W]``, whether one is accepted and the first one's column, ``[R]``; and what the rejected ones leave of ``law [R, V]``."""
    laws, sources, (R, N) = tree.laws, tree.law, tree.tokens.shape
    assert laws is not None
    assert sources is not None
    rows = torch.arange(R, device=law.device)
    going, first = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows)
    for w, this in enumerate(node.unbind(1)):
        asked, at = (this < N) & ~going, this.clamp(max=N - 1)
        if wait and not bool(asked.any()):
            break
        token, source = tree.tokens[rows, at], sources.expand(R, N)[rows, at]
        chance = torch.where(asked, law[rows, token] / laws[rows, source, token].to(law), 0)
        yes = accept(chance[:, None], depth, this[:, None])[:, 0]
        going, first = going | yes, torch.where(yes, w, first)
        rejected = asked & ~yes
        if wait:  # no work for other rows
            cut = rejected.nonzero()[:, 0]
            law = law.index_copy(0, cut, residual(law[cut], laws[cut, source[cut]].to(law)))
        else:
            law = torch.where(rejected[:, None], residual(law, laws[rows, source].to(law)), law)
    return going, first, law


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) of ``[B, V]`` distributions; p itself if that is all zero (then rejection has probability 0)."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def children(exists: Tensor, parents: Tensor, here: Tensor) -> Tensor:
    """``[R, N]`` the nodes of ``exists`` and ``parents [R, N]`` after ``here [R]``: 0 for the last committed token, and 1 + a node."""
    return exists & (parents == here[:, None] - 1)
