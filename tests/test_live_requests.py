"""Sources of requests that have nothing now, and requests that are refused or cancelled."""

from __future__ import annotations

import subprocess
import sys
from threading import Event

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import zoo
from specdec.executors import Pipelined, Serial


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", 0))


@pytest.fixture(scope="module")
def small():
    return sd.HFModel(tiny("llama", 1))


def test_rows_go_on_while_the_source_has_nothing(target, small):
    rounds: list[int] = []

    def live():
        yield sd.Request([5, 6], 8, key="first")
        while len(rounds) < 4:
            yield None
        yield sd.Request([7], 4, key="second", arrival=None)

    decoder = sd.decoder(target).draft(small, length=2).build()
    done = list(
        decoder.serve(live(), 4, seed=0, clock="rounds", on_round=lambda round: rounds.append(round.number))
    )
    assert {one.request.key for one in done} == {"first", "second"}
    alone = decoder.generate([[5, 6], [7]], [8, 4], seed=0)
    assert all(one.ids == alone.ids[one.index] for one in done)
    second = next(one for one in done if one.request.key == "second")
    assert second.arrived > 0  # when it was taken
    assert second.queueing == 0


def test_an_idle_server_asks_its_source_again(target):
    asked = 0

    def live():
        nonlocal asked
        for _ in range(5):
            asked += 1
            yield None
        yield sd.Request([5], 2, arrival=None)

    (one,) = sd.decoder(target).build().serve(live(), 2, seed=0)
    assert asked == 5
    assert len(one.ids) == 2
    assert 0.001 < one.arrived <= one.started


@pytest.mark.parametrize("executor", [Serial(), Pipelined(2)])
def test_a_refused_request_is_yielded_and_the_others_go_on(target, small, executor):
    decoder = sd.decoder(target).draft(small, length=2).executor(executor).build()
    good = [sd.Request([5, 6], 8), sd.Request([7], 6, arrival=2)]
    bad = [
        sd.Request([], 3, arrival=1),
        sd.Request([10**6], 3, arrival=1),
        sd.Request([5], 10**6, arrival=1),
        sd.Request([5], 0, arrival=2),
    ]
    mixed = [good[0], *bad, good[1]]
    done = {one.index: one for one in decoder.serve(iter(mixed), 4, seed=0, clock="rounds", errors="yield")}
    assert [done[i].finish for i in range(6)] == ["length", "error", "error", "error", "error", "length"]
    for i in range(1, 5):
        assert not done[i].ids
        assert str(done[i].error).startswith(f"request {i}: ")
    alone = decoder.generate([good[0].prompt, *[[1]] * 4, good[1].prompt], [8, 1, 1, 1, 1, 6], seed=0)
    assert done[0].ids == alone.ids[0]
    assert done[5].ids == alone.ids[5]
    assert sd.Summary.of(done.values()).requests == 2
    with pytest.raises(ValueError, match="request 1: its prompt is empty"):
        list(decoder.serve(iter(mixed), 4, seed=0, clock="rounds"))
    with pytest.raises(ValueError, match="errors is 'ignore': give 'raise', or 'yield'"):
        decoder.serve(mixed, errors="ignore")


def test_any_error_of_a_request_is_yielded(target, small):
    decoder = sd.decoder(target).draft(small, length=2).build()

    class Prompt(list):
        def __iter__(self):
            raise RuntimeError("a template's own error")

    some = [sd.Request(Prompt([1]), 3), sd.Request([5], 3, arrival=None), sd.Request([6], 3)]
    done = {one.index: one for one in decoder.serve(some, 2, seed=0, errors="yield")}
    assert [done[i].finish for i in range(3)] == ["error", "length", "length"]
    assert "template's own" in str(done[0].error)


def test_a_cancelled_request_ends_with_what_it_has(target, small):
    stop = Event()
    decoder = sd.decoder(target).draft(small, length=2).build()
    late = Event()
    late.set()
    modes = set()

    def asked():
        modes.add(torch.is_inference_mode_enabled())
        return stop.is_set()

    requests = [
        sd.Request([5, 6], 40, cancelled=asked),
        sd.Request([7], 12),
        sd.Request([8], 5, cancelled=late.is_set, arrival=1),
    ]

    def watch(round):
        if round.number == 3:
            stop.set()

    done = {one.index: one for one in decoder.serve(requests, 3, seed=0, clock="rounds", on_round=watch)}
    alone = decoder.generate([[5, 6], [7]], [40, 12], seed=0)
    assert done[0].finish == "cancelled"
    assert 3 <= len(done[0].ids) < 40
    assert done[0].ids == alone.ids[0][: len(done[0].ids)]
    assert done[1].ids == alone.ids[1]
    assert (done[2].finish, done[2].ids) == ("cancelled", [])
    assert modes == {False}  # the user's code is not in inference mode


def test_the_users_code_is_not_in_inference_mode(target):
    seen = []

    def source():
        seen.append(torch.is_inference_mode_enabled())
        yield sd.Request([5], 3)

    decoder = sd.decoder(target).build()
    for _ in decoder.serve(source(), on_round=lambda _: seen.append(torch.is_inference_mode_enabled())):
        seen.append(torch.is_inference_mode_enabled())
    assert len(seen) > 3
    assert not any(seen)


def test_what_a_request_may_not_have():
    with pytest.raises(TypeError, match="seed is"):
        sd.Request([1], 3, seed="x")
    with pytest.raises(TypeError, match="cancelled is True: give a function"):
        sd.Request([1], 3, cancelled=True)
    with pytest.raises(TypeError, match="on_chunk is 'print': give a function"):
        sd.Request([1], 3, on_chunk="print")


@pytest.mark.parametrize("executor", [Serial(), Pipelined(2)])
def test_a_request_may_have_stops_of_its_own(target, small, executor):
    decoder = sd.decoder(target).draft(small, length=3).executor(executor).build()
    serial, prompts = sd.decoder(target).draft(small, length=3).build(), [[5, 6], [7], [8], [9, 2]]
    alone = [serial.generate([p], 30, seed=3, eos_token_id=()).ids[0] for p in prompts]
    own = [(), alone[1][4], (alone[2][7], alone[2][2]), None]  # of the last: what the stream says
    stream = alone[3][5]
    requests = [sd.Request(p, 30, seed=3, eos_token_id=eos) for p, eos in zip(prompts, own)]
    done = {one.index: one for one in decoder.serve(requests, 3, eos_token_id=stream, clock="rounds")}
    for i, ends in enumerate([set(), {own[1]}, set(own[2]), {stream}]):
        expected = next((alone[i][:n] for n in range(1, 31) if alone[i][n - 1] in ends), alone[i])
        assert done[i].ids == expected
        assert done[i].finish == ("eos" if expected[-1] in ends else "length")
    assert len(done[0].ids) == 30 > len(done[1].ids)


def test_a_request_may_have_strings_of_its_own():
    target, draft = (sd.HFModel(*zoo.load(name)) for name in ("pocket-target", "pocket-140k"))
    decoder = sd.decoder(target).draft(draft, length=3).sampling(temperature=0).build()
    text = decoder.generate("import os\n", 24).texts[0]
    middle = text[len(text) // 2 :][:3]
    requests = [
        sd.Request("import os\n", 24, stop_strings=middle),
        sd.Request("import os\n", 24),
        sd.Request("import os\n", 24, stop_strings=()),
    ]
    done = {one.index: one for one in decoder.serve(requests, 3, stop_strings=[text[2:6]], seed=0)}
    assert [done[i].finish for i in range(3)] == ["stop_string", "stop_string", "length"]
    assert middle in done[0].text
    assert text[2:6] in done[1].text
    assert len(done[1].ids) < len(done[0].ids) < 24 == len(done[2].ids)
    bad = sd.Request("import os\n", 4, stop_strings=[""])
    (refused,) = decoder.serve([bad], errors="yield")
    assert str(refused.error).startswith("request 0: stop_strings contains an empty string")
    with pytest.raises(ValueError, match="request 0: eos_token_id"):
        list(decoder.serve([sd.Request("a", 4, eos_token_id=10**6)]))


@pytest.mark.parametrize("executor", [Serial(), Pipelined(2)])
def test_chunks_of_a_request_are_its_text(executor):
    target, draft = (sd.HFModel(*zoo.load(name)) for name in ("pocket-target", "pocket-140k"))
    decoder = sd.decoder(target).draft(draft, length=3).executor(executor).build()
    chunks, modes = {}, set()

    def see(chunk):
        modes.add(torch.is_inference_mode_enabled())
        chunks.setdefault(chunk.row, []).append(chunk)

    texts = ["naïve — ", "import os\n", "x = '日本"]
    requests = [sd.Request(text, 9 + 3 * n, on_chunk=see if n else None) for n, text in enumerate(texts)]
    done = {one.index: one for one in decoder.serve(requests, 2, seed=0)}
    assert sorted(chunks) == [1, 2]
    assert modes == {False}
    for index, some in chunks.items():
        assert "".join(chunk.text for chunk in some) == done[index].text
        assert [token for chunk in some for token in chunk.ids] == done[index].ids
        assert [chunk.finish for chunk in some] == [None] * (len(some) - 1) + [done[index].finish]
        assert len(some) > 2


@pytest.mark.parametrize("what", ["on_chunk", "cancelled"])
def test_a_client_that_has_gone_ends_its_own_request_alone(target, small, what):
    asked = []

    def gone(*chunk):
        asked.append(chunk)
        if len(asked) == 3:
            raise BrokenPipeError("nobody reads")

    decoder = sd.decoder(target).draft(small, length=2).build()
    requests = [sd.Request([5, 6], 20, **{what: gone}), sd.Request([7], 12)]
    done = {one.index: one for one in decoder.serve(requests, 2, seed=0, errors="yield")}
    alone = decoder.generate([[5, 6], [7]], [20, 12], seed=0)
    assert done[1].ids == alone.ids[1]
    assert done[0].finish == "error"
    assert str(done[0].error) == "nobody reads"
    assert 0 < len(done[0].ids) < 20
    assert done[0].ids == alone.ids[0][: len(done[0].ids)]
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(BrokenPipeError):
        list(decoder.serve(requests, 2, seed=0))


def test_chunks_without_a_tokenizer_have_ids(target):
    chunks = []
    (one,) = sd.decoder(target).build().serve([sd.Request([5], 3, on_chunk=chunks.append)])
    assert [chunk.text for chunk in chunks] == [None] * 3
    assert [token for chunk in chunks for token in chunk.ids] == one.ids


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_stream_left_open_at_the_end_of_a_program_is_quiet(tmp_path, workers):
    script = tmp_path / "left_open.py"
    script.write_text(
        "import specdec as sd\n"
        "from specdec.executors import Pipelined\n"
        "target, small = (sd.TableModel.random(6, 1, seed=s) for s in (0, 1))\n"
        f"decoder = sd.decoder(target).draft(small, 2).executor(Pipelined(2, workers={workers!r})).build()\n"
        "served = decoder.serve([sd.Request([i], 50) for i in range(4)], 4, seed=0)\n"
        "stream = decoder.stream([[1], [2]], 50, seed=0)\n"
        "for _ in range(3):\n    next(stream)\n"
        "next(served)\n"
        "print('done')\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "done\n"
    assert ran.stderr == ""


def test_a_request_without_a_temperature_is_refused_alone(target):
    decoder = sd.decoder(target).sampling(temperature=[0, 1.0]).build()
    requests = [sd.Request([5, n], 4) for n in range(3)]
    done = {one.index: one for one in decoder.serve(requests, 2, seed=0, errors="yield")}
    assert [done[n].finish for n in range(3)] == ["length", "length", "error"]
    assert "request 2: temperature has 2 entries" in str(done[2].error)
    with pytest.raises(ValueError, match="request 2: temperature has 2 entries"):
        list(decoder.serve(requests, 2, seed=0))


@pytest.mark.parametrize("executor", [Serial(), Pipelined(2)], ids=["serial", "pipelined"])
def test_a_request_whose_cache_does_not_fit_is_yielded(target, small, executor, monkeypatch):
    own = target.cache

    def cache(batch, capacity):
        if capacity > 60:
            raise MemoryError("too large")
        return own(batch, capacity)

    monkeypatch.setattr(target, "cache", cache)
    decoder = sd.decoder(target).draft(small, length=2).executor(executor).build()
    requests = [
        sd.Request([5], 9),
        sd.Request([6], 9, arrival=1),
        sd.Request([7], 100, arrival=1),
        sd.Request([8], 9, arrival=1),
    ]
    done = {one.index: one for one in decoder.serve(requests, 4, seed=0, clock="rounds", errors="yield")}
    assert [done[n].finish for n in range(4)] == ["length", "length", "error", "length"]
    assert str(done[2].error) == "too large"
    alone = decoder.generate([[5], [6], [7], [8]], 9, seed=0)
    assert all(done[n].ids == alone.ids[n] for n in (0, 1, 3))
    with pytest.raises(MemoryError, match="too large"):
        list(decoder.serve(requests, 4, seed=0, clock="rounds"))


def test_arrivals_may_be_numbers_of_numpy(target):
    requests = [sd.Request([5], 2, arrival=np.float32(0.5)), sd.Request([6], 2, arrival=np.float32(7.5))]
    done = list(sd.decoder(target).build().serve(requests, 2, seed=0, clock="rounds"))
    assert [one.arrived for one in done] == [0.5, 7.5]
