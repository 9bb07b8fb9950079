"""Processes that share a batch give what one process gives; and what each of them is given."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_training import trained_with_clipping
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec import distributed, selectors
from specdec.distributed import generate, joined, shares, total
from specdec.drafts.stateless import Stateless
from specdec.stats import Stats

PROMPTS = [[5, 6], [7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 2, [50] * 9, [3, 1, 3, 1, 3]]
BUDGETS = [14, 1, 9, 12, 2]


def decoders():
    target, small = (sd.HFModel(tiny("llama", 0, num_hidden_layers=n), byte_tokenizer()) for n in (2, 1))
    base = sd.decoder(target)
    pool = base.pool({"model": small, "ngram": sd.drafts.NGram(), "none": None}, selectors.Random(), 3)
    return {
        "model": base.draft(small, 3).build(),
        "tree, in a pipeline": base.draft(sd.drafts.Tree(small, (2, 1)), 2)
        .executor(sd.executors.Pipelined())
        .build(),
        "pool": pool.verifier(sd.Coupled()).build(),
    }


def runs(generate):
    """Everything that is compared: (name, result)."""
    out = {}
    for name, decoder in decoders().items():
        out[name] = generate(decoder, PROMPTS, BUDGETS, seed=3)
        out[f"{name}, stops"] = generate(decoder, PROMPTS, 12, seed=list(range(5)), eos_token_id=[5, 40, 77])
        out[f"{name}, one prompt"] = generate(decoder, ["a text"], 9, seed=1, stop_strings="x")
    return out


class Broken(Stateless):
    """A draft that fails for one prompt."""

    def init(self, context, target_cache):
        if 50 in context.tokens:
            raise KeyError("fifty")

    def propose(self, state, context, budget, rng):
        return sd.Proposal.none(context.batch), None


def process(folder):
    """What each process of the launched script does."""
    from accelerate import PartialState

    own = []
    alone = sd.Decoder.generate

    def noted(decoder, prompts, max_new_tokens, **settings):
        own.append(max_new_tokens)
        return alone(decoder, prompts, max_new_tokens, **settings)

    sd.Decoder.generate = noted
    found = runs(generate)
    assert PartialState().num_processes == 2
    decoder = next(iter(decoders().values()))
    free = generate(decoder, PROMPTS, 5, batch_size=2, progress=True)  # process 0's seeds are everybody's
    broken = sd.decoder(decoder.target).draft(Broken()).build()
    said = []
    for call in (
        lambda: generate(broken, PROMPTS, 5, seed=0),
        lambda: generate(decoder, PROMPTS, 0),
        lambda: generate(decoder, PROMPTS[: 2 + PartialState().process_index], 5),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    path = Path(folder) / f"{PartialState().process_index}.pkl"
    path.write_bytes(pickle.dumps((found, free.ids, said, sorted(own[0]))))
    trained_with_clipping(Path(folder), PartialState().process_index)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """What two processes leave, started by accelerate's launcher. Without --multi_gpu it starts one on CPUs, whatever it is asked for."""
    tmp_path = tmp_path_factory.mktemp("two")
    script = tmp_path / "two.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch; torch.set_num_threads(1)\n"
        "from test_distributed import process\n"
        "process(sys.argv[2])\n"
        "torch.distributed.barrier(); torch.distributed.destroy_process_group()\n"  # a process that just ends may abort
    )
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    words = [
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", *words]
    done = subprocess.run(
        [*launch, "--main_process_port", str(port), str(script), str(Path(__file__).parent), str(tmp_path)],
        # No settings of the user's own, and one thread each.
        env={**os.environ, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path


@pytest.mark.slow
def test_two_processes_give_what_one_gives(two):
    (found, free, said, own), other = (pickle.loads((two / f"{p}.pkl").read_bytes()) for p in (0, 1))
    expected = runs(lambda decoder, *args, **settings: decoder.generate(*args, **settings))
    assert found.keys() == expected.keys() == other[0].keys()
    for name, one in expected.items():
        for two in (found[name], other[0][name]):
            assert two.ids == one.ids, name
            assert two.texts == one.texts
            assert two.finish == one.finish
            assert two.prompt_ids == one.prompt_ids
            if not name.startswith("pool"):  # arms are chosen in each process
                assert two.row_stats == one.row_stats
                assert (two.stats.rounds, two.stats.accepted) == (one.stats.rounds, one.stats.accepted)
                assert two.stats.tau == pytest.approx(one.stats.tau, nan_ok=True)
                assert two.stats.accepted_at == one.stats.accepted_at
        assert found[name].stats == other[0][name].stats
        assert found[name].stats.tokens_per_second > 0
    whole = sorted(BUDGETS)
    assert own != whole != other[3]  # each decoded a share,
    assert sorted(own + other[3]) == whole  # and together everything once
    assert "eos" in found["model, stops"].finish
    assert free == other[1]
    assert said == other[2]
    assert said[0] in (
        "RuntimeError: process 0 of 2 failed: KeyError: 'fifty'",
        "RuntimeError: process 1 of 2 failed: KeyError: 'fifty'",
    )
    assert said[1] == "ValueError: max_new_tokens is 0 for row 0: give at least 1"
    assert said[2].startswith(
        "ValueError: prompts or max_new_tokens differ between the processes: give every process all"
    )


@pytest.mark.slow
def test_processes_share_a_batch_of_training(two, tmp_path):
    """Two CPU processes train as one does: the mean of their gradients is the whole batch's, and is clipped as a whole.

    In float64, since sums in another order differ in the last bits, and without Muon's steps, which round gradients to bfloat16: there a
    last bit becomes the 256th part of an entry. The gradients of its matrices are compared in its momentum.
    """
    trained_with_clipping(tmp_path, 0)
    for clip in ("0.05", "1e+09"):
        alone, shared = (torch.load(folder / f"{clip}-0", weights_only=False) for folder in (tmp_path, two))
        for name in alone["master"]:
            torch.testing.assert_close(shared["master"][name], alone["master"][name], rtol=0, atol=1e-6)
        for optimiser, gradients in (("muon", "momentum_buffer"), ("adam", "exp_avg")):
            mine, theirs = alone[optimiser]["state"], shared[optimiser]["state"]
            assert mine.keys() == theirs.keys()
            for i in mine:
                expected = mine[i][gradients]
                assert float((theirs[i][gradients] - expected).abs().max()) <= 1e-6 * float(
                    expected.abs().max()
                )
    first, second = (torch.load(two / f"weights-{rank}") for rank in "01")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_alone_it_is_the_decoders_own():
    decoder = decoders()["model"]
    one, two = generate(decoder, PROMPTS, BUDGETS, seed=3), decoder.generate(PROMPTS, BUDGETS, seed=3)
    assert (one.ids, one.texts, one.finish, one.row_stats) == (two.ids, two.texts, two.finish, two.row_stats)


@contextmanager
def as_processes(monkeypatch, count):
    """Threads of this process in place of processes: a function that runs another one in each, and returns what each gave or raised."""
    own, barrier, told = threading.local(), threading.Barrier(count), {}

    def gather(mine):
        told[own.rank] = mine
        barrier.wait(60)
        every = [one for rank in range(count) for one in told[rank]]
        barrier.wait(60)
        return every

    def state(cpu):
        return SimpleNamespace(num_processes=count, process_index=own.rank, is_main_process=not own.rank)

    def run(function):
        def one(rank):
            own.rank = rank
            try:
                return function()
            except Exception as error:
                return error

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    monkeypatch.setattr(distributed, "PartialState", state)
    monkeypatch.setattr(distributed, "gather_object", gather)
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda mine: gather(mine)[:1])
    yield run


@pytest.mark.parametrize("count", [1, 2, 6])  # of 5 rows: one process has none
def test_every_process_decodes_its_share_in_batches(monkeypatch, capsys, count):
    decoder, most = decoders()["model"], []
    expected = decoder.generate(PROMPTS, BUDGETS, seed=3).ids
    alone = sd.Decoder.generate

    def noted(self, prompts, budgets, **settings):
        def see(round):
            most.append(round.context.batch)

        return alone(self, prompts, budgets, on_round=see, **settings)

    monkeypatch.setattr(sd.Decoder, "generate", noted)
    with as_processes(monkeypatch, count) as run:
        for out in run(lambda: generate(decoder, PROMPTS, BUDGETS, seed=3, batch_size=1, progress=True)):
            assert out.ids == expected
    assert set(most) == {1}
    assert capsys.readouterr().err.count("decoding:   0%") == 1  # the share of process 0


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_no_batch_size_or_progress_is_refused_before_any_process_decodes(monkeypatch, count):
    of_two = sd.decoder(decoders()["model"].target).executor(sd.executors.Pipelined(2)).build()
    calls = [
        (of_two, {"batch_size": 0}, "batch_size is 0: give the most rows of a batch"),
        (of_two, {"batch_size": "4"}, "batch_size is '4': give a whole number, or None for all"),
        (of_two, {"progress": 1}, "progress is 1: give True or False"),
        (of_two, {"batch_size": 1}, "batch_size is 1, which makes a batch of 1"),
    ]
    monkeypatch.setattr(sd.Decoder, "_rounds", None)
    with as_processes(monkeypatch, count) as run:
        for decoder, given, says in calls:
            for error in run(partial(generate, decoder, PROMPTS, 5, **given)):
                assert says in str(error)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_shares_are_all_rows_once_and_balanced(lengths, processes):
    out = shares(lengths, processes)
    assert len(out) == processes
    assert sorted(b for share in out for b in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in out)
    loads = [sum(lengths[b] for b in share) for share in out]
    assert max(loads) - min(loads) <= max(lengths)
    assert min(len(lengths), processes) == sum(bool(share) for share in out)


def test_shares_against_brute_force():
    for lengths in product((1, 3, 8), repeat=5):
        best = min(
            max(sum(n for n, p in zip(lengths, where) if p == q) for q in range(2))
            for where in product(range(2), repeat=5)
        )
        found = max(sum(lengths[b] for b in share) for share in shares(lengths, 2))
        assert found <= 7 / 6 * best  # Graham's bound for the longest first


def test_sums_and_order():
    fast = Stats(
        rounds=2, tokens=5, reached=Counter({0: 2, 1: 1}), seconds=Counter(draft=1.0, overlapped=-0.5)
    )
    slow = Stats(rounds=3, tokens=7, reached=Counter({0: 3}), seconds=Counter(target=2.0))
    both = total([fast, slow])
    assert (both.rounds, both.tokens, both.reached) == (5, 12, Counter({0: 5, 1: 1}))
    assert both.seconds == slow.seconds
    assert both.lossless
    assert not total([fast, Stats(lossless=False)]).lossless
    decoder = decoders()["model"]
    whole = decoder.generate(PROMPTS[:3], 6, seed=[1, 2, 3])
    parts = [
        ([0, 2], decoder.generate([PROMPTS[0], PROMPTS[2]], 6, seed=[1, 3])),
        ([1], decoder.generate([PROMPTS[1]], 6, seed=[2])),
    ]
    made = joined(parts)
    assert (made.ids, made.texts, made.row_stats) == (whole.ids, whole.texts, whole.row_stats)
    assert made.stats.tokens == whole.stats.tokens
