"""The seconds of a pool's rounds: planted ones are recovered, and a pool's names are checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import drafts, zoo
from specdec.arm_policy import Arm
from specdec.lab import arm_times
from specdec.lab.arm_times import ARMS, POOL, charges, load_pool, measured, several
from specdec.lab.pipeline import Part


def models():
    target, draft = tiny("llama", 0, torch.float32), tiny("llama", 1, torch.float32, num_hidden_layers=1)
    arms = {
        "model": Arm(drafts.Model(sd.HFModel(draft)), 3),
        "ngram": Arm(drafts.NGram(), 3),
        "none": Arm(None),
    }
    return sd.HFModel(target), arms, [[1, 2, 3, 4 + b] for b in range(8)]


def rounds_of(count, rows, whole, draft, drafted):
    """What ``timed`` says of equal rounds."""
    return whole, [Part(rows, draft, 0.0, drafted, 1.0 + n * whole) for n in range(count)]


def test_planted_seconds_are_recovered(monkeypatch):
    target, arms, prompts = models()
    model = arms["model"].draft
    arms["long"] = Arm(model, 7)  # as long as its cost says
    arms["recycling"] = Arm(drafts.Recycling(), 3)
    seen, warm = set(), sd.Sampling([1.0, 0.5] * 3 + [0.7, 0.0])

    def planted(decoder, prompts, rounds, micro, seed):
        b = len(prompts)
        assert decoder.sampling == sd.Sampling([warm.temperature[ids[-1] - 4] for ids in prompts])
        seen.add((b, len(set(decoder.sampling.temperature))))
        kind = type(decoder.draft).__name__
        k = decoder.length
        draft = {"Model": k * (2e-3 + 1e-3 * b), "NGram": 3e-4 * b, "Recycling": 3e-4 * b}.get(kind, 0.0)
        d = {"Model": k * b, "NGram": 2 * b, "Recycling": 2 * b}.get(kind, 0)  # two of three are found
        around = 6e-4 * b if kind == "Recycling" else 0.0  # outside of its drafting, and its own all the same
        return rounds_of(rounds, b, draft + around + 5e-3 + 1e-3 * b + 1e-4 * d, draft, d)

    monkeypatch.setattr(arm_times, "timed", planted)
    times = measured(target, arms, prompts, rounds=2, repeats=1, sampling=warm)
    assert seen == {(1, 1), (2, 2), (4, 3), (8, 4)}
    flat = [x for pair in times.draft for x in pair]
    assert flat == pytest.approx([2e-3, 1e-3, 0, 1.5e-4, 0, 0, 2e-3, 1e-3, 0, 4.5e-4], abs=1e-9)
    assert times.verify == pytest.approx((5e-3, 1e-3, 1e-4))
    assert times.read[0] > 0 == times.read[1] == times.read[2]  # an n-gram has nothing to read


def test_models_of_one_size_share_their_measurements(monkeypatch):
    target, arms, prompts = models()
    arms = {name: Arm(arm.draft, 1 if arm.draft else None) for name, arm in arms.items()}
    twin = drafts.Model(sd.HFModel(tiny("llama", 2, torch.float32, num_hidden_layers=1)))
    large = drafts.Model(sd.HFModel(tiny("llama", 3, torch.float32)))

    def planted(decoder, prompts, rounds, micro, seed):
        draft = decoder.draft
        b = len(prompts)
        if isinstance(draft, drafts.NGram):
            return rounds_of(rounds, b, 2e-3 * b, 0.0, 0)  # it finds nothing
        slow = {id(arms["model"].draft.model): 1e-3, id(twin.model): 3e-3, id(large.model): 8e-3}
        d = slow.get(id(getattr(draft, "model", None)), 0.0)
        return rounds_of(rounds, b, (d + 2e-3) * b, d * b, b * (d > 0))

    monkeypatch.setattr(arm_times, "timed", planted)
    arms |= {"twin": Arm(twin, 1), "large": Arm(large, 1)}
    times = measured(target, arms, prompts, rounds=2, repeats=1)
    assert times.draft[0] == times.draft[3] == pytest.approx((0, 2e-3), abs=1e-9)
    assert times.draft[4] == pytest.approx((0, 8e-3), abs=1e-9)
    assert times.read[0] == times.read[3] != times.read[4]
    assert times.verify == pytest.approx((0, 2e-3, 0), abs=1e-9)


def test_in_a_pool_a_round_has_the_costs_of_all_drafts(monkeypatch):
    """Every arm's rounds are longer by what a draft reads for rows of others; rounds of several arms are charged the sum of their drafting."""
    target, arms, prompts = models()
    used = []

    def planted(decoder, prompts, rounds, micro, seed):
        b = len(prompts)
        assert isinstance(decoder.draft, drafts.Pool)
        with torch.inference_mode():
            assignment = decoder.begin(b)
            context = sd.Context.of(prompts)
            chosen = assignment.choose(context, sd.rng.Philox(torch.arange(b))).arm.tolist()
        number = {"model": 0, "ngram": 1}
        arm = [number.get(decoder.selecting.names[a], 2) for a in chosen]
        used.append(tuple(arm))
        each = tuple((3, 2, 0)[a] for a in arm)
        draft = 6e-3 * (0 in arm) + 1e-4 * sum(each)
        whole = (draft + 5e-3 + 2e-3 * b + 3e-4 * sum(each)) * (1 + 0.1 * (len(set(arm)) > 1))
        parts = [Part(b, draft, 0.0, sum(each), 1.0 + n * whole, each) for n in range(rounds)]
        return whole, parts

    monkeypatch.setattr(arm_times, "timed", planted)
    times = measured(target, arms, prompts, rounds=2, repeats=1, pooled=True)
    assert set(used) == {(a,) * b for a in range(3) for b in (1, 2, 4, 8)}
    assert times.verify == pytest.approx((5e-3, 2e-3, 3e-4))
    assert [x for pair in times.draft for x in pair] == pytest.approx([2e-3, 1e-4, 0, 1e-4, 0, 0], abs=1e-9)
    del used[:]
    longer = several(target, arms, prompts, ("none", "model") * 4, times, 2, 1)
    assert set(used) == {(2, 0) * 4, (2,) * 8, (0,) * 8}
    assert longer == pytest.approx(1.1)
    for arm in ([2, 0], [0, 0]):
        parts = (np.array(arm), np.array([0, 3]), np.zeros(2))
        (draft, verify), (one, sum_of) = (replace(times, several=x).round(*parts) for x in (longer, 1.0))
        assert draft.sum() + verify == pytest.approx((one.sum() + sum_of) * (1.1 if arm[0] else 1.0))
    del used[:]
    costs = charges(target, arms, prompts, rounds=2, repeats=1, pooled=True)
    assert set(used) == {(a,) * 8 for a in range(3)}
    assert costs.verify == pytest.approx((5e-3 + 16e-3) / 8)
    assert costs.draft == pytest.approx((6e-3 / 24 + 4e-4, 4e-4, 0.0))


def test_rows_are_charged_what_a_batch_of_their_arm_takes(monkeypatch):
    target, arms, prompts = models()
    rounds = {"NoDraft": (8e-3, 0), "Model": (20e-3, 24), "NGram": (11e-3, 6)}  # the n-gram found little

    def planted(decoder, prompts, count, micro, seed):
        seconds, drafted = rounds[type(decoder.draft).__name__]
        return seconds, [Part(len(prompts), 0.0, 0.0, drafted)] * count

    monkeypatch.setattr(arm_times, "timed", planted)
    costs = charges(target, arms, prompts, rounds=2, repeats=1)
    assert costs.verify == pytest.approx(1e-3)
    assert costs.draft == pytest.approx((12e-3 / 24, 3e-3 / 6, 0.0))
    for arm, drafted in ((0, 3), (1, 6 / 8), (2, 0)):
        whole = 8 * float(costs.seconds(torch.tensor([arm]), torch.tensor([drafted])))
        assert whole == pytest.approx([*rounds.values()][(arm + 1) % 3][0])


def test_real_rounds_are_timed():
    target, arms, prompts = models()
    times = measured(target, arms, prompts, rounds=3, repeats=1)
    (fixed, row), _, none = times.draft
    assert fixed + row > 0
    assert none == (0, 0)
    assert sum(times.verify) > 0
    with pytest.raises(ValueError, match="at least 2"):
        measured(target, arms, prompts[:1])
    with pytest.raises(ValueError, match="temperature has 3 entries and there are 8 prompts"):
        measured(target, arms, prompts, sampling=sd.Sampling([1.0, 0.5, 0.0]))
    with pytest.raises(ValueError, match="'model' has no length"):
        measured(target, {"model": Arm(arms["model"].draft)}, prompts)


def test_a_pool_by_name():
    made = load_pool((POOL[0], "pocket-spire/2", "ngram/8", "ngram", "none"), length=3)
    kinds = (drafts.Model, drafts.Spire, drafts.NGram, drafts.NGram, type(None))
    assert [type(arm.draft) for arm in made.values()] == list(kinds)
    assert [arm.length for arm in made.values()] == [3, 2, 8, 3, None]
    assert made["ngram"].draft == drafts.NGram(max_match=4, min_match=2)
    assert set(POOL) <= set(zoo.names())
    assert {arm.partition("/")[0] for arm in ARMS} == {*POOL, "pocket-spire", "ngram", "none"}


@pytest.mark.parametrize("name", ["pocket-none", "ngram/0", "ngram/x", "none/2", "/3"])
def test_names_that_are_no_arms_are_refused(name):
    with pytest.raises(SystemExit, match=name):
        load_pool((name,))


def test_a_model_has_one_length():
    with pytest.raises(SystemExit, match="another length"):
        load_pool((f"{POOL[0]}/2", POOL[0]))
