"""The memory of a cache for captured steps: the same tensors for every step, written by operators that can be captured."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.cache.slots import Slots, flatten
from specdec.kernels.float8 import DTYPES, bits, rounded


class StaticStore(KVStore):
    """All rows that a cache was made for, including those that left.

    Attributes:
        layers: for each layer its keys ``[B, S, H, D]`` and values. slots: of a row. spare: the flat slot that padding goes to.
    """

    def __init__(self, cache: Slots):
        whole = copy.copy(cache)
        whole._blocks = cache._whole
        Slots._view(whole)
        self.layers, self._flat, self.slots = whole.layers, whole._flat, whole.slots
        self._blocks = [(block.shape[3], flatten(block)) for block in cache._whole]
        self._plain = all(shape.dtype not in DTYPES for shape in cache.shapes)
        self.spare = self.slots - 1
        self._at: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def direct(self) -> list[tuple[Tensor, Tensor]] | None:
        return self.layers if self._plain else None

    def begin(self) -> None:
        """Called before a forward, because the tensor of slots may have new contents."""
        self._at = {}

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As ``KVStore.append``."""
        known = self._at.get(key.shape[1])
        if known is None or known[0] is not slots:
            self._at[key.shape[1]] = known = (slots, self._numbers(slots, key.shape[1]))
        for into, buffer, new in zip(self._flat[layer], self.layers[layer], (key, value)):
            new = bits(rounded(new[0].transpose(0, 1), buffer.dtype))
            into.index_copy_(0, known[1], new.reshape(-1, new.shape[-1]))
        return self.layers[layer]

    def copy(self, source: Tensor, other: StaticStore, target: Tensor) -> None:
        """As ``Slots.copy``: the entries of flat slots ``source [T]`` of ``other`` to flat ``target [T]``, which differ."""
        for (heads, mine), (_, theirs) in zip(self._blocks, other._blocks, strict=True):
            found = theirs.index_select(1, other._numbers(source, heads))
            mine.index_copy_(1, self._numbers(target, heads), found)

    def _numbers(self, slots: Tensor, heads: int) -> Tensor:
        """As ``Slots._numbers``."""
        row, slot = slots // self.slots, slots % self.slots
        head = torch.arange(heads, device=slots.device)
        return ((row[:, None] * heads + head) * self.slots + slot[:, None]).flatten()
