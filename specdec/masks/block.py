"""Block-local attention: a query sees the block of positions that it is in (Blockwise BERT, Qiu et al., arXiv 1911.02972)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.arguments import at_least
from specdec.masks.mask import Mask
from specdec.masks.reach import Reach


@dataclass(frozen=True, repr=False)
class Block(Mask):
    """``kv // size == q // size``: a query sees its whole block, later positions too; combine it with ``Causal()`` to hide the future.

    Raises:
        TypeError: a size that is no whole number.
        ValueError: a size below 1.
    """

    size: int

    def __post_init__(self) -> None:
        at_least(1, "Block.size", self.size, "a block holds at least 1 position")

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return kv_position // self.size == q_position // self.size

    @property
    def reach(self) -> Reach:
        return Reach(0, self.size)
