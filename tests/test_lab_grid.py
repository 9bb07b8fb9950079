"""Measured grids: noise-free multipliers with intervals, the model's own error and its verdicts, and the time that a grid takes."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec.audit.tau import Efficiency
from specdec.cost import Fitted, Host, Shape, Window, magicdec, spire, vanilla
from specdec.data.prompts import entries
from specdec.lab import grid_plan
from specdec.lab.bootstrap import DRAWS, LEAST, interval
from specdec.lab.calibrated import Around, Bare, Calibrated, Model, fit
from specdec.lab.grid import GridSettings, turns
from specdec.lab.grid_plan import Probe, estimate, minutes
from specdec.lab.grid_rows import grid_rows
from specdec.lab.grid_summary import Statement, Verdict, noise, summary, verdict
from specdec.lab.multipliers import Recording, Taus, packages_of, ratio, round_seconds
from specdec.lab.steady import Measured, Run
from specdec.stats import Stats

BIG = Shape(layers=8, d_model=256, heads=4, kv_heads=4, d_head=64, d_ff=1024, vocab=2000)
SMALL = Shape(layers=4, d_model=128, heads=4, kv_heads=4, d_head=32, d_ff=512, vocab=2000)
METHODS = {
    "vanilla": vanilla(SMALL), "magicdec": magicdec(BIG, Window(65)), "spire": spire(BIG.with_layers(2), Window(65))
}  # fmt: skip
MODEL = Model(BIG, METHODS, bytes=4, weight_bytes=4)
MACHINE = Fitted("made up", 60e9, 20e9, 2e-4, 5e-5, False, cached_bytes_per_second=8e9)
HOST = Around(Host(1e-4, 1e-5, 5e-5, 1e-5), Host(2e-4, 2e-5, 5e-5, 2e-5))
TRUE = Calibrated(MODEL, MACHINE, dict.fromkeys(("plain", *METHODS), HOST))
GRID = GridSettings()  # the recipe's own


def runs(method, k, seconds, tau=1.0, draft=0.0):
    """Repeats that took ``seconds`` a round."""
    return Measured(
        method,
        k,
        [
            Run(
                10,
                s * 10,
                10,
                Stats(full_tokens=round(10 * tau), full_rounds=10, seconds=Counter(draft=draft * 10)),
            )
            for s in seconds
        ],
    )


def synthetic(noise, seed=0):
    """Bare steps, and rounds of all methods at all grid points, of the model itself with relative noise."""
    draw = np.random.default_rng(seed)

    def noisy(seconds):
        return seconds * math.exp(draw.normal(0, noise))

    bare, rounds = [], {}
    for batch, context in GRID.points:
        at = context + 10
        cases = []
        for method, k in [("plain", 0), *((m, k) for m in METHODS for k in (2, 4, 8))]:
            scale = math.exp(draw.normal(0, noise))
            drafting = MODEL.seconds(MACHINE, method, batch, at, k)[0] + (
                HOST.draft.seconds(batch, k) if k else 0
            )
            whole = TRUE.seconds(method, batch, at, k)
            cases.append(runs(method, k, [whole * scale], draft=drafting * scale))
        rounds[batch, context] = cases
        if (batch, context) not in GRID.corners:
            continue
        for what, tokens in [("target", 1), ("target", 5), ("vanilla", 1), ("spire", 1)]:
            step = MODEL.step(what, batch, context, tokens)
            bare.append(Bare(what, batch, context, tokens, step, noisy(MACHINE.time(step))))
    return bare, rounds


@cache
def fitted(noise):
    bare, rounds = synthetic(noise)
    some = {(b, c, c + 10): rounds[b, c] for b, c in GRID.fitted}
    return fit(MODEL, bare, some, leave_out=GRID.inner), rounds


def test_a_model_that_is_right_knows_it():
    made, rounds = fitted(0.0)
    assert made.error is not None
    assert made.error < 0.01
    for batch, context in set(GRID.points) - set(GRID.fitted):
        for m in rounds[batch, context]:
            assert made.seconds(m.method, batch, context + 10, m.k) == pytest.approx(
                m.round_seconds, rel=0.03
            )


def test_the_models_own_error_is_that_of_its_predictions():
    """It is estimated at fitted points only, and met at the others."""
    made, rounds = fitted(0.05)
    unseen = []
    for batch, context in set(GRID.points) - set(GRID.fitted):
        errors = [
            (m.method, math.log(made.seconds(m.method, batch, context + 10, m.k) / m.round_seconds))
            for m in rounds[batch, context]
        ]
        unseen += [a - b for one, a in errors for other, b in errors if one < other]
    met = math.sqrt(sum(e * e for e in unseen) / len(unseen))
    assert made.error == pytest.approx(met, rel=0.4)
    assert set(made.errors) == {(a, b) for a in made.hosts for b in made.hosts if a < b}
    assert all(0.4 * met < error < 2.5 * met for error in made.errors.values())
    assert made.error > 0.05  # that of a difference is larger than that of one


def test_a_fit_without_points_to_leave_out_has_no_error():
    bare, rounds = synthetic(0.0)
    some = {(b, c, c + 10): rounds[b, c] for b, c in GRID.corners}
    made = fit(MODEL, bare, some)
    assert (made.error, made.errors) == (None, {})
    with pytest.raises(ValueError, match="give points at which two methods"):
        fit(MODEL, bare, some, leave_out=[(3, 7)])


def test_the_points_of_a_fit_are_corners_and_every_second_inside():
    assert GRID.inner == [(2, 512), (4, 256), (8, 512), (16, 256)]
    assert GRID.fitted == GRID.corners + GRID.inner
    assert len(GRID.points) == 24
    assert GridSettings(batches=(1, 2), contexts=(8, 16, 32)).inner == []


# -- verdicts ----------------------------------------------------------------------------------------------------------------------


def error(value, other=()):
    """The same error for every pair."""
    names = ("magicdec", "plain", "spire")
    return {(a, b): value for a in names for b in names if a < b} | dict(other)


def line(**multipliers):
    """Rows by method: measured and modelled multiplier of each."""
    return {
        m: {"multiplier": measured, "modelled": modelled} for m, (measured, modelled) in multipliers.items()
    }


def test_a_verdict_names_the_fastest_or_says_too_close():
    rows = line(plain=(1.0, 1.0), spire=(1.5, 1.6), magicdec=(1.52, 1.5))
    sure, unsure, unknown = (verdict(rows, errors) for errors in (error(0.05), error(0.07), {}))
    assert (sure.fastest, sure.named, sure.too_close, sure.holds) == ("magicdec", "spire", False, False)
    assert sure.lead == pytest.approx(1.6 / 1.5 - 1)
    assert sure.loss == pytest.approx(1.52 / 1.5 - 1)
    assert (unsure.too_close, unsure.holds) == (True, True)  # within 3 %
    assert not unknown.too_close
    far = verdict(line(plain=(1.0, 1.0), spire=(1.4, 1.6), magicdec=(1.52, 1.5)), error(0.07))
    assert (far.too_close, far.holds) == (True, False)  # too close, and loses 8.6 %
    twins = error(0.2, {("magicdec", "spire"): 0.01})  # only the pair's own error counts
    assert not verdict(rows, twins).too_close
    third = verdict(line(plain=(1.0, 1.5), spire=(1.5, 1.6), magicdec=(1.5, 1.59)), {("plain", "spire"): 0.1})
    assert third.too_close  # with the third, though not with the second
    right = verdict(line(plain=(1.0, 1.0), spire=(1.4, 1.6)), error(0.07))
    assert (right.named, right.too_close, right.holds, right.loss) == ("spire", False, True, 0.0)


def test_the_summary_counts_verdicts_at_points_that_were_not_fitted():
    said = {  # measured and modelled, of spire; plain is 1
        (1, 8): (False, 1.3, 1.3),  # right
        (2, 8): (False, 0.98, 1.02),  # wrong, but too close, and within 3 %
        (4, 8): (False, 0.9, 1.01),  # too close, and loses 11 %
        (8, 8): (False, 0.99, 1.2),  # sure and wrong, by 1 %
        (16, 8): (True, 0.5, 2.0),  # fitted
    }
    rows = [
        {
            "part": "constant",
            "quantity": "error_of_a_difference",
            "method": "plain",
            "over": "spire",
            "value": 0.05,
        }
    ]
    for (batch, context), (was, measured, modelled) in said.items():
        for method, k, one, other in (("plain", 0, 1.0, 1.0), ("spire", 4, measured, modelled)):
            rows.append(
                {"part": "grid", "method": method, "batch": batch, "context": context, "k": k, "best_k": True}
                | {"multiplier": one, "modelled": other, "fitted": was}
            )
    found = {r["quantity"]: r["value"] for r in summary(rows, 1.0)}
    assert found["unfitted_points_best_k"] == 4
    assert found["winner_predicted_share_best_k"] == 0.25
    assert found["too_close_share_best_k"] == 0.5
    assert found["right_or_too_close_and_within_3_percent_share_best_k"] == 0.5
    assert found["winner_predicted_or_within_3_percent_share_best_k"] == 0.75
    assert found["largest_loss_by_following_the_model_best_k"] == pytest.approx(1 / 0.9 - 1)
    assert found["model_holds_best_k"] is False


def test_the_statement_about_the_model_has_three_limits():
    right, close = Verdict("spire", "spire", 0.2, False, 0.0), Verdict("spire", "plain", 0.01, True, 0.02)
    wrong, worse = Verdict("spire", "plain", 0.2, False, 0.01), Verdict("spire", "plain", 0.2, False, 0.12)
    assert Statement.of([right] * 9 + [wrong]).holds
    assert Statement.of([right] * 6 + [close] * 3).holds
    for why, some in {
        "89%": [right] * 8 + [wrong],
        "40%": [right] * 6 + [close] * 4,
        "12.0%": [right] * 9 + [worse],
    }.items():
        said = Statement.of(some)
        assert not said.holds
        assert "does not hold" in str(said)
        assert why in str(said)
    assert str(Statement.of([])) == "not judged: the model was fitted to all points"
    assert "holds at 10 points" in str(Statement.of([right] * 9 + [wrong]))


def test_another_run_takes_the_models_place():
    def run(*measured):
        return [
            {"part": "grid", "method": method, "batch": batch, "context": 8, "k": 4 * (method != "plain")}
            | {"best_k": True, "multiplier": one, "modelled": 1.0, "fitted": batch == 4}
            | {"round_seconds": 1 / one, "modelled_round_seconds": 1.0}
            for batch, spire in zip((1, 2, 4), measured)
            for method, one in (("plain", 1.0), ("spire", spire))
        ]

    for found in noise(run(1.5, 0.8, 2.0), run(1.2, 1.1, 0.5)):
        assert (found["points"], found["same_fastest"]) == (2, 1)
        assert found["loss"] == pytest.approx(1 / 0.8 - 1)
        assert found["difference"] == pytest.approx(1.1 / 0.8 - 1)  # of 20 %, 37.5 % and 75 %
        squares = [math.log(a) ** 2 for a in (1.5 / 1.2, 0.8 / 1.1)]
        assert found["run_error"] == pytest.approx(math.sqrt(sum(squares) / 2))
        assert found["model_error"] == pytest.approx(math.sqrt((math.log(1.5) ** 2 + math.log(0.8) ** 2) / 2))
    with pytest.raises(ValueError, match="no point in common"):
        noise(run(1.5, 0.8, 2.0), [])


# -- noise-free multipliers --------------------------------------------------------------------------------------------------------


def scored(tokens, rounds):
    made = (torch.tensor(t, dtype=torch.float64) for t in (tokens, rounds))
    return Efficiency(*made, torch.ones(len(tokens), 1), torch.ones(len(tokens), 1))


def texts(clusters=8):
    """τ of two drafts at a context of 8 on two texts of each of several packages: 3 and 1.5, more in the later packages."""
    packages = np.repeat([f"p{i}" for i in range(clusters)], 2)
    rounds = np.linspace(25, 15, 2 * clusters)
    scores = {("spire", 8, 4): scored(3 * 20.0 * np.ones(2 * clusters), rounds)}
    scores["vanilla", 8, 4] = scored(1.5 * 20.0 * np.ones(2 * clusters), rounds)
    return Taus(scores, {8: packages})


def test_a_multiplier_is_tau_times_times():
    plain, mine = runs("plain", 0, [1.0, 1.1, 0.9] * 2), runs("spire", 4, [1.5, 1.4, 1.6] * 2, tau=99.0)
    taus = texts()
    value, low, high = ratio(mine, plain, 8, taus)
    assert value == pytest.approx(taus.tau("spire", 8, 4) / 1.5)  # not 99: the runs' own luck
    assert low < value < high
    assert ratio(plain, plain, 8, taus) == (1, 1, 1)
    # A ratio of two drafts on the same texts is known better than each of them: it does not depend on the package here.
    other = runs("vanilla", 4, [1.5, 1.4, 1.6] * 2)
    assert ratio(mine, other, 8, taus) == pytest.approx((2, 2, 2))


def test_intervals_are_over_packages_and_repeats():
    taus = texts(40)
    drawn = taus.drawn("spire", 8, 4)
    low, high = interval(drawn)
    of_package = [60 * 2 / r.sum() for r in np.linspace(25, 15, 80).reshape(40, 2)]
    assert high - low == pytest.approx(2 * 1.96 * np.std(of_package) / math.sqrt(40), rel=0.2)
    seconds = np.random.default_rng(0).normal(1, 0.1, 15)
    low, high = interval(round_seconds(runs("spire", 4, seconds)))
    assert min(seconds) <= low < np.median(seconds) < high <= max(seconds)
    assert round_seconds(runs("spire", 4, [2.0])).tolist() == [2.0] * DRAWS


def test_too_few_packages_or_repeats_give_no_interval():
    few, enough = ([runs("spire", 4, [1.0] * n), runs("plain", 0, [1.0] * n)] for n in (LEAST - 1, LEAST))
    assert texts(LEAST - 1).drawn("spire", 8, 4) is None
    for cases, packages in ((few, 8), (enough, LEAST - 1), (few, LEAST - 1)):
        value, low, high = ratio(*cases, 8, texts(packages))
        assert (low, high) == (None, None)
        assert value > 1
    assert ratio(*enough, 8, texts(LEAST))[1] is not None


def test_taus_are_kept_by_package():
    taus = texts()
    kept = Taus.of(json.loads(json.dumps(taus.rows("these"))), "these")
    for at in taus.scores:
        assert kept.tau(*at) == pytest.approx(taus.tau(*at), rel=1e-12)
        assert np.allclose(kept.drawn(*at), taus.drawn(*at), rtol=1e-12)
    assert np.all(kept.drawn("plain", 8, 0) == 1)
    with pytest.raises(ValueError, match="of other models"):
        Taus.of(taus.rows("those"), "these")


def test_packages_are_those_of_the_source_files():
    files = list(dict.fromkeys((e["package"], e["path"]) for e in entries()))
    numbers = np.array([0, len(files) - 1, 0])
    assert packages_of(SimpleNamespace(prompt=numbers)).tolist() == [files[0][0], files[-1][0], files[0][0]]


def test_rows_of_noise_free_multipliers():
    found = {
        (2, 8): [
            runs("plain", 0, [1.0] * 6),
            runs("vanilla", 4, [1.0] * 6, tau=2.9),
            runs("spire", 4, [1.2] * 6, tau=1.2),
        ]
    }
    rows = grid_rows(found, set(), None, 4, texts())
    grid = {r["method"]: r for r in rows if r["part"] == "grid"}
    assert grid["spire"]["live_tau"] == 1.2
    assert grid["spire"]["tau"] == pytest.approx(texts().tau("spire", 8, 4))
    assert grid["spire"]["multiplier"] == pytest.approx(grid["spire"]["tau"] / 1.2)
    assert grid["spire"]["tokens_per_second"] == pytest.approx(2 * grid["spire"]["multiplier"])
    assert grid["spire"]["multiplier_low"] < grid["spire"]["multiplier"] < grid["spire"]["multiplier_high"]
    pairs = [r for r in rows if r["part"] == "ratio"]
    assert [(r["over"], r["at"]) for r in pairs] == [("vanilla", "k4"), ("vanilla", "best_k")]
    assert all(r["ratio"] == pytest.approx(2 / 1.2) for r in pairs)


# -- the time that it takes --------------------------------------------------------------------------------------------------------


def test_the_time_of_a_grid_is_told_in_advance(monkeypatch):
    settings = GridSettings(batches=(4, 8), contexts=(10, 20), lengths=(4,), repeats=2)
    methods = SimpleNamespace(names=["plain", "spire"], lengths=[4])
    grid = SimpleNamespace(s=settings, methods=methods)
    probes = (Probe(40, feed=1.0, run=2.0), Probe(160, feed=4.0, run=8.0))
    monkeypatch.setattr(grid_plan, "SHORT", 0)
    recorded, measured = estimate(grid, Recording(positions=5, prompts=2), probes)
    points = {40: (1.0, 2.0), 80: (2.0, 4.0), 160: (4.0, 8.0)}
    expected = 0.0
    for tokens in (40, 80, 80, 160):
        feed, run = points[tokens]
        bare = 2 * 2 * run / settings.new_tokens
        expected += feed + 2 * run * 2 + 2 * run * 2 + bare * (grid_plan.BARE_REPEATS + 2)
    assert measured == pytest.approx(expected)
    assert recorded == pytest.approx(grid_plan.SCORING * (2 * 30 + 2 * 40) / 40)
    monkeypatch.setattr(grid_plan, "SHORT", 1e9)  # short runs are repeated
    more = sum(2 * 6 * run for _, run in points.values()) + 2 * 6 * points[80][1]
    assert estimate(grid, Recording(prompts=2), probes)[1] == pytest.approx(expected + more)
    monkeypatch.setattr(grid_plan, "SHORT", 0)
    settings = replace(settings, repeats=18)  # six visits of three
    grid = SimpleNamespace(s=settings, methods=methods)
    visited = 0.0
    for tokens in (40, 80, 80, 160):
        feed, run = points[tokens]
        bare = 2 * 2 * run / settings.new_tokens
        visited += 6 * feed + 2 * run * 18 + 2 * run * 7 + bare * (grid_plan.BARE_REPEATS + 12)
    assert estimate(grid, Recording(prompts=2), probes)[1] == pytest.approx(visited)
    assert turns(2) == 8
    assert turns(1) == 1
    assert minutes(60.0, 90.0) == "2.5 minutes: 1.0 for the noise-free tau, 1.5 for the grid"


def test_points_that_the_model_is_fitted_to_are_spread_over_the_time_unless_it_is_limited():
    s = GridSettings(batches=(1, 2, 4, 8, 16, 32), contexts=(128, 256, 512, 1024))
    order = s.order(s.fitted)
    assert sorted(order) == s.points
    at = [order.index(p) for p in s.fitted]
    assert at == sorted(at)
    assert all(2 <= b - a <= 4 for a, b in pairwise(at))  # every third point of 24 is one of the 8
    limited = replace(s, seconds=60.0).order(s.fitted)
    assert limited[:8] == s.fitted
    assert sorted(limited) == s.points
