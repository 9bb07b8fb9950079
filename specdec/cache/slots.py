"""Keys and values of a batch in slots: plain tensors, one block for all layers of a kind."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.kernels import float8
from specdec.kernels.allocation import zeros
from specdec.kernels.device import to_device
from specdec.kernels.native import library
from specdec.kernels.native.blocks import Buffers, buffers
from specdec.kernels.native.ops import store_kv


class KVShape(NamedTuple):
    """The shape of one layer's slots: keys ``[heads, key_size]`` and values ``[heads, value_size]``."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class Slots(KVStore):
    """``slots`` slots for each of ``batch`` rows; caches give them their meaning.

    Args:
        shapes: one for each layer.
    Attributes:
        lease: held by all caches of one memory while captured steps use it (``graphs.programs``); ``None`` where none do.
        layers: for each layer its keys ``[B, S, H, D]`` and values ``[B, S, H, Dv]``. Slot s of row b has the number
            ``b * slots + s`` wherever slots are numbered flat.

    In memory heads come before slots, so that the entries that one head reads are contiguous, which dominates a step over a long
    context. ``layers`` and ``_blocks [layers, B, S, H, D]`` are views that hide this. Of numbers of eight bits ``_blocks`` has the bytes;
    they are rounded when they are put in, which kernels that store themselves do not do.
    """

    lease: object | None = None

    def __init__(self, shapes: Sequence[KVShape], batch: int, slots: int):
        self.shapes, self.slots = list(shapes), slots
        # One tensor for all buffers of a kind, so that one launch moves entries or selects rows for all layers.
        kinds: dict[tuple[int, int, torch.dtype, torch.device], list[tuple[int, int]]] = defaultdict(list)
        for i, s in enumerate(self.shapes):
            kinds[s.heads, s.key_size, s.dtype, s.device].append((i, 0))
            kinds[s.heads, s.value_size, s.dtype, s.device].append((i, 1))
        self._places = list(kinds.values())
        with torch.inference_mode(False):
            # Zeros, not empty: batched attention reads unused slots with weight 0, and 0 * NaN is NaN.
            made = [
                zeros(len(at), batch, heads, slots, size, dtype=dtype, device=device)
                for (heads, size, dtype, device), at in kinds.items()
            ]
            self._blocks = [float8.bits(block).transpose(2, 3) for block in made]
        self._whole = self._blocks  # all rows, including those that left
        self._view()

    def _view(self) -> None:
        pairs: list[list[Tensor]] = [[torch.empty(0)] * 2 for _ in self.shapes]
        flat: list[list[Tensor]] = [[torch.empty(0)] * 2 for _ in self.shapes]
        with torch.inference_mode(False):
            for block, at in zip(self._blocks, self._places):
                for buffer, (layer, which) in zip(block.unbind(0), at):
                    pairs[layer][which] = buffer.view(self.shapes[layer].dtype)
                    flat[layer][which] = buffer.transpose(1, 2).view(-1, buffer.shape[-1])
        self.layers, self._flat = [(k, v) for k, v in pairs], [(k, v) for k, v in flat]
        self._numbered: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}
        self._buffers: tuple[Buffers | None] | None = None

    def unleased(self) -> Any:
        """A copy that keeps no cache's memory in use."""
        new = copy.copy(self)
        new.lease = None
        return new

    @property
    def direct(self) -> list[tuple[Tensor, Tensor]] | None:
        """``layers``, unless a derived class overrides ``append`` or entries are rounded."""
        plain = type(self).append is Slots.append and all(s.dtype not in float8.DTYPES for s in self.shapes)
        return self.layers if plain else None

    @property
    def buffers(self) -> Buffers | None:
        """As ``KVStore.buffers``."""
        if self._buffers is None:
            self._buffers = (None if self.direct is None else buffers(self.layers),)
        return self._buffers[0]

    def __getstate__(self) -> dict[str, Any]:
        """The state without addresses, which a copy must not share."""
        return {**vars(self), "_buffers": None}

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``key [1, H, T, D]`` and ``value [1, H, T, Dv]`` into flat ``slots [T]``; returns the layer's buffers."""
        self.put(layer, slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self.layers[layer]

    def put(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys [T, H, D]`` and ``values [T, H, Dv]`` into flat ``slots [T]``, on the layer's device."""
        into = self.layers[layer]
        keys, values = (float8.rounded(t, buffer.dtype) for t, buffer in zip((keys, values), into))
        plain = (
            keys.is_cpu
            and keys.stride(-1) == 1 == values.stride(-1)
            and slots.dtype == torch.long
            and not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad))
        )
        if plain and library() is not None:
            store_kv(into[0], slots, keys)
            store_kv(into[1], slots, values)
            return
        into_keys, into_values = self._flat[layer]
        at = self._numbers(slots, keys.shape[1])
        into_keys.index_copy_(0, at, float8.bits(keys).reshape(-1, keys.shape[-1]))
        into_values.index_copy_(0, at, float8.bits(values).reshape(-1, values.shape[-1]))

    def _numbers(self, slots: Tensor, heads: int) -> Tensor:
        """``[T * H]``: where the heads of flat ``slots [T]`` are in memory; all layers of a forward pass the same tensor."""
        key = (slots.device, heads)
        known = self._numbered.get(key)
        if known is None or known[0] is not slots:
            row, slot = slots // self.slots, slots % self.slots
            head = torch.arange(heads, device=slots.device)
            at = ((row[:, None] * heads + head) * self.slots + slot[:, None]).flatten()
            self._numbered[key] = known = (slots, at)
        return known[1]

    def copy(self, source: Sequence[int], target: Sequence[int], other: Slots | None = None) -> None:
        """Copy the entries of flat slots ``source`` (of ``other``, with the same shapes, or of these) into flat ``target``.

        All memory that this takes is taken before anything changes.
        """
        if not len(source):
            return
        at, copies = torch.tensor([list(source), list(target)]), []
        for mine, theirs in zip(self._blocks, (other or self)._blocks):
            there, here = to_device(at, mine.device).unbind(0)
            heads = mine.shape[3]
            src, dst = (other or self)._numbers(there, heads), self._numbers(here, heads)
            flat = flatten(theirs)
            # Of a view that is not contiguous (after rows have left), index_select would copy all of it on a CPU.
            entries = flat.index_select(1, src) if flat.is_contiguous() else flat[:, src]
            copies.append((flatten(mine), dst, entries))
        for into, dst, entries in copies:
            into.index_copy_(1, dst, entries)

    def _gathered(self, rows: Tensor, used: Sequence[int]) -> list[Tensor]:
        """The blocks of some rows, in the given order; ``used [B]``: how many slots of each row matter.

        Where rows that stay keep their numbers and only gaps are filled from the end (as executors do), only the rows that fill gaps are
        copied; otherwise all are.
        """
        order = rows.tolist()
        moved = [(new, old) for new, old in enumerate(order) if new != old]
        with torch.inference_mode(False):
            if len(set(order)) == len(order) and all(old >= len(order) for _, old in moved):
                for to, old in moved:
                    for block in self._blocks:
                        block[:, to, : used[old]] = block[:, old, : used[old]]
                return [block[:, : len(order)] for block in self._blocks]
            self._whole = [
                block.transpose(2, 3).index_select(1, to_device(rows, block.device)).transpose(2, 3)
                for block in self._blocks
            ]
            return self._whole

    def widened(self, batch: int) -> Any:
        """The same entries in memory with room for ``batch`` rows, so that others can join without a copy; this object, if there is room, or a new one, after
        which this one must not be used."""
        if self._whole[0].shape[1] >= batch:
            return self
        new, rows = copy.copy(self), self._blocks[0].shape[1]
        with torch.inference_mode(False):
            new._whole = [
                zeros(
                    len(block),
                    batch,
                    *block.transpose(2, 3).shape[2:],
                    dtype=block.dtype,
                    device=block.device,
                ).transpose(2, 3)
                for block in self._blocks
            ]
            new._blocks = [block[:, :rows] for block in new._whole]
            for into, block in zip(new._blocks, self._blocks):
                into.copy_(block)
        new._view()
        return new


def flatten(block: Tensor) -> Tensor:
    """``[layers, B, S, H, D]`` -> ``[layers, B * H * S, D]`` as it lies in memory, a view."""
    return block.transpose(2, 3).view(block.shape[0], -1, block.shape[-1])
