"""Streams of requests: everybody's text is what it would be alone, whoever comes and goes."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec.audit.adversaries import AdversarialSelector, Adversary
from specdec.audit.catalogue import MENU
from specdec.executors import Optimistic
from specdec.serving import joined

PROMPTS = [[5], [7, 8, 9], [1, 2, 3, 4] * 6, [50] * 9, [3, 1], [90, 4, 5, 6], list(range(17)), [11, 12] * 5]
BUDGETS = [12, 3, 16, 1, 9, 14, 2, 13]
ARRIVALS = [0, 0, 2, 2, 3, 9, 30, 30.5]


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", 0), byte_tokenizer())


@pytest.fixture(scope="module")
def small():
    return sd.HFModel(tiny("llama", 0, num_hidden_layers=1), byte_tokenizer())


def requests(**settings):
    return [sd.Request(p, b, a, **settings) for p, b, a in zip(PROMPTS, BUDGETS, ARRIVALS)]


def drafts_of(small):
    @sd.chain_draft
    def spread(prefix):
        return torch.arange(97, dtype=torch.float64).roll(sum(prefix[-2:])) / 20

    return {
        "plain": sd.drafts.Nothing(),
        "model": sd.drafts.Model(small),
        "ngram": sd.drafts.NGram(),
        "tree": sd.drafts.Tree(small, (2, 1)),
        "function": spread,
    }


@pytest.mark.parametrize("capacity", [None, 60], ids=["growing", "whole"])
@pytest.mark.parametrize("name", ["plain", "model", "ngram", "tree", "function"])
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
    from specdec.models.cache import SlotCache

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


def test_what_cannot_be_served_is_refused_at_once(target, small):
    decoder = sd.decoder(target).draft(small).build()
    for wrong, message in (
        ({"limit": 0}, "limit is 0"),
        ({"clock": "sun"}, "'wall' .* or 'rounds'"),
        ({"capacity": 0}, "capacity is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.serve([], **wrong)
    with pytest.raises(ValueError, match="build with Serial"):
        sd.decoder(target).draft(small).executor(Optimistic()).build().serve([])
    with pytest.raises(ValueError, match="'adversary' cannot take in rows"):
        sd.decoder(sd.TableModel.random(3)).draft(Adversary(MENU), length=2).build().serve([])
    with pytest.raises(ValueError, match="'magicdec' cannot take in rows"):
        sd.decoder(target).draft(sd.drafts.MagicDec()).build().serve([])
    with pytest.raises(ValueError, match="arrival is -1"):
        sd.Request([1], arrival=-1)
    with pytest.raises(ValueError, match="arrival is nan"):
        sd.Request([1], arrival=float("nan"))
    with pytest.raises(ValueError, match="at least one finished"):
        sd.Summary.of([])
    assert list(decoder.serve([])) == []


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (sd.Request([1], 0), ValueError, "request 1: max_new_tokens is 0: it must be >= 1"),
        (sd.Request([1], 300), ValueError, "request 1: its prompt has 1 tokens .* 301 positions"),
        (sd.Request([], 3), ValueError, "request 1: prompts is empty"),
        (sd.Request([[1], [2]], 3), ValueError, "request 1: prompt holds 2 prompts"),
        (sd.Request([97], 3), ValueError, "request 1: its prompt has an id outside"),
        (sd.Request([1.5], 3), TypeError, "request 1"),
        (sd.Request([1] * 20, 20), ValueError, "request 1: 20 tokens, .* need 44 slots and capacity is 40"),
        ([1, 2], TypeError, "request 1 is a list: give Request"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_on_arrival(target, small, wrong, error, message):
    stream = (
        sd.decoder(target).draft(small, length=4).build().serve([sd.Request([1], 1), wrong], 1, capacity=40)
    )
    assert next(stream).index == 0
    with pytest.raises(error, match=message):
        next(stream)


def test_contexts_join_row_by_row():
    a, b = sd.Context.of([[1, 2], [3]], capacity=4), sd.Context.of([[5] * 6], request=torch.tensor([9]))
    both = joined([a, b])
    assert both.tokens.shape == (3, 6)
    assert [both.row(n) for n in range(3)] == [[1, 2], [3], [5] * 6]
    assert both.request.tolist() == [0, 1, 9]
    assert joined([a], 12).tokens.shape == (2, 12)
