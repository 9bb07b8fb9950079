"""The memory of a cache for captured steps: the same tensors for every step, written by operators that can be captured."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache
from specdec.cache.contract import KVStore
from specdec.cache.paged import PagedCache, PagePool
from specdec.cache.slots import Slots, flatten
from specdec.cache.static_pool import StaticPool
from specdec.cache.token_index import Row
from specdec.kernels.float8 import DTYPES, bits, rounded


class StaticStore(KVStore):
    """All rows that a cache was made for, including those that left, or all pages of a pool.

    Attributes:
        layers: for each layer its keys ``[B, S, H, D]`` and values. slots: of a row or a page. page: slots of a page, 0 without pages.
        spare: the flat slot that padding goes to: the last one of the first row, or of the spare page.
    """

    def __init__(self, cache: Slots):
        whole = copy.copy(cache)
        whole._blocks = cache._whole
        Slots._view(whole)
        self.layers, self._flat, self.slots = whole.layers, whole._flat, whole.slots
        self._blocks = [(block.shape[3], flatten(block)) for block in cache._whole]
        self._plain = all(shape.dtype not in DTYPES for shape in cache.shapes)
        self.page, self.spare = 0, self.slots - 1
        if isinstance(cache, PagePool):
            self.page, self.spare = cache.page, (cache.pages + cache.spare) * cache.page - 1
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

    def numbers(self, rows: Tensor, table: Tensor | None, at: Tensor) -> Tensor:
        """``[R, n]`` the flat numbers of slots ``at [R, n]`` of ``rows [R]``; in pages by their ``table [R, P]``."""
        if table is None:
            return rows.long()[:, None] * self.slots + at
        return table.gather(1, at // self.page).long() * self.page + at % self.page

    def _numbers(self, slots: Tensor, heads: int) -> Tensor:
        """As ``Slots._numbers``."""
        row, slot = slots // self.slots, slots % self.slots
        head = torch.arange(heads, device=slots.device)
        return ((row[:, None] * heads + head) * self.slots + slot[:, None]).flatten()


def memory_of(cache: Any) -> Slots | None:
    """What the steps of a cache are captured over: the cache itself if it has slots, its pool if it has pages; ``None`` for other caches."""
    if type(cache) is PagedCache:
        return cache.pool if type(cache.pool) is StaticPool else None
    return cache if type(cache) is SlotCache else None


def held(cache: Any, rows: Sequence[Row]) -> tuple[int, Mapping[int, list[int]] | None, int]:
    """Have slots for what ``rows`` are about to be fed. Pages that other rows hold, too, are copied, and a pool may grow.

    Returns:
        the most slots of a row; its pages and the slots of a page, ``None`` and 0 without pages.
    """
    if isinstance(cache, PagedCache):
        table = cache.hold(rows)
        most = (cache.capacity // 256 + 1) * 256  # the same for capacities that differ little
        return min(cache.pool.pages * cache.page, most), table, cache.page
    return cache.slots, None, 0
