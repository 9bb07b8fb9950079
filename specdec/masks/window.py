"""The sliding window: a query sees the latest positions only (Longformer, Beltagy et al., arXiv 2004.05150)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.arguments import at_least
from specdec.masks.mask import Mask
from specdec.masks.reach import Reach


@dataclass(frozen=True, repr=False)
class Window(Mask):
    """``kv > q - size``: ``size`` positions, the query's own included, as ``window=`` of ``attention``.

    It does not hide the future: use it as ``Causal() & Window(size)``.

    Raises:
        TypeError: a size that is no whole number.
        ValueError: a size below 1: a query must see itself.
    """

    size: int

    def __post_init__(self) -> None:
        remedy = "a query sees itself, so the size is at least 1; for no window leave it out"
        at_least(1, "Window.size", self.size, remedy)

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return kv_position > q_position - self.size

    @property
    def reach(self) -> Reach:
        return Reach(0, self.size)
