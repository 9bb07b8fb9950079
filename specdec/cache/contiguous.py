"""A KV cache of contiguous slots: the host remembers which tokens each row's slots hold, and rolling back changes a length.

Slot ``s`` of a row holds the keys and values of its committed token at position ``s``, for ``s < length``. The nodes of a
proposal that was scored take slots ``length + n`` at position ``length + depth``; they enter the token index through ``commit`` only,
because equal tokens do not mean equal ancestors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.cache.slots import KVShape, Slots
from specdec.cache.token_index import TokenIndex
from specdec.types import Context, Verdict

__all__ = ["KVShape", "SlotCache", "check_memory", "free_bytes"]


class SlotCache(Slots, TokenIndex):
    """Slots for ``batch`` rows of ``capacity`` tokens (nodes included), and the token index of what is in them.

    Args:
        shapes: one for each layer. spare: slots past ``capacity``, for padding.
    Attributes:
        layers: for each layer its keys ``[B, S, H, D]`` and values ``[B, S, H, Dv]``.
    """

    def __init__(self, shapes: Sequence[KVShape], batch: int, capacity: int, spare: int = 0):
        Slots.__init__(self, shapes, batch, capacity + spare)
        TokenIndex.__init__(self, batch, capacity)

    def unleased(self) -> SlotCache:
        """As ``Slots.unleased``: without what was noted of its rows, too."""
        new: SlotCache = super().unleased()
        new.begun = [None] * self.batch
        return new

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Take the accepted nodes of the proposal that was scored last, in this ``context``, into the token index.

        Nodes that were never fed here (a draft's last one) are left out, and so are their descendants; rows in which the proposal was not
        scored do not change. Node ids must be those of the proposal that was scored.
        """
        source: list[int] = []
        target: list[int] = []
        accepted = self.accepted(context, verdict)
        for b, start, path in accepted:
            slot = b * self.slots + start
            # The nodes of a chain are in place.
            moved = [(node, d) for d, node in enumerate(path) if node != d]
            source += [slot + node for node, _ in moved]
            target += [slot + d for _, d in moved]
        self.copy(source, target)
        self.accept(verdict, accepted)

    def select(self, rows: Tensor) -> SlotCache:
        """The cache of some rows, in the given order; the old object must not be used again.

        Where rows that stay keep their numbers and only gaps are filled from the end (as executors do), only the rows that fill gaps are
        copied; otherwise all are.
        """
        order = rows.tolist()
        if order == list(range(self.batch)):
            return self
        new = copy.copy(self)
        new._blocks = self._gathered(rows, [n + fed for n, fed in zip(self._lengths, self._fed)])
        new._whole = self._whole
        new._view()
        new._hold(*self._rows(order))
        return new

    def join(self, other: SlotCache) -> SlotCache:
        """A cache of both caches' rows, these first; neither may be used again.

        Where rows have left this cache, the new rows take their place and nothing else is copied.
        """
        mine, theirs, capacity = self.batch, other.batch, max(self.capacity, other.capacity)
        used = [n + fed for n, fed in zip(other._lengths, other._fed)]
        room = capacity == self.capacity and self._whole[0].shape[1] >= mine + theirs
        new = copy.copy(self)
        if room:
            new._blocks = [block[:, : mine + theirs] for block in self._whole]
        else:
            spare = self.slots - self.capacity
            check_memory(self.shapes, mine + theirs, capacity, spare)
            grown = SlotCache(self.shapes, mine + theirs, capacity, spare)
            vars(new).update(vars(grown))
            held = [n + fed for n, fed in zip(self._lengths, self._fed)]
            _copy_rows(self._blocks, new._blocks, 0, held)
        _copy_rows(other._blocks, new._blocks, mine, used)
        new._view()
        new._hold_both(self, other)
        return new

    def take(self, b: int, other: SlotCache, i: int) -> None:
        """Row ``b`` becomes a copy of row ``i`` of ``other``, which may be this cache."""
        used = other._lengths[i] + other._fed[i]
        with torch.inference_mode(False), torch.no_grad():
            for there, here in zip(other._blocks, self._blocks):
                here[:, b, :used] = there[:, i, :used]
        self._become(b, other, i)

    def parts(self, b: int, first: int, end: int) -> Iterator[list[Tensor]]:
        """Where the entries of slots ``first:end`` of row ``b`` are: in one part, for each kind of buffer a view ``[layers, n, H, D]``."""
        yield [block[:, b, first:end] for block in self._blocks]


def _copy_rows(source: Sequence[Tensor], target: Sequence[Tensor], first: int, used: Sequence[int]) -> None:
    """Copy the ``used [R]`` slots of all rows of ``source`` blocks to rows ``first`` on of ``target``."""
    with torch.inference_mode(False), torch.no_grad():
        for there, here in zip(source, target):
            for b, n in enumerate(used):
                here[:, first + b, :n] = there[:, b, :n]


def check_memory(shapes: Sequence[KVShape], batch: int, capacity: int, spare: int = 0) -> None:
    """Raise MemoryError for a cache that does not fit, naming one that would."""
    slots = capacity + spare
    for device in {shape.device for shape in shapes}:
        slot = sum(shape.bytes for shape in shapes if shape.device == device)
        need, free = slot * batch * slots, free_bytes(device)
        if free is not None and need > free:
            rows, tokens = free // (slot * slots), max(free // (slot * batch) - spare, 0)
            fewer = f" (generate(..., batch_size={rows}))" if rows else ""
            raise MemoryError(
                f"a KV cache of {batch} rows x {capacity} tokens needs {need / 2**30:.2f} GiB on {device} and {free / 2**30:.2f} "
                f"GiB are free: batch {rows} would fit at this capacity{fewer}, capacity {tokens} at this batch"
            )


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on a device, or ``None`` where that is unknown."""
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
