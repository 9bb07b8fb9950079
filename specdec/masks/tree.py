"""The tree mask: a proposed token sees the text and its ancestors, not its siblings (SpecInfer, Miao et al., arXiv 2305.09781)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec import tree
from specdec.masks.mask import Mask


@dataclass(frozen=True, repr=False, eq=False)
class Tree(Mask):
    """A mask over *slots*: node n of row b takes slot ``root[b] + n``, and slots below the root hold the text, in order.

    Siblings have the same position and different slots, so a window over a tree must be given positions:
    ``Tree(root, parents) & OriginalText(Window(8), tree.positions(S))``.

    Args:
        root: ``[B]`` slot of each row's first node. parents: ``[B, N]`` as in a proposal, on the host; nodes that do not
            exist may hold anything, and the mask must not be evaluated for them.
    Raises:
        ValueError: the number of roots is not the number of rows of parents.

    The mask works on the device of ``root``.
    """

    root: Tensor
    parents: Tensor
    ancestors: Tensor = field(init=False)
    depth: Tensor = field(init=False)

    no_intervals: ClassVar[str] = (
        "which slots a node sees depends on its branch: give the tree to AttentionPlan(tree=...) and lower the rest of the mask"
    )

    def __post_init__(self) -> None:
        if self.root.dim() != 1 or self.parents.dim() != 2 or len(self.root) != len(self.parents):
            raise ValueError(
                f"Tree: root is {list(self.root.shape)} and parents {list(self.parents.shape)}; they must be [B] and [B, N]"
            )
        device = self.root.device
        object.__setattr__(self, "ancestors", tree.ancestors(self.parents).to(device))
        object.__setattr__(self, "depth", tree.depths(self.parents).to(device))

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        last = self.parents.shape[1] - 1
        query, key = q_position - self.root[b], kv_position - self.root[b]  # nodes; the text is below 0
        if last < 0:
            return key <= query
        above = self.ancestors[b, query.clamp(0, last), key.clamp(0, last)] & (query <= last) & (key <= last)
        return torch.where((query >= 0) & (key >= 0), above, key <= query)

    def positions(self, slots: int) -> Tensor:
        """``[B, slots]`` position in the text of each slot, for ``OriginalText``; -1 after the tree."""
        node = torch.arange(slots, device=self.root.device) - self.root[:, None]
        nodes = self.parents.shape[1]
        if not nodes:
            return torch.where(node < 0, node + self.root[:, None], -1)
        at = self.root[:, None] + torch.where(node < 0, node, self.depth.gather(1, node.clamp(0, nodes - 1)))
        return torch.where(node < nodes, at, -1)

    @property
    def slots(self) -> int:
        return int(self.root.max()) + self.parents.shape[1]

    @staticmethod
    def example(model: Any) -> Tree:
        return Tree(torch.tensor([5, 3]), torch.tensor([[-1, -1, 0, 0, 1, 3], [-1, 0, 0, 1, -1, 2]]))
