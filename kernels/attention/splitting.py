"""Into chunks of how many slots rows are cut, so that all multiprocessors have work to the end (flash-decoding, Dao et al., 2023).

A program reads one chunk of one row, and a device holds some programs at a time; as one ends, the next begins, in order. A batch of
few rows does not fill the device, and one of uneven rows leaves it to the longest row in the end. Shorter chunks mend both; they
cost a start each, parts of results that are written and read again, and a second launch that merges them.

Times are said in bytes that one program reads meanwhile: on an H200, of which two programs share a multiprocessor, 16 KiB a
microsecond. Nothing here is measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

START = 16 << 10  # of a program, one that finds nothing to do included
MERGE = 64 << 10  # of the second launch
LEAST = 64 << 10  # a program reads at least that much, or its row is not cut further
TRIED = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 256, 512])


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
