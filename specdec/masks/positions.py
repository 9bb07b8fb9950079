"""What a position means once slots have been dropped: the position in the text (SPIRe) or in the cache (StreamingLLM).

A compact cache keeps some tokens of a text; slot s of row b holds the token of position ``positions[b, s]``. Attention works on
slots, so a mask must be told which of the two numbers to use, and the rotary embedding must use the same one.

- SPIRe (arXiv 2504.06419) counts in the original text: a key keeps the rotation that it was written with, distances are the
  true ones, and the distance to a sink grows with the text, beyond any length seen in training.
- StreamingLLM (arXiv 2309.17453) and MagicDec (arXiv 2408.11049) count inside the cache: with the text's tokens 0, 1, 2, 3, 6, 7, 8
  cached, they have positions 0 to 6 and the query for token 9 has position 7. No distance exceeds the size of the cache, so a
  text may be longer than any seen in training. A key's rotation follows its slot, which changes with every eviction. Since
  only differences matter, keys in the window may stay rotated by their position in the text if the sinks are rotated forward
  by the number of evicted tokens.

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
class OriginalText(Mask):
    """``mask`` applied to positions in the text: ``Window(64)`` reaches 64 positions back, whether they were kept or not.

    Args:
        mask: over positions. positions: ``[B, S]``, or ``[B, H, S]`` where heads keep different tokens; the queries' own slots
            included. -1 marks an empty slot, which no query sees; slots from S on are empty, too.
    Raises:
        ValueError: positions of another shape.
    """

    mask: Mask
    positions: Tensor

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        query, key = (_at(self.positions, b, h, slot) for slot in (q_position, kv_position))
        return self.mask(b, h, query, key) & (key >= 0)

    @property
    def rotary(self) -> Tensor:
        """``[B, S]`` or ``[B, H, S]``: the position that the key in each slot is rotated by; -1 for an empty slot."""
        return self.positions

    @property
    def slots(self) -> int:
        return self.positions.shape[-1]

    @staticmethod
    def example(model: Any) -> OriginalText:
        positions = torch.tensor([[0, 1, 5, 6, 9, 10, 11, 12, -1, -1], [0, 2, 3, 4, 8, 9, 10, 20, 21, 22]])
        return OriginalText(Causal() & Window(5), positions)


@dataclass(frozen=True, repr=False, eq=False)
class InCache(Mask):
    """``mask`` applied to slots: ``Window(64)`` reaches 64 kept tokens back, whatever their positions in the text.

    Args:
        mask: over slots. positions: as for ``OriginalText``; only which slots are empty matters.
    Raises:
        ValueError: positions of another shape.
    """

    mask: Mask
    positions: Tensor

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return self.mask(b, h, q_position, kv_position) & (_at(self.positions, b, h, kv_position) >= 0)

    @property
    def rotary(self) -> Tensor:
        """``[B, S]`` or ``[B, H, S]``: the position that the key in each slot is rotated by at every use; -1 for an empty slot."""
        slot = torch.arange(self.positions.shape[-1], device=self.positions.device)
        return torch.where(self.positions >= 0, slot, -1)

    @property
    def slots(self) -> int:
        return self.positions.shape[-1]

    @staticmethod
    def example(model: Any) -> InCache:
        return InCache(Causal() & Window(5), OriginalText.example(model).positions)


def _check(mask: OriginalText | InCache) -> None:
    check_masks(mask.mask)
    if mask.positions.dim() not in (2, 3):
        raise ValueError(
            f"{type(mask).__name__}: positions is {list(mask.positions.shape)}; it must be [B, S] or [B, H, S]"
        )


def _at(positions: Tensor, b: Any, h: Any, slot: Any) -> Tensor:
    slot = torch.as_tensor(slot, device=positions.device)
    inside = slot.clamp(max=positions.shape[-1] - 1)
    found = positions[b, inside] if positions.dim() == 2 else positions[b, h, inside]
    return torch.where(slot < positions.shape[-1], found, -1)
