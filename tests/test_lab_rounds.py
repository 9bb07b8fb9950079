"""The lab's rounds: prompts that are fed once, steady runs, what is captured, where time goes, grids and pipelines."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts.spire import SpireModel
from specdec.executors import Pipelined, Serial
from specdec.lab import grid
from specdec.lab.calibrated import Bare
from specdec.lab.captured import captured, keepers, replay_of_a_chain
from specdec.lab.grid import promising
from specdec.lab.grid_rows import grid_rows
from specdec.lab.grid_summary import at_k, summary, winner
from specdec.lab.multipliers import round_seconds
from specdec.lab.pipeline import PipelineComparison, timed, waited
from specdec.lab.prefill import group, prefilled
from specdec.lab.stages import Stages, profile, sides
from specdec.lab.steady import Measured, Run, capacity, steady
from specdec.models import Windowed
from specdec.stats import Record, Stats

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8, 9]]


def models(windowed=False):
    """A target, a draft, and both as ones whose prompts are fed once."""
    target, draft = (sd.HFModel(tiny("llama", seed, torch.float32)) for seed in (0, 1))
    draft = Windowed(draft, 4, 1, block=4) if windowed else draft
    return target, draft, prefilled(target, taps=()), prefilled(draft)


@pytest.mark.parametrize("windowed", [False, True])
def test_steady_runs_go_on_where_the_prompts_ended(windowed):
    """Twice over the same prompts: what they add is taken back, and the tokens are those of ordinary decoding."""
    target, draft, fed, kept = models(windowed)
    decoder = sd.decoder(fed).draft(kept, 2).build()
    prompts = group(PROMPTS, [3, 4], capacity(7, 6, 2), fed, [kept])
    with torch.inference_mode():
        runs = [steady(decoder, [prompts], 6) for _ in range(2)]
    assert runs[0].stats.tau == runs[1].stats.tau
    assert runs[0].rounds == runs[1].rounds
    assert runs[0].tokens >= 12  # six a row on average, and what the last round adds
    assert runs[0].seconds > runs[0].round_seconds > runs[0].stage("draft") > 0
    seen = []
    plain = sd.decoder(target).draft(draft, 2).build()
    plain.generate(PROMPTS, 30, seed=[3, 4], eos_token_id=(), on_round=lambda r: seen.append(Record.of(r)))
    expected = Stats.of(seen[2 : 2 + runs[0].rounds])
    assert (expected.tokens, expected.tau) == (runs[0].stats.tokens, runs[0].stats.tau)


def test_caches_without_prompts_are_refused():
    _, _, fed, kept = models()
    with pytest.raises(RuntimeError, match=r"call Group\.use\(\) before"):
        kept.cache(2, 8)
    prompts = group(PROMPTS, [0, 1], 20, fed, [kept])
    prompts.use()
    with pytest.raises(RuntimeError, match="nothing is prefilled for 3 rows"):
        kept.cache(3, 8)
    with pytest.raises(ValueError, match=r"prefilled\(taps=\.\.\.\)"):
        fed.score(fed.cache(2, 20), prompts.context, taps=(0,))


def test_a_ring_takes_over_what_another_holds():
    _, _, _, kept = models(windowed=True)
    context = sd.Context.of(PROMPTS, capacity=20)
    with torch.inference_mode():
        at = kept.feed(context, 20)
        kept.at = at
        one, two = kept.cache(2, 20), kept.cache(2, 20)
        a, b, whole = (kept.score(c, context).logits for c in (one, two, at.cache))
    assert torch.equal(a, b)
    assert torch.equal(a, whole)
    assert one is not two


def test_magicdec_drafts_over_a_target_whose_prompts_are_fed_once():
    """Its view is of the target as it was, and its rounds are those of ordinary decoding."""
    target, _, fed, _ = models()
    magic = sd.drafts.MagicDec(window=5, sinks=1, block=4)
    prompts = group(PROMPTS, [3, 4], capacity(7, 6, 2), fed, [])
    run = steady(sd.decoder(fed).draft(magic, 2).build(), [prompts], 6)
    seen = []
    plain = sd.decoder(target).draft(magic, 2).build()
    plain.generate(PROMPTS, 30, seed=[3, 4], eos_token_id=(), on_round=lambda r: seen.append(Record.of(r)))
    assert run.stats.tau == Stats.of(seen[2 : 2 + run.rounds]).tau


def test_what_is_captured_is_found_in_targets_and_drafts():
    target, draft = (sd.HFModel(tiny("llama", seed, torch.float32), graphs="eager") for seed in (0, 1))
    decoder = sd.decoder(target).greedy().draft(draft, 2).build()
    assert captured(decoder.target, decoder.draft) == []
    assert replay_of_a_chain(decoder.draft, 2, 2) is None
    decoder.generate(PROMPTS, 12)
    assert [p is q for p, q in zip(keepers(target, draft), (target.steps, draft.steps))] == [True, True]
    assert (
        len(captured(decoder.target, decoder.draft))
        == len(target.steps.captured) + len(draft.steps.captured)
        > 1
    )
    chain = replay_of_a_chain(decoder.draft, 2, 2)
    assert chain.forwards == 2
    assert replay_of_a_chain(decoder.draft, 2, 3) is None
    with torch.inference_mode():
        tokens, _ = chain()
    assert tokens.shape[0] >= 2


def test_spires_chain_is_found_in_its_programs():
    target = sd.HFModel(tiny("llama", num_hidden_layers=3, dtype=torch.float32), graphs="eager")
    spire = sd.drafts.Spire(SpireModel.from_target(target, 2, window=4), block=4, graphs="eager")
    decoder = sd.decoder(target).draft(spire, 2).build()
    decoder.generate(PROMPTS, 12, seed=0)
    assert replay_of_a_chain(decoder.draft, 2, 2).forwards in (2, 3)


# -- stages --------------------------------------------------------------------------------------------------------------------


def test_time_goes_to_functions_and_sides_and_nothing_is_patched(capsys):
    _, _, fed, kept = models()
    decoder = sd.decoder(fed).draft(kept, 2).build()
    prompts = group(PROMPTS, [3, 4], capacity(7, 8, 2), fed, [kept])
    own = vars(type(decoder.draft)).copy(), vars(sd.HFModel).copy()
    before = sys.getprofile()
    stages = profile("vanilla", decoder, [prompts], 8)
    assert sys.getprofile() is before
    assert (vars(type(decoder.draft)), vars(sd.HFModel)) == own
    rounds = {name: n for (_, name), n in stages.calls.items()}
    assert rounds["drafts.model: Model.propose"] == rounds["verifiers.rejection: Rejection.__call__"]
    drafting = {name for side, name in stages.seconds if side == "draft"}
    assert {"drafts.model: Model.propose", "models.hf: HFModel.score"} <= drafting
    assert any(side == "target" and name == "models.hf: HFModel.score" for side, name in stages.seconds)
    assert all(side == "rest" for side, name in stages.seconds if name.startswith("verifiers."))
    said = capsys.readouterr().out
    assert "vanilla, k = 2" in said
    assert max(stages.seconds, key=lambda key: stages.seconds[key])[1] in said


def test_seconds_are_exclusive_and_counted_only_while_the_clock_runs():
    model = sd.HFModel(tiny("llama", dtype=torch.float32))
    decoder = sd.decoder(model).greedy().build()
    stages = Stages(sides(decoder))
    with stages.watching():
        decoder.generate(PROMPTS, 4)
        assert not stages.seconds
        stages.clock(True)
        total = decoder.generate(PROMPTS, 4).stats
        stages.clock(False)
    assert total.tokens == 8
    inside = sum(stages.seconds.values())
    assert inside > 0
    assert stages.seconds["target", "models.hf: HFModel.score"] < inside  # without what it calls


def test_a_watched_failure_leaves_no_profiler():
    before = sys.getprofile()
    with pytest.raises(ValueError, match="no"), Stages().watching():
        raise ValueError("no")
    assert sys.getprofile() is before


# -- grids ---------------------------------------------------------------------------------------------------------------------


def measured(method, k, seconds, acceptance=(), tokens=10):
    stats = Stats(full_tokens=tokens, full_rounds=10)
    stats.reached = Counter({d: 1000 for d, _ in enumerate(acceptance)})
    stats.accepted_at = Counter({d: round(1000 * a) for d, a in enumerate(acceptance)})
    return Measured(method, k, [Run(tokens, seconds * 10, 10, stats)])


def test_the_k_that_promise_most():
    short, long = (measured("m", k, 1.0, [0.9] * 8) for k in (4, 8))
    assert promising(short, long, (1, 2, 4, 8)) == [8, 4]  # a longer block costs nothing
    dear = measured("m", 8, 9.0, [0.9] * 8)
    assert promising(measured("m", 4, 1.0), dear, (1, 2, 4, 8))[0] <= 4
    assert promising(measured("m", 4, 1.0), measured("m", 8, 2.0, [0.0] * 8), (1, 2, 4, 8), count=1) == [1]
    known = promising(short, long, (1, 2, 4, 8), taus=[1.5, 2.0, 1.1, 1.2], count=2)
    assert known == [2, 1]  # not by the acceptance of the short runs


def test_rows_of_a_grid_say_who_wins():
    found = {
        (b, 64): [
            measured("plain", 0, 1.0),
            measured("spire", 4, 1.0, tokens=10 * b),
            measured("spire", 2, 1.0, tokens=15),
        ]
        for b in (1, 2)
    }
    rows = grid_rows(found, {(1, 64)}, None, 10)
    assert [(r["multiplier"], r["best_k"]) for r in rows if r["method"] == "spire"] == [
        (1, 0),
        (1.5, 1),
        (2, 1),
        (1.5, 0),
    ]
    assert winner(at_k(rows, best=False)[2, 64], "multiplier") == "spire"
    values = {r["quantity"]: r["value"] for r in summary(rows, 1.0)}
    assert values["spire_largest_multiplier_k4"] == 2
    assert values["spire_largest_multiplier_best_k"] == 2
    assert [r["modelled"] for r in rows] == [None] * 6


def test_the_corners_of_a_grid():
    settings = grid.GridSettings(batches=(4, 1, 2), contexts=(96, 32))
    assert settings.points == [(1, 32), (1, 96), (2, 32), (2, 96), (4, 32), (4, 96)]
    assert settings.corners == [(1, 32), (1, 96), (4, 32), (4, 96)]
    assert grid.GridSettings(batches=(1,), contexts=(32,)).corners == [(1, 32)]


def test_runs_that_captured_a_shape_are_left_out(monkeypatch):
    """Unless a method has no others."""
    programs, turns = [object()], Counter()

    def steady(decoder, groups, new_tokens, turn=0):
        turns[decoder.name] += 1
        if decoder.name == "unlucky" or (decoder.name == "plain" and turns["plain"] == 3):
            programs.append(object())
        return Run(
            turns[decoder.name], 1.0, 1, Stats(reached=Counter(range(4)), accepted_at=Counter(range(4)))
        )

    monkeypatch.setattr(grid, "steady", steady)
    monkeypatch.setattr(grid, "captured", lambda *parts: list(programs))
    monkeypatch.setattr(grid, "SHORT", 0)
    methods = SimpleNamespace(
        names=["plain", "unlucky", "lucky"], lengths=[4],
        decoder=lambda method, k: SimpleNamespace(name=method, draft=None, target=None),
    )  # fmt: skip
    lab = grid.Grid(grid.GridSettings(repeats=3), methods)
    cases = grid.kept(lab.visit(lab.chosen([], 8), []))
    found = {case.method: [run.tokens for run in case.runs] for case in cases}
    assert found == {"plain": [4, 5], "unlucky": [3, 4, 5], "lucky": [3, 4, 5]}  # those before warm up


@pytest.fixture
def laboratory(monkeypatch):
    """A grid whose runs, steps and fits are made up: ``ran``, ``fed`` and ``fits`` list them. A clock ticks with every run."""
    made = SimpleNamespace(
        ran=[], fed=[], fits=[], programs=[], capture=lambda *run: False, fail=lambda fits: False, time=0
    )

    def steady(decoder, groups, new_tokens, turn=0):
        made.time += 1
        run = (groups[0], decoder.name, decoder.k, turn)
        made.ran.append(run)
        if made.capture(*run):
            made.programs.append(object())
        stats = Stats(reached=Counter(range(8)), accepted_at=Counter(range(8)))
        return Run(len(made.programs), float(1 + turn % 5), 1, stats)

    def groups(batch, context):
        made.fed.append((batch, context))
        return [(batch, context)]

    def timed_steps(decoders, at, *more):
        visit = len(made.fed)
        return [Bare("target", *at, 1, None, float(visit), times=(float(visit), visit + 10.0))]

    def fit(model, bare, rounds, apart, leave_out):
        made.fits.append(
            (bare, {at: [len(m.runs) for m in some] for at, some in rounds.items()}, [*leave_out])
        )
        if made.fail(len(made.fits)):
            raise ValueError("too few")
        number = float(len(made.fits))
        return SimpleNamespace(
            multiplier=lambda *at: number, seconds=lambda *at: number, machine=MagicMock(), error=0.0, errors={},
            hosts={}, executor="serial",
        )  # fmt: skip

    for name, value in {"steady": steady, "timed_steps": timed_steps, "fit": fit, "SHORT": 0}.items():
        monkeypatch.setattr(grid, name, value)
    monkeypatch.setattr(grid, "captured", lambda *parts: list(made.programs))
    monkeypatch.setattr(grid, "perf_counter", lambda: float(made.time))
    made.methods = SimpleNamespace(
        names=["plain", "vanilla", "spire"], lengths=[2, 4, 8], left_out={}, groups=groups, model=None,
        decoder=lambda method, k, *more: SimpleNamespace(name=method, k=k, draft=None, target=None),
    )  # fmt: skip
    return made


def test_every_point_is_visited_several_times(laboratory):
    """The model is fitted to the runs of all visits, and no two runs of a case have the same random numbers."""
    s = grid.GridSettings(batches=(1, 2, 4, 8), contexts=(8, 16, 32), repeats=13)
    told = []
    rows = grid.Grid(s, laboratory.methods).measure(lambda some: told.append(some))
    assert s.visits == 6
    assert s.inner == [(4, 16)]
    order = s.order(s.fitted)
    assert laboratory.fed == order * 6
    assert len(told) == len(order) + 5  # at every point, and then after every visit
    assert told[-1] == rows
    assert len(laboratory.fits) == 6
    bare, rounds, inner = laboratory.fits[-1]
    assert inner == s.inner
    # Of a point at place p among all: visits 6 times, 2 times each; a tenth at each end is left out.
    places = [1 + order.index(p) for p in order if p in s.corners]
    n = len(order)
    for one, place in zip(bare, places):
        times = sorted(t for v in range(6) for t in (place + v * n, place + v * n + 10))
        assert sorted(one.times) == times
        assert one.seconds == pytest.approx(sum(times[1:-1]) / 10)
    assert rounds.keys() == {(b, c, c + 3.0) for b, c in s.fitted}
    assert {n for some in rounds.values() for n in some} == {13}
    counted = [r for r in laboratory.ran if r[3] < grid.UNTIMED]
    assert len({*counted}) == len(counted)
    measured = [r for r in rows if r["part"] == "grid"]
    assert {(r["batch"], r["context"]) for r in measured} == {*s.points}
    assert {r["repeats"] for r in measured} == {13}
    assert {r["modelled"] for r in measured} == {6.0}  # of the last fit
    one = laboratory.methods.names
    cases = grid.Grid(s, laboratory.methods).visit([Measured(one[0], 0, [])], [(1, 8)], 3)
    assert [run.visit for run in cases[0].runs] == [3, 3]


def test_a_model_that_cannot_be_fitted_again_is_dropped(laboratory):
    """Runs that captured a shape do not count."""
    laboratory.fail = lambda fits: fits > 1
    s = grid.GridSettings(batches=(1, 2), contexts=(8, 16), repeats=6)
    laboratory.capture = lambda at, method, k, turn: (
        (at, method, turn) == ((2, 8), "spire", 24 + 1)
    )  # of visit 1
    rows = grid.Grid(s, laboratory.methods).measure(lambda some: None)
    measured = [r for r in rows if r["part"] == "grid"]
    assert {r["modelled"] for r in measured} == {None}
    assert not [r for r in rows if r["part"] == "constant"]
    few = {(r["batch"], r["context"], r["method"]) for r in measured if r["repeats"] < 6}
    assert few == {(2, 8, "spire")}


def test_the_repeats_of_a_visit(laboratory, monkeypatch):
    assert [grid.share(n, v, 6) for n in (6, 13) for v in range(6)] == [1] * 6 + [2, 2, 2, 2, 2, 3]
    assert grid.GridSettings(repeats=5).visits == grid.GridSettings(seconds=60.0).visits == 1
    monkeypatch.setattr(grid, "SHORT", 12.0)  # a visit has 2 s, and a run takes 1
    for repeats, runs in ((6, 2), (18, 3)):
        lab = grid.Grid(grid.GridSettings(repeats=repeats), laboratory.methods)
        (case,) = lab.visit([Measured("plain", 0, [])], [(1, 8)], 1)
        assert len(case.runs) == runs
    monkeypatch.setattr(grid, "SHORT", 1e9)  # at most four times the repeats
    (case,) = lab.visit([Measured("plain", 0, [])], [(1, 8)], 1)
    assert len(case.runs) == 12


def test_intervals_are_wider_if_visits_differ():
    """And equal for equal runs, however they are visited; two cases have the same visits and repeats drawn."""

    def case(seconds, visit):
        return Measured("x", 4, [Run(1, s, 1, Stats(), visit=visit(i)) for i, s in enumerate(seconds)])

    rough = [1.0 + (i // 3) for i in range(18)]  # as slow as the number of the visit
    apart, mixed = (round_seconds(case(rough, visit)) for visit in (lambda i: i // 3, lambda i: 0))
    assert apart.std() > 1.4 * mixed.std()
    assert apart.mean() == pytest.approx(mixed.mean(), rel=0.03)
    double = round_seconds(case([2 * s for s in rough], lambda i: i // 3))
    assert double == pytest.approx(2 * apart)
    assert round_seconds(case([1.0] * 7, lambda i: i % 2)).tolist() == [1.0] * len(apart)


# -- pipelines -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["serial", "threads", "processes"])
def test_a_timed_pipeline_stops_when_its_rounds_are_over(executor, monkeypatch):
    """And can be used again; drafts that are waited for draft the same."""
    models = [sd.HFModel(tiny("llama", i, torch.float32)) for i in (0, 1)]
    decoder = sd.decoder(models[0]).draft(models[1], 2).build()
    assert waited(decoder) is decoder
    with monkeypatch.context() as patch:
        patch.setattr(models[0], "device", torch.device("cuda"))
        slow = waited(decoder)
    if executor != "serial":
        decoder = replace(decoder, executor=Pipelined(2, workers=executor, ahead=False))
    seen = []
    original = Pipelined.run if executor != "serial" else Serial.run

    def run(self, *args):
        for round in original(self, *args):
            seen.append(round.number)
            yield round

    monkeypatch.setattr(type(decoder.executor), "run", run)
    micro = 1 if executor == "serial" else 2
    rows = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    for _ in range(2):
        seconds, parts = timed(decoder, rows, 5, micro, 0)
        assert seconds > 0
        assert len(parts) == 5 * micro
        assert max(seen) <= 8  # of 27 tokens a row
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    prompts = [[1, 2, 3], [4, 5]]
    assert slow.generate(prompts, 9, seed=0).ids == decoder.generate(prompts, 9, seed=0).ids
    assert len(waits) > 2


def test_a_comparison_has_a_row_for_every_mode():
    target, draft = (sd.HFModel(tiny("llama", seed, torch.float32)) for seed in (0, 1))
    decoder = sd.decoder(target).draft(draft, 2).build()
    rows = PipelineComparison((2, 8), ("threads",), rounds=4, repeats=1).rows(
        "tiny", decoder, [[1, 2, 3], [4, 5], [6, 7], [9]]
    )
    assert [(r["mode"], r["workers"], r["micro_batches"]) for r in rows] == [
        ("serial", None, 1),
        ("steady", "threads", 2),
    ]
    assert rows[0]["gain"] == 1
    assert rows[1]["gain"] == pytest.approx(rows[0]["milliseconds"] / rows[1]["milliseconds"])
    assert all(r["milliseconds"] > 0 < r["predicted"] for r in rows)


def test_a_comparison_of_too_few_rows_or_rounds_is_refused():
    for wrong in ({"rounds": 1}, {"repeats": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is"):
            PipelineComparison(**wrong)
    decoder = sd.decoder(sd.HFModel(tiny("llama", 0, torch.float32))).build()
    with pytest.raises(ValueError, match=r"^the batch is 3: give 4 rows or more"):
        PipelineComparison(rounds=2, repeats=1).rows("tiny", decoder, [[1], [2], [3]])
