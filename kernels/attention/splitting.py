"""Chooses the chunk size into which rows are cut, so that all multiprocessors stay busy (flash-decoding, Dao et al., 2023).

A program reads one chunk of one row, and a device runs a limited number of programs at a time, in order. A batch of few rows does
not fill the device, and in a batch of uneven rows the longest row runs alone in the end. Shorter chunks avoid both; each costs a
program start and a partial result that is written and read again, and a second launch merges the results.

Times are in bytes that one program reads meanwhile: on an H200, with two programs per multiprocessor, 16 KiB per microsecond. The
constants are not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.kernels.attention.lowered import Lowered
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, split

START = 16 << 10  # cost of a program's start, also without work
MERGE = 64 << 10  # cost of the second launch
LEAST = 64 << 10  # rows are not cut into smaller chunks than this
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
    """The most chunks of a row, their slots, and the alignment of the first slot of a row's windows.

    Args:
        chunk: fixed slots of a chunk, whose borders are then multiples of it. plan: caches the choice for all layers. Without it,
            and without a window, row lengths are assumed to be spread from a third of ``max_length`` to ``max_length``.
    """
    tile, initial = work.tile, 0
    span = lowered.max_length  # slots that a row's queries may see, except the first ones
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
    elif window is None and lowered.seen is None and lowered.ring is None:
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
    """Slots of a chunk, a multiple of ``tile``; the longest row's slots if it is best not to cut.

    Args:
        spans: ``[R]`` slots that the programs of each row visit. copies: programs per chunk of a row.
        resident: programs that the device runs at a time. tile: slots of a tile.
        slot_bytes: bytes that a program reads per slot. part_bytes: bytes written and read per part of the results.
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
    """``[C]`` an upper bound of the time at which the last program ends, for chunks of ``slots [C]``.

    It is the smaller of two bounds that hold for any order of programs (Graham, 1966): the last program begins before a device that
    is never idle would be done; and all end within the number of waves times the longest program, which is the smaller bound for
    rows of similar length.
    """
    parts = -(-int(span.max()) // slots)
    working = copies * (-(-span[:, None] // slots)).sum(0)
    starts = copies * len(span) * parts
    longest = np.minimum(slots, span.max()) * slot_bytes + START
    waves = np.where(starts == working, -(-starts // resident) * longest, np.inf)
    busy = (copies * float(span.sum()) * slot_bytes + starts * START) / resident
    return np.minimum(waves, busy + longest)
