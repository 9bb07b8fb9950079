"""Strided attention: a query sees every ``stride``-th position back (Sparse Transformer, Child et al., arXiv 1904.10509)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.arguments import at_least
from specdec.masks.mask import Mask


@dataclass(frozen=True, repr=False)
class Strided(Mask):
    """``(q - kv) % stride == 0``: the second of the paper's two strided heads; the first is ``Window(stride)``.

    Raises:
        TypeError: a stride that is no whole number.
        ValueError: a stride below 1.
    """

    stride: int

    def __post_init__(self) -> None:
        at_least(1, "Strided.stride", self.stride, "the distance between seen positions is at least 1")

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return (q_position - kv_position) % self.stride == 0
