"""τ: the dynamic programme against enumeration, and the whole estimator against live decoding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.audit.tau import chances, efficiency, parallel_chances, spire_chances
from specdec.drafts.spire import SpireModel


def enumerated(accept, n, k):
    """Expected rounds by walking every outcome of every decision."""

    def rounds(s):
        if s >= n:
            return 0.0
        room, total, here = min(k, n - s - 1), 1.0, 1.0
        for j in range(room):
            total += here * (1 - accept[s][j]) * rounds(s + j + 1)
            here *= accept[s][j]
        return total + here * rounds(s + room + 1)

    return rounds(0)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 3), (5, 1), (7, 3), (9, 4)])
def test_rounds_by_enumeration(n, k):
    accept = torch.rand(3, n, k, generator=torch.Generator().manual_seed(n))
    made = efficiency(accept, cut=True)
    for c in range(3):
        assert float(made.rounds[c]) == pytest.approx(enumerated(accept[c].tolist(), n, k), rel=1e-6)


def test_whole_rounds_by_simulation():
    """Rounds that start among the first n positions, and where the last one ends."""
    n, k, runs = 6, 3, 20000
    accept = torch.rand(n, k, generator=torch.Generator().manual_seed(0))
    made = efficiency(accept[None])
    draws = torch.rand(runs, n, k, generator=torch.Generator().manual_seed(1)) < accept
    kept = draws.long().cumprod(-1).sum(-1) + 1  # [runs, n] tokens of a round that starts there
    rounds, end = torch.zeros(2, runs)
    for run in range(runs):
        s = 0
        while s < n:
            rounds[run], s = rounds[run] + 1, s + int(kept[run, s])
        end[run] = s
    for counted, expected in ((rounds, made.rounds), (end, made.tokens)):
        assert abs(float(counted.mean()) - float(expected)) < 4 * float(counted.std()) / runs**0.5


def test_limits():
    assert efficiency(torch.zeros(2, 12, 4)).tau == pytest.approx(1)
    assert efficiency(torch.ones(2, 15, 4)).tau == pytest.approx(5)
    everything = efficiency(torch.ones(2, 15, 4), k=2)
    assert everything.tau == pytest.approx(3)
    assert everything.accepted.tolist() == everything.reached.tolist()


def test_chance_of_a_token_by_enumeration():
    """Over all pairs of a proposal and a verdict: P(accepted | committed x) = min(1, q(x) / p(x))."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.0, 0.3])
    residual = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    accepted, committed = torch.zeros(4), torch.zeros(4)
    for x, y in itertools.product(range(4), range(4)):
        keep = min(1.0, float(p[x] / q[x])) if q[x] > 0 else 0.0
        committed[y] += q[x] * (1 - keep) * residual[y]
        if x == y:
            accepted[x] += q[x] * keep
            committed[x] += q[x] * keep
    torch.testing.assert_close(committed, p)
    torch.testing.assert_close(accepted[:3] / committed[:3], chances(p, q)[:3])


@pytest.mark.parametrize("kind", ["model", "spire"])
def test_same_mean_as_live_decoding(kind):
    """Expected rounds of target-sampled texts against counted rounds of as many others, in standard errors of both."""
    target = tiny("llama", num_hidden_layers=3, vocab_size=11)
    k, G, C = 3, 14, 400
    prompts = torch.randint(0, 11, (C, 9), generator=torch.Generator().manual_seed(5)).tolist()
    wrapped = sd.HFModel(target)
    model = (
        SpireModel.from_target(target, 2, window=5)
        if kind == "spire"
        else tiny("llama", seed=1, vocab_size=11)
    )
    draft = sd.drafts.Spire(model) if kind == "spire" else sd.drafts.Model(sd.HFModel(model))
    live = sd.decoder(wrapped).draft(draft, k).build().generate(prompts, G, seed=1)
    counted = torch.tensor([s.rounds for s in live.row_stats], dtype=torch.float64)
    texts = sd.decoder(wrapped).build().generate(prompts, G, seed=2).ids
    tokens = torch.tensor([a + b for a, b in zip(prompts, texts)])
    with torch.no_grad():
        out = target(tokens[:, :-1], output_hidden_states=True)
    if kind == "spire":
        inputs = {layer: out.hidden_states[layer] for layer in model.layers}
        accept = spire_chances(model, out.logits, inputs, tokens, 10, k)
    else:
        with torch.no_grad():
            accept = parallel_chances(out.logits, model(tokens[:, :-1]).logits, tokens, 10, k)
    expected = efficiency(accept, cut=True).rounds
    error = ((counted.var() + expected.var()) / C).sqrt()
    assert abs(float(counted.mean() - expected.mean())) < 4 * float(error)
    assert float(error) < 0.15  # of about seven rounds: a bias of a tenth would show
    assert float(expected.var()) < float(counted.var())


@pytest.mark.parametrize("kind", ["vanilla", "windowed", "spire", "no feedback", "all layers"])
def test_every_k_from_one_pass_is_each_k_on_its_own(kind, monkeypatch):
    """A block's first tokens do not depend on how many are to come, windows as narrow as the longest block included."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "recipes"))
    from _tau import Texts, each_k, score

    from specdec.training.forward import Parallel

    target, (L, n, longest) = tiny("llama", num_hidden_layers=3, vocab_size=23), (12, 17, 6)
    tokens = torch.randint(0, 23, (3, L + 1 + n + longest), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = target(tokens[:, :-1], output_hidden_states=True)
    hidden = {layer: out.hidden_states[layer] for layer in range(3)}
    texts = Texts(tokens, L, n, longest, ["code"] * 3, torch.arange(3).numpy(), out.logits[:, L:], hidden)
    spire = {
        "spire": {"layers": 2, "window": longest},
        "no feedback": {"layers": 2, "window": 9, "feedback": False},
        "all layers": {"layers": 3, "window": longest, "feedback": False},
    }
    if kind in spire:
        draft, forward = SpireModel.from_target(target, sinks=2, **spire[kind]), None
        if draft.memory is not None:
            torch.nn.init.normal_(draft.memory.weights, generator=torch.Generator().manual_seed(0))
    else:
        draft = tiny("llama", seed=1, vocab_size=23)
        forward = Parallel(3, 1) if kind == "windowed" else Parallel()
    found = list(each_k({kind: (draft, forward)}, texts, range(1, longest + 1)))
    assert [at_k.k for at_k, _ in found] == list(range(1, longest + 1))
    for at_k, scores in found:
        for sliced, alone in zip(scores[kind], score(draft, replace(texts, k=at_k.k), forward)):
            torch.testing.assert_close(sliced, alone, rtol=0, atol=1e-10)
    assert len({round(scores[kind].tau, 6) for _, scores in found}) == longest  # k does matter


def test_bad_input():
    with pytest.raises(ValueError, match="k is 5"):
        efficiency(torch.rand(1, 4, 4), k=5)
    with pytest.raises(ValueError, match="outside 0"):
        efficiency(torch.full((1, 4, 2), 1.5))
