"""Micro-batches in a pipeline: bit for bit the serial executor, whatever drafts, whoever fails; time line, time model, tuning."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pool import PROMPTS, Script
from tiny import tiny

import specdec as sd
from specdec.arm_policy import Arm
from specdec.audit import catalogue
from specdec.audit.certify import certify
from specdec.cost.pipeline import TimeModel
from specdec.drafts.spire import SpireModel
from specdec.executors import Pipelined, Serial, Timeline, profile, tune
from specdec.executors.timeline import Span

BUDGETS = [11, 1, 7, 10, 2, 9]
HOW = {  # every way with one of the types, since float32 and float64 take different paths through the models
    "threads": (Pipelined(2), "float64"),
    "threads, a row each": (Pipelined(6), "float32"),
    "threads, one micro-batch": (Pipelined(1), "float64"),
    "threads, barrier": (Pipelined(3, barrier=True), "float32"),
    "processes": (Pipelined(2, "processes"), "float32"),
    "processes, barrier": (Pipelined(4, "processes", barrier=True), "float64"),
}


class Models(NamedTuple):
    """A target, a smaller draft, and the transformers model of the target."""

    target: Any
    small: Any
    inner: Any


@cache
def models_of(dtype: str) -> Models:
    kind = getattr(torch, dtype)
    inner, small = (tiny("llama", 0, num_hidden_layers=n, dtype=kind) for n in (2, 1))
    return Models(sd.HFModel(inner), sd.HFModel(small), inner)


@pytest.fixture(scope="module")
def models():
    return models_of("float32")


def half_random(prefix):
    g = torch.Generator().manual_seed(sum(prefix[-2:]))
    return torch.rand(97, generator=g, dtype=torch.float64) * 4


def spire(inner):
    return sd.drafts.Spire(SpireModel.from_target(inner, 1, sinks=1, window=4), block=4)


def all_drafts(models):
    target, small, inner = models
    return {
        "model": sd.drafts.Model(small),
        "itself": sd.drafts.Model(target),
        "ngram": sd.drafts.NGram(),
        "tree": sd.drafts.Tree(small, (2, 2, 1)),
        "function": sd.chain_draft(half_random),
        "magicdec": sd.drafts.MagicDec(window=4, sinks=1),
        "magicdec, pruned": sd.drafts.MagicDec(
            window=3, sinks=1, pruner=sd.pruning.SnapKV(), budget=3, observation=2, refresh=2
        ),
        "spire": spire(inner),
    }


def verified(dtype, verifier):
    return sd.decoder(models_of(dtype).target).verifier(verifier).sampling(temperature=0.8)


@cache
def serial_run(dtype, verifier, name):
    """A decoder without its executor, an id that ends a row early, and what the serial executor makes of it."""
    base = verified(dtype, verifier).draft(all_drafts(models_of(dtype))[name], 3)
    eos = base.build().generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids[0][5]
    return base, eos, base.build().generate(PROMPTS, BUDGETS, seed=3, eos_token_id=eos)


def same(serial, piped, stats=True):
    assert piped.ids == serial.ids
    assert piped.finish == serial.finish
    if stats:
        assert piped.row_stats == serial.row_stats


def nothing_is_left():
    assert not [t.name for t in threading.enumerate() if "specdec" in t.name]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", HOW)
def test_equals_the_serial_executor_bit_for_bit(how, both):
    """Every draft, with one verifier or with ``both``."""
    (executor, dtype), turn = HOW[how], list(HOW).index(how)
    for i, name in enumerate(all_drafts(models_of(dtype))):
        if executor.workers == "processes" and ("magicdec" in name or name == "spire"):
            continue
        verifiers = (sd.Coupled(), sd.Rejection())
        for verifier in verifiers if both else verifiers[(i + turn) % 2 :][:1]:
            base, eos, serial = serial_run(dtype, verifier, name)
            assert "eos" in serial.finish
            same(serial, base.executor(executor).build().generate(PROMPTS, BUDGETS, seed=3, eos_token_id=eos))
    nothing_is_left()


@pytest.mark.parametrize("how", HOW)
def test_a_pool_equals_plain_sampling_under_coupled(how):
    executor, dtype = HOW[how]
    target, small, inner = models_of(dtype)
    arms: dict[str, Any] = {
        "model": sd.drafts.Model(small),
        "ngram": sd.drafts.NGram(),
        "short": Arm(sd.drafts.Model(small), 1),
        "none": None,
        "tree": sd.drafts.Tree(small, (2, 1)),
        "itself": sd.drafts.Model(target),
    }
    if executor.workers == "threads":
        arms |= {"spire": spire(inner), "magicdec": sd.drafts.MagicDec(window=4, sinks=1)}
    plain = verified(dtype, sd.Coupled())
    eos = plain.build().generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids[0][5]
    base = plain.pool(arms, Script(), 3)
    expected, serial, early, late = (
        b.build().generate(PROMPTS, BUDGETS, seed=3, eos_token_id=eos)
        for b in (plain, base, base.executor(executor), base.executor(replace(executor, ahead=False)))
    )
    same(expected, serial, stats=False)
    same(serial, late)
    same(serial, early, stats=False)  # one round ahead, the script's arms come a round later
    nothing_is_left()


def test_streams_stop_strings_and_a_batch_of_one(models):
    target, small, _ = models
    base = sd.decoder(target).draft(small, 3)
    for executor in (Pipelined(), Pipelined(workers="processes")):
        decoder = base.executor(executor).build()
        same(base.build().generate([[5, 6]], 9, seed=1), decoder.generate([[5, 6]], 9, seed=1))
        same(base.build().generate(PROMPTS, 1, seed=1), decoder.generate(PROMPTS, 1, seed=1))
        same(base.build().generate(PROMPTS, 2, seed=1), decoder.generate(PROMPTS, 2, seed=1))
        stop = {"stopping_criteria": [lambda ids, scores: bool(ids[0, -1] % 7 == 0)]}
        same(*(d.generate(PROMPTS, BUDGETS, seed=1, **stop) for d in (base.build(), decoder)))
        pieces: dict[int, list[int]] = {b: [] for b in range(len(PROMPTS))}
        for piece in decoder.stream(PROMPTS, BUDGETS, seed=4):
            pieces[piece.row] += piece.ids
        assert list(pieces.values()) == base.build().generate(PROMPTS, BUDGETS, seed=4).ids
    nothing_is_left()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of the system's threads")
def test_the_system_s_thread_has_ended_too(models):
    """Python joins a thread before that frees what MKL holds, under a lock that a fork would copy as locked."""
    target, small, _ = models
    decoder = sd.decoder(target).draft(small, 3).executor(Pipelined(2)).build()
    decoder.generate(PROMPTS, 4, seed=0)
    before = len(os.listdir("/proc/self/task"))
    for seed in range(40):
        decoder.generate(PROMPTS[:2], 2, seed=seed)
        assert len(os.listdir("/proc/self/task")) <= before


def test_two_runs_at_the_same_time(models):
    target, small, _ = models
    for workers in ("threads", "processes"):
        decoder = sd.decoder(target).draft(small, 3).executor(Pipelined(2, workers)).build()
        expected = [decoder.generate(PROMPTS, BUDGETS, seed=s).ids for s in (1, 2)]
        found: list[list[list[int]]] = [[[] for _ in PROMPTS] for _ in expected]
        streams = (decoder.stream(PROMPTS, BUDGETS, seed=s) for s in (1, 2))
        for pieces in zip_longest(*streams):
            for rows, piece in zip(found, pieces):
                if piece is not None:
                    rows[piece.row] += piece.ids
        assert found == expected
    nothing_is_left()


def test_on_cuda_workers_have_a_stream_of_their_own():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    target, small = (sd.HFModel(tiny("llama", 0, num_hidden_layers=n).cuda().float()) for n in (2, 1))
    base = sd.decoder(target).draft(small, 3).verifier(sd.Coupled())
    same(*(b.build().generate(PROMPTS, BUDGETS, seed=3) for b in (base, base.executor(Pipelined(3)))))


# -- failures ------------------------------------------------------------------------------------------------------------


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.handle = threading.Lock()


@dataclass
class Fails:
    """A draft of nothing that does something bad at a moment of its life."""

    when: str
    action: Any
    after: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    name = "fails"

    def _at(self, moment):
        self.calls[moment] = self.calls.get(moment, 0) + 1
        if moment == self.when and self.calls[moment] > self.after:
            self.action()

    def init(self, context, target_cache):
        self._at("init")

    def propose(self, state, context, budget, rng):
        self._at("propose")
        return sd.Proposal.none(context.batch), None

    def observe(self, state, round):
        self._at("observe")

    def select(self, state, rows):
        self._at("select")


def boom():
    raise KeyError("no such luck")


def unpicklable():
    raise Unpicklable("a lock", "more")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def table():
    return sd.decoder(sd.TableModel.random(5, 1, seed=0))


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("when", ["init", "propose", "observe", "select"])
def test_what_a_draft_raises_is_raised(table, workers, when, after):
    decoder = table.draft(Fails(when, boom, after)).executor(Pipelined(3, workers)).build()
    with pytest.raises(KeyError, match="no such luck") as raised:
        decoder.generate([[1], [2], [3], [4], [0], [1]], [1, 20, 3, 4, 5, 6], seed=0)
    if workers == "processes":  # a traceback does not travel, so it is told
        assert "in the drafting worker" in raised.value.__notes__[0]
        assert "in boom" in raised.value.__notes__[0]
    nothing_is_left()


def test_what_cannot_travel_is_told_in_words(table):
    for when in ("init", "propose"):
        decoder = table.draft(Fails(when, unpicklable)).executor(Pipelined(2, "processes")).build()
        with pytest.raises(RuntimeError, match="Unpicklable in the drafting worker: a lock and more"):
            decoder.generate([[1], [2]], 9, seed=0)
    nothing_is_left()


@pytest.mark.parametrize("when", ["init", "propose", "observe"])
def test_a_worker_that_dies_is_an_error_at_once(table, when):
    decoder = table.draft(Fails(when, die, after=1)).executor(Pipelined(2, "processes")).build()
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"drafting worker died \(exit code -9\)"):
        decoder.generate([[1], [2], [3]], 20, seed=0)
    assert time.perf_counter() - began < 5
    nothing_is_left()


def test_the_consumer_may_stop_or_raise(table, capfd):
    def stop(round):
        if round.number == 2:
            raise ZeroDivisionError

    for workers in ("threads", "processes"):
        decoder = table.draft(sd.TableModel.random(5, 1, seed=1)).executor(Pipelined(3, workers)).build()
        for rounds in (1, 3, 5):
            stream = decoder.stream([[1], [2], [3], [4]], 50, seed=0)
            for _ in range(rounds):
                next(stream)
            stream.close()
            nothing_is_left()
        with pytest.raises(ZeroDivisionError):
            decoder.generate([[1], [2], [3]], 50, seed=0, on_round=stop)
        nothing_is_left()
        slow = table.draft(Fails("propose", lambda: time.sleep(0.2))).executor(Pipelined(2, workers)).build()
        stream = slow.stream([[1], [2]], 50, seed=0)
        for _ in range(2):
            next(stream)
        stream.close()  # the worker is in the middle of a proposal
        nothing_is_left()
    assert "Traceback" not in capfd.readouterr().err


@dataclass
class Widens(Fails):
    """Proposes more nodes than it says, of which ``exist`` exist."""

    exist: int = 4
    trees = True

    def propose(self, state, context, budget, rng):
        tokens = torch.arange(4).expand(context.batch, 4)
        parents = torch.full((context.batch, 4), -1)
        size = torch.where(budget > 0, self.exist, 0)
        return sd.Proposal(tokens, parents, size, torch.full((context.batch, 4, 5), 0.2), "sampled"), None


def test_more_nodes_than_promised(table):
    decoder = table.draft(Widens("never", boom), 1).executor(Pipelined(1, "processes")).build()
    with pytest.raises(ValueError, match=r"4 nodes in a row, and there is room for 1: declare the maximum"):
        decoder.generate([[1], [2]], 9, seed=0)
    nothing_is_left()


def test_columns_without_nodes_take_no_room(table):
    base = table.draft(Widens("never", boom, exist=1), 1)
    outs = [
        base.executor(Pipelined(1, w)).build().generate([[1], [2]], 9, seed=0)
        for w in ("threads", "processes")
    ]
    same(*outs)


def test_what_a_drafting_process_sends_is_small(monkeypatch):
    """A pipe full of answers would stop the process, which then reads no request: neither side would go on."""
    from specdec.executors import forked

    own = forked._dumps

    def small(value):
        made = own(value)
        assert not isinstance(value, forked.DraftResponse) or len(made) < 4096
        return made

    target, draft = (sd.TableModel.random(8, order=1, seed=seed) for seed in (0, 1))
    prompts = [[n % 8] for n in range(48)]
    monkeypatch.setattr(forked, "_dumps", small)
    for kind in (sd.drafts.Tree(draft, (3, 3, 2)), sd.drafts.NGram()):
        base = sd.decoder(target).draft(kind)
        same(
            *(
                base.executor(how).build().generate(prompts, 12, seed=5)
                for how in (Serial(), Pipelined(2, "processes"))
            )
        )
    nothing_is_left()


def test_clear_refusals(models, table):
    target, small, inner = models
    with pytest.raises(ValueError, match="workers is 'fibres': there are 'threads', 'processes'"):
        Pipelined(workers="fibres")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="micro_batches is 0: need at least 1"):
        Pipelined(0)
    with pytest.raises(
        ValueError,
        match="micro_batches is 3 and there are 2 rows: each micro-batch needs a row; use at most 2",
    ):
        table.executor(Pipelined(3)).build().generate([[1], [2]], 4)
    with pytest.raises(
        ValueError, match=r"there is 1 row: .* use at most 1, or Pipelined\(\) without a number"
    ):
        table.executor(Pipelined(2)).build().generate([1], 4)
    one = table.executor(Pipelined()).build().generate([1], 4, seed=0)  # as the message says
    assert one.ids == table.build().generate([1], 4, seed=0).ids
    base = sd.decoder(target).executor(Pipelined(2, "processes"))
    for draft, name in ((spire(inner), "spire"), (sd.drafts.MagicDec(window=4), "magicdec")):
        with pytest.raises(
            ValueError, match=rf"draft '{name}' reads the target's cache .* Pipelined\(workers='threads'\)"
        ):
            base.draft(draft).build()
        with pytest.raises(ValueError, match=f"draft '{name}' reads the target's cache"):
            base.pool({"a": small, "b": draft}, Script()).build()
    with pytest.raises(ValueError, match="random decisions that are kept in this process"):
        certify(catalogue.BASE.draft(catalogue.CHAIN).executor(Pipelined(1, "processes")).build())
    nothing_is_left()


def test_a_model_that_runs_one_call_at_a_time():
    target = sd.HFModel(tiny("llama", dtype=torch.float32), graphs="eager")
    base = sd.decoder(target).executor(Pipelined(2))
    for draft in (target, sd.drafts.Model(target), sd.models.Windowed(target, 8, 1)):
        with pytest.raises(
            ValueError, match=r"a wrapper of its own, HFModel\(model\.model, model\.tokenizer\)"
        ):
            base.draft(draft).build()
    with pytest.raises(ValueError, match=r"'magicdec' runs the target on its own cache.*graphs=False"):
        base.draft(sd.drafts.MagicDec(window=8)).build()
    other = sd.decoder(target).draft(sd.HFModel(target.model), 2)
    same(*(b.build().generate(PROMPTS, BUDGETS, seed=3) for b in (other, other.executor(Pipelined(2)))))


# -- exactness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", [Pipelined(2), Pipelined(3, barrier=True)], ids=["2", "3, barrier"])
@pytest.mark.parametrize("name", ["chain", "tree", "adversary"])
def test_certified_with_the_real_keys(name, executor):
    draft = {
        "chain": catalogue.CHAIN,
        "tree": catalogue.TREE,
        "adversary": catalogue.Adversary(catalogue.MENU, salt=1),
    }[name]
    builder = catalogue.BASE.draft(draft, 2)
    prompts, budgets = ((0, 1), (2,), (1, 1, 0)), (3, 2, 3)
    found = certify(builder.executor(executor).build(), prompts, budgets)
    alone = certify(builder.build(), prompts, budgets)
    again = certify(builder.executor(executor).build(), prompts, budgets)
    assert found.lossless
    assert found.branches == again.branches
    assert found.distribution == again.distribution  # not a bit depends on the threads' turns
    for distribution, serial in zip(found.distribution, alone.distribution):
        assert distribution == pytest.approx(serial, abs=1e-14)


# -- time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_seconds_sum_to_the_wall_clock(models, workers):
    target, small, _ = models
    line = Timeline()
    decoder = sd.decoder(target).draft(small, 3).executor(Pipelined(2, workers, timeline=line)).build()
    began = time.perf_counter()
    out = decoder.generate(PROMPTS, 30, seed=0)
    wall = time.perf_counter() - began
    told = sum(out.stats.seconds.values())
    assert told <= wall
    assert told > 0.5 * wall
    assert {"prefill", "draft", "target", "verify"} <= out.stats.seconds.keys()
    assert line.seconds <= wall


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_time_line(models, workers, tmp_path):
    target, small, _ = models
    line = Timeline()
    arms = {"a": sd.drafts.Model(small), "b": sd.drafts.Model(target), "none": None}
    decoder = (
        sd.decoder(target).pool(arms, Script(), 3).executor(Pipelined(3, workers, timeline=line)).build()
    )
    out = decoder.generate(PROMPTS, 12, seed=0)
    assert line.workers == ["target", "drafts"]
    for worker in line.workers:
        spans = sorted((s for s in line.spans if s.worker == worker), key=lambda s: s.began)
        assert all(a.ended <= b.began for a, b in pairwise(spans))
        assert all(s.began <= s.ended for s in spans)
    stages = {worker: {s.stage for s in line.spans if s.worker == worker} for worker in line.workers}
    assert stages == {"target": {"prefill", "verify"}, "drafts": {"prefill", "draft", "prepare"}}
    assert {s.micro_batch for s in line.spans} == {0, 1, 2}
    verified = [s for s in line.spans if s.stage == "verify"]
    drafted = [s for s in line.spans if s.stage == "draft"]
    assert len(verified) == len(drafted) == sum(len(r) > 0 for r in _rounds(decoder, out))
    for micro_batch in range(3):  # a micro-batch is drafted, then verified, then drafted
        turns = sorted(
            (s.began, s.ended, s.stage) for s in verified + drafted if s.micro_batch == micro_batch
        )
        assert [t[2] for t in turns] == ["draft", "verify"] * (len(turns) // 2)
        assert all(a[1] <= b[0] for a, b in pairwise(turns))
    assert all(0 < share <= 1 for share in line.busy().values())
    assert repr(line).startswith(f"Timeline({len(line.spans)} spans of target, drafts, ")

    line.chrome(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(line.spans)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["pid"] == 0 for e in events)
    named = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert sorted(named.values()) == ["drafts", "target"]
    assert {e["tid"] for e in events} == named.keys()
    line.plot(tmp_path / "line.png")
    line.plot(tmp_path / "part.png", (0.0, line.seconds / 2))
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
    line.clear()
    assert repr(line) == "Timeline(0 spans of no worker, 0.000 s)"
    assert line.seconds == 0
    assert line.busy() == {}
    line.plot(tmp_path / "empty.png")


def _rounds(decoder, out):
    """The rounds of a run that were not prefill, by micro-batch."""
    rounds: list[Any] = []
    decoder.generate(PROMPTS, 12, seed=0, on_round=lambda r: rounds.append(r.committed) if r.number else None)
    return rounds


def test_a_time_line_of_known_spans():
    line = Timeline()
    line.spans = [Span("target", "verify", 0, 10.0, 10.5), Span("drafts", "draft", 1, 10.25, 11.0)]
    assert line.seconds == 1.0
    assert line.busy() == {"target": 0.5, "drafts": 0.75}
    event = next(e for e in line.events() if e["name"] == "draft 1")
    assert (event["ts"], event["dur"], event["cat"]) == (250_000.0, 750_000.0, "draft")


def test_time_model_by_hand():
    model = TimeModel(draft=(1.0, 0.5), verify=(2.0, 0.25))
    assert (model.d(4), model.v(4)) == (3.0, 3.0)
    assert model.serial(8) == 5.0 + 4.0
    assert model.barrier(8, 2) == 3.0 + 3.0 + 3.0
    assert model.steady(8, 2) == 6.0
    assert model.steady(8, 1) == model.barrier(8, 1) == model.serial(8)
    assert model.steady(8, 4) == max(4 * 2.0, 4 * 2.5, 4.5)
    assert model.gain(8, 2) == 1.5
    with pytest.raises(ValueError, match="seconds are not negative"):
        TimeModel((-1.0, 0.0), (1.0, 0.0))


times = st.floats(0, 10).map(lambda x: round(x, 3))


@settings(max_examples=200, deadline=None)
@given(st.tuples(times, times), st.tuples(times, times), st.integers(1, 40), st.integers(1, 20))
def test_the_best_number_against_brute_force(draft, verify, batch, limit):
    model = TimeModel(draft, verify)
    best = model.best(batch, limit)
    every = [model.steady(batch, m) for m in range(1, min(limit, batch) + 1)]
    assert model.steady(batch, best) == min(every)
    assert every.index(min(every)) == best - 1


@settings(max_examples=100, deadline=None)
@given(st.tuples(times, times), st.tuples(times, times), st.sets(st.integers(1, 64), min_size=2))
def test_fit_recovers_a_line(draft, verify, sizes):
    model = TimeModel(draft, verify)
    found = TimeModel.fit(
        [(n, model.d(n), model.v(n)) for n in sizes for _ in range(3)] + [(n, 1e3, 1e3) for n in sizes]
    )
    assert found.d(32) == pytest.approx(model.d(32), rel=1e-6, abs=1e-7)
    assert found.v(7) == pytest.approx(model.v(7), rel=1e-6, abs=1e-7)


def test_fit_of_odd_samples():
    falling = TimeModel.fit([(1, 3.0, 1.0), (2, 2.0, 3.0), (4, 1.0, 9.0)])
    assert falling.draft[1] == 0.0
    assert 1.0 < falling.draft[0] < 3.0
    assert falling.verify[0] == 0.0
    with pytest.raises(ValueError, match="samples have 1 batch sizes: a line needs at least 2"):
        TimeModel.fit([(4, 1.0, 1.0)] * 3)
    with pytest.raises(ValueError, match="samples have 0 batch sizes"):
        TimeModel.fit([])


def test_tune(models):
    target, small, _ = models
    decoder = sd.decoder(target).draft(small, 3).build()
    tuned = tune(decoder, PROMPTS, 16, executor=Pipelined(barrier=True))
    assert 1 in tuned.observed
    assert all(speed > 0 for speed in tuned.observed.values())
    best = max(tuned.observed, key=lambda m: tuned.observed[m])
    expected = (
        Serial()
        if isinstance(tuned.executor, Serial)
        else Pipelined(tuned.executor.micro_batches, barrier=True)
    )
    assert tuned.executor == expected
    assert tuned.observed[getattr(tuned.executor, "micro_batches", 1)] <= tuned.observed[best]
    assert np.isfinite([*tuned.model.draft, *tuned.model.verify]).all()
    with pytest.raises(ValueError, match="prompts has one row: give at least 2"):
        profile(decoder, PROMPTS[:1])
    with pytest.raises(ValueError, match="prompts has one row: give at least 2"):
        tune(sd.decoder(target).draft(small, 3), PROMPTS[0])  # a builder, and one row of ids
