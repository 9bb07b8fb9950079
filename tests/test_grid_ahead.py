"""Grids whose rounds are launched ahead: prompts that are fed once, clocks, methods that are left out, fits, and stage d's budget."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_lab_grid import GRID, MODEL, runs, synthetic, texts
from tiny import byte_tokenizer, tiny

import specdec as sd
from recipes.gpu import paper
from recipes.gpu.stage import Stage
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead, Serial
from specdec.graphs.programs import MOST
from specdec.lab import grid, methods, steady
from specdec.lab.calibrated import fit
from specdec.lab.captured import captured
from specdec.lab.grid import Grid, GridSettings
from specdec.lab.grid_constants import constants
from specdec.lab.grid_rows import grid_rows
from specdec.lab.grid_summary import report
from specdec.lab.methods import Methods
from specdec.lab.prefill import group, prefilled
from specdec.lab.steady import capacity
from specdec.rng import Philox, seeds
from specdec.stop_rules import StopRules

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8, 9]]


def model_of(seed, kind=sd.HFModel):
    return kind(tiny("llama", seed, num_hidden_layers=1 + (seed == 0)), graphs="recorded")


def rounds_of(decoder, prompts, count, turn=0):
    """What ``count`` rounds after the prefill did."""
    prompts.use()
    context, (B, S) = prompts.context, prompts.context.tokens.shape
    rng = Philox(seeds([seed + 1000 * turn for seed in prompts.seed], B))
    limits, out = StopRules(max_length=torch.full((B,), S - decoder.length)), []
    with torch.inference_mode():
        for round in decoder.executor.run(decoder, context, rng, limits):
            text = [t[:n].tolist() for t, n in zip(round.context.tokens, round.context.length.tolist())]
            out.append((text, round.proposal.tokens.tolist(), round.verdict.tokens.tolist()))
            if round.number == count:
                break
    return out


# -- models whose prompts are fed once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "model", "spire"])
def test_runs_from_one_prefill_are_alike_under_both_executors(kind):
    """In any order, and with the programs that the first of them captured."""
    target, small = model_of(0), model_of(1)
    spire = SpireModel.from_target(target, 1, window=4, sinks=1)
    torch.nn.init.normal_(spire.memory.weights)
    fed, kept = prefilled(target, taps=spire.layers), prefilled(small)
    draft = {"model": kept, "spire": sd.drafts.Spire(spire, block=3, graphs="recorded")}.get(kind)
    base = sd.decoder(fed) if kind is None else sd.decoder(fed).draft(draft, 2)
    serial, ahead = (base.executor(e).build() for e in (Serial(), Ahead()))
    prompts = group(PROMPTS, [3, 4], capacity(7, 12, 3), fed, [kept])
    wanted = [rounds_of(serial, prompts, 8, turn) for turn in (0, 1)]
    assert wanted[0] != wanted[1]
    assert rounds_of(ahead, prompts, 8) == wanted[0]
    programs = captured(fed, ahead.draft)
    assert rounds_of(ahead, prompts, 8, turn=1) == wanted[1]
    assert rounds_of(ahead, prompts, 5) == wanted[0][:6]
    assert rounds_of(ahead, prompts, 8) == wanted[0]
    now = captured(fed, ahead.draft)
    assert all(any(p is q for q in programs) for p in now)
    assert rounds_of(serial, prompts, 8) == wanted[0]
    if kind is None:  # prompts that are not fed once give the same text
        plain = sd.decoder(target).build().generate(PROMPTS, 9, seed=[3, 4], eos_token_id=())
        assert [row[len(PROMPTS[b]) :] for b, row in enumerate(wanted[0][8][0])] == [
            ids[:8] for ids in plain.ids
        ]


class Scores(sd.HFModel):
    def score(self, *args, **kwargs):
        return super().score(*args, **kwargs)


class Pieces(sd.HFModel):
    def _pieces(self, *args, **kwargs):
        return super()._pieces(*args, **kwargs)


class Runs(sd.HFModel):
    def _run(self, *args, **kwargs):
        return super()._run(*args, **kwargs)


class Caches(sd.HFModel):
    def cache(self, *args, **kwargs):
        return super().cache(*args, **kwargs)


class Declared(sd.HFModel):
    """Declares that captured chains may bypass its ``score``, which says nothing of whole rounds."""

    fast_chain = "slots"


class Wrapper:
    """No HFModel, whatever its attributes are."""

    def __init__(self, model):
        self.plain = self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)


@pytest.mark.parametrize("kind", [Scores, Pieces, Runs, Caches, Declared])
@pytest.mark.parametrize("fed", [False, True])
def test_subclasses_are_refused_fed_or_not(kind, fed):
    """As a target and as a draft; so is what derives from a prefilled model."""
    other = model_of(0)
    target = model_of(0, kind)
    mine, drafting = (prefilled(target, taps=()), prefilled(target)) if fed else (target, target)
    with pytest.raises(ValueError, match=rf"the target is a {kind.__name__}: use executors\.Serial"):
        sd.decoder(mine).executor(Ahead()).build()
    with pytest.raises(ValueError, match=rf"the draft's model is a {kind.__name__}"):
        sd.decoder(other).draft(sd.drafts.Model(drafting), 2).executor(Ahead()).build()


@pytest.mark.parametrize("taps", [(), None])
def test_what_derives_from_a_prefilled_model_is_refused(taps):
    fed = prefilled(model_of(0), taps=taps)
    sd.decoder(model_of(0)).draft(sd.drafts.Model(fed), 2).executor(Ahead()).build()
    derived = object.__new__(type("Mine", (type(fed),), {"score": Scores.score}))
    vars(derived).update(vars(fed))
    with pytest.raises(ValueError, match="the target is a Mine"):
        sd.decoder(derived).executor(Ahead()).build()
    with pytest.raises(ValueError, match="the draft's model is a Mine"):
        sd.decoder(model_of(0)).draft(sd.drafts.Model(derived), 2).executor(Ahead()).build()
    with pytest.raises(ValueError, match="the target is a Wrapper"):
        sd.decoder(Wrapper(model_of(0))).executor(Ahead()).build()


# -- clocks --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", [Serial(), Ahead()])
def test_the_clock_runs_from_verdict_to_verdict_where_rounds_are_in_flight(executor, monkeypatch):
    target = model_of(0)
    fed = prefilled(target, taps=())
    decoder = sd.decoder(fed).executor(executor).build()
    groups = [group(PROMPTS, [i, 9], capacity(7, 4, 5), fed, []) for i in (3, 4)]
    steady.steady(decoder, groups, 2)  # captures
    said, original, now = [], type(executor).run, iter(range(100))

    def run(self, *args):
        for round in original(self, *args):
            said.append(round.number)
            yield round

    def clock():
        said.append("time")
        return next(now)

    monkeypatch.setattr(type(executor), "run", run)
    monkeypatch.setattr(steady, "perf_counter", clock)
    monkeypatch.setattr(steady, "sync", lambda: said.append("sync"))
    made = steady.steady(decoder, groups, 3)
    ahead = isinstance(executor, Ahead)
    one = [0, "sync", 1, "time", 2, 3, 4, "time"]
    if not ahead:
        one = [0, "sync", 1, "sync", "time", 2, 3, 4, "sync", "time"]
    assert said == one * 2
    assert (made.rounds, made.tokens, made.seconds) == (6, 12, 2)
    assert made.executor == ("ahead" if ahead else "serial")
    assert made.stats.rounds == 12


# -- grids ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and two drafts on disk."""
    where = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("target", "vanilla", "distilled")):
        model = tiny(
            "llama", seed, torch.float32, num_hidden_layers=1 + (seed == 0), max_position_embeddings=512
        )
        model.save_pretrained(where / name)
        byte_tokenizer().save_pretrained(where / name)
    return where


def settings(folder, executor, **more):
    """``float64`` is no option of a command line: with it, logits of other shapes give the same texts."""
    files = {"target": "target", "draft": "vanilla", "distilled": "distilled"}
    given = {name: str(folder / file) for name, file in files.items()} | {
        "spire": "untrained",
        "executor": executor,
    }
    given |= {"graphs": "eager", "dtype": "float64", "contexts": (24,), "batches": (2,), "lengths": (4,)}
    return GridSettings(**given | {"new_tokens": 4, "repeats": 1} | more)


@pytest.fixture
def short(monkeypatch):
    """No repeats beyond those asked for, and no more rows."""
    monkeypatch.setattr(grid, "SHORT", 0.0)
    monkeypatch.setattr(grid, "BARE_REPEATS", 1)
    monkeypatch.setattr(methods, "LEAST_ROWS", 1)
    monkeypatch.setattr(
        methods, "prompts", lambda: [f"text {i} and what follows it, and so on and on" for i in range(4)]
    )


@pytest.fixture
def choosy(monkeypatch):
    """An ``Ahead`` that refuses MagicDec, and models that say so, and nothing else; it lists what it refused."""
    refused = []

    def check(self, composition):
        model = getattr(composition.draft, "model", None)
        if type(composition.draft) is sd.drafts.MagicDec or getattr(model, "refused", False):
            refused.append(composition)
            raise ValueError("Ahead() has no such step")

    monkeypatch.setattr(Ahead, "check", check)
    return refused


def counts(measured):
    """What the runs of each method and k did, without their times."""
    return {
        (m.method, m.k): [
            (r.tokens, r.rounds, r.stats.accepted, r.stats.drafted, r.stats.texts) for r in m.runs
        ]
        for m in measured
    }


def test_a_point_decodes_the_same_under_both_executors(folder, short, monkeypatch):
    """With the same seeds."""
    monkeypatch.setattr(grid, "captured", lambda *parts: [])  # no run is left out
    found, names = {}, []
    for executor in ("ahead", "serial"):
        s = settings(folder, executor, new_tokens=3)
        lab = Grid(s, Methods(s))
        names = lab.methods.names = names or lab.methods.names
        groups = lab.methods.groups(2, 24)
        found[executor] = lab.visit(lab.chosen(groups, 24), groups)
        assert {r.executor for m in found[executor] for r in m.runs} == {executor}
    serial, ahead = counts(found["serial"]), counts(found["ahead"])
    assert ahead.keys() >= {("plain", 0), ("vanilla", 4), ("distilled_vanilla", 4), ("spire", 4)}
    assert ahead == serial
    assert any(run[2] for runs in ahead.values() for run in runs)  # something was accepted


WHOLE = {"contexts": (24, 40), "batches": (1, 2), "new_tokens": 6}


@pytest.mark.parametrize("more", [{}, pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_every_method_of_a_grid_runs_under_its_executor(more, folder, short, capsys):
    """Plain decoding too; what it refuses is left out by name, with the reason that building it gives."""
    s = settings(folder, "ahead", **more)
    lab = Grid(s, Methods(s), replayed=True)
    parts = lab.methods
    assert {*parts.names, *parts.left_out} == {"plain", *parts.drafts}
    assert parts.names[0] == "plain"
    assert not {*parts.names} & {*parts.left_out}
    for name in parts.names:
        assert type(parts.decoder(name, 4 if name != "plain" else 0).executor) is Ahead
    for name, why in parts.left_out.items():
        with pytest.raises(ValueError) as refused:
            parts.decoder(name, 4)
        assert str(refused.value) == why
    told = []
    rows = lab.measure(lambda some: told.append(list(some)))
    assert told[-1] == rows
    assert [(r["method"], r["why"]) for r in rows if r["part"] == "left_out"] == [*parts.left_out.items()]
    measured = [r for r in rows if r["part"] == "grid"]
    assert {r["method"] for r in measured} == {*parts.names}
    assert {r["executor"] for r in rows if r["part"] != "bare"} == {"ahead"}
    for batch, context in s.points:
        here = {r["method"]: r for r in measured if (r["batch"], r["context"]) == (batch, context)}
        assert here["plain"]["multiplier"] == 1
        for r in here.values():
            speed = r["tau"] / r["round_seconds"] * here["plain"]["round_seconds"] / here["plain"]["tau"]
            assert r["multiplier"] == pytest.approx(speed)
            assert (r["draft_seconds"], r["verify_seconds"]) == (0, 0)  # a round is one step
    # Bare steps are those of captured chains, as under Serial; the draft's share of the host's work is not known.
    bare = {
        (r["method"], r["batch"], r["context"]): r
        for r in rows
        if r["part"] == "bare" and r["method"] != "target"
    }
    assert bare.keys() == {(name, *point) for name in parts.names[1:] for point in s.points}
    assert all(r["replayed"] for r in bare.values())
    drawing = [r["value"] for r in rows if str(r.get("quantity")).startswith("host_draft_")]
    assert not any(drawing)
    if more:  # one point may be too few for a model
        assert drawing
        assert all(r["modelled"] for r in measured)
    report(rows)
    said = capsys.readouterr().out
    assert "k = 4: multiplier [modelled], whole rounds launched ahead" in said
    assert all(f"{name} is left out: {why}" in said for name, why in parts.left_out.items())


def test_methods_appear_as_soon_as_they_are_not_refused(folder, short, choosy):
    """The check decides, not a list of names; nothing is fed for a method that is left out."""
    s = settings(folder, "ahead", contexts=(24,), in_cache=True)
    parts = Methods(s)
    why = "Ahead() has no such step"
    assert parts.left_out == {"magicdec": why, "magicdec_in_cache": why}
    assert parts.names == ["plain", "vanilla", "windowed", "distilled_vanilla", "spire"]
    assert len(choosy) == 2
    parts.caching["distilled_vanilla"].refused = True
    found = [parts._refused(name) for name in ("plain", "distilled_vanilla", "windowed")]
    assert found == [None, why, None]
    (one, *others) = parts.groups(2, 24)[0].prefills
    assert one[0] is parts.target
    assert [model for model, _ in others] == [*parts.caching.values()]
    parts.names.remove("windowed")
    assert parts.caching["windowed"] not in [model for model, _ in parts.groups(2, 24)[0].prefills]
    whole = Methods(replace(s, executor="serial"))
    assert (whole.left_out, len(whole.names)) == ({}, 7)
    assert all(type(whole.decoder(name, 4).executor) is Serial for name in whole.names[1:])
    assert whole.groups(2, 24)[0].context.tokens.shape[1] == capacity(24, s.new_tokens, 4)


def test_an_executor_that_cannot_run_plain_decoding_is_refused(folder):
    with pytest.raises(
        SystemExit, match=r"--executor ahead cannot run plain: .* has no graphs.*--graphs auto"
    ):
        Methods(settings(folder, "ahead", graphs=""))


def test_programs_of_all_methods_and_lengths_are_kept(folder, short):
    """They are those of the target's memory, and a run that captures is not counted."""
    s = settings(folder, "ahead", new_tokens=1)
    parts = Methods(s)
    parts.target.steps.most -= MOST  # what it holds without a grid
    lab, groups = Grid(s, parts), parts.groups(2, 24)
    cases = [(name, k) for name in parts.names for k in ([0] if name == "plain" else parts.lengths)]
    for turn in range(3):
        made = [lab.run(steady.Measured(name, k, []), groups, turn) for name, k in cases]
    assert len(captured(parts.target)) == len(cases) >= 4
    assert not any(run.captured for run in made)
    # A row has room for the round that is not counted, too.
    assert groups[0].context.tokens.shape[1] == capacity(24, 1, 4) == 24 + 2 + 2 * 5 + 4


# -- rows and fits -------------------------------------------------------------------------------------------------------------------


def under(executor, rounds):
    return {
        at: [replace(m, runs=[replace(r, executor=executor) for r in m.runs]) for m in some]
        for at, some in rounds.items()
    }


def test_rounds_of_two_executors_are_never_compared_or_fitted_together():
    bare, rounds = synthetic(0.0)
    found = {(b, c, c + 10): rounds[b, c] for b, c in GRID.corners}
    first = next(iter(found))
    mixed = found | {first: under("ahead", found)[first]}
    with pytest.raises(ValueError, match="ran under ahead and serial: give rounds of one executor"):
        fit(MODEL, bare, mixed)
    point = rounds[1, 128]
    one = {(1, 128): [under("ahead", {0: point})[0][0], *point[1:]]}
    with pytest.raises(ValueError, match="ran under ahead and serial"):
        grid_rows(one, set(), None, 20)
    with pytest.raises(ValueError, match="ran under no executor"):
        steady.executor_of([])
    some = {(2, 8): [runs("plain", 0, [1.0] * 6), runs("vanilla", 4, [1.0] * 6), runs("spire", 4, [1.2] * 6)]}
    rows = grid_rows(under("ahead", some), set(), None, 4, texts())
    assert {(r["part"], r["executor"]) for r in rows} == {("grid", "ahead"), ("ratio", "ahead")}


def test_the_hosts_share_of_rounds_launched_ahead_is_one_term():
    """Their stages are not known, so nothing is said of drafting; whole rounds are explained as well."""
    bare, rounds = synthetic(0.0)
    found = {(b, c, c + 10): rounds[b, c] for b, c in GRID.corners}
    serial, ahead = fit(MODEL, bare, found), fit(MODEL, bare, under("ahead", found))
    assert (serial.executor, ahead.executor) == ("serial", "ahead")
    assert serial.hosts["vanilla"].draft.seconds(1, 4) > 0
    assert all(around.draft.seconds(8, 4) == 0 for around in ahead.hosts.values())
    for (batch, _, at), some in found.items():
        for m in some:
            assert ahead.seconds(m.method, batch, at, m.k) == pytest.approx(m.round_seconds, rel=0.03)
    rows = constants(ahead, bare)
    assert {r.get("executor") for r in rows} == {"ahead", None}  # none for bare steps
    assert all(r["executor"] == "ahead" for r in rows if r["part"] == "constant")


# -- stage d -------------------------------------------------------------------------------------------------------------------------


def stage_of(rows, until=1e9, toy=False):
    return Stage("d", "cpu", toy, until, 0, rows.append)


def test_stage_d_measures_ahead_first_and_leaves_time_for_serial(monkeypatch):
    now, began, seen = [0.0], [], {}

    class Study:
        def __init__(self, stage, folder):
            pass

        def __getattr__(self, name):
            return lambda stage: None

        def grid(self, stage, executor):
            began.append(executor)
            seen[executor] = stage.deadline
            now[0] = stage.deadline

    monkeypatch.setattr(paper, "Study", Study)
    stage = stage_of([])
    stage.began, stage.seconds = 0.0, 100.0
    paper.run(stage)
    assert began == ["ahead", "serial"]
    assert seen["serial"] == pytest.approx(100)
    assert 10 < seen["serial"] - seen["ahead"] < 20


def test_stage_d_counts_the_time_that_loading_takes(monkeypatch, tmp_path):
    """Points are begun until one would end after the deadline; without time for one, a row names the executor."""
    now, given, rows = [0.0], [], []

    def load(s):
        now[0] += 7
        return s

    class Measuring:
        def __init__(self, s, methods, first, replayed, least):
            given.append((s.executor, s.seconds, methods.executor, replayed))

        def measure(self, told):
            told([{"part": "left_out", "executor": "ahead", "method": "magicdec", "why": "because"}])

    monkeypatch.setattr(paper, "monotonic", lambda: now[0])
    monkeypatch.setattr("recipes.gpu.stage.monotonic", lambda: now[0])
    monkeypatch.setattr(paper, "Methods", load)
    monkeypatch.setattr(paper, "Grid", Measuring)
    stage = stage_of(rows)
    study = paper.Study(stage, tmp_path)
    saved = SimpleNamespace(cpu=lambda: saved, save_pretrained=lambda folder: None)
    study.tokenizer, study.drafts = saved, {"vanilla": saved, "spire": saved}
    stage.deadline = 100.0
    study.grid(stage, "ahead")
    assert given == [("ahead", 100 - 7 - paper.POINT, "ahead", True)]
    assert rows[0]["case"] == "magicdec, ahead"
    assert rows[0]["note"] == "left out: because"
    assert "multiplier" not in rows[0]
    assert [r["case"] for r in rows[1:]] == [
        f"grid, {b} x {c}, ahead" for b in (16, 64, 128) for c in (512, 4096)
    ]
    rows.clear()
    stage.deadline = now[0] + paper.POINT + paper.LOADING
    study.grid(stage, "serial")
    assert [r["case"] for r in rows] == ["grid, serial"]
    assert "not run" in rows[0]["note"]
    assert len(given) == 1


def test_rows_of_stage_d_name_their_executor():
    rows, measured = [], []
    for method, k, multiplier in (("plain", 0, 1.0), ("vanilla", 4, 1.5), ("spire", 4, 3.0)):
        measured.append(
            {"part": "grid", "executor": "ahead", "method": method, "batch": 1, "context": 8, "k": k, "tau": 2.0, "fitted": True}
            | {"multiplier": multiplier, "modelled": None, "round_seconds": 1e-3}
        )  # fmt: skip
    bare = {
        "part": "bare",
        "method": "spire",
        "batch": 1,
        "context": 8,
        "tokens": 1,
        "seconds": 1.0,
        "modelled_seconds": None,
    }
    paper.Study._grid_rows(stage_of(rows), "ahead", [bare, *measured])
    found = {r["case"]: r for r in rows}
    assert [*found] == [
        "bare step, spire draft, 1 tokens a row, 1 x 8, grid ahead",
        *("plain, 1 x 8, ahead", "vanilla, 1 x 8, ahead", "spire, 1 x 8, ahead"),
        "spire over others, 1 x 8, ahead",
    ]
    assert all(r["executor"] == "ahead" for r in rows[1:])
    assert found["spire over others, 1 x 8, ahead"]["over_vanilla"] == 2
