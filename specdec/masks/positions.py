"""What a position means once slots have been dropped: the position in the text (SPIRe) or in the cache (StreamingLLM).

A compact cache keeps some tokens of a text; slot s of row b holds the token of position ``positions[b, s]``. Attention works on
slots, so a mask must be told which of the two numbers to use, and the rotary embedding must use the same one.

- SPIRe (arXiv 2504.06419) counts in the original text: a key keeps the rotation that it was written with, and the distance to a
  sink grows with the text, beyond any length seen in training.
- StreamingLLM (arXiv 2309.17453) and MagicDec (arXiv 2408.11049) count inside the cache: no distance exceeds its size, so a text may be longer
  than any seen in training. A key's rotation follows its slot, which changes with every eviction. Since only differences matter, keys in the
  window may stay rotated by their position in the text if the sinks are rotated forward by the number of evicted tokens.

For sinks and a window both see the same slots and only rotations differ. Where the kept slots have gaps (SnapKV, H2O) a window
differs too: it counts text positions in ``OriginalText`` and kept tokens in ``InCache``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.masks.causal import Causal
from specdec.masks.mask import Mask, check_masks
from specdec.masks.window import Window


@dataclass(frozen=True, repr=False, eq=False)
class _Kept(Mask):
    """A mask over the kept slots."""

    mask: Mask
    positions: Tensor

    def __post_init__(self) -> None:
        check_masks(self.mask)
        if self.positions.dim() not in (2, 3):
            name, shape = type(self).__name__, list(self.positions.shape)
            raise ValueError(f"{name}: positions is {shape}; it must be [B, S] or [B, H, S]")

    def _at(self, b: Any, h: Any, slot: Any) -> Tensor:
        slot = torch.as_tensor(slot, device=self.positions.device)
        inside = slot.clamp(max=self.slots - 1)
        found = self.positions[b, inside] if self.positions.dim() == 2 else self.positions[b, h, inside]
        return torch.where(slot < self.slots, found, -1)

    @property
    def slots(self) -> int:
        return self.positions.shape[-1]


@dataclass(frozen=True, repr=False, eq=False)
class OriginalText(_Kept):
    """``mask`` applied to positions in the text: ``Window(64)`` reaches 64 positions back, whether they were kept or not.

    Args:
        mask: over positions. positions: ``[B, S]``, or ``[B, H, S]`` where heads keep different tokens; the queries' own slots
            included. -1 marks an empty slot, which no query sees; slots from S on are empty, too.
    Raises:
        ValueError: positions of another shape.
    """

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        query, key = (self._at(b, h, slot) for slot in (q_position, kv_position))
        return self.mask(b, h, query, key) & (key >= 0)

    @property
    def rotary(self) -> Tensor:
        """``[B, S]`` or ``[B, H, S]``: the position that the key in each slot is rotated by; -1 for an empty slot."""
        return self.positions

    @staticmethod
    def example(model: Any) -> OriginalText:
        positions = torch.tensor([[0, 1, 5, 6, 9, 10, 11, 12, -1, -1], [0, 2, 3, 4, 8, 9, 10, 20, 21, 22]])
        return OriginalText(Causal() & Window(5), positions)


@dataclass(frozen=True, repr=False, eq=False)
class InCache(_Kept):
    """``mask`` applied to slots: ``Window(64)`` reaches 64 kept tokens back, whatever their positions in the text.

    Args:
        mask: over slots. positions: as for ``OriginalText``; only which slots are empty matters.
    Raises:
        ValueError: positions of another shape.
    """

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return self.mask(b, h, q_position, kv_position) & (self._at(b, h, kv_position) >= 0)

    @property
    def rotary(self) -> Tensor:
        """``[B, S]`` or ``[B, H, S]``: the position that the key in each slot is rotated by at every use; -1 for an empty slot."""
        return torch.arange(self.slots, device=self.positions.device).where(self.positions >= 0, -1)

    @staticmethod
    def example(model: Any) -> InCache:
        return InCache(Causal() & Window(5), OriginalText.example(model).positions)
