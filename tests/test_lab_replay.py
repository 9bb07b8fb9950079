"""Traces and replays: equal to the parallel formulas, equal to live decoding in the mean, refused where they would be wrong."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec import lab
from specdec.audit import lengths
from specdec.audit.adversaries import Remembers
from specdec.audit.block import block_chances
from specdec.audit.planted import LooksThenDrops
from specdec.audit.tau import efficiency, magicdec_chances, parallel_chances, spire_chances
from specdec.drafts.siblings import Distinct, Independent
from specdec.drafts.spire import SpireModel
from specdec.executors import Pipelined
from specdec.lab import recorder, timing
from specdec.lab.prompt_file import Entry, pieces, prompt_entries, read, shipped
from specdec.lab.selection import Requests
from specdec.masks import Causal, Function, Window
from specdec.models import Masked

V, K = 23, 3
HOW = {"new_tokens": 9, "k": K, "eos_token_id": (), "progress": False}


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3, vocab_size=V))


@pytest.fixture(scope="module")
def spire(target):
    model = SpireModel.from_target(target.model, 2, window=5, sinks=1)
    torch.nn.init.normal_(model.memory.weights, generator=torch.Generator().manual_seed(0))
    return model


def prompts(count, seed=5, length=9):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, (count, length), generator=draw).tolist()


@pytest.fixture(scope="module")
def trace(target, tmp_path_factory):
    return lab.record(target, prompts(6), tmp_path_factory.mktemp("trace") / "t", taps=(1, 2), **HOW)


def parallel(kind, target, spire, trace):
    """``[C, n, k]`` by the parallel formulas of ``audit.tau``, which share no code with the replay."""
    tokens = torch.tensor([text.ids for text in trace.texts])
    start = trace.texts[0].prompt + 1
    with torch.no_grad():
        out = target.model(tokens[:, :-1], output_hidden_states=True)
        if kind == "model":
            theirs = small().model(tokens[:, :-1]).logits
            return parallel_chances(out.logits, theirs, tokens, start, K)
        if kind == "spire":
            inputs = {layer: out.hidden_states[layer] for layer in spire.layers}
            return spire_chances(spire, out.logits, inputs, tokens, start, K)
        logits = out.logits[:, start - 1 :]
        return magicdec_chances(sd.drafts.MagicDec(window=4, sinks=1), target, logits, tokens, start, K)


def small():
    return sd.HFModel(tiny("llama", seed=1, vocab_size=V))


@pytest.mark.parametrize("kind", ["model", "spire", "magicdec"])
def test_a_replay_is_the_parallel_formula(kind, target, spire, trace):
    draft = {
        "model": small,
        "spire": lambda: sd.drafts.Spire(spire),
        "magicdec": lambda: sd.drafts.MagicDec(4, 1),
    }
    found = lab.replay(trace, draft[kind](), K, target=None if kind == "model" else target)
    expected = parallel(kind, target, spire, trace)[:, : found.accept.shape[1]]
    torch.testing.assert_close(found.accept, expected.double(), rtol=0, atol=2e-5)
    assert 0.1 < float(found.accept.mean()) < 0.95


def test_recorded_activations_stand_in_for_the_target(target, spire, trace, tmp_path, monkeypatch):
    without = lab.record(target, prompts(6), tmp_path / "t", **HOW)  # no taps: the target is computed
    whole = lab.replay(without, sd.drafts.Spire(spire), K, target=target)
    monkeypatch.setattr(type(target), "score", None)  # the target is not computed again
    monkeypatch.setattr(type(target), "prefill", None)
    again = lab.replay(trace, sd.drafts.Spire(spire), K, target=target, cache=False, check=False)
    torch.testing.assert_close(whole.accept, again.accept)


LIVE = {
    "chain": (lambda: small(), K),
    "point masses": (lambda: sd.drafts.NGram(), K),
    "tree": (lambda: sd.drafts.Tree(small(), (2, 2, 1)), K),
    "distinct": (lambda: sd.drafts.Tree(small(), (2, 2, 1), siblings=Distinct()), K),
    "block": (lambda: small(), K),
}


def live(target, draft, k, verifier, repeats=8):
    """Rounds of live decoding, ``[repeats * prompts]``."""
    decoder = sd.decoder(target).draft(draft, k).verifier(verifier).build()
    rows, rounds = prompts(120), []
    for repeat in range(repeats):
        out = decoder.generate(rows, 10, seed=repeat + 50, eos_token_id=())
        rounds += [one.rounds for one in out.row_stats]
    return np.array(rounds)


def apart(replayed, counted):
    """How many standard errors two means of rounds are apart."""
    error = (replayed.var() / len(replayed) + counted.var() / len(counted)) ** 0.5
    return abs(replayed.mean() - counted.mean()) / error


def ends(accept):
    """Expected rounds of texts whose budget ends after ``n`` tokens, as in ``generate``."""
    return efficiency(accept, cut=True).rounds.numpy()


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k != "chain" else k for k in LIVE]
)
def test_live_decoding_agrees(kind, target, tmp_path, monkeypatch):
    trace = lab.record(
        target, [row for row in prompts(120) for _ in range(4)], tmp_path / "t", **HOW, batch=64
    )
    make, k = LIVE[kind]
    how = "block" if kind == "block" else "rejection"
    counted = live(target, make(), k, sd.BlockVerification() if kind == "block" else sd.Rejection())
    replay = lab.replay(trace, make(), k, batch=64)
    assert apart(ends(replay.chances(how)), counted) < 4
    if kind == "block":  # its weights are not those of the token rule, and not turned round
        assert apart(ends(block_chances(replay.q, replay.p)), counted) > 6
    elif kind != "point masses":  # both formulas turned round
        turned = recorder.chances
        monkeypatch.setattr(recorder, "chances", lambda p, q: turned(q, p))
        one = recorder.sibling_chances
        monkeypatch.setattr(recorder, "sibling_chances", lambda p, q, x: one(q[0], p.expand(len(q), -1), x))
        two = recorder.distinct_chances
        monkeypatch.setattr(recorder, "distinct_chances", lambda p, q, x, m, **_: two(q, p, x, m))
        wrong = ends(lab.replay(trace, make(), k, batch=64, cache=False).accept)
        assert apart(wrong, counted) > 6


def test_a_policy_is_a_draft_that_stops(target, trace):
    """A draft that stops where it is unsure, replayed, and the whole draft with a policy."""
    whole = lab.replay(trace, small(), K)
    sure = float(whole.most.median())

    @dataclass(frozen=True)
    class Stopping(sd.drafts.Model):
        def propose(self, state, context, budget, rng):
            proposal, state = super().propose(state, context, budget, rng)
            size = torch.minimum(lengths.before(proposal.probs.amax(-1) > sure), proposal.size)
            return replace(proposal, size=size), state

    ours = whole.stopping(lambda seen: lengths.before(seen.most > sure))
    theirs = lab.replay(trace, Stopping(small().model), K, cache=False)
    for a, b in zip(ours.efficiency(), theirs.efficiency()):
        torch.testing.assert_close(a, b)
    assert torch.equal(ours.proposed, theirs.proposed)
    assert 1 < ours.tau < whole.tau
    with pytest.raises(ValueError, match="the policy anticipates"):
        whole.stopping(lambda seen: lengths.before(seen.own > sure))


def table(probs):
    return sd.TableModel(probs)


@pytest.fixture(scope="module")
def coin(tmp_path_factory):
    model = table([0.7, 0.3])
    return lab.record(model, [[0], [1], [0]], tmp_path_factory.mktemp("coin") / "t", 40, 2, progress=False)


@pytest.mark.parametrize("draft", [Remembers, LooksThenDrops])
def test_drafts_that_depend_on_dropped_tokens_are_refused(draft, coin):
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    with pytest.raises(ValueError, match="depends on more than the text"):
        lab.replay(coin, draft(half, [1] if draft is Remembers else 1), 2, cache=False)


@pytest.mark.slow
def test_masks_of_functions_are_told_apart(target, tmp_path):
    """Functions have no name: a draft under one is replayed again, and a target is named by what its mask shows."""

    def under(n):
        return Masked(target, Causal() & (Window(1) | Function(lambda b, h, q, kv: (q - kv) % n == 0)))

    settings = {**HOW, "new_tokens": 6}
    trace = lab.record(target, prompts(3), tmp_path / "t", **settings)
    found = [lab.replay(trace, under(n), K).tau for n in (2, 3)]
    assert found == [lab.replay(trace, under(n), K, cache=False).tau for n in (2, 3)]
    assert found[0] != found[1]
    lab.record(under(2), prompts(3), tmp_path / "m", **settings)
    lab.record(under(2), prompts(3), tmp_path / "m", **settings)
    with pytest.raises(ValueError, match="target"):
        lab.record(under(3), prompts(3), tmp_path / "m", **settings)


def test_what_cannot_be_replayed_is_simulated(target, tmp_path):
    trace = lab.record(target, prompts(40), tmp_path / "t", **HOW, batch=40)
    exact = lab.replay(trace, small(), K)
    counted = lab.simulate(trace, small(), target, K, repeats=10, batch=40)
    differences = (exact.efficiency().rounds - counted.counted.rounds / 10).numpy()
    assert abs(differences.mean()) < 4 * differences.std() / 40**0.5
    assert counted.counted.tau == pytest.approx(exact.tau, rel=0.06)
    assert (counted.counted.accepted <= counted.counted.reached).all()
    found = lab.compare({"exact": exact, "simulated": counted})
    assert [row["exact"] for row in found.rows] == [True, False]
    assert "simulated, not exact: simulated" in repr(found)
    with pytest.raises(ValueError, match="blocks of 3 were simulated"):
        lab.compare([counted], k=2)


def test_a_lossy_simulation_is_named_and_never_the_best(target, tmp_path):
    trace = lab.record(target, prompts(8), tmp_path / "t", **HOW, batch=8)
    exact = lab.replay(trace, small(), K)
    typical = sd.verifiers.TypicalAcceptance(epsilon=1e-9, delta=1e-9)  # accepts nearly everything
    lossy = lab.simulate(trace, small(), target, K, verifier=typical)
    assert lossy.tau > exact.tau
    found = lab.compare({"exact": exact, "typical": lossy})
    assert [row["lossless"] for row in found.rows] == [True, False]
    assert found.answer == ""
    assert "lossy, so these texts are not the target's: typical" in repr(found)

    class Clock:
        def seconds(self, name, batch, context, k):
            return 1.0

    decided = lab.decide({"exact": exact, "typical": lossy}, Clock(), places=[(1, 8)])
    assert [row["lossless"] for row in decided.rows] == [True, True, False]
    assert decided.best[0]["method"] == "exact"
    assert "typical" not in " ".join(decided.best[0]["close"])
    assert "lossy, so these texts are not the target's: typical" in repr(decided)


TREES = {  # parents, depths, siblings
    "children of different shapes": ([-1, -1, 0], [0, 0, 1], [0, 1, 0]),
    "alike": ([-1, -1], [0, 0], [0, 1]),
}


@dataclass(frozen=True)
class Odd:
    """A chain of independent draws from a table, with something about it that a replay cannot follow."""

    how: str
    info = sd.capabilities.DraftInfo("odd", trees=True, nodes=lambda length: 2 * length)

    def init(self, context, target_cache):
        return torch.ones(context.batch, dtype=torch.long)

    def propose(self, state, context, budget, rng):
        B, k = context.batch, int(budget.max())
        if k == 0:
            return sd.Proposal.none(B), state
        half = torch.full((B, k, 2), 0.5, dtype=torch.float64)
        depth = torch.arange(k).expand(B, k)
        length = context.length[:, None].expand(B, k)
        if self.how == "a tree that depends on a draw":
            pair = rng.categorical(
                half[:, :1].expand(B, 2, 2), sd.rng.Key(length[:, :1], 0, torch.arange(2).expand(B, 2))
            )
            size = torch.where(pair[:, 0] == 1, 2, 1)
            source = torch.zeros(B, 2, dtype=torch.long)
            tree = sd.Proposal(pair, torch.full((B, 2), -1), size, half[:, :1], "sampled", source)
            return tree, state
        if self.how in TREES:
            parents, depths, siblings = (torch.tensor(part).expand(B, -1) for part in TREES[self.how])
            n = parents.shape[1]
            key = sd.rng.Key(context.length[:, None].expand(B, n), depths, siblings)
            tokens = rng.categorical(half[:, :1].expand(B, n, 2), key)
            source = torch.zeros(B, n, dtype=torch.long)
            return sd.Proposal(tokens, parents, torch.full((B,), n), half[:, :1], "sampled", source), state
        key = sd.rng.Key(length, 0, depth) if self.how == "keys without depths" else sd.rng.Key(length, depth)
        size = budget
        if self.how == "as long as the last accepted":
            size = torch.minimum(budget, state)
        if self.how == "reads the target's scores":
            half = torch.where(state[:, None, None] > 0, half, half / 0.0)
        return sd.Proposal.chain(rng.categorical(half, key), size, half, "sampled"), state

    def observe(self, state, round):
        if self.how == "reads the target's scores":
            return torch.where(round.scores.logits[:, 0].isnan().any(1), 0, 1)
        return round.verdict.accepted + 1

    def select(self, state, rows):
        return state[rows]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("nothing", None),
        ("as long as the last accepted", "depends on more than the text"),
        ("a tree that depends on a draw", "depends on more than the text"),
        ("keys without depths", "was not drawn by"),
        ("reads the target's scores", "sum to inf"),
        ("children of different shapes", "siblings have different subtrees"),
    ],
)
def test_what_a_replay_cannot_follow_is_refused(how, error, coin):
    if error is None:
        assert lab.replay(coin, Odd(how), 2, cache=False).tau > 1.5
        return
    with pytest.raises(ValueError, match=error):
        lab.replay(coin, Odd(how), 2, cache=False)


def test_siblings_that_are_not_drawn_as_declared_are_refused(coin):
    """Two draws from one law: independent ones are replayed, and no others."""

    class Declared(Odd):
        info = replace(Odd.info, siblings="distinct")

    assert lab.replay(coin, Odd("alike"), 1, cache=False).tau > 1.5
    with pytest.raises(ValueError, match="not drawn without replacement"):
        lab.replay(coin, Declared("alike"), 1, cache=False)


def test_drafts_that_do_not_fit_are_refused(target, trace, tmp_path):
    with pytest.raises(ValueError, match="is a pool"):
        pool = sd.drafts.Pool((sd.drafts.NGram(), sd.drafts.NoDraft()))
        lab.replay(trace, pool, 2)
    with pytest.raises(ValueError, match="vocabulary of 29 and the trace of 23"):
        lab.replay(trace, sd.HFModel(tiny("llama", vocab_size=29)), 2)
    with pytest.raises(ValueError, match="has 16 positions, and a text of the trace 22"):
        lab.replay(trace, sd.HFModel(tiny("llama", vocab_size=V, max_position_embeddings=16)), 2)
    with pytest.raises(ValueError, match="k is 0: give at least 1"):
        lab.replay(trace, small(), 0)
    with pytest.raises(ValueError, match="blocks of up to 2 were replayed"):
        lab.compare([lab.replay(trace, small(), 2)], k=3)


def test_greedy_texts(target, tmp_path):
    greedy = lab.record(target, prompts(3), tmp_path / "t", sampling=sd.Sampling(temperature=0), **HOW)
    itself = lab.replay(greedy, target, K)
    assert itself.tau == K + 1
    other = lab.replay(greedy, small(), K)
    assert other.tau < 2
    assert set(other.accept.unique().tolist()) <= {0.0, 1.0}
    rounds = torch.tensor([text.rounds for text in greedy.texts])
    live = torch.arange(other.size.shape[1]) < rounds[:, None]
    assert (other.proposed[live] == K).all()  # all are drafted and verified
    assert (other.size[live] < K).any()  # and some of them after a token that is not the text's


def test_what_an_ngram_proposes_is_counted_in_full(target, tmp_path):
    rows = [[1, 2, 3, 1, 2, 3, 4, 1, 2], [5, 6, 7]]
    trace = lab.record(target, rows, tmp_path / "t", **HOW)
    draft = sd.drafts.NGram(max_match=2)
    replay = lab.replay(trace, draft, K)
    for c, text in enumerate(trace.texts):
        for s in range(text.rounds):
            ids = np.array(text.ids[: text.prompt + 1 + s])
            assert int(replay.proposed[c, s]) == len(draft.lookup(ids, K))
    assert (replay.proposed >= replay.size).all()
    assert (replay.proposed > replay.size).any()
    requests = Requests.of({"ngram": replay, "none": None})
    assert requests.size is not None
    assert torch.equal(requests.size[0], replay.proposed)


@pytest.mark.parametrize("greedy", [False, True])
def test_only_what_is_stored_of_a_law_is_copied_to_the_host(target, tmp_path, monkeypatch, greedy):
    """The largest probabilities are chosen where the distributions are; they, their ids and the rest are those of the whole distributions."""
    how = {**HOW, "sampling": sd.Sampling(temperature=0.0 if greedy else 1.0)}
    whole = lab.record(target, prompts(3), tmp_path / "whole", **how)
    copied, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: copied.append(tuple(t.shape)) or cpu(t))
    few = lab.record(target, prompts(3), tmp_path / "few", keep=4, **how)
    assert (3, 4) in copied
    assert not [shape for shape in copied if shape[-1:] == (V,)]
    for number in range(3):
        top, law = whole.law(number).probs.topk(4), few.law(number)
        assert torch.equal(law.probs, top.values)
        assert torch.equal(law.ids, top.indices)
        rest = (1 - top.values.double().sum(1)).clamp(min=0).float()
        assert torch.equal(law.rest, rest)


def test_texts_end_at_an_end_token(target, tmp_path):
    how = {**HOW, "eos_token_id": (3, 7, 11)}
    trace = lab.record(target, prompts(40), tmp_path / "t", **how)
    ended = [text for text in trace.texts if text.ended]
    assert 5 < len(ended) < 40
    assert all(
        text.ids[-1] in (3, 7, 11) and text.rounds == len(text.ids) - text.prompt - 1 for text in ended
    )
    found = lab.replay(trace, small(), K).efficiency()
    rounds = [text.rounds for text in trace.texts]
    assert all(0 <= r <= n for r, n in zip(found.rounds.tolist(), rounds))
    assert all(abs(found.tokens[i] - text.rounds) < 1e-9 for i, text in enumerate(trace.texts) if text.ended)


def test_siblings_without_replacement(target, tmp_path):
    """Of two of them, the expected share of the text that one round accepts, as by hand from p and q."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])
    trace = lab.record(table(p), [[0]] * 4, tmp_path / "t", 30, 1, progress=False)
    tree = sd.drafts.Tree(table(q), (2,), siblings=Distinct())
    found = lab.replay(trace, tree, 1).accept
    first = torch.minimum(p, q)
    rest = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    chance = []
    for x in range(3):
        later = [
            float((q - p).clamp(min=0)[y] * torch.minimum(rest[x], q[x] / (1 - q[y])))
            for y in range(3)
            if y != x
        ]
        chance.append((float(first[x]) + sum(later)) / float(p[x]))
    for text, chances in zip(trace.texts, found):
        wanted = [chance[x] for x in text.ids[text.prompt + 1 :][: text.rounds]]
        assert chances[: text.rounds, 0].tolist() == pytest.approx(wanted, abs=1e-6)
    narrow = sd.drafts.Tree(table([1.0, 0.0, 0.0]), (2,), siblings=Distinct())
    with pytest.raises(ValueError, match="not drawn without replacement"):
        lab.replay(trace, narrow, 1)


@pytest.mark.parametrize("siblings", [Independent(), Distinct()])
def test_the_largest_probabilities_are_enough_for_chains(target, trace, tmp_path, siblings):
    few = lab.record(target, prompts(6), tmp_path / "t", keep=4, **HOW)
    assert [text.ids for text in few.texts] == [text.ids for text in trace.texts]
    law = few.law(2)
    torch.testing.assert_close(law.probs.sum(1) + law.rest, torch.ones(13))
    whole = trace.law(2).probs
    torch.testing.assert_close(whole.gather(1, law.ids), law.probs)
    one, other = (lab.replay(t, small(), K).accept for t in (few, trace))
    torch.testing.assert_close(one, other)
    tree = sd.drafts.Tree(small(), (2, 2), siblings=siblings)
    exact, bounded = (lab.replay(t, tree, 2) for t in (trace, few))
    assert (bounded.accept <= exact.accept + 1e-6).all()
    assert (exact.accept <= bounded.high + 1e-6).all()
    assert (bounded.high - bounded.accept).max() > 1e-3
    (low, high), (same, again) = (replay.sums() for replay in (bounded, exact))
    assert torch.equal(same, again)
    assert low[0].sum() / low[1].sum() < same[0].sum() / same[1].sum() < high[0].sum() / high[1].sum()
    one, other = lab.compare({"exact": exact}).rows[0], lab.compare({"bounded": bounded}).rows[0]
    assert other["tau_low"] < one["tau_low"] < one["tau_high"] < other["tau_high"]
    assert (other["ratio_low"], other["ratio_high"]) == (1, 1)


def test_recording_continues(target, trace, tmp_path):
    rows, folder = prompts(6), tmp_path / "t"
    lab.record(target, rows[:4], folder, taps=(1, 2), **HOW, batch=2)
    part = folder / "part-000"
    lines = (part / "texts.jsonl").read_text().splitlines(keepends=True)
    (part / "texts.jsonl").write_text("".join(lines[:3]) + lines[3][:20])  # interrupted while writing
    os.truncate(part / "own.bin", (part / "own.bin").stat().st_size - 5)
    again = lab.record(target, rows, folder, taps=(1, 2), **HOW)
    assert [text.ids for text in again.texts] == [text.ids for text in trace.texts]
    for i in range(6):
        torch.testing.assert_close(again.law(i).probs, trace.law(i).probs)
        torch.testing.assert_close(again.activations(i), trace.activations(i))
    assert len(list(folder.glob("part-*"))) == 2


def test_fewer_and_other_prompts(target, trace, tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(trace.folder, folder)
    some = lab.record(target, prompts(6)[:2], folder, taps=(1, 2), **HOW)
    assert [text.ids for text in some.texts] == [text.ids for text in trace.texts][:2]
    assert some.id != trace.id
    named = [Entry((), "new", f"file {i // 2}", given=tuple(row)) for i, row in enumerate(prompts(6))]
    again = lab.record(target, named, folder, taps=(1, 2), **HOW)
    assert again.categories == ["new"] * 6
    assert len(set(again.sources)) == 3
    twice = lab.record(target, [[1], [1], [2]], tmp_path / "u", **HOW)
    assert [s == twice.sources[0] for s in twice.sources] == [True, True, False]


def test_parts_are_never_shared(target, trace, tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(trace.folder, folder)
    (folder / "part-000").rename(folder / "part-002")  # as if another process had had nothing to do
    lab.record(target, prompts(7), folder, taps=(1, 2), **HOW)
    assert sorted(path.name for path in folder.glob("part-*")) == ["part-002", "part-003"]


def test_every_process_writes_a_part(target, trace, tmp_path, monkeypatch):
    """Two processes, one after the other, in place of accelerate's."""
    from specdec.lab import recording

    class State:
        def __init__(self, index):
            self.process_index, self.num_processes = index, 2

        def main_process_first(self):
            return __import__("contextlib").nullcontext()

        def wait_for_everyone(self):
            return None

    for index in range(2):
        monkeypatch.setattr(recording, "PartialState", lambda index=index, cpu=True: State(index))
        lab.record(target, prompts(6), tmp_path / "t", taps=(1, 2), **HOW)
    both = lab.Trace(tmp_path / "t")
    assert len(both.parts) == 2
    assert [text.ids for text in both.texts] == [text.ids for text in trace.texts]
    torch.testing.assert_close(both.law(3).probs, trace.law(3).probs)


APART = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from test_lab_replay import HOW, V, lab, prompts, sd, tiny
lab.record(sd.HFModel(tiny("llama", num_hidden_layers=3, vocab_size=V)), prompts(6), sys.argv[2], taps=(1, 2), **HOW)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_the_prompts(trace, tmp_path):
    (script := tmp_path / "apart.py").write_text(APART)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    words = [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path / "t")]
    started = [
        subprocess.Popen(words, env={**os.environ, **world, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    try:
        assert [process.wait(timeout=200) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    both = lab.Trace(tmp_path / "t")
    assert [len(part.texts) for part in both.parts] == [3, 3]
    assert [text.ids for text in both.texts] == [text.ids for text in trace.texts]


@pytest.mark.slow
def test_results_are_stored_by_draft(target, trace, tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(trace.folder, folder)
    shutil.rmtree(folder / "replays", ignore_errors=True)
    copy = lab.Trace(folder)
    first = lab.replay(copy, small(), 2)
    stored = list((folder / "replays").iterdir())
    assert len(stored) == 1
    torch.testing.assert_close(lab.replay(copy, small(), 2).accept, first.accept)
    other = lab.replay(copy, sd.HFModel(tiny("llama", seed=2, vocab_size=V)), 2)
    assert not torch.equal(first.accept, other.accept)
    lab.replay(copy, sd.drafts.Model(small(), sd.Sampling(temperature=0.5)), 2)
    lab.replay(copy, small(), 3)
    assert len(list((folder / "replays").iterdir())) == 4
    lab.replay(copy, sd.drafts.chain_draft(lambda ids: torch.ones(V)), 2)  # a function has no name
    narrow, wide = (
        SpireModel.from_target(target.model, 2, window=w, sinks=1, feedback=False) for w in (3, 9)
    )
    a, b = (lab.replay(copy, sd.drafts.Spire(one), 2, target=target) for one in (narrow, wide))
    assert not torch.equal(a.accept, b.accept)
    files = list((folder / "replays").iterdir())
    assert len(files) == 6
    for file in files:
        file.write_bytes(file.read_bytes()[:50])  # broken
    torch.testing.assert_close(lab.replay(copy, small(), 2).accept, first.accept)


def test_refusals(target, spire, trace, tmp_path):
    other = sd.HFModel(tiny("llama", seed=9, num_hidden_layers=3, vocab_size=V))
    with pytest.raises(ValueError, match=r"is of target .* record this one"):
        lab.replay(trace, small(), K, target=other)
    with pytest.raises(ValueError, match="blocks of at most 3: record with k=4"):
        lab.replay(trace, small(), 4)
    with pytest.raises(ValueError, match="reads the target: pass target="):
        lab.replay(trace, sd.drafts.Spire(spire), K)
    with pytest.raises(ValueError, match="reads the target: pass target="):
        lab.replay(trace, sd.drafts.MagicDec(4, 1), K)
    with pytest.raises(ValueError, match=r"recorded with temperature=1\.0"):
        lab.replay(trace, small(), K, sampling=sd.Sampling(temperature=0.5))
    with pytest.raises(FileNotFoundError, match="holds no trace"):
        lab.replay(tmp_path / "none", small(), K)
    with pytest.raises(ValueError, match="prompt 0 is another one than in the trace"):
        lab.record(target, prompts(6, seed=6), trace.folder, taps=(1, 2), **HOW)
    with pytest.raises(ValueError, match="trace with new_tokens 9, not 10"):
        lab.record(target, prompts(6), trace.folder, taps=(1, 2), **{**HOW, "new_tokens": 10})
    with pytest.raises(ValueError, match="trace with target"):
        lab.record(other, prompts(6), trace.folder, taps=(1, 2), **HOW)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        lab.record(target, [[1], []], tmp_path / "a", **HOW)
    with pytest.raises(ValueError, match=r"prompt 0 has 250 tokens.* 256 positions: shorten it to 243"):
        lab.record(target, [[1] * 250], tmp_path / "a", **HOW)
    with pytest.raises(ValueError, match="prompts is empty"):
        lab.record(target, [], tmp_path / "a", **HOW)


def test_verifiers_of_trees_without_a_formula_are_refused_by_name(trace):
    chain, tree = lab.replay(trace, small(), 2), lab.replay(trace, sd.drafts.Tree(small(), (2, 1)), 2)
    assert torch.equal(chain.chances("traversal"), chain.chances("block"))
    assert torch.equal(chain.chances("k-SEQ"), chain.chances("rejection"))
    assert torch.equal(chain.chances("optimal transport"), chain.accept)
    for verifier, why in (
        ("block", "it takes chains"),
        ("traversal", "how likely a node is accepted depends on siblings that are not in the text"),
        ("k-SEQ", "how many candidates the next token has depends on siblings"),
        ("optimal transport", "because equal siblings go on together"),
    ):
        with pytest.raises(
            ValueError, match=rf"verifier is '{verifier}' and trees were replayed: .*{why}.*lab\.simul"
        ):
            tree.efficiency(verifier=verifier)
    with pytest.raises(
        ValueError, match="verifier is 'coupled': give one of 'rejection', 'block', 'traversal', 'k-"
    ):
        chain.chances("coupled")


def test_another_tokenizer_is_refused(tmp_path):
    target = sd.HFModel(tiny("llama"), byte_tokenizer())
    trace = lab.record(target, ["abc", "def"], tmp_path / "t", 4, 2, eos_token_id=(), progress=False)
    other = byte_tokenizer()
    other.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="another tokenizer"):
        lab.replay(trace, sd.HFModel(tiny("llama", seed=1), other), 2)


def test_processors_are_given_again(target, tmp_path):
    def softer(ids, scores):
        return scores / 2

    how = sd.Sampling(processors=(softer,))
    trace = lab.record(target, prompts(2), tmp_path / "t", sampling=how, **HOW)
    assert lab.replay(trace, small(), K, sampling=how, cache=False).tau > 1
    with pytest.raises(ValueError, match=r"processors .*softer: pass sampling="):
        lab.replay(trace, small(), K)


# -- compare ------------------------------------------------------------------------------------------------------------------


def made(trace, value):
    """A replay in which every token is accepted with the same probability."""
    C, n = len(trace), max(t.rounds for t in trace.texts)
    q = torch.full((C, n, K), value, dtype=torch.float64)
    size = torch.full((C, n), K)
    return lab.replays.Replay(trace, f"at {value}", K, q, q, q, q, q, size, size, torch.tensor(True))


def test_compare(trace):
    found = lab.compare([made(trace, 0.5), made(trace, 0.8)])
    rows = {row["method"]: row for row in found.rows}
    assert rows["at 0.5"]["tau"] == pytest.approx(1 + 0.5 + 0.25 + 0.125, rel=0.02)
    assert rows["at 0.8"]["ratio"] == pytest.approx(rows["at 0.8"]["tau"] / rows["at 0.5"]["tau"])
    assert rows["at 0.5"]["ratio"] == rows["at 0.5"]["ratio_high"] == 1
    assert rows["at 0.8"]["acceptance"] == pytest.approx([0.8] * 3)
    assert "at 0.8 (k = 3) has the most" in repr(found)
    assert "too close" not in repr(found)
    assert len(found.frame()) == 2
    assert found.plot().axes
    each = lab.compare({"a": made(trace, 0.5)}, k=range(1, 4))
    assert [row["k"] for row in each.rows] == [1, 2, 3]
    assert [row["tau"] for row in each.rows] == pytest.approx([1.5, 1.75, 1.875], rel=0.02)


def test_compare_by_category(target, tmp_path):
    rows = [Entry((f"{i}",), "even" if i % 2 == 0 else "odd", str(i // 2)) for i in range(12)]
    model = sd.HFModel(tiny("llama"), byte_tokenizer())
    trace = lab.record(model, rows, tmp_path / "t", 4, 2, eos_token_id=(), progress=False)
    replay = lab.replay(trace, sd.HFModel(tiny("llama", seed=1), byte_tokenizer()), 2)
    found = lab.compare([replay])
    assert [(row["category"], row["texts"], row["sources"]) for row in found.rows] == [
        ("all", 12, 6),
        ("even", 6, 6),
        ("odd", 6, 6),
    ]
    few = [Entry((str(i),), "one" if i else "two", str(i)) for i in range(6)]
    trace = lab.record(model, few, tmp_path / "few", 4, 2, eos_token_id=(), progress=False)
    rows = lab.compare([lab.replay(trace, sd.drafts.NGram(), 2)]).rows
    assert [row["tau_low"] is None for row in rows] == [False, False, True]


def noisy(trace, name, more):
    """Acceptance that differs much between texts, and by ``more`` from another replay's."""
    one = made(trace, 0.5)
    accept = (
        torch.linspace(0.1, 0.8, len(trace), dtype=torch.float64)[:, None, None].expand_as(one.accept) + more
    )
    return replace(one, name=name, accept=accept, high=accept)


def test_the_answer_is_paired(trace):
    found = lab.compare([noisy(trace, "low", 0), noisy(trace, "high", 0.04)])
    low, high = found.rows
    assert low["tau_high"] > high["tau_low"]  # intervals overlap, and yet it is better on every text
    assert found.close == []
    same = lab.compare([noisy(trace, "a", 0), noisy(trace, "b", 0)])
    assert same.close == ["b (k = 3)"]


def test_compare_refuses(target, trace, coin, tmp_path):
    other = lab.record(target, prompts(6, seed=8), tmp_path / "o", taps=(1, 2), **HOW)
    for another in (coin, other):
        with pytest.raises(ValueError, match="another trace"):
            lab.compare({"a": made(trace, 0.5), "b": made(another, 0.5)})
        with pytest.raises(ValueError, match="of different traces"):
            lab.decide({"a": made(trace, 0.5), "b": made(another, 0.5)}, lab.Times({}))
    with pytest.raises(ValueError, match="2 sources, too few"):
        lab.decide([made(coin, 0.5)], lab.Times({}))
    with pytest.raises(ValueError, match="2 sources, too few"):
        lab.compare([made(coin, 0.5)])
    with pytest.raises(ValueError, match=r"there are at 0\.5"):
        lab.compare([made(trace, 0.5)], reference="vanilla")
    with pytest.raises(ValueError, match="two of one name"):
        lab.compare([made(trace, 0.5), made(trace, 0.5)])
    with pytest.raises(ValueError, match="trees of depth 2"):
        tree = lab.replay(trace, sd.drafts.Tree(small(), (2, 1)), 2)
        lab.compare([tree], k=1)


# -- time and decide ----------------------------------------------------------------------------------------------------------


def test_time_runs_all_decoders(target):
    plain, fast = sd.decoder(target).build(), sd.decoder(target).draft(small(), 2).build()
    times = lab.time({"plain": plain, "fast": fast}, prompts(3), (1, 2), (5,), rounds=3, repeats=2)
    assert times.places == [(1, 5), (2, 5)]
    assert all(
        len(times.repeats("fast", b, 5, 2)) == 2 and times.seconds("plain", b, 5, 0) > 0 for b in (1, 2)
    )
    assert len(times.rows) == len(times.frame()) == 4
    assert "milliseconds" in repr(times)
    first, second = times.plot().axes
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == (
        "batch 1, context 5",
        "batch 2, context 5",
    )
    assert [label.get_text() for label in first.get_yticklabels()] == ["plain", "fast 2"]
    widths = [bar.get_width() for bar in first.patches]
    assert widths == pytest.approx(
        [1e3 * times.seconds(name, 1, 5, k) for name, k in (("plain", 0), ("fast", 2))]
    )
    with pytest.raises(ValueError, match="no time of fast with k = 4"):
        times.seconds("fast", 1, 5, 4)
    with pytest.raises(ValueError, match="no prompt has 10 tokens"):
        lab.time({"plain": plain}, prompts(3), (1,), (10,))


def test_decide_says_what_to_use_where(trace):
    seconds = {
        ("plain", 0, 1, 5): [1.0, 1.1, 0.9, 1.0, 1.0],
        ("at 0.5", K, 1, 5): [1.2, 1.3, 1.1, 1.2, 1.2],
        ("at 0.8", K, 1, 5): [1.9, 1.8, 2.0, 1.9, 1.9],
        ("plain", 0, 8, 5): [1.0] * 5,
        ("at 0.5", K, 8, 5): [3.0, 3.1, 2.9, 3.0, 3.0],
        ("at 0.8", K, 8, 5): [4.0] * 5,
    }
    found = lab.decide([made(trace, 0.5), made(trace, 0.8)], lab.Times(seconds))
    assert [(row["batch"], row["method"]) for row in found.best] == [(1, "at 0.5"), (8, "plain")]
    rows = {(row["batch"], row["method"]): row for row in found.rows}
    one = rows[1, "at 0.5"]
    assert one["ratio"] == pytest.approx(one["tau"] / 1.2)
    assert one["ratio_low"] < one["ratio"] < one["ratio_high"]
    assert one["close"] == ["at 0.8 3"]
    assert rows[8, "at 0.8"]["loss"] == pytest.approx(1 - rows[8, "at 0.8"]["tau"] / 4)
    assert rows[8, "plain"]["close"] == []
    assert "batch 8, context 5: do not speculate" in repr(found)
    assert found.plot().axes

    class Model:
        def seconds(self, method, batch, context, k):
            return 1.0 + 0.1 * k * batch

    modelled = lab.decide([made(trace, 0.8)], Model(), k=(1, 3), places=[(1, 100), (64, 100)])
    assert [(row["method"], row["k"]) for row in modelled.best] == [("at 0.8", 3), ("plain", 0)]
    with pytest.raises(ValueError, match="clock is a model: give batches"):
        lab.decide([made(trace, 0.8)], Model())
    few = lab.Times({key: some[:4] for key, some in seconds.items()})
    with pytest.raises(ValueError, match="clock has 4 repeats, too few for an interval"):
        lab.decide([made(trace, 0.5), made(trace, 0.8)], few)


def test_a_model_that_may_be_wrong_by_more_than_a_lead_decides_nothing(trace):
    """``made`` accepts alike on all texts, so all that is uncertain here is the clock."""

    @dataclass
    class Model:
        error: float | None = None
        errors: dict = field(default_factory=dict)

        def seconds(self, method, batch, context, k):
            return {"plain": 1.0, "a": 2.0, "b": 2.1}[method]

    replays = [replace(made(trace, 0.8), name=name) for name in "ab"]

    def best(**known):
        return lab.decide(replays, Model(**known), places=[(1, 5)]).best[0]

    sure = best()
    assert (sure["method"], sure["close"]) == ("a", [])
    assert sure["ratio_low"] == pytest.approx(sure["ratio_high"])
    assert best(error=0.1)["close"] == ["b 3"]
    assert best(error=2.0)["close"] == ["b 3", "plain"]
    assert best(error=0.01)["close"] == []
    by_pair = best(error=0.1, errors={("a", "b"): 0.01, ("a", "plain"): 0.05})
    assert by_pair["close"] == []
    spread = np.exp(1.96 * 0.05)
    assert by_pair["ratio_high"] / by_pair["ratio"] == pytest.approx(spread, rel=0.02)
    assert by_pair["ratio"] / by_pair["ratio_low"] == pytest.approx(spread, rel=0.02)


def test_a_round_of_a_pipeline_is_a_round_of_all_rows(target, monkeypatch):
    """With a clock that counts the verified micro-batches."""
    draft = sd.decoder(target).draft(small(), 2)
    decoders = {"serial": draft, "two": draft.executor(Pipelined(2)), "three": draft.executor(Pipelined(3))}
    ticks = itertools.count()
    monkeypatch.setattr(timing, "perf_counter", lambda: next(ticks))
    times = lab.time(decoders, prompts(6), 6, 5, rounds=3, repeats=1)
    assert [times.seconds(name, 6, 5, 2) for name in decoders] == [1, 2, 3]


def test_drafts_are_compared_under_two_verifiers(trace):
    token = lab.replay(trace, small(), K)
    block = token.under("block")
    assert block.name == f"{token.name}, block"
    assert block.efficiency(2).tau == token.efficiency(2, "block").tau > token.efficiency(2).tau
    assert torch.equal(block.chances("rejection"), token.accept)
    row = lab.compare([token, block]).rows[1]
    assert row["tau"] == pytest.approx(token.efficiency(verifier="block").tau)
    assert 1 <= row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    with pytest.raises(ValueError, match="it takes chains"):
        lab.replay(trace, sd.drafts.Tree(small(), (2, 1)), 2).under("block")


# -- prompts of one's own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (['{"prompt": "a"}', "no json"], "line 2 of p.jsonl is not JSON"),
        (['{"prompt": "a"}', "", '{"text": "b"}'], "line 3 of p.jsonl is not an object with either"),
        (['{"prompt": "a", "turns": ["b"]}'], "line 1 of p.jsonl is not an object with either"),
        (['{"prompt": "  "}'], "line 1 of p.jsonl: prompt is empty"),
        (['{"prompt": 3}'], r"line 1 of p.jsonl: prompt is \[3\]: give a text"),
        (['{"turns": ["a", 3]}'], "give a list of texts"),
        (['{"turns": []}'], "turns is empty"),
        (['{"prompt": "a", "messages": []}'], "line 1 of p.jsonl is not an object with either"),
        (['{"messages": "a"}'], r"line 1 of p.jsonl: messages is 'a': give a list of \{\"role\""),
        (['{"messages": []}'], "line 1 of p.jsonl: messages has none of the user's: give at least one"),
        (['{"messages": [{"role": "user"}]}'], "message 1 has role: give role and content"),
        (
            ['{"messages": [{"role": "user", "content": "a", "tool_calls": []}]}'],
            "message 1 has role, content, tool_calls: give role and content, and nothing else",
        ),
        (
            ['{"messages": [{"role": "tool", "content": "a"}]}'],
            "message 1 has the role 'tool': give system, user",
        ),
        (
            ['{"messages": [{"role": "user", "content": ["a"]}]}'],
            r"message 1 has the content \['a'\]: give a text",
        ),
        (['{"messages": [{"role": "user", "content": " "}]}'], "line 1 of p.jsonl: messages is empty"),
        ([""], "has no prompts"),
        (['{"prompt": "a", "category": "all"}'], 'category is "all"'),
    ],
)
def test_a_file_of_prompts_names_the_line(lines, error, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=error):
        read(path)


def test_a_prompt_that_is_too_long_is_named_by_its_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "a" * 250}))
    model = sd.HFModel(tiny("llama"), byte_tokenizer())
    with pytest.raises(ValueError, match=r"line 2 of p\.jsonl has 250 tokens"):
        lab.record(model, read(path), tmp_path / "t", 4, 2, progress=False)


def test_turns_follow_the_targets_own_answers(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["ab", "cd"], "category": "talk"}\n{"turns": ["e"]}')
    tok = byte_tokenizer()
    tok.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    model = sd.HFModel(tiny("llama", vocab_size=97), tok)
    trace = lab.record(model, read(path), tmp_path / "t", 4, 2, eos_token_id=(), progress=False)
    assert [text.number for text in trace.texts] == [(0, 0), (0, 1), (1, 0)]
    first, second, _ = trace.texts
    answer = tok.decode(first.ids[first.prompt :], skip_special_tokens=True)
    assert tok.decode(second.ids[: second.prompt]) == f"<user>ab<assistant>{answer}<user>cd"
    assert trace.categories == ["talk", "talk", "uncategorised"]
    tok.chat_template = None
    with pytest.raises(ValueError, match=r"line 1 of p\.jsonl: turns and messages need a chat template"):
        lab.record(model, read(path), tmp_path / "u", 4, 2, progress=False)


def test_messages_are_a_conversation_up_to_the_users_last(tmp_path):
    path = tmp_path / "p.jsonl"
    talk = [
        ("system", "S"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "the file's answer"),
    ]
    line = {"messages": [{"role": role, "content": said} for role, said in talk], "category": "talk"}
    path.write_text(json.dumps(line))
    tok = byte_tokenizer()
    tok.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    model = sd.HFModel(tiny("llama", vocab_size=97), tok)
    trace = lab.record(model, read(path), tmp_path / "t", 4, 2, eos_token_id=(), progress=False)
    (text,) = trace.texts
    assert tok.decode(text.ids[: text.prompt]) == "<system>S<user>a<assistant>b<user>c"
    assert trace.categories == ["talk"]
    assert prompt_entries(path, tok, 5) == read(path)  # chats lose no beginning
    assert [tok.decode(list(one.given)) for one in pieces(read(path), tok, 9, 1)] == ["<system>S"]
    tok.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(
        ValueError, match=r"line 1 of p\.jsonl: .*refuses its messages \(no system messages\)"
    ):
        lab.record(model, read(path), tmp_path / "u", 4, 2, progress=False)


def test_a_chat_is_cut_in_its_first_turn():
    tok = byte_tokenizer()
    chat, plain = Entry(("abcdefgh", "more"), chat=True, name="line 1"), Entry(("xyzxyzxyzxyz",))
    with pytest.raises(ValueError, match="line 1: turns and messages need a chat template"):
        pieces([chat, plain], tok, 4, 1)
    tok.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert [tok.decode(list(one.given)) for one in pieces([chat, plain], tok, 4, 2)] == [
        "<abc",
        "defg",
        "xyzx",
        "yzxy",
    ]
    assert [one.turns for one in pieces([chat], tok, 4, 1)] == [("abcdefgh",)]  # recorded once
    with pytest.raises(ValueError, match="no prompt has 13 tokens, and the longest has 12"):
        pieces([chat, plain], tok, 13, 1)


def test_shipped_prompts_have_files_as_sources():
    found = shipped()
    assert len(found) == 72
    assert {entry.category for entry in found} == {"code", "prose", "tabular"}
    assert 10 < len({entry.source for entry in found}) < 72
