"""Requests join and leave a batch of ``Ahead``: each has the text of ``generate`` and the rounds of ``Serial``, recorded on the CPU."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import test_ahead
import test_ahead_head_trees
import test_ahead_heads
import test_ahead_trees
import test_ahead_windowed
import torch
from tiny import tiny

import specdec as sd
from specdec.cache.paged import PagePool
from specdec.drafts.heads import Medusa
from specdec.executors import Ahead, Serial, whole_rounds
from specdec.executors.whole_rounds import Rounds
from specdec.graphs.whole_round import WholeRound

PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 4], [9, 9, 4, 2, 7, 7, 1], [11, 12, 1], [8, 1, 8], [2, 2, 2, 2], [7, 3, 5]]
BUDGETS = [23, 4, 40, 1, 17, 9, 31]
KINDS = [
    "model",
    "spire",
    None,
    "windowed",
    "magicdec",
    "eagle3",
    "window",
    "dflash",
    "medusa",
    "tree",
    "head's tree",
]


def builder_of(kind, graphs="eager"):
    """Chains of 3."""
    if kind in ("windowed", "magicdec"):
        return test_ahead_windowed.builder_of(kind, graphs)
    if kind == "medusa":
        target = sd.HFModel(tiny("llama"), graphs=graphs)
        return sd.decoder(target).draft(sd.drafts.Head(Medusa.from_target(target, heads=3), graphs=graphs), 3)
    if kind == "tree":
        return test_ahead_trees.builder_of(graphs=graphs)
    if kind == "head's tree":
        return test_ahead_head_trees.builder_of(graphs=graphs).sampling(temperature=5.0)
    if kind in ("model", "spire", None):
        return test_ahead.builder_of(kind, graphs)
    return test_ahead_heads.builder_of(kind, graphs)


def served(decoder, requests, **settings):
    """Ids and counts of every request, by its number."""
    done = sorted(decoder.serve(requests, seed=3, eos_token_id=(), **settings), key=lambda one: one.index)
    return [(one.ids, one.finish, one.stats.rounds, one.stats.drafted, one.stats.accepted) for one in done]


def requests(arrivals=None, prompts=PROMPTS, budgets=BUDGETS):
    arrivals = arrivals or [0] * len(prompts)
    return [sd.Request(p, b, arrival=at) for p, b, at in zip(prompts, budgets, arrivals)]


def same(make, asked, **settings):
    """What both executors serve, and what ``generate`` says; ``make`` a builder for each, or one would lend the other its memory, grown already."""
    serial, ahead = (make().executor(e).build() for e in (Serial(), Ahead()))
    one, other = (served(decoder, asked, **settings) for decoder in (serial, ahead))
    assert other == one
    prompts, budgets = zip(*((r.prompt, r.max_new_tokens) for r in asked))
    whole = serial.generate(list(prompts), list(budgets), seed=3, eos_token_id=())
    assert [ids for ids, *_ in other] == whole.ids


@pytest.mark.parametrize("capacity", [None, pytest.param(96, marks=pytest.mark.slow)])
@pytest.mark.parametrize("graphs", ["eager", pytest.param("recorded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_says_what_generate_says(kind, graphs, capacity):
    same(
        lambda: builder_of(kind, graphs).sampling(temperature=1.0),
        requests([0, 0, 0, 1, 1, 5, 30]),
        limit=3,
        clock="rounds",
        capacity=capacity,
    )


@pytest.mark.parametrize("kind", ["model", "spire", "magicdec", "eagle3"])
def test_with_a_capacity_captured_rounds_outlive_pauses_and_streams(monkeypatch, kind):
    """Seven requests with a pause, three times; what occurs for the first time is captured when it occurs again."""
    capture, made = WholeRound.capture, []
    monkeypatch.setattr(
        WholeRound, "capture", lambda self, how: (made.append(self.shape), capture(self, how))[1]
    )
    decoder = builder_of(kind, "recorded").executor(Ahead()).build()
    asked, counts = requests([0, 2, 3, 3, 4, 90, 95]), []
    for _ in range(3):
        served(decoder, asked, limit=3, clock="rounds", capacity=96)
        counts.append(len(made))
    assert counts[0] == len(set(made)) > 0
    assert counts[2] == counts[1] == len(set(made))


@pytest.mark.parametrize("drafted", [False, True, "tree"])
def test_a_target_in_pages(drafted):
    def make():
        target = sd.HFModel(tiny("llama"), graphs="eager", page=8)
        builder = sd.decoder(target).verifier(sd.Coupled())
        small = sd.HFModel(tiny("llama", 1), graphs="eager")
        draft = sd.drafts.Tree(small, (3, 2, 2)) if drafted == "tree" else small
        return builder.draft(draft, 3) if drafted else builder

    same(make, requests(), limit=2)
    same(make, requests([0, 0, 0, 3, 4, 5, 6]), limit=4, clock="rounds")


@pytest.mark.parametrize("kind", [None, "windowed", "medusa", "model", "spire"])
def test_caches_grow_when_rows_and_longer_requests_join(monkeypatch, kind):
    monkeypatch.setattr(whole_rounds, "SHORTEST", 16)
    budgets = [12, 12, 12, 9, 30, 90, 60]
    same(lambda: builder_of(kind), requests([0, 0, 0, 3, 5, 8, 12], budgets=budgets), limit=5, clock="rounds")


def test_a_batch_that_begins_anew_is_launched_ahead_again(monkeypatch):
    """A request arrives while the last row of the batch ends."""
    launch, said = Rounds._launch, []
    monkeypatch.setattr(Rounds, "_launch", lambda self, fresh: (said.append(fresh), launch(self, fresh))[1])
    decoder = builder_of(None).executor(Ahead()).build()
    for arrival in range(4, 10):
        said.clear()
        list(
            decoder.serve(
                requests([0, arrival], PROMPTS[:2], [8, 30]), limit=2, clock="rounds", eos_token_id=()
            )
        )
        assert said.count(False) > 20, arrival


def test_rounds_are_launched_ahead_while_nobody_waits(monkeypatch):
    launch, said = Rounds._launch, []
    monkeypatch.setattr(Rounds, "_launch", lambda self, fresh: (said.append(fresh), launch(self, fresh))[1])
    decoder, joined = builder_of("model").executor(Ahead()).build(), []
    asked = requests([0, 6], PROMPTS[:2], [40, 12])

    def note(round):
        joined.append(round.context.batch)

    list(decoder.serve(asked, limit=2, seed=3, clock="rounds", eos_token_id=(), on_round=note))
    assert said.count(False) > 5
    # The round in flight when the second request arrives is the only one that it waits for.
    assert joined.index(2) <= 6 + 3


def test_two_streams_and_a_call_between_each_other():
    decoder = builder_of("model").executor(Ahead()).build()
    expected = [served(decoder, requests(), limit=limit) for limit in (2, 3)]
    streams = [decoder.serve(requests(), limit=limit, seed=3, eos_token_id=()) for limit in (2, 3)]
    found = [{}, {}]
    for pair in zip(*streams, strict=True):
        alone = decoder.generate(PROMPTS[:2], 9, seed=3, eos_token_id=()).ids
        for kept, one in zip(found, pair):
            kept[one.index] = one.ids
    assert alone == decoder.generate(PROMPTS[:2], 9, seed=3, eos_token_id=()).ids
    assert [[kept[i] for i in sorted(kept)] for kept in found] == [[ids for ids, *_ in e] for e in expected]


def test_a_consumer_that_stops_can_begin_again():
    decoder = builder_of("spire").executor(Ahead()).build()
    expected = served(decoder, requests(), limit=2)
    stream = decoder.serve(requests(), limit=2, seed=3, eos_token_id=())
    next(stream)
    stream.close()
    assert served(decoder, requests(), limit=2) == expected


def test_one_that_is_cancelled_or_stops_leaves():
    decoder, ends = builder_of("eagle3").executor(Ahead()).build(), []
    asked = [
        *requests(None, PROMPTS[:3], [40, 20, 20]),
        sd.Request([4, 4], 60, cancelled=lambda: len(ends) > 2),
    ]
    free = served(decoder, requests(None, PROMPTS[:1], [40]), limit=1)[0][0]
    asked[0] = sd.Request(PROMPTS[0], 40, eos_token_id=free[7])
    done = {}
    for one in decoder.serve(asked, limit=2, seed=3, eos_token_id=()):
        ends.append(one.index)
        done[one.index] = one
    assert done[0].finish == "eos"
    assert done[0].ids == free[: free.index(free[7]) + 1]
    assert done[3].finish == "cancelled"
    assert 0 < len(done[3].ids) < 60


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 40))])
def test_random_streams(seed):
    pick = random.Random(seed)
    kind = pick.choice(KINDS)
    count = pick.randint(2, 9)
    largest = 15 if kind == "head's tree" else 96  # the last id of its vocabulary
    prompts = [[pick.randint(0, largest) for _ in range(pick.randint(3, 12))] for _ in range(count)]
    budgets = [pick.choice([1, 2, 3, 7, 20, 40]) for _ in range(count)]
    arrivals = sorted(pick.choice([0, 0, 1, 4, 9, 25]) for _ in range(count))
    temperature = pick.choice([0.0, 1.0])
    verifier = pick.choice([sd.Rejection(), sd.Coupled(), sd.verifiers.FusedRejection()])
    capacity = pick.choice([None, 80])
    same(
        lambda: builder_of(kind).sampling(temperature=temperature).verifier(verifier),
        requests(arrivals, prompts, budgets),
        limit=pick.randint(1, 4),
        clock="rounds",
        capacity=capacity,
    )


OWN = [
    sd.Sampling(0.0),
    None,
    sd.Sampling(0.7, top_k=5),
    sd.Sampling(1.3, top_p=0.8),
    sd.Sampling(0.0, top_p=0.3),
    sd.Sampling(2.0, top_k=9, top_p=0.9, min_p=0.05),
    sd.Sampling(1.0, min_p=0.3),
]


@pytest.mark.parametrize("verifier", [sd.Rejection(), pytest.param(sd.Coupled(), marks=pytest.mark.slow)])
@pytest.mark.parametrize("graphs", ["eager", pytest.param("recorded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tree"])
def test_requests_have_samplings_of_their_own(kind, graphs, verifier):
    decoders = [
        builder_of(kind, graphs).sampling(temperature=0.5, top_k=11).verifier(verifier).executor(e).build()
        for e in (Serial(), Ahead())
    ]
    asked = requests([0, 0, 2, 3, 5, 5, 8])
    asked = [replace(one, sampling=own) for one, own in zip(asked, OWN)]
    one, other = (served(d, asked, limit=3, clock="rounds", own_sampling=True) for d in decoders)
    assert other == one
    alone = builder_of(kind).sampling(temperature=0).build()
    assert one[0][0] == alone.generate([PROMPTS[0]], BUDGETS[0], eos_token_id=()).ids[0]


@pytest.mark.parametrize("verifier", [sd.Rejection(), sd.Coupled()])
def test_lists_of_settings(verifier):
    lists = {"temperature": [0.0, 1.0, 2.0], "top_k": [None, 3, 2**70], "top_p": [0.9, None, 0.7]}
    builder = builder_of("model").verifier(verifier).sampling(**lists)
    found = [builder.executor(e).build().generate(PROMPTS[:3], 30, seed=2).ids for e in (Serial(), Ahead())]
    assert found[0] == found[1]


@pytest.mark.parametrize("own", [sd.Sampling(0.4, top_k=7), sd.Sampling(0.0)])
def test_a_draft_keeps_a_sampling_of_its_own(own):
    target, small = (sd.HFModel(tiny("llama", n), graphs="eager") for n in (0, 1))
    builder = sd.decoder(target).draft(sd.drafts.Model(small, sampling=own), 3)
    asked = [replace(one, sampling=sampling) for one, sampling in zip(requests(), OWN)]
    one, other = (
        served(builder.executor(e).build(), asked, limit=3, clock="rounds", own_sampling=True)
        for e in (Serial(), Ahead())
    )
    assert other == one


def test_steps_do_not_change_with_every_request(monkeypatch):
    """Once a row had a truncation, rows without one run in the same step."""
    shapes, made = set(), Rounds._made
    monkeypatch.setattr(
        Rounds,
        "_made",
        lambda self, shape, update: (shapes.add(shape.sampling), made(self, shape, update))[1],
    )
    decoder = builder_of("model").executor(Ahead()).build()
    asked = [replace(one, sampling=sampling) for one, sampling in zip(requests(), OWN * 2)]
    list(decoder.serve([*asked, *asked], 1, seed=3, own_sampling=True, eos_token_id=()))
    assert len(shapes) <= 5


def test_samplings_that_no_step_computes_are_refused(monkeypatch):
    for length in (2, 4):  # of two children of one token
        target = sd.HFModel(tiny("llama"), graphs="eager")
        tree = sd.drafts.Tree(sd.HFModel(tiny("llama", 1), graphs="eager"), (2,))
        builder = sd.decoder(target).draft(tree, length).executor(Ahead())
        with pytest.raises(ValueError, match="here each has its own"):
            builder.sampling(temperature=[0.5, 1.0]).build()
    decoder = builder_of("model").executor(Ahead()).build()
    asked = [
        sd.Request([5, 6, 7], 9, sampling=sd.Sampling(processors=(lambda ids, scores: scores,))),
        sd.Request([5, 6, 7], 9, sampling=sd.Sampling(0.3)),
    ]
    done = {one.index: one for one in decoder.serve(asked, own_sampling=True, errors="yield", seed=3)}
    assert "processors or a grammar" in str(done[0].error)
    assert done[1].finish == "length"
    with pytest.raises(ValueError, match="request 0: its sampling has processors"):
        list(decoder.serve(asked, own_sampling=True, seed=3))


def test_a_request_whose_text_has_no_pages_is_refused_alone(monkeypatch):
    """A pool of 12 pages at most. Its prompt fits, its end does not."""
    short = PagePool._short
    monkeypatch.setattr(
        PagePool, "_short", lambda self, n: (torch.device("cpu"), 1, 12) if n > 12 else short(self, n)
    )
    decoder = sd.decoder(sd.HFModel(tiny("llama"), graphs="eager", page=8)).executor(Ahead()).build()
    asked = requests([0, 3, 6], PROMPTS[:3], [30, 80, 20])
    done = list(decoder.serve(asked, limit=2, clock="rounds", errors="yield", seed=3, eos_token_id=()))
    found = {one.index: one for one in done}
    assert [found[i].finish for i in range(3)] == ["length", "error", "length"]
    assert isinstance(found[1].error, MemoryError)
    alone = decoder.generate(PROMPTS[:3], [30, 80, 20], seed=3, eos_token_id=(), batch_size=1).ids
    assert [found[0].ids, found[2].ids] == [alone[0], alone[2]]


@pytest.mark.parametrize("executor", [Ahead(), Serial()], ids=["ahead", "serial"])
def test_a_stream_lets_go_of_its_memory_at_once(executor):
    """Whether it ends or is left, and before the garbage collector runs."""
    decoder = builder_of("model", "recorded").executor(executor).build()
    steps = decoder.target.steps
    gc.disable()
    try:
        for left in (True, False, True):
            stream = decoder.serve(requests(), limit=3, capacity=96, seed=3, eos_token_id=())
            next(stream)
            assert not all(storage.free for storage in steps._storages)
            stream.close() if left else list(stream)
            del stream
            assert all(storage.free for storage in steps._storages)
    finally:
        gc.enable()


def test_errors_that_are_kept_hold_no_memory():
    """Of an own processor, of an own ``on_chunk``, and of a request that is refused: what is kept says where it was raised, and no more."""

    def breaks(ids, scores):
        if len(ids[0]) > 8:
            raise KeyError("no such token")
        return scores

    def raises(chunk):
        raise OSError("gone")

    decoder = builder_of("model", "recorded").executor(Serial()).build()
    steps = decoder.target.steps
    asked = [
        sd.Request([5, 6, 7], 20, sampling=sd.Sampling(processors=(breaks,))),
        sd.Request([3, 4, 4], 9, on_chunk=raises),
        sd.Request([], 9),
        sd.Request([9, 9], 9),
    ]
    gc.disable()
    try:
        done = list(decoder.serve(asked, capacity=96, seed=3, errors="yield", own_sampling=True))
        assert all(storage.free for storage in steps._storages)
    finally:
        gc.enable()
    kinds = {one.index: type(one.error) for one in done}
    assert kinds == {0: KeyError, 1: OSError, 2: ValueError, 3: type(None)}
    assert all(one.error.__traceback__ is None for one in done if one.error)
    assert any("in breaks" in note for one in done if one.index == 0 for note in one.error.__notes__)
