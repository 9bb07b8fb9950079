"""Streams of requests: everybody's text is what it would be alone, whoever comes and goes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_pool import Script
from tiny import tiny

import specdec as sd
from specdec.audit.adversaries import AdversarialSelector, Adversary
from specdec.audit.catalogue import MENU
from specdec.drafts.stateless import Stateless
from specdec.executors import Optimistic, Pipelined, Serial, Timeline
from specdec.serving import server
from specdec.serving.server import Server, joined
from specdec.serving.settings import Settings

PROMPTS = [[5], [7, 8, 9], [1, 2, 3, 4] * 6, [50] * 9, [3, 1], [90, 4, 5, 6], list(range(17)), [11, 12] * 5]
BUDGETS = [12, 3, 16, 1, 9, 14, 2, 13]
ARRIVALS = [0, 0, 2, 2, 3, 9, 30, 30.5]


def requests(**settings):
    return [sd.Request(p, b, a, **settings) for p, b, a in zip(PROMPTS, BUDGETS, ARRIVALS)]


def drafts_of(small):
    @sd.chain_draft
    def spread(prefix):
        return torch.arange(97, dtype=torch.float64).roll(sum(prefix[-2:])) / 20

    return {
        "plain": sd.drafts.NoDraft(),
        "model": sd.drafts.Model(small),
        "ngram": sd.drafts.NGram(),
        "tree": sd.drafts.Tree(small, (2, 1)),
        "function": spread,
    }


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        *((name, None) for name in ("plain", "model", "ngram", "tree", "function")),
        *((name, 60) for name in ("model", "tree")),
        *(pytest.param(name, 60, marks=pytest.mark.slow) for name in ("plain", "ngram", "function")),
    ],
)
def test_a_stream_says_what_generate_says(target, small, name, capacity):
    verifier = sd.Rejection() if capacity else sd.Coupled()
    decoder = sd.decoder(target).draft(drafts_of(small)[name], length=2).verifier(verifier).build()
    settings = {"seed": 3, "eos_token_id": (7, 60)}
    alone = decoder.generate(PROMPTS, BUDGETS, **settings)
    for limit in (1, 3):
        done = list(decoder.serve(requests(), limit, clock="rounds", capacity=capacity, **settings))
        assert sorted(one.index for one in done) == list(range(8))
        for one in done:
            assert one.ids == alone.ids[one.index]
            assert one.finish == alone.finish[one.index]
            assert one.text == alone.texts[one.index]
            assert one.stats == alone.row_stats[one.index]


def test_a_requests_own_seed_is_generates(target, small):
    decoder = sd.decoder(target).draft(small, length=2).build()
    done = list(decoder.serve(requests(seed=11), 4, clock="rounds"))
    for one in done:
        alone = decoder.generate([PROMPTS[one.index]], BUDGETS[one.index], seed=11)
        assert one.ids == alone.ids[0]


@pytest.mark.parametrize(
    ("executor", "capacity"),
    [
        *((Serial(), 60), (Pipelined(2), None)),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((Serial(), None), (Pipelined(2), 60))),
    ],
)
def test_captured_steps_of_rows_that_come_and_go(executor, capacity):
    """Texts are those without graphs; in a cache for all rows, what was captured serves whoever joins."""
    said, seen = [], []
    for how in (False, "recorded"):
        target, small = (
            sd.HFModel(tiny("llama", 0, torch.float32, num_hidden_layers=n), graphs=how) for n in (2, 1)
        )
        decoder = sd.decoder(target).draft(small, 3).executor(executor).build()

        def note(round, steps=target.steps):
            if steps is not None:
                seen.append([{id(p) for p in s.programs.values()} for s in steps._storages if s.programs])

        served = decoder.serve(requests(), limit=4, seed=2, clock="rounds", capacity=capacity, on_round=note)
        said.append({one.index: one.ids for one in served})
        if how:
            assert target.steps.why is small.steps.why is None
            assert any(seen)
    assert said[0] == said[1]
    if capacity is not None:
        for before, after in pairwise(seen):
            assert all(any(old <= new for new in after) for old in before)


def test_without_seeds_torchs_generator_decides(target, small):
    decoder = sd.decoder(target).draft(small, length=2).build()

    def run(seed):
        torch.manual_seed(seed)
        return [one.ids for one in decoder.serve(requests(), 4, clock="rounds")]

    assert run(0) == run(0) != run(1)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_limit_holds_and_times_are_in_order(target, small, limit):
    """In every round; nobody starts before it is due, and nobody waits while a row is free."""
    decoder = sd.decoder(target).draft(small, length=2).build()
    flying, rounds = set(), []

    def watch(round):
        flying.update(round.context.request.tolist())
        assert len(flying) <= limit
        flying.difference_update(round.context.request[round.finished].tolist())
        rounds.append(round)

    done = list(decoder.serve(requests(), limit, seed=0, clock="rounds", on_round=watch))
    for one in done:
        assert one.arrived <= one.started <= one.first_token <= one.finished
    starts = [one.started for one in sorted(done, key=lambda one: one.index)]
    assert starts == sorted(starts)
    assert [one.finished for one in done] == sorted(one.finished for one in done)
    if limit == 5:
        assert all(one.queueing < 1 for one in done)
    assert max(round.context.batch for round in rounds) <= limit
    summary = sd.Summary.of(done)
    assert summary.requests == 8
    assert summary.tokens == sum(len(one.ids) for one in done)
    assert summary.throughput == pytest.approx(summary.tokens / summary.span)
    assert summary.latency["p50"] <= summary.latency["p95"] <= summary.latency["max"]


def test_an_endless_generator_is_taken_one_at_a_time(small):
    taken = []

    def forever():
        for n in itertools.count():
            taken.append(n)
            yield sd.Request([n % 97], 1 + n % 5, key=f"number {n}")

    stream = sd.decoder(small).build().serve(forever(), 3, seed=0, clock="rounds")
    assert taken == []
    some = list(itertools.islice(stream, 60))
    stream.close()
    assert len(taken) <= 64
    assert len({one.index for one in some}) == 60
    assert all(one.request.key == f"number {one.index}" and len(one.ids) == 1 + one.index % 5 for one in some)


def test_rows_that_finish_when_others_arrive_make_room(small):
    """One round ends some rows and the next begins with others in their place; caches do not grow for it."""
    decoder, batches = sd.decoder(small).build(), []
    many = [sd.Request([n], 4, arrival=3 * (n // 4)) for n in range(24)]
    done = list(
        decoder.serve(many, 4, seed=0, clock="rounds", on_round=lambda r: batches.append(r.context.batch))
    )
    assert [one.ids for one in done] == decoder.generate([[n] for n in range(24)], 4, seed=0).ids
    assert set(batches) == {4}
    assert all(one.queueing == 0 and one.latency == 3 for one in done)


def test_the_slots_of_rows_that_left_are_used_again(small):
    from specdec.cache.contiguous import SlotCache

    made = []
    original = SlotCache.__init__

    def counting(self, shapes, batch, capacity, spare=0):
        made.append((batch, capacity))
        original(self, shapes, batch, capacity, spare)

    decoder = sd.decoder(small).build()
    many = [sd.Request([n], 3 + n % 7, arrival=n) for n in range(30)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotCache, "__init__", counting)
        done = list(decoder.serve(many, 5, seed=0, clock="rounds", capacity=16))
    assert len(done) == 30
    assert made.count((5, 16)) == 1  # the others are for prefills


def test_requests_that_come_while_nobody_is_there(small):
    """The server sleeps until they are due."""
    late = [sd.Request([5], 2, arrival=0.0), sd.Request([6], 2, arrival=0.3), sd.Request([7], 2, arrival=0.3)]
    began = time.perf_counter()
    done = list(sd.decoder(small).build().serve(late, 2, seed=0))
    assert 0.3 <= time.perf_counter() - began < 5
    assert [one.index for one in done] == [0, 1, 2]
    assert done[0].finished < 0.3 <= done[1].started
    assert all(one.arrived <= one.started <= one.first_token <= one.finished for one in done)


def test_a_request_may_be_further_off_than_a_machine_sleeps(small, monkeypatch):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(server, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        list(sd.decoder(small).build().serve([sd.Request([5], 2, arrival=1e300)]))
    assert slept == [3600] * 3


@pytest.mark.parametrize("salt", [0, 1])
def test_selectors_see_requests_come_and_go(target, small, salt):
    arms = {"model": small, "ngram": sd.drafts.NGram(), "none": None}
    builder = sd.decoder(target).verifier(sd.Coupled())
    alone = builder.build().generate(PROMPTS, BUDGETS, seed=5)
    pool = builder.pool(arms, AdversarialSelector(salt), 3, capacities={"model": 2, "ngram": 1}).build()
    rounds = []
    done = list(pool.serve(requests(), 4, seed=5, clock="rounds", on_round=rounds.append))
    assert all(one.ids == alone.ids[one.index] for one in done)
    assert len({arm for round in rounds for arm in round.arm.tolist()}) == 3
    for round in rounds:
        if round.number:
            assert bool((torch.bincount(round.arm, minlength=3)[:2] <= torch.tensor([2, 1])).all())
    with pytest.raises(ValueError, match="capacities hold 3 rows"):
        builder.pool({"a": small}, AdversarialSelector(), capacities={"a": 3}).build().serve([], 4)


def test_stop_strings_and_texts(target, small):
    decoder = sd.decoder(target).draft(small, length=3).build()
    texts = ["abc", "hello there", "x"]
    alone = decoder.generate(texts, 30, seed=2, stop_strings=("e", "Q"))
    some = [sd.Request(text, 30, arrival=2 * n) for n, text in enumerate(texts)]
    for one in decoder.serve(some, 2, seed=2, clock="rounds", stop_strings=("e", "Q")):
        assert one.text == alone.texts[one.index]
        assert one.finish == alone.finish[one.index]
    assert "stop_string" in alone.finish


class Alone(sd.TableModel):
    """A model whose cache no row can join."""

    def cache(self, batch, capacity):
        return object()


def test_what_cannot_be_served_is_refused_at_once(target, small):
    decoder = sd.decoder(target).draft(small).build()
    for wrong, message in (
        ({"limit": 0}, "limit is 0"),
        ({"clock": "sun"}, "'wall' .* or 'rounds'"),
        ({"capacity": 0}, "capacity is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"eos_token_id": 97}, "^eos_token_id is 97"),
        ({"stop_strings": ""}, "^stop_strings contains an empty string"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.serve([], **wrong)
    with pytest.raises(TypeError, match=r"seed is \[1\]: give a whole number, from which every request gets"):
        decoder.serve([], seed=[1])
    with pytest.raises(
        ValueError, match=r"Optimistic.*build with Serial\(\), Pipelined\(micro_batches\) or Ahead\(\)"
    ):
        sd.decoder(target).draft(small).executor(Optimistic()).build().serve([])
    with pytest.raises(ValueError, match="'adversary' cannot take in rows"):
        sd.decoder(sd.TableModel.random(3)).draft(Adversary(MENU), length=2).build().serve([])
    for made, who in (
        (sd.decoder(Alone([0.4, 0.6])), "the target"),
        (sd.decoder(sd.TableModel([0.5, 0.5])).draft(Alone([0.4, 0.6])), "the model of draft 'model',"),
    ):
        with pytest.raises(
            ValueError, match=rf"{who} TableModel.* cannot take in rows .*its cache has no join"
        ):
            made.build().serve([])
    with pytest.raises(ValueError, match="arrival is -1"):
        sd.Request([1], arrival=-1)
    for never in ("nan", "inf"):
        with pytest.raises(ValueError, match=f"arrival is {never}"):
            sd.Request([1], arrival=float(never))
    with pytest.raises(ValueError, match="at least one finished"):
        sd.Summary.of([])
    assert list(decoder.serve([])) == []


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (sd.Request([1], 0), ValueError, "request 1: max_new_tokens is 0: give at least 1"),
        (sd.Request([1], 300), ValueError, "request 1: its prompt has 1 tokens .* 301 positions"),
        (sd.Request([], 3), ValueError, "request 1: its prompt is empty"),
        (sd.Request([[1], [2]], 3), ValueError, "request 1: prompt holds 2 prompts"),
        (sd.Request([97], 3), ValueError, "request 1: its prompt has an id outside"),
        (sd.Request([1.5], 3), TypeError, "request 1"),
        (sd.Request([1] * 20, 20), ValueError, "request 1: 20 tokens, .* need 44 slots and capacity is 40"),
        (sd.Request([1], 3, seed=-1), ValueError, "request 1: seed is -1"),
        ([1, 2], TypeError, "request 1 is a list: give Request"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_on_arrival(target, small, wrong, error, message):
    decoder = sd.decoder(target).draft(small, length=4).build()
    stream = decoder.serve(iter([sd.Request([1], 1), wrong]), 1, capacity=40)
    assert next(stream).index == 0
    with pytest.raises(error, match=message):
        next(stream)


def test_requests_are_in_the_order_of_their_arrival(small):
    decoder = sd.decoder(small).build()
    late, early = sd.Request([1], 2, arrival=5), sd.Request([2], 2, arrival=1)
    says = (
        "request 1: its arrival is 1 and that of the one before it 5: give requests in the order of arrival"
    )
    with pytest.raises(ValueError, match=says):
        decoder.serve([late, early], clock="rounds")
    with pytest.raises(ValueError, match=says):
        list(decoder.serve(iter([late, early]), clock="rounds"))
    with pytest.raises(TypeError, match="request 1 is a str: give Request"):
        decoder.serve([early, "text"], clock="rounds")
    with pytest.raises(TypeError, match="requests is a Request: give a list"):
        decoder.serve(early, clock="rounds")
    for name in ("limit", "capacity"):
        with pytest.raises(TypeError, match=rf"{name} is 2\.5: give a whole number"):
            decoder.serve([early], **{name: 2.5})


def test_contexts_join_row_by_row():
    a, b = sd.Context.of([[1, 2], [3]], capacity=4), sd.Context.of([[5] * 6], request=torch.tensor([9]))
    both = joined([a, b])
    assert both.tokens.shape == (3, 6)
    assert [both.row(n) for n in range(3)] == [[1, 2], [3], [5] * 6]
    assert both.request.tolist() == [0, 1, 9]
    assert joined([a], 12).tokens.shape == (2, 12)


# -- in a pipeline ---------------------------------------------------------------------------------------------------------

PIPES = {
    "threads": Pipelined(2),
    "three": Pipelined(3),
    "barrier": Pipelined(3, barrier=True),
    "processes": Pipelined(2, "processes"),
}


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not [t.name for t in threading.enumerate() if "specdec" in t.name]
    assert not multiprocessing.active_children()


def same(done, alone):
    assert sorted(one.index for one in done) == list(range(len(alone.ids)))
    for one in done:
        assert one.ids == alone.ids[one.index]
        assert one.finish == alone.finish[one.index]
        assert one.stats == alone.row_stats[one.index]


@pytest.fixture(scope="module")
def serial(target, small):
    """Takes a draft's name and a verifier; returns a decoder, settings of a run, and the run, which serial serving repeats."""

    @cache
    def run(name, verifier):
        base = sd.decoder(target).draft(drafts_of(small)[name], length=2).verifier(verifier)
        stop = base.build().generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids[2][7]
        settings: dict[str, Any] = {"seed": 3, "eos_token_id": stop}
        alone = base.build().generate(PROMPTS, BUDGETS, **settings)
        assert "eos" in alone.finish
        same(list(base.build().serve(requests(), 4, clock="rounds", **settings)), alone)
        return base, settings, alone

    return run


@pytest.mark.parametrize(
    ("how", "verifier"),
    [
        *(
            pytest.param(how, sd.Rejection(), marks=pytest.mark.slow if how in ("three", "barrier") else ())
            for how in PIPES
        ),
        *(
            pytest.param(how, sd.Coupled(), marks=() if how == "barrier" else pytest.mark.slow)
            for how in PIPES
        ),
    ],
)
def test_a_pipeline_serves_what_serial_serves(serial, verifier, how):
    for name in ("model", "ngram", "tree"):
        base, settings, alone = serial(name, verifier)
        decoder = base.executor(PIPES[how]).build()
        for limit, capacity in ((3, None), (5, 60)):
            done = list(decoder.serve(requests(), limit, clock="rounds", capacity=capacity, **settings))
            same(done, alone)
            for one in done:
                assert one.arrived <= one.started <= one.first_token <= one.finished


@pytest.mark.parametrize("how", PIPES)
def test_pages_are_served_in_a_pipeline(how):
    model, draft = (tiny("llama", 0, num_hidden_layers=n) for n in (2, 1))
    base = sd.decoder(sd.HFModel(model, page=16)).draft(sd.HFModel(draft, page=16), length=2)
    alone = sd.decoder(sd.HFModel(model)).draft(sd.HFModel(draft), length=2).build()
    expected = alone.generate(PROMPTS, BUDGETS, seed=3)
    decoder = base.executor(PIPES[how]).build()
    server, done = Server(decoder, decoder.executor, requests(), Settings(4, 3, clock="rounds")), []
    for one in server.run():
        done.append(one)
        assert len({id(place.micro_batch.cache.pool) for place in server.places if place.micro_batch}) <= 1
    same(done, expected)
    server = Server(decoder, decoder.executor, requests(), Settings(4, 3, clock="rounds", capacity=60))
    same(list(server.run()), expected)
    pools = {id(place.spare.pool): place.spare.pool for place in server.places}
    assert len(pools) == 1  # it serves all micro-batches, and in the end everything is there again
    (pool,) = pools.values()
    assert sorted(pool.free) == list(range(pool.pages))


@pytest.mark.parametrize("how", PIPES)
def test_a_pool_is_served_in_a_pipeline(target, small, how):
    arms = {"model": small, "ngram": sd.drafts.NGram(), "none": None}
    plain = sd.decoder(target).verifier(sd.Coupled())
    alone = plain.build().generate(PROMPTS, BUDGETS, seed=5)
    for ahead in (True, False):
        pool = plain.pool(arms, AdversarialSelector(1), 3, capacities={"model": 3, "ngram": 2})
        rounds = []
        decoder = pool.executor(replace(PIPES[how], ahead=ahead)).build()
        done = list(decoder.serve(requests(), 6, seed=5, clock="rounds", on_round=rounds.append))
        assert all(one.ids == alone.ids[one.index] for one in done)
        assert len(done) == 8
        assert len({arm for round in rounds for arm in round.arm.tolist()}) == 3
        for round in rounds:
            if round.number:
                assert bool((torch.bincount(round.arm, minlength=3)[:2] <= torch.tensor([3, 2])).all())
    # Arms that depend on nobody else are the serial executor's, and so is every number under Rejection.
    scripted = sd.decoder(target).pool(arms, Script(), 3)
    serial = scripted.build().generate(PROMPTS, BUDGETS, seed=5)
    piped = scripted.executor(replace(PIPES[how], ahead=False)).build()
    same(list(piped.serve(requests(), 4, seed=5, clock="rounds")), serial)


def test_arms_that_are_chosen_ahead_are_the_rows_own(target, small):
    """The first choice of rows that begin a micro-batch serves two rounds; rows that join it have made two when they are drafted first."""
    arms = {"model": small, "ngram": sd.drafts.NGram(), "none": None}
    decoder = sd.decoder(target).pool(arms, Script(), 3).executor(Pipelined(2)).build()
    served: dict[int, list[int]] = {}
    _, rounds = watched(decoder, requests(), 4, clock="rounds")
    for round in rounds:
        if round.number:
            for request, arm in zip(round.context.request.tolist(), round.arm.tolist()):
                served.setdefault(request, []).append(arm)
    began = 0
    for request, found in served.items():
        begins = [(max(n - 1, 0) + request) % 3 for n in range(len(found))]
        joins = [(n + request) % 3 for n in range(len(found))]
        assert found in (begins, joins)
        began += found == begins != joins
    assert 2 <= began < sum(len(found) > 1 for found in served.values())


def watched(decoder, requests, limit, **settings):
    """What is served, and the rounds."""
    rounds: list[Any] = []
    done = list(decoder.serve(requests, limit, seed=0, on_round=rounds.append, **settings))
    return done, rounds


def test_rows_are_spread_over_the_lanes(small):
    decoder = sd.decoder(small).executor(Pipelined(3)).build()
    done, rounds = watched(decoder, [sd.Request([n], 4) for n in range(7)], 20, clock="rounds")
    assert sorted(round.context.batch for round in rounds if not round.number) == [2, 2, 3]
    assert len(done) == 7
    late = [sd.Request([n], 9, arrival=n // 4) for n in range(40)]
    done, rounds = watched(decoder, late, 7, clock="rounds")
    assert max(round.context.batch for round in rounds) == 3
    flying = set()
    for round in rounds:
        flying.update(round.context.request.tolist())
        assert len(flying) <= 7
        flying.difference_update(round.context.request[round.finished].tolist())
    assert len(done) == 40


def test_a_round_of_every_lane_in_flight_is_one_of_the_clock(small):
    decoder = sd.decoder(small).executor(Pipelined(2)).build()
    done, _ = watched(decoder, [sd.Request([n], n) for n in (4, 4, 3, 6)], 4, clock="rounds")
    # Rows 0, 2 and 1, 3: halves while both micro-batches run, whole rounds from the end of the first micro-batch on.
    assert [(one.index, one.finished) for one in done] == [(2, 1.5), (0, 2.5), (1, 3.5), (3, 5.5)]


def test_a_pipeline_sleeps_only_when_nobody_is_there(small, monkeypatch):
    now, slept = [0.0], []

    def sleep(seconds):
        assert not server.scheduler.running
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("specdec.serving.server.sleep", sleep)
    monkeypatch.setattr("specdec.serving.server.perf_counter", lambda: now[0])
    decoder = sd.decoder(small).draft(small, length=1).executor(Pipelined(2)).build()
    late = [sd.Request([n], 4, arrival=time) for n, time in enumerate((0, 0, 2.5, 2.5, 2.5, 9))]
    server = Server(decoder, decoder.executor, late, Settings(4))
    done = list(server.run())
    assert slept == [2.5, 6.5]
    assert [one.started for one in sorted(done, key=lambda one: one.index)] == [0, 0, 2.5, 2.5, 2.5, 9]
    assert list(decoder.serve([], 2)) == []


def test_a_time_line_of_a_served_stream(target, small):
    line = Timeline()
    decoder = sd.decoder(target).draft(small, 2).executor(Pipelined(2, timeline=line)).build()
    _, rounds = watched(decoder, requests(), 4, clock="rounds")
    assert line.workers == ["target", "drafts"]
    for worker in line.workers:
        spans = sorted((s for s in line.spans if s.worker == worker), key=lambda s: s.began)
        assert all(a.ended <= b.began for a, b in pairwise(spans))
    stages = [s.stage for s in line.spans if s.worker == "target"]
    assert stages.count("verify") == sum(round.number > 0 for round in rounds)
    assert stages.count("prefill") == sum(round.number == 0 for round in rounds)


@dataclass(frozen=True)
class Reads:
    """A draft of nothing that has the target's cache in its state: it must be that of its rows whenever it is asked."""

    name = "reads"
    taps = (0,)

    def _see(self, cache, context):
        assert cache.batch == context.batch
        for b in range(context.batch):
            n = min(int(cache._lengths[b]), int(context.length[b]))
            assert n >= int(context.length[b]) - 1
            assert cache._tokens[b, :n].tolist() == context.row(b)[:n]

    def init(self, context, target_cache):
        self._see(target_cache, context)  # before rows leave it
        return target_cache

    def propose(self, state, context, budget, rng):
        self._see(state, context)
        return sd.Proposal.none(context.batch), state

    def observe(self, state, round):
        assert round.scores.fed is not None
        return state

    def select(self, state, rows):
        return None  # until it is told where they are

    def follow(self, state, target_cache):
        return target_cache

    def join(self, state, other):
        return None


def test_a_draft_that_reads_the_targets_cache_sees_its_own_rows(target):
    base = sd.decoder(target).draft(Reads(), length=2)
    alone = sd.decoder(target).build().generate(PROMPTS, BUDGETS, seed=3)
    for builder in (base, base.executor(Pipelined(2)), base.executor(Pipelined(3))):
        for capacity in (None, 60):
            done = list(builder.build().serve(requests(), 4, seed=3, clock="rounds", capacity=capacity))
            assert all(one.ids == alone.ids[one.index] for one in done)
    with pytest.raises(ValueError, match="draft 'reads' reads the target's cache"):
        base.executor(Pipelined(2, "processes")).build()


@dataclass
class Breaks(Stateless):
    """A draft of nothing that does something bad when rows join for the second time, or at once."""

    action: Any
    when: str = "join"
    joined: int = 0
    name = "breaks"

    def init(self, context, target_cache):
        if self.when == "init":
            self.action()

    def propose(self, state, context, budget, rng):
        return sd.Proposal.none(context.batch), None

    def join(self, state, other):
        self.joined += 1
        if self.joined == 2:
            self.action()


def boom():
    raise KeyError("no such luck")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["init", "join"])
def test_what_a_worker_raises_ends_the_stream(small, when):
    for how in PIPES.values():
        decoder = sd.decoder(small).draft(Breaks(boom, when), 2).executor(how).build()
        with pytest.raises(KeyError, match="no such luck"):
            list(decoder.serve([sd.Request([n], 9, arrival=n) for n in range(12)], 6, clock="rounds"))
    dying = sd.decoder(small).draft(Breaks(die, when), 2).executor(Pipelined(2, "processes")).build()
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"drafting worker died \(exit code -9\)"):
        list(dying.serve([sd.Request([n], 9, arrival=n) for n in range(12)], 6, clock="rounds"))
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("how", PIPES)
def test_a_consumer_that_stops_leaves_no_worker(small, how):
    def stop(round):
        if round.number == 2:
            raise ZeroDivisionError

    def left():
        return [t for t in threading.enumerate() if "specdec" in t.name] + multiprocessing.active_children()

    decoder = sd.decoder(small).draft(small, 2).executor(PIPES[how]).build()
    many = [sd.Request([n], 2 + n, arrival=n) for n in range(9)]
    decoder.serve(many, 4)  # never begun: there is nothing to stop
    for count in (1, 4):
        stream = decoder.serve(many, 4, clock="rounds", seed=0)
        assert len(list(itertools.islice(stream, count))) == count
        assert left()
        stream.close()
        assert not left()
    with pytest.raises(ZeroDivisionError):
        list(decoder.serve(many, 4, clock="rounds", on_round=stop))
    assert not left()
    wrong = decoder.serve([many[0], sd.Request([97], 3, arrival=1)], 4, clock="rounds", seed=0)
    with pytest.raises(ValueError, match="request 1: its prompt has an id outside"):
        list(wrong)
    assert not left()


def test_what_a_pipeline_cannot_serve(target, small):
    base = sd.decoder(target).executor(Pipelined(3))
    with pytest.raises(
        ValueError, match=r"micro_batches is 3 and limit is 2: .* use at most 2, or raise limit"
    ):
        base.draft(small).build().serve([], 2)
    with pytest.raises(ValueError, match="'adversary' cannot take in rows"):
        sd.decoder(sd.TableModel.random(3)).executor(Pipelined()).draft(Adversary(MENU), 2).build().serve([])
    alone = sd.decoder(target).executor(Pipelined()).build()  # two micro-batches where there is room for them
    assert [one.ids for one in alone.serve([sd.Request([5], 3)], 1, seed=0)] == alone.generate(
        [[5]], 3, seed=0
    ).ids
