"""The seconds of a pool's rounds: planted ones are recovered, and a pool's names are checked."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import drafts, zoo
from specdec.lab import arm_times
from specdec.lab.arm_times import POOL, load_pool, measured
from specdec.lab.pipeline import Part


def models():
    target, draft = tiny("llama", 0, torch.float32), tiny("llama", 1, torch.float32, num_hidden_layers=1)
    arms = {"model": drafts.Model(sd.HFModel(draft)), "ngram": drafts.NGram(), "none": None}
    return sd.HFModel(target), arms, [[1, 2, 3, 4 + b] for b in range(8)]


def test_planted_seconds_are_recovered(monkeypatch):
    target, arms, prompts = models()
    k = 3

    def planted(decoder, prompts, rounds, micro, seed):
        b = len(prompts)
        kind = type(decoder.draft).__name__
        draft = {"Model": 6e-3 + 3e-3 * b, "NGram": 3e-4 * b}.get(kind, 0.0)
        d = k if kind in ("Model", "NGram") else 0
        verify = 5e-3 + 1e-3 * b + 1e-4 * b * d
        return draft + verify, [Part(b, draft, verify)] * rounds

    monkeypatch.setattr(arm_times, "timed", planted)
    times = measured(target, arms, k, prompts, rounds=2, repeats=1)
    flat = [x for pair in times.draft for x in pair]
    assert flat == pytest.approx([2e-3, 1e-3, 0, 1e-4, 0, 0], abs=1e-12)
    assert times.verify == pytest.approx((5e-3, 1e-3, 1e-4))
    assert times.read[0] > 0 == times.read[1] == times.read[2]  # an n-gram has nothing to read


def test_models_of_one_size_share_their_measurements(monkeypatch):
    target, arms, prompts = models()
    twin = drafts.Model(sd.HFModel(tiny("llama", 2, torch.float32, num_hidden_layers=1)))
    large = drafts.Model(sd.HFModel(tiny("llama", 3, torch.float32)))

    def planted(decoder, prompts, rounds, micro, seed):
        draft = decoder.draft
        if isinstance(draft, drafts.NGram):
            return 0.0, [
                Part(len(prompts), 0.0, 1.0)
            ] * rounds  # its verification is not fitted: it proposes what it finds
        slow = {id(arms["model"].model): 1e-3, id(twin.model): 3e-3, id(large.model): 8e-3}
        d = slow.get(id(getattr(draft, "model", None)), 0.0)
        return 0.0, [Part(len(prompts), d * len(prompts), 2e-3 * len(prompts))] * rounds

    monkeypatch.setattr(arm_times, "timed", planted)
    times = measured(target, {**arms, "twin": twin, "large": large}, 1, prompts, rounds=1, repeats=1)
    assert times.draft[0] == times.draft[3] == pytest.approx((0, 2e-3), abs=1e-9)
    assert times.draft[4] == pytest.approx((0, 8e-3), abs=1e-9)
    assert times.read[0] == times.read[3] != times.read[4]
    assert times.verify == pytest.approx((0, 2e-3, 0), abs=1e-9)


def test_real_rounds_are_timed():
    target, arms, prompts = models()
    times = measured(target, arms, 3, prompts, rounds=3, repeats=1)
    (fixed, row), _, none = times.draft
    assert fixed + row > 0
    assert none == (0, 0)
    assert sum(times.verify) > 0
    with pytest.raises(ValueError, match="at least 2"):
        measured(target, arms, 3, prompts[:1])


def test_a_pool_by_name():
    made = load_pool((POOL[0], "pocket-spire", "ngram", "none"))
    kinds = (drafts.Model, drafts.Spire, drafts.NGram, type(None))
    assert [type(draft) for draft in made.values()] == list(kinds)
    assert set(POOL) <= set(zoo.names())
    with pytest.raises(SystemExit, match="pocket-none"):
        load_pool(("pocket-none",))
