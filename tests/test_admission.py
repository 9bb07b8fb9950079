"""In which order requests join: by kind, nobody waits for ever, and the order changes no text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from test_serving import BUDGETS, PROMPTS, requests, same

import specdec as sd
from specdec.executors import Pipelined
from specdec.serving import Admission, ByKind, InOrder, Waiting
from specdec.serving.arrivals import Arrivals


def order(kinds, admission, rows=2):
    """The numbers of requests that are all there from the start, in the order in which they join; the oldest of so many rows ends when one joins."""
    arrivals = Arrivals([sd.Request([1], key=kind) for kind in kinds], admission, lambda: 0.0)
    taken = []
    while (due := arrivals.take(taken[-rows:])) is not None:
        taken.append(due.number)
    assert arrivals.over
    return taken


def key(request):
    return request.key


def test_first_come_first_served():
    assert order("abab", InOrder()) == [0, 1, 2, 3]


def test_kinds_join_one_after_another():
    assert order("abcabcab", ByKind(key)) == [0, 3, 6, 1, 4, 7, 2, 5]
    assert order("ababab", ByKind(key, held=2)) == [0, 2, 1, 3, 5, 4]  # each time two are looked at
    assert order("abbbab", ByKind(key, held=2)) == [0, 1, 2, 3, 5, 4]
    assert order(["a", None, "a"], ByKind(key)) == [0, 2, 1]


def test_where_none_of_the_last_kind_waits_that_of_most_rows_is_next():
    rule = ByKind(key)
    waiting = [Waiting("b", 0), Waiting("c", 0), Waiting("a", 0)]
    assert rule.next(waiting, ["a", "b", "a", "a", "c"], "c") == 1
    assert rule.next(waiting, ["a", "b", "a", "a", "d"], "d") == 2
    assert rule.next(waiting, [], "c") == 1  # also when its row has ended
    assert rule.next(waiting, ["d"], "d") == rule.next(waiting, [], None) == 0


def test_one_that_was_passed_often_comes_first_and_its_kind_goes_on():
    """Also with an endless stream of another."""
    assert order("aabaaabaaa", ByKind(key, patience=3)) == [0, 1, 3, 4, 5, 2, 6, 7, 8, 9]
    endless = (sd.Request([1], key="b" if n == 3 else "a") for n in itertools.count())
    arrivals = Arrivals(endless, ByKind(key, patience=5, held=8), lambda: 0.0)
    taken = [arrivals.take(range(100)).number for _ in range(11)]
    assert taken == [0, 1, 2, 4, 5, 6, 7, 8, 3, 9, 10]
    assert arrivals.taken <= 11 + 8


@pytest.mark.parametrize("patience", [7, 60])
def test_no_request_is_passed_more_often_than_patience_says(patience):
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(3, (400,), generator=generator).tolist()
    taken = order(kinds, ByKind(key, patience, held=400), rows=16)
    assert sorted(taken) == list(range(400))
    passed = [sum(other > number for other in taken[:i]) for i, number in enumerate(taken)]
    assert max(passed) == patience
    for i, number in enumerate(taken):  # those of one kind are in order of arrival
        assert all(n < number for n in taken[:i] if kinds[n] == kinds[number])
    changes = sum(kinds[a] != kinds[b] for a, b in itertools.pairwise(taken))
    assert changes < 3 * 400 / patience  # 267 in order of arrival


def test_only_those_that_have_arrived_are_held():
    time = 0.0
    some = [sd.Request([1], arrival=at, key=kind) for at, kind in ((0, "a"), (0, "b"), (1, "a"))]
    arrivals = Arrivals(some, ByKind(key), lambda: time)
    assert [arrivals.take(()).number, arrivals.take((0,)).number, arrivals.take((0, 1))] == [0, 1, None]
    assert not arrivals.over
    time = 1.0
    assert arrivals.take((0, 1)).number == 2
    assert arrivals.over


@pytest.mark.parametrize("executor", [None, Pipelined(2)])
def test_texts_do_not_depend_on_the_order(target, small, executor):
    base = sd.decoder(target).draft(small, length=2)
    alone = base.build().generate(PROMPTS, BUDGETS, seed=3)
    decoder = (base if executor is None else base.executor(executor)).build()
    admission = ByKind(lambda request: len(request.prompt) % 2)
    done = list(decoder.serve(requests(), 3, seed=3, clock="rounds", admission=admission))
    same(done, alone)
    joined = [one.index for one in sorted(done, key=lambda one: one.started)]
    assert executor is not None or joined != sorted(joined)


def test_nobody_sleeps_while_requests_wait(small):
    """All rows end at their prefill, and a request of another day is on its way."""
    decoder = sd.decoder(small).build()
    some = [sd.Request([1, 2], 1, key=n % 2) for n in range(6)] + [sd.Request([1, 2], 1, arrival=1000)]
    done = list(decoder.serve(some, 1, clock="rounds", admission=ByKind(key)))
    assert [one.index for one in done] == [0, 2, 4, 1, 3, 5, 6]
    assert [one.started for one in done] == [0] * 6 + [1000]


def test_a_rule_of_ones_own(small):
    @dataclass
    class Latest:
        """Last come, first served."""

        held: int = 8

        def kind(self, request):
            return None

        def next(self, waiting, running, last):
            return np.int64(len(waiting) - 1)

    assert isinstance(Latest(), Admission)
    decoder = sd.decoder(small).build()
    some = [sd.Request([1, 2], 3, key=n) for n in range(5)]
    done = list(decoder.serve(some, 1, clock="rounds", admission=Latest()))
    assert [one.index for one in done] == [4, 3, 2, 1, 0]


def test_what_cannot_choose_is_refused(small):
    decoder = sd.decoder(small).build()
    for wrong in (ByKind, len, 3):
        with pytest.raises(
            TypeError, match=r"^admission is .*: give serving\.ByKind\(kind\), or an object with"
        ):
            decoder.serve([], admission=wrong)
    with pytest.raises(TypeError, match=r"^kind is 3"):
        ByKind(3)
    with pytest.raises(ValueError, match=r"^patience is 0: give a number of requests"):
        ByKind(key, patience=0)
    with pytest.raises(ValueError, match=r"^held is 0: give a number of requests"):
        ByKind(key, held=0)

    for nothing in (0, False):
        with pytest.raises(TypeError, match=r"^admission is "):
            decoder.serve([], admission=nothing)
    with pytest.raises(ValueError, match=r"^held of the admission is 0"):
        decoder.serve([], admission=InOrder(held=0))
    unhashable = ByKind(lambda request: [request.key])
    with pytest.raises(TypeError, match=r"^the kind of request 0 is \[None\]: give what can be hashed"):
        list(decoder.serve([sd.Request([1], 2)], admission=unhashable))

    class Wrong(ByKind):
        def next(self, waiting, running, last):
            return len(waiting)

    with pytest.raises(
        ValueError, match=r"^admission chose request 1 of 1 that wait: next\(\) returns a position"
    ):
        list(decoder.serve([sd.Request([1], 2)], admission=Wrong(key)))
