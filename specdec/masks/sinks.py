"""Attention sinks: the first positions, which every later query sees (StreamingLLM, Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.arguments import at_least
from specdec.masks.mask import Mask
from specdec.masks.reach import Reach


@dataclass(frozen=True, repr=False)
class Sinks(Mask):
    """``kv < count``. StreamingLLM's mask is ``Causal() & (Sinks(4) | Window(w))``; SPIRe's has one sink and ``w = 64``.

    Raises:
        TypeError: a count that is no whole number.
        ValueError: a negative count.
    """

    count: int

    def __post_init__(self) -> None:
        remedy = "the number of first positions that stay visible; 0 leaves them out"
        at_least(0, "Sinks.count", self.count, remedy)

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return kv_position < self.count

    @property
    def reach(self) -> Reach:
        return Reach(self.count, 0)
