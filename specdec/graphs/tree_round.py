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
from specdec.verifiers.tree_walk import Candidates, children, keyed, walk


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
        growing = Growing(self.state, budget, self.drawing, self.target.vocab_size, numbers)
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
        top, wanted, p = scored(logits, self.sampling)
        finite = torch.isfinite(top)
        finite = (finite[:, 1:] | ~tree.exists).all(1) & finite[:, 0]
        if p is None or self.shape.verdict == "coupled":
            if p is not None:
                wanted = self._race(p, length[:, None] + 1 + tree.nodes.depth)
            path, here = self._follow(tree, wanted)
            bonus = wanted.gather(1, here[:, None])[:, 0]
        else:
            numbers = self._uniforms(length, tree.depth, ACCEPT, tree.sibling)
            candidates = Candidates(tree.tokens, tree.exists, tree.parents, tree.fan, tree.laws, tree.law)
            path, law = walk(candidates, p, keyed(numbers))
            depths = torch.arange(self.shape.steps + 1, device=self.device)
            number = self._uniforms(length, depths, BONUS).gather(1, (path >= 0).sum(1, keepdim=True))
            bonus = pick(law, number[:, 0])
        return Decided((path >= 0).sum(1), bonus, finite, path)

    def _follow(self, tree: Grown, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """``path [R, steps]``, and 1 + its last node, as ``tree.follow``: the first child with the wanted token, ``wanted [R, N + 1]``."""
        here = torch.zeros_like(wanted[:, 0])
        path = []
        for _ in tree.fan:
            child = children(tree.exists, tree.parents, here) & (
                tree.tokens == wanted.gather(1, here[:, None])
            )
            found, node = child.any(1), child.int().argmax(1)
            path.append(torch.where(found, node, -1))
            here = torch.where(found, node + 1, here)
        return torch.stack(path, 1), here


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
