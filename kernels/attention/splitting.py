"""Into chunks of how many slots rows are cut, so that all multiprocessors have work to the end (flash-decoding, Dao et al., 2023).

A program reads one chunk of one row, and a device holds some programs at a time; as one ends, the next begins, in order. A batch of
few rows does not fill the device, and one of uneven rows leaves it to the longest row in the end. Shorter chunks mend both; they
cost a start each, parts of results that are written and read again, and a second launch that merges them.

Times are said in bytes that one program reads meanwhile: on an H200, of which two programs share a multiprocessor, 16 KiB a
microsecond. Nothing here is measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.kernels.attention.lowered import Lowered
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, split

START = 16 << 10  # of a program, one that finds nothing to do included
MERGE = 64 << 10  # of the second launch
LEAST = 64 << 10  # a program reads at least that much, or its row is not cut further
TRIED = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 256, 512])


class Work(NamedTuple):
    """What a launch has to do, beside its rows: see ``chunk_slots``."""

    copies: int
    resident: int
    tile: int
    slot_bytes: int
    part_bytes: int


def chunking(
    lowered: Lowered, window: Reach, work: Work, chunk: int | None, plan: AttentionPlan | None = None
) -> tuple[int, int, int]:
    """Into how many chunks rows are cut at most, their slots, and the multiples at which a window's slots of a row begin.

    Args:
        chunk: fixed slots of a chunk; its borders are then multiples of that. plan: remembers what is chosen for its rows, since
            all layers ask. Without it, and without a window, rows may be anything up to ``max_length`` and are taken to be
            spread from a third of it.
    """
    tile, initial = work.tile, 0
    span = lowered.max_length  # slots that a row's queries may see, but for the first ones
    if window is not None:
        nodes = 0 if lowered.depth is None else lowered.depth.shape[1]
        back, initial = split(window)
        span = min(span, back - 1 + max(lowered.max_count, nodes))
    if chunk is not None:
        slots = -(-chunk // tile) * tile
        most = -(-lowered.max_length // slots)
        return min(most, -(-initial // slots) + (span + slots - 2) // slots + 1), slots, slots
    key = ("triton chunks", window, work)
    if plan is not None and key in plan.known:
        return plan.known[key]
    if window is not None:  # the first tile begins before the first slot
        span = min(-(-initial // tile) * tile + span + tile - 1, lowered.max_length)
    if plan is not None:
        spans = [min(span, n) for n in plan.length]
    elif window is None and lowered.seen is None:
        rows = lowered.rows.shape[0]
        spans = [span - 2 * span * r // (3 * rows) for r in range(rows)]
    else:
        spans = [span] * lowered.rows.shape[0]
    slots = chunk_slots(spans, *work)
    made = -(-span // slots), slots, tile
    if plan is not None:
        plan.known[key] = made
    return made


def chunk_slots(
    spans: Sequence[int], copies: int, resident: int, tile: int, slot_bytes: int, part_bytes: int
) -> int:
    """Slots of a chunk, a multiple of ``tile``: those of the longest row where it is best not to cut.

    Args:
        spans: ``[R]`` slots that the programs of each row visit. copies: programs of a row that one chunk has.
        resident: programs that the device holds at a time. tile: slots of a tile.
        slot_bytes: that a program reads of a slot. part_bytes: that one part of all results takes, written and read.
    """
    span = np.asarray(spans)
    longest = int(span.max())
    most = max(1, longest * slot_bytes // LEAST)
    parts = TRIED[: int(np.searchsorted(TRIED, most, "right"))]
    slots = -(-longest // (parts * tile)) * tile
    parts = -(-longest // slots)
    cost = makespan(span, slots, copies, resident, slot_bytes)
    cost = cost + np.where(parts > 1, MERGE + parts * (part_bytes / resident), 0)
    return int(slots[int(np.argmin(cost))])


def makespan(span: np.ndarray, slots: np.ndarray, copies: int, resident: int, slot_bytes: int) -> np.ndarray:
    """``[C]`` when the last program has ended at the latest, for chunks of ``slots [C]``.

    Two bounds that hold in any order of programs (Graham, 1966), the lower of which is taken: the last one begins before a device
    that is never idle would be done; and they end within as many whole waves of the longest as there are programs, which is the
    lower one for rows about as long as each other.
    """
    parts = -(-int(span.max()) // slots)
    working = copies * (-(-span[:, None] // slots)).sum(0)
    starts = copies * len(span) * parts
    longest = np.minimum(slots, span.max()) * slot_bytes + START
    waves = np.where(starts == working, -(-starts // resident) * longest, np.inf)
    busy = (copies * float(span.sum()) * slot_bytes + starts * START) / resident
    return np.minimum(waves, busy + longest)
