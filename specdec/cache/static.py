"""The memory of a cache for captured steps: the same tensors for every step, written by operators that can be captured."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.cache.slots import Slots
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
            row, slot = slots // self.slots, slots % self.slots
            head = torch.arange(key.shape[1], device=slots.device)
            at = ((row[:, None] * key.shape[1] + head) * self.slots + slot[:, None]).flatten()
            self._at[key.shape[1]] = known = (slots, at)
        for into, buffer, new in zip(self._flat[layer], self.layers[layer], (key, value)):
            new = bits(rounded(new[0].transpose(0, 1), buffer.dtype))
            into.index_copy_(0, known[1], new.reshape(-1, new.shape[-1]))
        return self.layers[layer]
