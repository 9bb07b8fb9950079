"""A KV cache as a memo of tokens: the host remembers which tokens each row's slots hold; rolling back is changing a length.

Slot ``s`` of a row holds the keys and values of its committed token at position ``s``, for ``s < length``. The nodes of a
proposal that was scored take slots ``length + n`` at position ``length + depth``; they enter the memo through ``commit`` only,
because equal tokens do not mean equal ancestors.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.types import Context, Verdict


class KVShape(NamedTuple):
    """What one slot of one layer holds: keys ``[heads, key_size]`` and values ``[heads, value_size]``."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class SlotCache:
    """Slots for ``batch`` rows of ``capacity`` tokens (nodes included), and the memo of what is in them.

    Args:
        shapes: one for each layer. spare: slots past ``capacity``, for padding.
    Attributes:
        layers: for each layer its keys ``[B, S, H, D]`` and values ``[B, S, H, Dv]``.
    """

    def __init__(self, shapes: Sequence[KVShape], batch: int, capacity: int, spare: int = 0):
        self.capacity, self.slots = capacity, capacity + spare
        self.shapes = list(shapes)
        # One tensor for all buffers of a kind: moving a tree's accepted nodes, or selecting rows, is one launch for all layers.
        kinds: dict[tuple[int, int, torch.dtype, torch.device], list[tuple[int, int]]] = defaultdict(list)
        for i, s in enumerate(self.shapes):
            kinds[s.heads, s.key_size, s.dtype, s.device].append((i, 0))
            kinds[s.heads, s.value_size, s.dtype, s.device].append((i, 1))
        self._places = list(kinds.values())
        with torch.inference_mode(False):
            # Zeros, not empty: batched attention reads unused slots with weight 0, and 0 * NaN is NaN.
            self._blocks = [
                torch.zeros(len(at), batch, self.slots, heads, size, dtype=dtype, device=device)
                for (heads, size, dtype, device), at in kinds.items()
            ]
        self._hold(np.zeros((batch, capacity), dtype=np.int64), [0] * batch, [0] * batch)

    def _hold(self, tokens: np.ndarray, lengths: list[int], fed: list[int]) -> None:
        self._tokens, self._lengths, self._fed = tokens, lengths, fed
        pairs: list[list[Tensor]] = [[torch.empty(0)] * 2 for _ in self.shapes]
        flat: list[list[Tensor]] = [[torch.empty(0)] * 2 for _ in self.shapes]
        with torch.inference_mode(False):
            for block, at in zip(self._blocks, self._places):
                for buffer, (layer, which) in zip(block.unbind(0), at):
                    pairs[layer][which] = buffer
                    flat[layer][which] = buffer.view(1, -1, *buffer.shape[2:])
        self.layers, self._flat = [(k, v) for k, v in pairs], [(k, v) for k, v in flat]

    @property
    def batch(self) -> int:
        return len(self._lengths)

    @property
    def length(self) -> Tensor:
        """``[B]`` on the host: committed tokens in slots."""
        return torch.tensor(self._lengths, dtype=torch.long)

    @property
    def fed_nodes(self) -> Tensor:
        """``[B]`` on the host: nodes of the current proposal in slots."""
        return torch.tensor(self._fed, dtype=torch.long)

    def row(self, b: int) -> list[int]:
        """The committed tokens that row ``b`` holds."""
        return self._tokens[b, : self._lengths[b]].tolist()

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``key [1, H, T, D]`` and ``value [1, H, T, Dv]`` into flat ``slots [T]``; returns the layer's buffers."""
        keys, values = self._flat[layer]
        keys.index_copy_(1, slots, key.transpose(1, 2))
        values.index_copy_(1, slots, value.transpose(1, 2))
        return self.layers[layer]

    def sync(self, context: Context) -> Tensor:
        """Keep the longest prefix of each row that is still in ``context``: a length changes, nothing is copied.

        Returns:
            ``[B]`` how many tokens need not be fed again. The last committed one always must, since its logits are wanted.
        Raises:
            ValueError: the context has another number of rows.
        """
        return torch.tensor(self.matched(context), dtype=torch.long)

    def matched(self, context: Context) -> list[int]:
        """``sync``, as a list."""
        if context.batch != self.batch:
            raise ValueError(
                f"the context has {context.batch} rows and the cache {self.batch}: select the same rows of both"
            )
        committed, text = context.length.tolist(), context.tokens.numpy()
        held = [min(a, b) for a, b in zip(self._lengths, committed)]
        top = max(held, default=0)
        differ = self._tokens[:, :top] != text[:, :top]
        if differ.any():  # often only behind the end of a shorter row
            differ &= np.arange(top) < np.array(held)[:, None]
            for b in np.flatnonzero(differ.any(1)).tolist():
                held[b] = int(differ[b].argmax())
        for b, (new, old) in enumerate(zip(held, self._lengths)):
            if new < old:
                self._lengths[b], self._fed[b] = new, 0  # the slots after the prefix are free again
        return [min(h, n - 1) for h, n in zip(held, committed)]

    def forget_nodes(self, b: int) -> None:
        """Row ``b`` is about to be fed over the nodes that it holds."""
        self._fed[b] = 0

    def remember(self, b: int, text: np.ndarray, first: int, length: int, nodes: int) -> None:
        """Note that row ``b`` was fed ``text[first:length]`` and then ``nodes`` nodes of a proposal."""
        if first < length:
            self._tokens[b, first:length] = text[first:length]
        self._lengths[b], self._fed[b] = length, nodes

    def has_nodes(self, b: int, length: int, nodes: int) -> bool:
        """Whether row ``b`` holds ``length`` committed tokens and, after them, at least ``nodes`` nodes."""
        return self._lengths[b] == length and self._fed[b] >= nodes

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Take the accepted nodes of the proposal that was scored last, in this ``context``, into the memo.

        Nodes that were never fed here (a draft's last one) are left out, and so is everything below them; rows in which the
        proposal was not scored stay as they are. Node ids must be those of the proposal that was scored.
        """
        source: list[int] = []
        target: list[int] = []
        paths, accepted, tokens = verdict.path.tolist(), verdict.accepted.tolist(), verdict.tokens.numpy()
        for b, start in enumerate(context.length.tolist()):
            path, fed = paths[b][: accepted[b]], self._fed[b]
            self._fed[b] = 0
            if self._lengths[b] != start:
                continue
            taken = next((d for d, node in enumerate(path) if node >= fed), len(path))
            slot = b * self.slots + start
            moved = [
                d for d in range(taken) if path[d] != d
            ]  # none in a chain: its nodes are in place already
            source += [slot + path[d] for d in moved]
            target += [slot + d for d in moved]
            self._tokens[b, start : start + taken] = tokens[b, :taken]
            self._lengths[b] = start + taken
        if source:
            src, dst = torch.tensor([source, target])
            for block in self._blocks:
                flat = block.view(block.shape[0], -1, *block.shape[3:])
                flat.index_copy_(1, dst.to(block.device), flat.index_select(1, src.to(block.device)))

    def select(self, rows: Tensor) -> SlotCache:
        """The cache of some rows, in the order given; the old object must not be used any more.

        Where the rows that stay keep their numbers and only gaps are filled from the end (as the serial executor asks), just the
        fillers are copied; otherwise everything is.
        """
        order = rows.tolist()
        if order == list(range(self.batch)):
            return self
        moved = [(new, old) for new, old in enumerate(order) if new != old]
        new = object.__new__(SlotCache)
        new.capacity, new.slots, new.shapes, new._places = (
            self.capacity,
            self.slots,
            self.shapes,
            self._places,
        )
        with torch.inference_mode(False):
            if len(set(order)) == len(order) and all(old >= len(order) for _, old in moved):
                for to, old in moved:
                    top = self._lengths[old] + self._fed[old]
                    for block in self._blocks:
                        block[:, to, :top] = block[:, old, :top]
                new._blocks = [block[:, : len(order)] for block in self._blocks]
            else:
                new._blocks = [block.index_select(1, rows.to(block.device)) for block in self._blocks]
        new._hold(self._tokens[order], [self._lengths[b] for b in order], [self._fed[b] for b in order])
        return new


def check_memory(shapes: Sequence[KVShape], batch: int, capacity: int, spare: int = 0) -> None:
    """Raise MemoryError for a cache that would not fit, naming one that would."""
    slots = capacity + spare
    for device in {shape.device for shape in shapes}:
        slot = sum(shape.bytes for shape in shapes if shape.device == device)
        need, free = slot * batch * slots, free_bytes(device)
        if free is not None and need > free:
            rows, tokens = free // (slot * slots), max(free // (slot * batch) - spare, 0)
            raise MemoryError(
                f"a KV cache of {batch} rows x {capacity} tokens needs {need / 2**30:.2f} GiB on {device} and {free / 2**30:.2f} "
                f"GiB are free: batch {rows} would fit at this capacity, capacity {tokens} at this batch"
            )


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on a device, or ``None`` where it cannot be told."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
