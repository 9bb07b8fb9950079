"""The causal mask: a query sees the positions up to its own (Vaswani et al., arXiv 1706.03762)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.masks.mask import Mask


@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """``kv <= q``."""

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return kv_position <= q_position
