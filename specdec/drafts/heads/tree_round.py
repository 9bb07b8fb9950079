"""A head's tree in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.heads.captured import StaticPass
from specdec.drafts.heads.chain import Chain
from specdec.drafts.heads.contract import Sight
from specdec.drafts.heads.draft import Head
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.mtp import MTP
from specdec.drafts.heads.whole_round import Anchored, HeadDrafting
from specdec.drafts.tree_round import too_many
from specdec.graphs.branches import Branches, Growing, Grown, TreeShape, grown
from specdec.graphs.drafting import Given
from specdec.kernels.device import to_device
from specdec.kernels.topk import topk


class HeadTreeDrafting(HeadDrafting):
    """``Drafting`` of a head with a ``DynamicTree``. The head takes one slot for each node, and sees the whole text.

    The nodes that it reads take the slots from the text's last position on, in the order in which they are read. After the verdict, the head reads the accepted
    path again, as after a chain.
    """

    @staticmethod
    def why_not(draft: Head, target: object, length: int) -> str | None:
        """As ``Drafting.why_not``."""
        why = HeadDrafting.why_not(replace(draft, tree=Chain()), target, length)
        if why is not None:
            return why
        model, kinds = draft.model, (Eagle3, MTP)
        if type(model) not in kinds:
            names = " and ".join(kind.__name__ for kind in kinds)
            return (
                f"runs dynamic trees of the heads {names}, but the draft's head is a {type(model).__name__}"
            )
        if model.mask is not None or any(model.settings.get("windows") or ()):
            return "runs trees of heads that see all of the text, but the draft's head has a mask or windows"
        return too_many(_shape(draft, length).nodes)

    @staticmethod
    def tree(draft: Head, length: int) -> TreeShape:
        """As ``Drafting.tree``."""
        return _shape(draft, length)

    def grow(self, given: Given, growing: Growing, constants: Any) -> Grown:
        """As ``Drafting.grow``."""
        state, tree = growing.state, self.grower
        levels = min(tree.depth, given.steps)
        width = min(tree.top_k, self.model.outputs)
        at = _TreeAnchors(self, state[:, 0] - 1, given.longest + (levels - 1) * width)
        found = tree.candidates(self.model, at, given.carry, state[:, 2], 0, levels)
        tokens, parents, depth, size = tree.best(found, growing.budget)
        exists = torch.arange(tokens.shape[1], device=tokens.device) < size[:, None]
        finite = ~torch.isnan(torch.cat(found.scores, 1)).any(1, keepdim=True)
        tokens = tokens.clamp(0, growing.vocab_size - 1)
        return grown(tokens, exists, parents, depth, finite.expand_as(exists), [width] * levels)


class HeadStaticDrafting(HeadDrafting):
    """``Drafting`` with a ``StaticTree``, of a head whose distributions are marginal: they do not depend on drafted tokens."""

    @staticmethod
    def why_not(draft: Head, target: object, length: int) -> str | None:
        """As ``Drafting.why_not``."""
        why = HeadDrafting.why_not(replace(draft, tree=Chain()), target, length)
        return why or too_many(draft.tree.nodes(length))

    @staticmethod
    def tree(draft: Head, length: int) -> TreeShape:
        """As ``Drafting.tree``."""
        tree: Any = draft.tree
        return TreeShape(tree.nodes(length), tree)

    def constants(self, rows: int, device: torch.device, steps: int) -> Any:
        """The tree's shape, and ``[2, N]`` the depth and the rank of each node."""
        parents, *places = self.grower.shape(steps)
        with torch.inference_mode(False):
            return Branches(parents, False, rows, device), to_device(torch.tensor(places), device)

    def grow(self, given: Given, growing: Growing, constants: Any) -> Grown:
        """As ``Drafting.grow``."""
        branches, (depth, rank) = constants
        at: Any = Anchored(self, growing.state[:, 0] - 1, given.longest + self.model.block_slots)
        memo: Any = given.carry
        found, finite = [], []
        for n in range(len(branches.fan)):
            logits, memo = self.model.step(n, memo, growing.state[:, 2], at)
            best = topk(logits, self.grower.ranks)
            found.append(best.indices)
            finite.append(torch.isfinite(best.values[:, :1]))
        tokens = self.model.ids[torch.stack(found, 1)[:, depth, rank]].clamp(0, growing.vocab_size - 1)
        return branches.grown(tokens, growing.budget, torch.cat(finite, 1)[:, depth])


def _shape(draft: Head, length: int) -> TreeShape:
    tree: Any = draft.tree
    levels, k = min(tree.depth, length), min(tree.top_k, draft.model.outputs)
    return TreeShape(min(tree.total, k + (levels - 1) * k**2), tree)


class _TreeAnchors:
    """``slots.SlotAnchors`` in operators that can be captured. Each pass has one slot after each of ``parents``.

    Attributes:
        used: slots of each row so far; they follow the text, from its last position ``anchor [R]`` on.
    """

    def __init__(self, drafting: HeadTreeDrafting, anchor: Tensor, longest: int):
        self.store, self.anchor, self.used = drafting.store, anchor[:, None], 0
        self.longest = min(longest, self.store.slots)
        self._near = torch.zeros(len(anchor), 0, 0, dtype=torch.bool, device=anchor.device)
        self._parents: Tensor | None = None

    def under(self, parents: Tensor) -> None:
        """As ``SlotAnchors.under``."""
        self._parents = parents

    def slots(self, first: int, count: int | None = None, full: bool = False) -> StaticPass:
        """As ``contract.Anchors.slots``."""
        assert self._parents is not None
        parents, device, used = self._parents, self.anchor.device, self.used
        R, wide = parents.shape
        rows, new = torch.arange(R, device=device)[:, None], torch.arange(wide, device=device)
        own = torch.zeros(R, wide, used + wide, dtype=torch.bool, device=device)
        if used:
            own[:, :, :used] = self._near[rows, parents.clamp(min=0)] & (parents >= 0)[..., None]
        own[:, :, used:] = new[:, None] == new
        self._near = torch.cat([torch.nn.functional.pad(self._near, (0, wide)), own], 1)
        self.used = used + wide
        at = self.anchor + used + new
        node = torch.arange(self.longest, device=device) - self.anchor  # [R, S], negative in the text
        mine = own.gather(2, node.clamp(0, self.used - 1)[:, None].expand(-1, wide, -1))
        seen = (node < 0)[:, None] | (mine & (node < self.used)[:, None] & (node >= 0)[:, None])

        def narrow(sight: Sight) -> Tensor:
            raise NotImplementedError("a captured step drafts trees only for heads without windows")

        self.store.begin()
        flat = (rows * self.store.slots + at).flatten()
        return StaticPass(self.store, flat, seen, (self.anchor + first).expand(-1, wide), narrow)
