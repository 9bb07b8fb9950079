"""Fitting machines to step times: planted constants come back, predictions hold for other steps; and the recipe that uses it, at toy size."""

from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path

import pytest
from one_process import each
from recipe_runs import written

from specdec.cost import (
    FULL,
    Fitted,
    Hardware,
    Host,
    Shape,
    calibrate,
)
from specdec.cost.calibrate import missed
from specdec.cost.terms import Forward, step

ROOT = Path(__file__).parents[1]
TARGET = Shape(layers=8, d_model=256, heads=4, kv_heads=4, d_head=64, d_ff=640, vocab=4096, tied=True)
SMALL = Shape(layers=4, d_model=128, heads=4, kv_heads=4, d_head=32, d_ff=320, vocab=4096, tied=True)
CORE = Hardware("core", 60e9, 12e9, overhead=3e-4, overhead_per_layer=1e-4, overlapped=False)


def steps(batches=(1, 4, 32), contexts=(128, 1024), tokens=(1, 5)):
    shapes = (TARGET, SMALL, TARGET.with_layers(2))
    return [
        step(Forward(shape, b, n, c, 4, 4), FULL)
        for shape, b, c, n in product(shapes, batches, contexts, tokens)
    ]


def timed(machine, some):
    return [(s, machine.time(s)) for s in some]


def constants(machine):
    return [getattr(machine, n) for n in ("flops", "bytes_per_second", "overhead", "overhead_per_layer")]


# Planted constants


@pytest.mark.parametrize("overlapped", [False, True])
def test_planted_constants_come_back(overlapped):
    machine = Hardware("m", 40e9, 9e9, 2e-4, 5e-5, overlapped)
    found = calibrate(timed(machine, steps()), "found")
    assert (found.name, found.overlapped) == ("found", overlapped)
    assert constants(found) == pytest.approx(constants(machine), rel=1e-6)
    assert found.error < 1e-9
    assert found.cached_bytes_per_second is None


@pytest.mark.parametrize("overlapped", [False, True])
def test_cached_keys_and_values_have_a_rate_of_their_own(overlapped):
    machine = Fitted("m", 40e9, 20e9, 2e-4, 5e-5, overlapped, cached_bytes_per_second=5e9)
    samples = timed(machine, steps())
    found = calibrate(samples, cached_apart=True)
    assert constants(found) == pytest.approx(constants(machine), rel=1e-6)
    assert found.cached_bytes_per_second == pytest.approx(5e9)
    assert calibrate(samples).error > 0.02  # one rate for both cannot say it


@pytest.mark.parametrize("overlapped", [False, True])
def test_steps_fall_out_of_a_cache(overlapped):
    """The size is found if a step of just that size was measured; steps that follow others find less of the cache."""
    some = steps(batches=(1, 32), contexts=(64, 1024))
    size = next(s.bytes for s in some if 40e6 < s.bytes < 60e6)
    machine = Fitted("m", 40e9, 60e9, 2e-4, 5e-5, overlapped, cached_bytes_per_second=9e9, cache_bytes=size)
    samples = timed(machine, some)
    found = calibrate(samples, cached_apart=True, cache=True)
    assert found.cache_bytes == size
    assert constants(found) == pytest.approx(constants(machine), rel=1e-6)
    assert found.cached_bytes_per_second == pytest.approx(9e9)
    without = calibrate(
        samples, cached_apart=True
    )  # weights that always fit, and keys that never do, cannot say it
    assert max(map(abs, without.residuals)) > 0.02
    fits = min(some, key=lambda s: s.bytes)
    assert fits.bytes < size
    assert (
        found.time(fits) == found.time(fits, size) < found.time(fits, 1.2 * size) < found.time(fits, 3 * size)
    )


def test_no_cache_where_none_shows():
    machine = Fitted("m", 40e9, 20e9, 2e-4, 5e-5, False, cached_bytes_per_second=5e9)
    found = calibrate(timed(machine, steps()), overlapped=False, cached_apart=True, cache=True)
    for one in steps(batches=(2, 8), contexts=(300,)):
        assert found.time(one) == pytest.approx(machine.time(one), rel=1e-6)
    faster = Fitted("m", 40e9, 5e9, 2e-4, 5e-5, False, cached_bytes_per_second=20e9)  # memory, than the cache
    assert (
        calibrate(timed(faster, steps()), overlapped=False, cached_apart=True, cache=True).cache_bytes is None
    )


def test_the_share_that_a_cache_misses():
    assert missed(1.0, 1.0) == missed(0.2, 1.0) == 0
    for loop in (1.05, 1.5, 2.0, 20.0):
        m = missed(loop, 1.0)
        assert 0 < m <= 1
        assert m == pytest.approx(1 - math.exp(-m * loop), abs=1e-9)
    assert missed(2.0, 1.0) == missed(2e6, 1e6) == pytest.approx(0.797, abs=1e-3)


def test_the_time_of_a_step_by_hand():
    one = step(Forward(SMALL, 2, 3, 100, 4, 4), FULL)
    cached = sum(w.bytes for w in one.work if w.name in ("kv_reads", "kv_writes"))
    assert cached == 2 * 103 * SMALL.kv_values(1) * 4
    machine = Fitted("m", 1e9, 2e9, 0.5, 0.25, False, cached_bytes_per_second=1e8)
    moved = (one.bytes - cached) / 2e9 + cached / 1e8
    assert machine.time(one) == pytest.approx(one.flops / 1e9 + moved + 0.5 + 0.25 * 4)
    both = Fitted("m", 1e9, 2e9, 0.5, 0.25, True, cached_bytes_per_second=1e8)
    assert both.time(one) == pytest.approx(max(one.flops / 1e9, moved) + 0.5 + 0.25 * 4)
    apart = Fitted("m", 1e9, 2e9, 0.5, 0.25, False, cached_bytes_per_second=1e8, cache_bytes=1e6)
    share = missed(3e6, 1e6)
    moved = one.bytes * ((1 - share) / 2e9 + share / 1e8)
    assert apart.time(one, 3e6) == pytest.approx(one.flops / 1e9 + moved + 0.5 + 0.25 * 4)
    assert apart.time(one, 1e6) == Hardware("m", 1e9, 2e9, 0.5, 0.25, False).time(one)
    same = Fitted("m", 1e9, 2e9, 0.5, 0.25, False)
    assert same.time(one) == Hardware("m", 1e9, 2e9, 0.5, 0.25, False).time(one)


def test_noise_and_unseen_steps():
    """5 % of noise on a few steps: what was not measured is predicted as well."""
    noise = [1.05 if i % 2 else 0.95 for i in range(36)]
    samples = [(s, t * n) for (s, t), n in zip(timed(CORE, steps()), noise)]
    found = calibrate(samples)
    assert not found.overlapped
    assert len(found.residuals) == 36
    assert found.residuals[0] == pytest.approx(found.time(samples[0][0]) / samples[0][1] - 1)
    assert 0.02 < found.error < 0.07
    for other in steps(batches=(2, 8, 64), contexts=(300, 2000), tokens=(1, 3, 9)):
        assert found.time(other) == pytest.approx(CORE.time(other), rel=0.1)


def test_errors_are_relative():
    """A step that is 200 times longer than the others and off by a half must not set the overheads of the small ones."""
    small = steps(batches=(1,), contexts=(16, 64))
    huge = step(Forward(TARGET, 64, 1, 4096, 4, 4), FULL)
    samples = [*timed(CORE, small), (huge, CORE.time(huge) * 1.5)]
    found = calibrate(samples, overlapped=False)
    assert max(abs(r) for r in found.residuals[:-1]) < 0.1
    assert huge.bytes > 100 * small[0].bytes


def test_no_constant_is_negative():
    """Times that shrink with the number of layers would ask for a negative overhead."""
    samples = [(s, t + 8e-4 - 1e-4 * s.layers) for s, t in timed(CORE, steps())]
    for kind in (True, False):
        assert min(constants(calibrate(samples, overlapped=kind))) >= 0


def test_a_rate_that_nothing_shows_is_no_limit():
    machine = Hardware("m", 1e30, 5e9, 1e-4, 0.0, False)
    found = calibrate(timed(machine, steps()), overlapped=False)
    assert found.bytes_per_second == pytest.approx(5e9)
    assert found.flops > 1e20  # infinite, or as good as that
    assert math.isfinite(found.time(steps()[0]))


def test_refusals():
    good = timed(CORE, steps())
    with pytest.raises(ValueError, match="samples is empty"):
        calibrate([])
    with pytest.raises(ValueError, match=r"3 samples for 4 constants.*measure"):
        calibrate(good[:3])
    with pytest.raises(ValueError, match=r"4 samples for 5 constants"):
        calibrate(good[:4], cached_apart=True)
    with pytest.raises(ValueError, match=r"5 samples for 6 constants"):
        calibrate(good[:5], cached_apart=True, cache=True)
    with pytest.raises(ValueError, match="cache needs cached_apart"):
        calibrate(good, cache=True)
    with pytest.raises(
        ValueError, match=r"cache_bytes is 1\.0: give a positive number, and cached_bytes_per_second"
    ):
        Fitted("m", 1e9, 1e9, cache_bytes=1.0)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not positive"):
            calibrate([*good, (good[0][0], bad)])


def test_nothing_but_overheads():
    """A machine on which small steps wait for launches alone."""
    found = calibrate([(s, 1e-3 + 2e-4 * s.layers) for s in steps()])
    assert (found.flops, found.bytes_per_second) == (math.inf, math.inf)
    assert (found.overhead, found.overhead_per_layer) == pytest.approx((1e-3, 2e-4))


@pytest.mark.slow
def test_the_machine_can_be_chosen_by_what_it_is_to_predict():
    samples = timed(CORE, steps())
    seen = []

    def rank(made):
        seen.append(made)
        return 0.0 if made.overlapped else 1.0

    found = calibrate(samples, cached_apart=True, cache=True, rank=rank)
    assert found.overlapped  # though steps say otherwise
    assert not calibrate(samples, cached_apart=True, cache=True).overlapped
    assert {made.overlapped for made in seen} == {True, False}
    assert len({made.cache_bytes for made in seen}) > 2
    # Each pair's best fit only.
    assert len(seen) == len({(made.overlapped, made.cache_bytes) for made in seen})


# The host's work


def test_host_work_comes_back_by_part():
    host = Host(3e-4, 2e-5, 1e-4, 4e-5)
    assert host.seconds(8, 5) == pytest.approx(3e-4 + 8 * 2e-5 + 5 * (1e-4 + 8 * 4e-5))
    samples = [(b, n, host.seconds(b, n) + 0.01 * n, 0.01 * n) for b in (1, 4, 32) for n in (1, 3, 9)]
    found = Host.fit(samples)
    assert vars(found) == pytest.approx(vars(host), rel=1e-6)


def test_errors_of_host_work_are_relative_to_the_round():
    """One round of a second that is off by half must not set what rounds of milliseconds have."""
    host = Host(2e-3, 1e-4)
    small = [(b, n, host.seconds(b, n) + 1e-3, 1e-3) for b in (1, 2, 4) for n in (1, 2, 4)]
    found = Host.fit([*small, (64, 9, 1.5, 1.0)])
    for rows, tokens, measured, explained in small:
        assert found.seconds(rows, tokens) + explained == pytest.approx(measured, rel=0.2)


def test_host_work_is_never_negative():
    over = [(b, n, 0.01, 0.012) for b in (1, 8) for n in (2, 5)]  # steps explain more than was measured
    assert Host.fit(over) == Host()
    with pytest.raises(ValueError, match="per_row is -1"):
        Host(0.0, -1.0)
    with pytest.raises(ValueError, match="samples is empty"):
        Host.fit([])


# The recipe


RECIPE, TOY = (
    "recipes/spire_measured.py",
    (
        *("--spire", "untrained", "--new-tokens", "4", "--repeats", "1", "--lengths", "1", "2"),
        *("--prompts", "3", "--positions", "3"),
    ),
)


@pytest.mark.slow
def test_the_recipe_at_toy_size(tmp_path):
    file, plots = tmp_path / "m.json", tmp_path / "plots"
    sizes = ("--batches", "1", "2", "4", "--contexts", "32", "96")
    words = ("--distilled", "pocket-tiny", "--json", str(file), "--plots", str(plots))
    (done,) = each([RECIPE, *TOY, *sizes, *words], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batch 4, context 96" in done.stderr
    assert re.search(r"about [\d.]+ minutes: [\d.]+ for the noise-free tau, [\d.]+ for the grid", done.stderr)
    said = json.loads(file.read_text())
    assert set(said) == {"meta", "rows"}
    assert str(ROOT) not in file.read_text()
    grid = [r for r in said["rows"] if r["part"] == "grid"]
    methods = ("plain", "vanilla", "windowed", "distilled_vanilla", "magicdec", "magicdec_in_cache", "spire")
    assert {(r["method"], r["batch"], r["context"]) for r in grid} == set(
        product(methods, (1, 2, 4), (32, 96))
    )
    for r in grid:
        assert r["fitted"] == (r["batch"] != 2)
        assert r["multiplier"] > 0
        assert r["modelled"] > 0
        assert 1 <= r["tau"] <= r["k"] + 1
        assert 1 <= r["live_tau"] <= r["k"] + 1
        assert r["multiplier_low"] is None  # three prompts are not enough packages for an interval
        assert r["round_seconds"] >= sum(r[f"{s}_seconds"] for s in ("draft", "target", "verify")) * 0.5
        if r["method"] == "plain":
            assert (r["k"], r["multiplier"], r["tau"]) == (0, 1, 1)
            assert r["modelled"] == pytest.approx(1)
    for method, batch, context in product(methods[1:], (1, 2, 4), (32, 96)):
        some = [r for r in grid if (r["method"], r["batch"], r["context"]) == (method, batch, context)]
        assert 4 in {r["k"] for r in some}
        assert {r["k"] for r in some} <= {1, 2, 4}
        (best,) = (r for r in some if r["best_k"])
        assert best["tokens_per_second"] == max(r["tokens_per_second"] for r in some)
    values = {r["quantity"]: r["value"] for r in said["rows"] if r["part"] == "summary"}
    assert values["unfitted_points_k4"] == 2
    assert 0 <= values["winner_predicted_share_best_k"] <= 1
    bare = [r for r in said["rows"] if r["part"] == "bare"]
    assert {(r["batch"], r["context"]) for r in bare} == set(product((1, 4), (32, 96)))
    assert {p.name for p in plots.iterdir()} == {"measured_k4.png", "measured_best_k.png"}
    last = done.stdout.splitlines()[-4:]
    assert any(re.match(r"best k: (holds|does not hold) at 2 points", line) for line in last), last
    (again,) = each([RECIPE, "--report", str(file)])
    assert next(line for line in last if line.startswith("best k: ")) in again.stdout


@pytest.mark.slow
def test_the_recipe_takes_taus_that_were_kept(tmp_path):
    taus, file = tmp_path / "t.json", tmp_path / "m.json"
    sizes = ("--batches", "1", "2", "--contexts", "32", "--seconds", "0", "--taus", str(taus))
    first, second, other = each(
        [RECIPE, *TOY, *sizes, "--only-taus"],
        [RECIPE, *TOY, *sizes, "--json", str(file)],
        [RECIPE, *TOY, *sizes, "--positions", "4"],
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "noise-free tau after" in first.stderr
    assert "batch 1" not in first.stderr
    assert "noise-free tau after" not in second.stderr
    assert ": 0.0 for the noise-free tau" in second.stderr
    kept = {(r["method"], r["k"]): r for r in json.loads(taus.read_text())["rows"] if r["part"] == "score"}
    (row,) = (
        r
        for r in json.loads(file.read_text())["rows"]
        if r["part"] == "grid" and (r["method"], r["k"]) == ("vanilla", 4)
    )
    expected = kept["vanilla", 4]
    assert row["tau"] == written(
        sum(expected["expected_tokens"]) / sum(expected["expected_rounds"]), figures=3
    )
    assert other.returncode == 1
    assert "of other models, contexts, lengths or texts" in other.stderr


@pytest.mark.slow
def test_the_recipe_begins_no_point_when_its_time_is_over(tmp_path):
    """Corners come first, and what is measured stands: here the first one, without a model."""
    file = tmp_path / "m.json"
    sizes = ("--batches", "1", "2", "--contexts", "32", "--seconds", "0")
    (done,) = each([RECIPE, *TOY, *sizes, "--json", str(file)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 grid points are left out" in done.stderr
    grid = [r for r in json.loads(file.read_text())["rows"] if r["part"] == "grid"]
    assert {(r["batch"], r["modelled"]) for r in grid} == {(1, None)}
    assert {r["method"] for r in grid} == {
        "plain",
        "vanilla",
        "windowed",
        "magicdec",
        "magicdec_in_cache",
        "spire",
    }


@pytest.mark.slow
def test_the_recipe_explains_a_round():
    (done,) = each([RECIPE, *TOY, "--profile", "2", "64"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "spire, k = 4" in done.stdout
    assert re.search(r"^  draft  drafts\.spire\S*: \S+ +[\d.]+ ms", done.stdout, re.MULTILINE)
    assert re.search(r"^  target \S+: \S+ +[\d.]+ ms", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_recipe_refuses_what_it_cannot_do():
    wrong = [
        (["--contexts", "1024", "--new-tokens", "400"], "positions"),
        (["--contexts", "1500", "--new-tokens", "2"], "no prompt has 1500 tokens"),
        (["--spire", "nowhere"], "untrained"),
        (["--lengths", "0"], "at least 1"),
        (["--temperature", "0"], "temperature 1"),
    ]
    lines = [[RECIPE, *TOY, *words] for words, _ in wrong]
    for (_, why), done in zip(wrong, each(*lines)):
        assert done.returncode != 0
        assert why in done.stderr
        assert "Traceback" not in done.stderr
