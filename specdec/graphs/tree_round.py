"""A whole round of a tree as one captured step (``graphs.whole_round``): the decisions of ``Rejection`` and ``Coupled`` on trees of one shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.graphs.branches import Branches
from specdec.graphs.chain import scored
from specdec.graphs.drafting import Drafting, Given, Passed, Side
from specdec.graphs.whole_round import Decided, RoundShape, WholeRound
from specdec.kernels.philox.reference import ACCEPT, BONUS, DRAFT, Key, pick
from specdec.kernels.topk import topk
from specdec.sampling import fit
from specdec.verifiers.rejection import residual


class TreeRound(WholeRound):
    """One round of a batch whose draft proposes the tree ``shape.tree``.

    Nodes take the slots after the text's end in the order of their numbers. After the verdict, the step moves keys and values of the accepted path to the slots of their
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
        assert shape.tree is not None
        self.drafting, self.siblings = draft, shape.tree.siblings
        self.tree = Branches(shape.tree, shape.rows, device)

    def _within(self, budget: Tensor) -> Tensor:
        return self.tree.depth < budget[:, None]

    def _read(self, given: Given, ids: Tensor, caught: dict[int, list[Tensor]]) -> Tensor:
        return self.target.feed_nodes(given, ids, self.state[:, 0], self.tree.all, caught)

    def _passed(self, given: Given, ids: Tensor, caught: dict[int, list[Tensor]], made: Decided) -> Passed:
        length, path = self.state[:, 0], made.path
        assert path is not None
        self.target.keep_path(given, length, path)
        order = torch.nn.functional.pad(
            path.clamp(min=0) + 1, (1, 0)
        )  # the last committed token, and the path
        rows = torch.arange(len(order), device=order.device)[:, None]
        layers = {tap: x.view(*ids.shape, -1)[rows, order].flatten(0, 1) for tap, (x,) in caught.items()}
        return Passed(length, ids.gather(1, order), layers, made.accepted, made.bonus, path)

    def _draw(self, given: Given) -> tuple[Tensor, Tensor | None, Tensor]:
        shape, V, nowhere = self.shape, self.target.vocab_size, None
        forward = self.drafting.levels(given, self.state, self.tree)
        level = self.state[:, 2:]
        tokens: list[Tensor] = []
        tops: list[Tensor] = []
        laws: list[Tensor] = []
        for d, width in enumerate(self.tree.shape.widths):
            logits = fit(forward(d, level), V)
            top, _, q = scored(logits, shape.drawing)
            if q is None:
                some: Any = nowhere
                children = topk(shape.drawing.scores(logits, some, None), width).indices
            else:
                number = torch.arange(q.shape[1] * width, device=self.device).view(1, -1, width)
                key = Key(self.state[:, :1, None], d, number)
                drawn = self.siblings(q, width, key, _Numbers(self))
                children = drawn.tokens
                laws.append(drawn.distributions)
            level = children.flatten(1).clamp(0, V - 1)
            tokens.append(level)
            tops.append(top[..., None].expand(children.shape).flatten(1))
        return torch.cat(tokens, 1), torch.cat(laws, 1) if laws else None, torch.isfinite(torch.cat(tops, 1))

    def _decide(
        self, logits: Tensor, tokens: Tensor, q: Tensor | None, nodes: Tensor, length: Tensor
    ) -> Decided:
        """The verdict on ``tokens [R, N]``, of which ``nodes`` exist, from ``logits [R, N + 1, V]``."""
        top, wanted, p = scored(logits, self.shape.sampling)
        finite = torch.isfinite(top)
        finite = (finite[:, 1:] | ~nodes).all(1) & finite[:, 0]
        if p is None or self.shape.verdict == "coupled":
            if p is not None:
                wanted = self._race(p, length[:, None] + 1 + self.tree.all.depth)
            path, here = self._follow(tokens, wanted, nodes)
            bonus = wanted.gather(1, here[:, None])[:, 0]
        else:
            path, law = self._try(tokens, p, q, nodes, length)
            depths = torch.arange(self.shape.steps + 1, device=self.device)
            number = self._uniforms(length, depths, BONUS).gather(1, (path >= 0).sum(1, keepdim=True))
            bonus = pick(law, number[:, 0])
        return Decided((path >= 0).sum(1), bonus, finite, path)

    def _follow(self, tokens: Tensor, wanted: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """``path [R, steps]``, and 1 + its last node, as ``tree.follow``: the first child with the wanted token, ``wanted [R, N + 1]``."""
        here = torch.zeros(len(tokens), dtype=torch.long, device=self.device)
        path, going = [], torch.ones_like(here, dtype=torch.bool)
        for width in self.tree.shape.widths:
            children = self.tree.children[here, :width]
            there = children.clamp(min=0)
            equal = tokens.gather(1, there) == wanted.gather(1, here[:, None])
            equal &= (children >= 0) & nodes.gather(1, there)
            going = going & equal.any(1)
            node = there.gather(1, equal.int().argmax(1, keepdim=True))[:, 0]
            here = torch.where(going, node + 1, here)
            path.append(torch.where(going, node, -1))
        return torch.stack(path, 1), here

    def _try(
        self, tokens: Tensor, p: Tensor, q: Tensor | None, nodes: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``path [R, steps]``, and the distribution ``[R, V]`` of the token after it, as ``rejection.verify_tree`` on ``p [R, N + 1, V]``.

        Only children of the latest accepted node are asked, so a depth takes as many turns as a node there has children.
        """
        rows, law = torch.arange(len(tokens), device=self.device), p[:, 0]
        numbers = self._uniforms(length, self.tree.depth, ACCEPT, self.tree.sibling)
        here = torch.zeros_like(rows)
        path, going = [], torch.ones_like(rows, dtype=torch.bool)
        for width in self.tree.shape.widths:
            children, taken = self.tree.children[here, :width], torch.full_like(rows, -1)
            for w in range(width):
                node = children[:, w].clamp(min=0)
                asked = going & (taken < 0) & (children[:, w] >= 0) & nodes[rows, node]
                x = tokens[rows, node]
                if q is None:
                    drawn = torch.zeros_like(law).scatter_(1, x[:, None], 1)
                else:
                    drawn = q[rows, self.tree.law[node]].to(law)
                ratio = torch.where(asked, law[rows, x] / drawn[rows, x], 0)
                yes = asked & (numbers[rows, node] < ratio)
                taken = torch.where(yes, node, taken)
                left = torch.where((asked & ~yes)[:, None], residual(law, drawn), law)
                law = torch.where(yes[:, None], p[rows, node + 1], left)
            going = taken >= 0
            here = torch.where(going, taken + 1, here)
            path.append(taken)
        return torch.stack(path, 1), law


class _Numbers:
    """For ``drafts.siblings``: draws as by the ``Rng`` that the verifier gives to drafts, for keys whose ``sibling [1, ...]`` is on the device."""

    def __init__(self, round: TreeRound):
        self.round = round

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        """A token from ``probs [R, ..., V]``."""
        round, sibling = self.round, key.sibling
        assert isinstance(sibling, Tensor)
        assert isinstance(key.depth, int)
        length, flat = round.state[:, 0], sibling.flatten()
        numbers = round._uniforms(length, torch.full_like(flat, key.depth), DRAFT, flat)
        drawn = pick(probs, numbers.view(-1, *sibling.shape[1:]))
        if round.shape.verdict != "coupled":
            return drawn
        # The first node of a depth is drawn by the race of its position.
        while probs.dim() > 2:
            probs = probs[:, 0]
        raced = round._race(probs, length + key.depth)
        return torch.where(sibling == 0, raced.view(-1, *[1] * (sibling.dim() - 1)), drawn)
