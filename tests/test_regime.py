"""The regime map: cases whose gains are known by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from specdec.cost import Hardware, Shape
from specdec.lab.regime import Machine, Regime, grid, makespan

ENDLESS = 1e30
TARGET = Shape(4, 64, 4, 1, 16, 128, 100)
CORE = Hardware("core", 1e9, 1e9, 1e-4, 1e-5)
POINT = Regime(TARGET, Machine(CORE, 1e10, serial=0.05), 8, 1.0, 0.25, 16, 500)


def test_one_core_needs_neither_decomposition_nor_pipeline():
    gains = replace(POINT, cores=1, machine=Machine(CORE, 1e9, item=0.0)).gains()
    assert gains["decomposition"] == pytest.approx(1)
    assert gains["pipeline"] == 1
    assert not gains["cut"]
    assert gains["over_padded"] > 1.2  # padding is lost on one core, too
    equal = replace(POINT, cores=1, raggedness=0.0).gains()
    assert equal["over_padded"] == pytest.approx(equal["decomposition"])


def test_lengths_have_their_mean_and_spread():
    made = replace(POINT, batch=400).lengths()
    assert made.mean() == pytest.approx(500)
    assert np.log(made).std() == pytest.approx(1.0, rel=0.03)
    assert (replace(POINT, raggedness=0.0).lengths() == 500).all()


def test_a_long_row_alone_is_cut_for_all_cores():
    machine = Machine(replace(CORE, bytes_per_second=ENDLESS), ENDLESS, item=0.0)
    point = replace(POINT, machine=machine, batch=1, context=4000)
    length = point.lengths()
    whole, parts = point.attention(length, 5, 8, "packed")
    assert whole == pytest.approx(4 * 4 * 16 * 5 * 4000 / 1e9)  # one core has all of it
    assert parts == 1
    assert point.attention(length, 5, 8, "decomposed") == (pytest.approx(whole / 8), 8)
    assert point.gains()["cut"]
    assert "decomposition" in point.gains()["pays"]
    slow = replace(point, batch=8, raggedness=0.1, machine=replace(machine, item=1.0))
    assert not slow.gains()["cut"]  # every core has a row, and another item would cost more than it saves
    assert replace(slow, raggedness=1.0, machine=machine).gains()["cut"]


def test_selection_pays_for_every_draft_in_use():
    """Passes that take only their overhead: the best fixed draft k + 1 of them, A drafts in use A k + 1."""
    bare = Hardware("overheads", ENDLESS, ENDLESS, 1e-4)
    point = replace(POINT, machine=Machine(bare, ENDLESS, item=0.0), arms=4, k=3)
    gains = point.gains()
    assert gains["selection"] == pytest.approx(1.1 * (3 + 1) / (4 * 3 + 1))
    assert gains["own_devices"] == pytest.approx(1.1)
    assert gains["speculation"] == pytest.approx(2.8 / 4)
    assert gains["pays"] == []
    for alone in ({"arms": 1}, {"batch": 1}):
        assert replace(point, **alone).gains()["selection"] == pytest.approx(1.1)
        assert replace(POINT, **alone).gains()["selection"] == pytest.approx(1.1)


def test_a_pipeline_gains_what_cores_lose_together():
    work = Hardware("work", 1e9, ENDLESS)
    # Drafting takes as long as verification.
    draft = replace(POINT, raggedness=0.0, ratio=5 / 4, k=4, cores=8, batch=64)
    ideal = replace(draft, machine=Machine(work, ENDLESS, item=0.0)).gains()
    assert ideal["pipeline"] <= 1 + 1e-9  # cores that share work without loss gain nothing from a division
    lossy = replace(draft, machine=Machine(work, ENDLESS, serial=0.5, item=0.0)).gains()
    assert lossy["pipeline"] > 1.3
    assert lossy["micro_batches"] > 1
    assert "pipeline" in lossy["pays"]


def test_items_are_spread_over_cores():
    noise = np.random.default_rng(0)
    for _ in range(20):
        items = tuple(noise.uniform(0.1, 1, 6).tolist())
        best = min(
            max(sum(x for x, at in zip(items, where) if at == core) for core in range(3))
            for where in product(range(3), repeat=6)
        )
        assert best - 1e-12 <= makespan(items, 3) <= 4 / 3 * best
    assert makespan((1.0,) * 500, 4) == 125


def test_a_grid_has_a_row_for_each_point_and_bad_points_are_refused():
    rows = grid([POINT, replace(POINT, cores=2)])
    assert [r["cores"] for r in rows] == [8, 2]
    assert {
        "machine",
        "raggedness",
        "ratio",
        "batch",
        "selection",
        "decomposition",
        "pipeline",
        "pays",
    } <= set(rows[0])
    for name, value in (("cores", 0), ("batch", 0), ("raggedness", -1.0), ("ratio", -0.1)):
        with pytest.raises(ValueError, match=f"{name} is"):
            replace(POINT, **{name: value})
