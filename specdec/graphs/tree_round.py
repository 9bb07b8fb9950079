"""A whole round of a tree as one captured step (``graphs.whole_round``): the decisions of ``Rejection`` and ``Coupled`` on trees.

``FusedRejection`` decides on trees as ``Rejection`` does. Under ``Serial``, it decides from logits in rows whose tree is a chain (at the end of a text, or
with one child a node). There the executors may round differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.graphs.branches import Growing, Grown
from specdec.graphs.chain import scored
from specdec.graphs.drafting import Drafting, Given, Passed, Side
from specdec.graphs.whole_round import Decided, RoundShape, WholeRound
from specdec.kernels.philox.reference import ACCEPT, BONUS, DRAFT, Key, pick
from specdec.verifiers.rejection import residual


class TreeRound(WholeRound):
    """One round of a batch whose draft grows trees.

    Nodes take the slots after the text's end in the order of their numbers. After the verdict, the step moves the accepted path's keys and values to the slots of their
    positions, so that the next round begins as after a chain.
    """

    def __init__(
        self,
        target: Side,
        draft: Drafting,
        shape: RoundShape,
        device: torch.device,
        carry: Tensor | None = None,
    ):
        super().__init__(target, draft, shape, device, carry)
        self.constants = draft.constants(shape.rows, device, shape.steps)

    def _draw(self, given: Given, budget: Tensor) -> Grown:
        assert self.draft is not None
        numbers = _Numbers(self)
        growing = Growing(self.state, budget, self.shape.drawing, self.target.vocab_size, numbers)
        return self.draft.grow(given, growing, self.constants)

    def _read(self, given: Given, ids: Tensor, drafted: Any, caught: dict[int, list[Tensor]]) -> Tensor:
        return self.target.feed_nodes(given, ids, self.state[:, 0], drafted.nodes, caught)

    def _passed(self, given: Given, ids: Tensor, caught: dict[int, list[Tensor]], made: Decided) -> Passed:
        length, path = self.state[:, 0], made.path
        assert path is not None
        self.target.keep_path(given, length, path)
        # The last committed token, and the path.
        order = torch.nn.functional.pad(path.clamp(min=0) + 1, (1, 0))
        rows = torch.arange(len(order), device=order.device)[:, None]
        layers = {tap: x.view(*ids.shape, -1)[rows, order].flatten(0, 1) for tap, (x,) in caught.items()}
        return Passed(length, ids.gather(1, order), layers, made.accepted, made.bonus, path)

    def _said(self, drafted: Any, made: Decided) -> list[Tensor]:
        """Tokens, path and parents; -2 is the parent of a node that does not exist."""
        assert made.path is not None
        return [drafted.tokens, made.path, torch.where(drafted.exists, drafted.parents, -2)]

    def _decide(self, logits: Tensor, drafted: Any, length: Tensor) -> Decided:
        tree: Grown = drafted
        top, wanted, p = scored(logits, self.shape.sampling)
        finite = torch.isfinite(top)
        finite = (finite[:, 1:] | ~tree.exists).all(1) & finite[:, 0]
        if p is None or self.shape.verdict == "coupled":
            if p is not None:
                wanted = self._race(p, length[:, None] + 1 + tree.nodes.depth)
            path, here = self._follow(tree, wanted)
            bonus = wanted.gather(1, here[:, None])[:, 0]
        else:
            numbers = self._uniforms(length, tree.depth, ACCEPT, tree.sibling)
            path, law = (self._points if tree.laws is None else self._try)(tree, p, numbers)
            depths = torch.arange(self.shape.steps + 1, device=self.device)
            number = self._uniforms(length, depths, BONUS).gather(1, (path >= 0).sum(1, keepdim=True))
            bonus = pick(law, number[:, 0])
        return Decided((path >= 0).sum(1), bonus, finite, path)

    def _follow(self, tree: Grown, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """``path [R, steps]``, and 1 + its last node, as ``tree.follow``: the first child with the wanted token, ``wanted [R, N + 1]``."""
        here = torch.zeros_like(wanted[:, 0])
        path = []
        for _ in tree.fan:
            here, node = _onward(
                here, _children(tree, here) & (tree.tokens == wanted.gather(1, here[:, None]))
            )
            path.append(node)
        return torch.stack(path, 1), here

    def _points(self, tree: Grown, p: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """As ``_try``, for point masses, whose residual is ``p`` without the rejected tokens.

        A child is accepted with the probability of its token, divided by what its earlier siblings leave. This is what ``verify_tree`` computes, up to rounding. Where they
        leave nothing (with a probability of about 0), ``p`` itself is used.
        """
        rows, V = torch.arange(len(p), device=self.device), p.shape[-1]
        here, path = torch.zeros_like(rows), []
        for _ in tree.fan:
            law, asked = p[rows, here], _children(tree, here)
            mass = torch.where(asked, law.gather(1, tree.tokens).double(), 0)
            rest = law.sum(1, keepdim=True, dtype=torch.float64) - (mass.cumsum(1) - mass)
            first = asked & (asked.cumsum(1) == 1)
            chance = mass / torch.where(first, 1, rest)
            here, node = _onward(here, asked & (numbers < chance))
            path.append(node)
        law, rejected = p[rows, here], torch.where(_children(tree, here), tree.tokens, V)
        gone = torch.zeros(len(p), V + 1, dtype=torch.bool, device=self.device).scatter_(1, rejected, True)
        left = law.masked_fill(gone[:, :V], 0)
        total = left.sum(1, keepdim=True)
        return torch.stack(path, 1), torch.where(total > 0, left / total, law)

    def _try(self, tree: Grown, p: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """``path [R, steps]``, and the distribution ``[R, V]`` of the token after it, as ``rejection.verify_tree`` on ``p [R, N + 1, V]``, with the uniform
        ``numbers [R, N]``.

        Only children of the last accepted node are tested, so a depth takes as many turns as a node has children there.
        """
        laws, tokens = tree.laws, tree.tokens
        assert laws is not None
        assert tree.law is not None
        rows, law = torch.arange(len(p), device=self.device), p[:, 0]
        here, path, going = torch.zeros_like(rows), [], torch.ones_like(rows, dtype=torch.bool)
        for width in tree.fan:
            children, taken = _children(tree, here) & going[:, None], torch.full_like(rows, -1)
            number = children.cumsum(1)
            for w in range(width):
                this = children & (number == w + 1)
                node, asked = this.int().argmax(1), this.any(1) & (taken < 0)
                x, drawn = tokens[rows, node], laws[rows, tree.law[node]].to(law)
                ratio = torch.where(asked, law[rows, x] / drawn[rows, x], 0)
                yes = asked & (numbers[rows, node] < ratio)
                taken = torch.where(yes, node, taken)
                left = torch.where((asked & ~yes)[:, None], residual(law, drawn), law)
                law = torch.where(yes[:, None], p[rows, node + 1], left)
            going = taken >= 0
            here = torch.where(going, taken + 1, here)
            path.append(taken)
        return torch.stack(path, 1), law


def _children(tree: Grown, here: Tensor) -> Tensor:
    """``[R, N]`` the nodes after ``here [R]``: 0 for the last committed token, and 1 + a node."""
    return tree.exists & (tree.parents == here[:, None] - 1)


def _onward(here: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """``here [R]`` after the first of the ``accepted [R, N]`` nodes, and this node; -1 where there is none."""
    some, node = accepted.any(1), accepted.int().argmax(1)
    return torch.where(some, node + 1, here), torch.where(some, node, -1)


class _Numbers:
    """``Numbers`` of a round."""

    def __init__(self, round: TreeRound):
        self.round = round

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        """As ``Numbers.categorical``."""
        round, sibling = self.round, key.sibling
        assert isinstance(sibling, Tensor)
        assert isinstance(key.depth, int)
        length, flat = round.state[:, 0], sibling.flatten()
        numbers = round._uniforms(length, torch.full_like(flat, key.depth), DRAFT, flat)
        drawn = pick(probs, numbers.view(-1, *sibling.shape[1:]))
        # The first node of a depth is drawn by the race of its position. A view with an offset does not contain that node.
        if round.shape.verdict != "coupled" or sibling.storage_offset():
            return drawn
        while probs.dim() > 2:
            probs = probs[:, 0]
        raced = round._race(probs, length + key.depth)
        return torch.where(sibling == 0, raced.view(-1, *[1] * (sibling.dim() - 1)), drawn)
