"""The GPU suite: at toy size on a CPU, its limits of time, its bars and its reports."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from one_process import each
from recipe_runs import ROOT, quick, report, run, written
from tiny import tiny

import specdec as sd


@pytest.mark.slow
def test_the_gpu_suite_at_toy_size(tmp_path):
    """All stages on the CPU, by the code that a GPU would run; Triton's kernels are interpreted."""
    pytest.importorskip("triton")
    from recipes.gpu.bars import BARS

    file = tmp_path / "g.json"
    said = run("recipes/gpu/suite.py", "--toy", "--minutes", "5", "--json", str(file), timeout=900)
    rows = report(file)
    columns = {"stage", "case", "seconds", "floor_seconds", "share_of_floor", "max_error"}
    assert {r["stage"] for r in rows} == {*"atgpbcsfhide", "bars"}
    measured = [r for r in rows if r["stage"] != "bars"]
    assert all(set(r) >= columns for r in rows)  # bars, too
    assert not [r for r in rows if r.get("failed")]
    assert not [r for r in measured if "not run" in r.get("note", "")]
    correct = {r["case"]: r for r in measured if r["stage"] == "a" and r["max_error"] is not None}
    for case in ("ragged verify", "tree in a window", "pages", "soft cap", "sink logits", "ring: verify", "intervals",
                 "first positions beside a window", "tree of 70 nodes in a window", "ragged verify, heads 8, 1 of 80"):  # fmt: skip
        assert correct[f"{case}, bfloat16: triton"]["max_error"] < 2e-2
    assert correct["rotary embedding and KV store, 3 tokens, bfloat16"]["max_error"] < 2e-2
    assert correct["rejection, logits, temperature 0.7, float32"]["max_error"] < 1e-5
    timed = [r for r in measured if r["stage"] in "bc" and r["floor_seconds"] is not None]
    assert all(r["share_of_floor"] == written(r["floor_seconds"] / r["seconds"], figures=3) for r in timed)
    assert {r["kind"] for r in timed if "kind" in r} >= {"eager"}
    texts = [r for r in measured if r["case"].startswith("sampled text")]
    assert {r["differ"] for r in texts if r.get("bar") == "invariant"} == {0.0}
    grid = {"plain", "vanilla", "windowed", "distilled_vanilla", "magicdec", "spire"}
    assert {r["case"].partition(",")[0] for r in measured if "multiplier" in r} == grid
    bare = [r for r in measured if r["case"].startswith("bare step")]
    assert {r["case"].split()[2] for r in bare if r["replayed"]} == grid - {"plain"}
    assert all(r["replayed"] or "step, target" in r["case"] for r in bare)
    assert all(r["modelled"] for r in measured if "multiplier" in r)
    assert {"tau", "multiplier", "gain"} <= {name for r in measured for name in r}
    bars = [r for r in rows if r["stage"] == "bars"]
    assert [r["case"] for r in bars] == [bar.name for bar in BARS]
    assert {r["verdict"] for r in bars} == {"not measured"}  # times at toy size are worth nothing
    points = {bar.key: bar.points for bar in BARS}
    have = Counter(r["bar"] for r in measured if "bar" in r)
    assert have["texts"] == points["texts"]
    assert have["logits"] == points["logits"] * 3 // 4  # the compiled kind is not compiled on a CPU
    assert have["tests"] == 1  # of a file that stands for the others
    assert max(r["differ"] for r in measured if r.get("bar") == "texts") == 0
    gains = [r for r in measured if "promised_share" in r]
    assert {r["case"].partition(", 2 x 16")[0] for r in gains} >= {
        "a draft, prescribed",
        "a draft, sampled, ahead",
    }
    floors = {r["case"]: r["floor_seconds"] for r in measured if r["case"].startswith("a round, ")}
    for r in gains:
        name, _, plain = r["case"].partition(", 2 x 16, over ")
        whole, alone = floors[f"a round, {name}, 2 x 16"], floors[f"a round, {plain}, 2 x 16"]
        assert r["promised"] == written(sd.verifiers.Synthetic(0.7).tau(4) * alone / whole, figures=3)
        assert whole > alone
        assert r["promised_share"] == written(r["ratio"] / r["promised"], figures=3)
    assert said.count("not measured") == len(bars)
    table = file.with_suffix(".md").read_text()
    assert "| stage | case | seconds | floor_seconds | share_of_floor | max_error | note |" in table


def test_bytes_of_problems_count_keys_and_values_as_they_are_held():
    from recipes.gpu.cases import TINY, slots
    from recipes.gpu.stage import Stage

    stage = Stage("b", "cpu", True, float("inf"), 0, lambda row: None)
    plain, narrow = (
        slots(stage, TINY, torch.bfloat16, [59, 30], [1, 1], kv=kv) for kv in (None, torch.float8_e4m3fn)
    )
    heads, size, slot = TINY.query, TINY.size, TINY.kv * 2 * TINY.size
    assert plain.bytes == 2 * (60 + 31) * slot + 2 * 2 * 2 * heads * size
    assert narrow.bytes == (60 + 31) * slot + 2 * 2 * 2 * heads * size
    assert narrow.held[0] is narrow.held[0]  # converted before it is timed
    assert narrow.held[0].dtype is torch.float8_e4m3fn
    other = narrow.again(stage)
    assert torch.equal(other.held[0].float(), other.keys.to(torch.float8_e4m3fn).float())
    assert not torch.equal(other.held[0].float(), narrow.held[0].float())


@pytest.mark.slow
def test_the_hosts_time_of_a_round(tmp_path):
    file = tmp_path / "host.json"
    quick("-m", "recipes.gpu.host", "--batches", "2", "--rounds", "20", "--turns", "1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert {(r["case"], r["executor"]) for r in rows} == {
        (case, executor)
        for case in (
            *("plain, greedy", "a draft, greedy", "a draft, sampled"),
            *("SPIRe, greedy", "SPIRe, sampled", "a head, greedy", "a head, sampled"),
            *("a tree, greedy", "a tree, sampled", "a head's tree, greedy", "a head's tree, sampled"),
        )
        for executor in ("Serial", "Ahead")
    }
    assert all(r["ms"] > 0 and r["rounds"] > 5 for r in rows)


@pytest.mark.slow
def test_the_gpu_suite_stops_in_time_and_goes_on_after_a_failure(tmp_path):
    """A stage that cannot be had is a row and an exit code; the next one, a process of its own, has no time."""
    pytest.importorskip("triton")
    files = tmp_path / "a.json", tmp_path / "b.json"
    code = f"""
import sys
sys.path.insert(0, ".")
import recipes.gpu.suite as g
g.STAGES["a"] = "no_such_module"
common = dict(toy=True, device="cpu", minutes="0.0001")
assert g.main(g.Settings("a", isolated=False, json={str(files[0])!r}, **common)) == 1
assert g.main(g.Settings("b", isolated=True, json={str(files[1])!r}, **common)) == 0
"""
    said = run("-c", code)
    failed, rows = (report(file) for file in files)
    columns = {"stage", "case", "seconds", "floor_seconds", "share_of_floor", "max_error"}
    assert all(set(r) >= columns for r in failed + rows)
    assert [r["case"] for r in failed if r.get("failed")] == ["stage"]
    assert "no_such_module" in failed[0]["note"]
    assert "FAILED a stage" in said
    rows = [r for r in rows if r["stage"] == "b"]
    assert {r["case"] for r in rows} >= {"copy", "matmul bf16"}
    assert all("not run: its share" in r["note"] for r in rows if r["seconds"] is None)


def of_a_bar(case, seconds=1.0, **more):
    return {
        "stage": "b",
        "case": case,
        "seconds": seconds,
        "floor_seconds": 1.0,
        "bar": "verify",
        "clock": "graph",
        **more,
    }


@pytest.mark.parametrize(
    ("rows", "verdict", "note"),
    [
        ([], "not measured", None),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", 1.3)], "met", "2 of 2 points"),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", 1.4)], "not met", "2 of 2 points"),
        ([of_a_bar("even", 1.1)], "partly measured (1 of 2 points)", "1 of 2 points"),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", None)], "partly measured (1 of 2 points)", "1 of 2 points"),
        ([of_a_bar("even", 1.1), of_a_bar("even", 1.1)], "partly measured (1 of 2 points)", "1 of 2 points"),
        ([of_a_bar("even", 1.4)], "not met", "1 of 2 points"),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", failed=True)], "not met", "2 of 2 points; failed: ragged"),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", None, failed=True)], "not met", "1 of 2 points; failed: ragged"),
        ([of_a_bar("even", None, failed=True)], "not met", "0 of 2 points; failed: even"),
        (
            [of_a_bar("even", 1.1), of_a_bar("ragged", clock="events")],
            "met",
            "2 of 2 points; with the host's launches, not replayed: ragged",
        ),
    ],
)  # fmt: skip
def test_a_bar_is_met_by_every_point_and_none_that_failed(rows, verdict, note):
    from recipes.gpu.bars import verdicts

    bar = verdicts(rows, measured=True)[0]
    assert (bar["verdict"], bar["note"]) == (verdict, note)
    assert {b["verdict"] for b in verdicts(rows, measured=True)[1:]} == {"not measured"}
    assert {b["verdict"] for b in verdicts(rows, measured=False)} == {"not measured"}


def test_bars_know_how_many_points_the_suite_has():
    from recipes.gpu import bars, checks, ours, rounds, steps

    points = {bar.key: bar.points for bar in bars.BARS}
    assert {key: points[key] for key in steps.BARS.values()} == dict(Counter(steps.BARS.values()))
    assert set(steps.BARS) <= set(steps.POINTS)
    assert {key: points[key] for key in rounds.BARRED.values()} == dict.fromkeys(
        rounds.BARRED.values(), len(rounds.BARS)
    )
    assert set(rounds.BARS) <= set(rounds.POINTS)
    assert set(ours.BARS) < set(ours.DECODED)
    assert points["tests"] == len(checks.FILES)


@pytest.mark.parametrize(
    ("rows", "verdict", "value"),
    [
        ([], "not measured", None),
        ([("ours 1", 300.0)], "not measured", None),
        ([("theirs 1", 300.0)], "not measured", None),
        ([("ours 1", 300.0), ("theirs 1", 200.0)], "met", 1.5),
        ([("ours 1", 300.0), ("theirs 1", 200.0), ("theirs 1", 250.0)], "not met", 1.2),
        ([("ours 1", 300.0), ("theirs 16", 200.0)], "not measured", None),
        ([("ours 1", None)], "not met", None),
        ([("ours 1", 300.0), ("theirs 1", None)], "not met", None),
    ],
)
def test_a_bar_compares_with_the_fastest_of_the_others(rows, verdict, value):
    from recipes.gpu.bars import verdicts

    made = [
        {"case": f"{key}, {n}", "bar": key, "tokens_per_second": speed} | ({} if speed else {"failed": True})
        for n, (key, speed) in enumerate(rows)
    ]
    bars = {bar["case"]: bar for bar in verdicts(made, measured=True)}
    bar = bars["tokens a second at batch 1 over transformers' generate, compiled"]
    assert (bar["verdict"], bar["value"]) == (verdict, value)


def test_our_speed_and_theirs_have_the_keys_of_their_bars(monkeypatch):
    from recipes.gpu import others, ours
    from recipes.gpu.bars import BARS
    from recipes.gpu.stage import Stage

    rows = []
    stage = Stage("h", "cpu", True, float("inf"), 0, rows.append)
    target = sd.HFModel(tiny("llama", 0, torch.float32))
    decoder = sd.decoder(target).greedy().build()
    monkeypatch.setattr(ours, "decoded", lambda *_: (0.5, [[1]]))
    monkeypatch.setattr(others, "theirs", lambda *_: 0.25)
    monkeypatch.setattr(ours, "stopped", lambda _: {})
    for point in ours.DECODED:
        for kind in (ours.GRAPHS, ours.AHEAD, ours.EAGER):
            ours.timed(stage, decoder, kind, point)
        for name in (others.COMPILED, others.EAGER):
            others.timed(stage, target.model, name, point)
    wanted = {key for bar in BARS if bar.over for key in (bar.key, bar.over)}
    assert Counter(r["bar"] for r in rows if "bar" in r) == Counter(wanted)
    assert {r["tokens_per_second"] for r in rows if r.get("bar") == "theirs 16"} == {64.0}
    assert {point for _, point in others.ORDER} == set(ours.DECODED)


def test_skipped_tests_are_counted():
    from recipes.gpu.checks import missed

    assert missed("3 passed in 2.05s") == 0
    assert missed("1 failed, 3 passed, 2 skipped, 1 warning in 2.05s") == 3
    assert missed("2 errors in 0.50s") == 2
    assert missed("no summary") is None


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_gpu_suite_that_is_ended_leaves_what_it_has_measured(how, tmp_path):
    """And rows of other stages that the file had stay; those of its own are replaced."""
    pytest.importorskip("triton")
    file = tmp_path / "g.json"
    old = {
        "command": "before",
        "date": "",
        "versions": {},
        "machine": "",
        "seed": 0,
        "stages": "a,b",
        "toy": True,
    }
    rows = [dict.fromkeys(("seconds", "max_error")) | {"stage": stage, "case": "old"} for stage in "ab"]
    file.write_text(json.dumps({"meta": old, "rows": rows}))
    words = [
        sys.executable,
        "recipes/gpu/suite.py",
        "--toy",
        "--isolated",
        "--stages",
        "a",
        "--json",
        str(file),
    ]
    child = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        end = monotonic() + 120
        while monotonic() < end:
            measured = [r for r in report(file) if r["stage"] == "a" and r["max_error"] is not None]
            if len(report(file)) >= 15 and len(measured) > 1:
                break
            assert child.poll() is None
            sleep(0.05)
        child.send_signal(how)
        code = child.wait(30)
    finally:
        child.kill()
    assert code == (143 if how == signal.SIGTERM else -signal.SIGKILL)
    rows = report(file)
    assert [r["case"] for r in rows if r["stage"] == "b"] == ["old"]
    assert sum(r["max_error"] is not None for r in rows if r["stage"] == "a") > 1
    assert "old" not in {r["case"] for r in rows if r["stage"] == "a"}
    meta = json.loads(file.read_text())["meta"]
    assert (meta["stages"], meta["earlier"]) == ("a", [{**old, "stages": "b"}])
    assert "| a | " in file.with_suffix(".md").read_text()
    if how == signal.SIGTERM:  # nothing is left over
        assert {f.name for f in tmp_path.iterdir()} == {"g.json", "g.md"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a process can be tied to its parent")
def test_the_gpu_suites_tests_end_with_it(tmp_path):
    """Also if its process is killed, which cannot end them."""
    began, slow = tmp_path / "began", tmp_path / "test_slow.py"
    slow.write_text(
        "import os, time\n"
        "def test_slow():\n"
        f"    open({str(began)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    code = f"import time\nfrom recipes.gpu.checks import Tests\nTests({str(slow)!r}, {str(tmp_path)!r})\ntime.sleep(60)"
    suite = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        end = monotonic() + 60
        while not (began.exists() and began.read_text()) and monotonic() < end:
            assert suite.poll() is None
            sleep(0.05)
        child = Path("/proc", began.read_text(), "stat")
    finally:
        suite.kill()
    suite.wait()
    end = monotonic() + 10
    while _runs(child) and monotonic() < end:
        sleep(0.05)
    assert not _runs(child)


def _runs(stat):
    """Whether a process runs, by its file in /proc: it is gone, or not waited for."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "XZ"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_rows_of_captured_steps_fail_where_nothing_was_captured():
    from recipes.gpu.steps import stopped

    model = tiny("llama", 0, torch.float32)
    made = sd.HFModel(model, graphs="eager")
    assert stopped(sd.HFModel(model)) == {}
    assert stopped(made) == {"failed": True, "note": "its steps are not captured: none was"}
    decoder = sd.decoder(made).greedy().build()

    def memory():
        decoder.generate([[1, 2, 3]], 8)
        assert stopped(made) == {}  # also after a failure, which the next case has nothing to do with
        return made.steps._storages[0]

    memory().too_large.add("a shape")
    assert stopped(made)["note"].endswith("too little memory")
    memory().failed.add("a shape")
    assert "as the warnings say" in stopped(made)["note"]
    memory()
    made.steps.why = "it waits"
    assert stopped(made)["note"].endswith("it waits")
    memory()


@pytest.fixture
def suite(monkeypatch):
    from recipes.gpu import suite

    monkeypatch.setattr(suite, "ready", lambda device: None)
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    return suite


def test_what_a_stage_takes_too_long_the_next_one_lacks(suite, monkeypatch):
    """And nothing that one leaves over makes another longer; imports count."""
    now, told = [1000.0], {}
    monkeypatch.setattr(suite, "monotonic", lambda: now[0])
    monkeypatch.setattr(suite, "BEGAN", 970.0)
    spends = {"a": 10.0, "b": 270.0, "c": 30.0}

    def stage(s, name, until, put):
        told[name] = until - now[0]
        now[0] += spends[name]

    monkeypatch.setattr(suite, "stage", stage)
    assert suite.main(suite.Settings("a,b,c", "2,4,3", toy=True, device="cpu")) == 0
    assert told == {"a": 90.0, "b": 240.0, "c": 180.0}
    now[0], told["c"], spends["b"] = 1000.0, 0, 370.0
    assert suite.main(suite.Settings("a,b,c", "2,4,3", toy=True, device="cpu")) == 0
    assert told["c"] == 970 + 540 - 1380


@pytest.mark.slow
def test_a_stage_that_does_not_stop_is_ended(suite, monkeypatch, tmp_path):
    """What it has said stays, and that it was ended is a failure."""
    start = subprocess.Popen
    row = {"stage": "a", "case": "said before", "seconds": 1.0}
    code = f"import sys, time; open(sys.argv[1], 'a').write({json.dumps(row)!r} + chr(10) + '{{half a r'); time.sleep(60)"

    def popen(words, **how):
        if "--rows" not in words:  # git's, which says the commit
            return start(words, **how)
        return start(
            [
                sys.executable,
                "-S",
                "-c",
                code if "a" in words else "raise SystemExit(3)",
                words[words.index("--rows") + 1],
            ],
            stdin=how["stdin"],
            text=True,
        )

    monkeypatch.setattr(suite.subprocess, "Popen", popen)
    monkeypatch.setattr(suite, "BEGAN", monotonic())
    monkeypatch.setattr(suite, "GRACE", 1.0)
    file = tmp_path / "new" / "g.json"
    assert (
        suite.main(suite.Settings("a,b", "0.02", toy=True, device="cpu", isolated=True, json=str(file))) == 1
    )
    notes = [(r["case"], r.get("note", "")) for r in report(file) if r["stage"] in "ab"]
    assert notes[0] == ("said before", "")
    assert [case for case, _ in notes[1:]] == ["stage", "stage"]
    assert "it did not stop in time" in notes[1][1]
    assert "code 3" in notes[2][1]


def test_the_gpu_suites_commands_end_in_fifteen_minutes_and_leave_no_stage_out(suite):
    """With two minutes for two starts of a machine."""
    names, total = [], 2.0
    for stages, minutes in suite.COMMANDS.values():
        each = suite.minutes_of(minutes, stages.split(","))
        assert len(each) == len(minutes.split(","))
        total += sum(each.values())
        names += stages.replace("+", ",").split(",")
    assert total <= 15
    assert sorted(names) == sorted(suite.STAGES)
    assert sorted(suite.Settings().stages.replace("+", ",").split(",")) == sorted(names)


def test_stages_run_at_the_same_time_and_share_their_cases(suite, monkeypatch, tmp_path):
    """Each process says which share is its; all rows are in the report."""
    start, asked, threads = subprocess.Popen, [], []
    code = (
        "import json, sys; said = sys.stdin.readline(); "
        "open(sys.argv[1], 'a').write(json.dumps({'stage': sys.argv[2], 'case': sys.argv[3], 'until': said}) + chr(10))"
    )

    def popen(words, **how):
        threads.append(how["env"].get("OMP_NUM_THREADS"))
        said = [words[words.index(option) + 1] for option in ("--rows", "--stages", "--share")]
        asked.append(said[1:])
        return start([sys.executable, "-S", "-c", code, *said], stdin=how["stdin"], text=how["text"])

    monkeypatch.setattr(suite.subprocess, "Popen", popen)
    monkeypatch.setattr(suite, "BEGAN", monotonic())
    monkeypatch.setattr(suite, "SHARES", {"a": 2})
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    put = []
    suite.processes(suite.started(suite.Settings(device="cuda"), "a+t"), monotonic() + 60, put.append)
    assert asked == [["a", "0/2"], ["a", "1/2"], ["t", "0/1"]]
    assert threads == ["2", "2", "9"]  # those that share cases share the cores
    assert sorted((r["stage"], r["case"]) for r in put) == [("a", "0/2"), ("a", "1/2"), ("t", "0/1")]
    assert all(float(r["until"]) > monotonic() for r in put)  # they begin when they are told to


def test_a_stage_in_a_process_of_its_own_puts_files_beside_the_report(suite, monkeypatch, tmp_path):
    words, folders = [], []
    monkeypatch.setattr(suite.subprocess, "Popen", lambda said, **_: words.extend(said))
    child = suite.Child(suite.Settings(json=str(tmp_path / "out" / "g.json"), device="cpu"), "p", "0/1")
    monkeypatch.setattr(suite.sys, "stdin", io.StringIO("1.0\n"))
    monkeypatch.setattr(suite.sys, "argv", words[words.index(suite.__file__) :])
    monkeypatch.setattr("recipes.gpu.profiles.run", lambda stage: folders.append(stage.folder))
    monkeypatch.setattr("recipes.gpu.tied.tie", lambda: None)
    assert suite.main(suite.settings()) == 0
    assert folders == [tmp_path / "out"]
    child.file.close()


def test_a_recipes_refusal_is_a_row_and_an_exit_is_an_exit():
    from recipes.gpu.stage import Stage

    put = []
    stage = Stage("d", "cpu", True, 0.0, 0, put.append)
    with stage.case("tau"):
        raise SystemExit("no prompt is long enough")
    assert put[0]["failed"]
    assert put[0]["note"].startswith("SystemExit: no prompt is long enough (")
    with pytest.raises(SystemExit), stage.case("another"):
        raise SystemExit(1)
    assert len(put) == 1


def test_after_an_error_of_the_device_a_process_ends():
    from recipes.gpu.stage import Stage

    put = []
    stage = Stage("a", "cpu", True, 0.0, 0, put.append)
    with stage.case("an error that passes"):
        raise RuntimeError("CUDA error: invalid configuration argument")

    def lost():
        raise RuntimeError("CUDA error: misaligned address")

    stage.sync = lost
    with pytest.raises(SystemExit) as ended, stage.case("attention"), stage.case("one backend"):
        raise RuntimeError("CUDA error: misaligned address\nmore")
    assert ended.value.code == 3
    assert [(r["case"], r["failed"]) for r in put] == [("an error that passes", True), ("one backend", True)]
    assert put[1]["note"].startswith("RuntimeError: CUDA error: misaligned address (")


def test_a_report_without_times_keeps_what_is_not_one(tmp_path):
    from recipes.gpu.report import Report

    report = Report(str(tmp_path / "g.json"), 0, True, True, untimed=True)
    report.add({"stage": "a", "case": "an error", "max_error": 0.1, "seconds": 2.0, "eager_seconds": 3.0})
    report.add(
        {"stage": "d", "case": "a multiplier", "multiplier": 2.0, "tau": 3.0, "note": "multiplier 2.0"}
    )
    report.add({"stage": "d", "case": "over others", "over_vanilla": 2.0, "note": "vanilla 2.0"})
    report.add({"stage": "s", "case": "a round", "seconds": 2.0, "note": "5 tokens a second"})
    report.add({"stage": "s", "case": "a ratio", "ratio": 2.0, "note": "2.0 x"})
    report.add({"stage": "s", "case": "another round", "note": "not run"})
    report.add({"stage": "s", "case": "a failure", "failed": True, "note": "ValueError"})
    report.add({"stage": "t", "case": "a file", "seconds": 2.0, "missed": 1, "note": "1 failed in 2.0s"})
    rows = json.loads((tmp_path / "g.json").read_text())["rows"]
    kept = {r["case"]: r for r in rows if r["stage"] != "bars"}
    assert all(r["seconds"] is None and "eager_seconds" not in r for r in kept.values())
    assert not any("2.0" in str(r) for r in kept.values())
    notes = {case: r.get("note") for case, r in kept.items()}
    assert notes == {
        "an error": "ran",
        "a multiplier": "ran",
        "over others": "ran",
        "a round": "ran",
        "a ratio": "ran",
        "another round": "not run",
        "a failure": "ValueError",
        "a file": "1 failed",
    }
    assert (kept["an error"]["max_error"], kept["a multiplier"]["tau"]) == (0.1, 3.0)


def test_shares_of_a_stage_are_all_of_its_cases():
    from recipes.gpu.stage import Stage

    shares = [Stage("a", "cpu", True, 0.0, 0, print, (number, 3)) for number in range(3)]
    for _ in range(7):
        assert sum(stage.mine() for stage in shares) == 1
    alone = Stage("a", "cpu", True, 0.0, 0, print)
    assert all(alone.mine() for _ in range(3))


def test_what_pytest_said_becomes_rows():
    from recipes.gpu.checks import failures, summary

    said = "..F\nFAILED tests/test_x.py::test_a[1-b] - AssertionError: no\nFAILED tests/test_x.py::test_c\n2 failed, 5 passed in 1.25s\n"
    assert summary(said) == "2 failed, 5 passed in 1.25s"
    assert failures(said) == [
        ("tests/test_x.py::test_a[1-b]", "AssertionError: no"),
        ("tests/test_x.py::test_c", ""),
    ]
    assert summary("Segmentation fault") == "no summary"


def test_the_gpu_suites_reports_are_merged(tmp_path):
    def write(name, stages, toy):
        about = {
            "command": name,
            "date": "",
            "versions": {},
            "machine": "",
            "seed": 0,
            "stages": stages,
            "toy": toy,
        }
        empty = dict.fromkeys(("seconds", "floor_seconds", "share_of_floor", "max_error"))
        rows = [{**empty, "stage": stage, "case": name} for stage in stages.split(",")]
        (tmp_path / name).write_text(json.dumps({"meta": about, "rows": rows}))
        return str(tmp_path / name)

    files, out = [write("x.json", "a,b", True), write("y.json", "b,c", True)], tmp_path / "all.json"
    merge = ["recipes/gpu/suite.py", "--toy", "--stages", "", "--json", str(out), "--merge"]
    full, none = [*merge, write("full.json", "a", False)], [*merge, str(ROOT / "pyproject.toml")]
    wrong = ["recipes/gpu/suite.py", "--toy", "--stages", "a,b", "--minutes"]
    ran = each(
        [*merge, *files],
        full,
        none,
        [*wrong, "1,2,3"],
        [*wrong, "1,0"],
        [*wrong, "x"],
        ["recipes/gpu/suite.py"],
    )
    assert ran[0].returncode == 0, ran[0].stderr
    assert [(r["stage"], r["case"]) for r in report(out) if r["stage"] != "bars"] == [
        ("a", "x.json"),
        ("b", "y.json"),
        ("c", "y.json"),
    ]
    meta = json.loads(out.read_text())["meta"]
    assert [(m["command"], m["stages"]) for m in meta["earlier"]] == [("x.json", "a"), ("y.json", "b,c")]
    assert "has rows of full size, and these are of toy size" in ran[1].stderr
    assert "is no report of this suite" in ran[2].stderr
    for some in ran[3:6]:
        assert "give minutes for all stages, or for each of --stages a,b" in some.stderr
    if not torch.cuda.is_available():
        assert "no CUDA device: run this on a machine with a GPU, or with --toy on the CPU" in ran[6].stderr
    assert all(some.returncode == 1 for some in ran[1:6])
