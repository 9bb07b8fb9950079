"""Into what chunks rows are cut: launches played through, program by program, without a device."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from specdec.kernels.attention.splitting import LEAST, START, chunk_slots, makespan

H200 = {"resident": 2 * 132, "tile": 64, "slot_bytes": 512}  # bf16, head size 128
LLAMA = {"copies": 8, **H200}


def part_bytes(rows, queries=6, heads=32, size=128):
    return 2 * rows * queries * heads * (size + 1) * 4


def played(spans, chunk, copies, resident, start=0.0, slot_bytes=1):
    """When the last program ends if each begins as soon as there is room, in the order of the grid: rows, heads, chunks."""
    ends = [0.0] * resident
    for c in range(-(-max(spans) // chunk)):
        for _ in range(copies):
            for span in spans:
                own = min(max(span - c * chunk, 0), chunk)
                heapq.heapreplace(ends, ends[0] + own * slot_bytes + start)
    return max(ends)


def over_ideal(spans, copies=8, resident=264, **more):
    chunk = chunk_slots(spans, copies, **{**H200, "resident": resident, "part_bytes": part_bytes(len(spans))})
    return chunk, played(spans, chunk, copies, resident, **more) * resident / (copies * sum(spans))


UNEVEN = {
    "a third to the whole": np.linspace(4096, 12288, 64, dtype=int).tolist(),
    "the same, the longest first": np.linspace(12288, 4096, 64, dtype=int).tolist(),
    "by chance": np.random.default_rng(0).integers(4096, 12289, 64).tolist(),
    "short and long": [1024, 16384] * 32,
}


@pytest.mark.parametrize("name", list(UNEVEN))
def test_uneven_rows_end_together(name):
    spans = UNEVEN[name]
    chunk, tail = over_ideal(spans)
    assert chunk < max(spans)
    assert tail <= 1.15
    assert played(spans, max(spans), 8, 264) * 264 / (8 * sum(spans)) > 1.15  # which it would not do uncut


@pytest.mark.parametrize("at", [0, 40, 63])
def test_one_long_row_does_not_hold_up_the_others(at):
    """All rows have as many chunks as the longest, and those with nothing in them start, too: not so even as above."""
    spans = [2048] * 64
    spans[at] = 32768
    assert over_ideal(spans)[1] <= 1.3
    assert played(spans, 32768, 8, 264) * 264 / (8 * sum(spans)) > 5


@pytest.mark.parametrize("rows", [36, 40, 48, 80, 100])
def test_a_wave_that_is_not_full_is_filled(rows):
    chunk, tail = over_ideal([8192] * rows)
    assert tail <= 1.15
    assert (chunk < 8192) == (played([8192] * rows, 8192, 8, 264) * 264 / (8 * 8192 * rows) > 1.15)


@pytest.mark.parametrize(
    ("rows", "span"), [(33, 8192), (64, 8192), (66, 4096), (64, 1024), (128, 8192), (33, 600)]
)
def test_full_batches_of_even_rows_are_not_cut(rows, span):
    chunk, tail = over_ideal([span + r % 2 for r in range(rows)])
    assert chunk >= span + 1
    assert tail <= 1.15


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_few_long_rows_are_cut_until_the_device_is_full(rows):
    chunk, tail = over_ideal([8192] * rows)
    programs = 8 * rows * -(-8192 // chunk)
    assert 132 <= programs <= 264
    assert tail <= 264 / programs


def test_a_program_reads_at_least_so_much_and_a_second_launch_has_to_pay():
    """Rings of sinks and a window are short: one launch a layer."""
    for slot_bytes, size in ((512, 128), (256, 64), (1024, 256)):
        rule = {**LLAMA, "slot_bytes": slot_bytes, "part_bytes": part_bytes(1, 1, size=size)}
        for span in (1, LEAST // slot_bytes, 2 * LEAST // slot_bytes - 1):
            assert chunk_slots([span], **rule) >= span
        long = 64 * LEAST // slot_bytes
        assert LEAST <= chunk_slots([long], **rule) * slot_bytes < 8 * LEAST


def test_chunks_are_whole_tiles_and_cover_the_longest_row():
    g = np.random.default_rng(1)
    for _ in range(200):
        spans = g.integers(1, int(g.integers(2, 40000)), int(g.integers(1, 80))).tolist()
        tile, slot_bytes = int(g.choice([16, 32, 64])), int(g.choice([128, 512, 2048]))
        chunk = chunk_slots(
            spans, int(g.integers(1, 33)), int(g.integers(1, 300)), tile, slot_bytes, part_bytes(9)
        )
        assert chunk % tile == 0
        assert 0 < chunk < max(spans) + tile


def test_no_launch_ends_after_its_bound():
    for spans in [*UNEVEN.values(), [4096] * 40, [4096] * 3]:
        slots = np.array([256, 512, 1024, 2048, 4096, 16384])
        bound = makespan(np.array(spans), slots, 8, 264, 512)
        for chunk, latest in zip(slots.tolist(), bound.tolist()):
            last = played(spans, chunk, 8, 264, START, 512)
            assert last <= latest
            assert latest <= last + min(chunk, max(spans)) * 512 + 2 * START  # and is not much too late
