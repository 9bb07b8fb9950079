"""τ: the dynamic programme against enumeration, and the whole estimator against live decoding."""

from __future__ import annotations

import itertools

import pytest
import torch
from fake_device import FakeDevice, onto
from tiny import tiny

import specdec as sd
from specdec.audit.tau import chances, efficiency, magicdec_chances, parallel_chances, spire_chances
from specdec.drafts.spire import SpireModel
from specdec.pruning import H2O


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


@pytest.mark.parametrize("parents", [None, [-1, -1, 0, 0, 1]])
def test_texts_of_different_lengths_are_each_as_alone(parents):
    draw = torch.Generator().manual_seed(3)
    accept = torch.rand(6, 9, 5, generator=draw) / (1 if parents is None else 2)
    n, cut = torch.tensor([9, 4, 1, 7, 3, 0]), torch.tensor([True, False, True, True, False, True])
    lengths = torch.randint(0, 4, (6, 9), generator=draw)
    padded = torch.where(torch.arange(9)[:, None] < n[:, None, None], accept, torch.nan)
    whole = efficiency(padded, None, cut, n=n, lengths=lengths, parents=parents)
    for c in range(5):
        m = int(n[c])
        alone = efficiency(
            accept[c : c + 1, :m], None, bool(cut[c]), lengths=lengths[c : c + 1, :m], parents=parents
        )
        for a, b in zip(whole, alone):
            torch.testing.assert_close(a[c], b[0], rtol=0, atol=1e-12)
    assert (float(whole.tokens[5]), float(whole.rounds[5])) == (0, 0)
    torch.testing.assert_close(whole.tokens[cut], n[cut].double(), rtol=0, atol=1e-12)


def test_lengths_of_rounds():
    """One length everywhere is k; without any a round is one token; rounds by enumeration otherwise."""
    accept = torch.rand(2, 8, 4, generator=torch.Generator().manual_seed(0))
    for k in (1, 3):
        for a, b in zip(efficiency(accept, k), efficiency(accept, lengths=torch.full((2, 8), k))):
            torch.testing.assert_close(a, b[..., : a.shape[-1]] if b.dim() == 2 else b, rtol=0, atol=1e-12)
    assert efficiency(accept, lengths=torch.zeros(2, 8, dtype=torch.long)).rounds.tolist() == [8, 8]
    lengths = torch.randint(0, 5, (2, 8), generator=torch.Generator().manual_seed(1))
    # A draft that is always rejected there.
    blocked = torch.where(torch.arange(4) < lengths[..., None], accept, 0)
    assert len(set(lengths.flatten().tolist())) == 5
    a, b = efficiency(accept, cut=True, lengths=lengths), efficiency(blocked, cut=True)
    torch.testing.assert_close(a.rounds, b.rounds, rtol=0, atol=1e-12)
    torch.testing.assert_close(a.accepted, b.accepted, rtol=0, atol=1e-12)
    assert float((b.reached - a.reached).min()) >= 0


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
    assert efficiency(torch.full((2, 15, 4), 1 + 1e-15, dtype=torch.float64)).tau == pytest.approx(5)
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


@pytest.mark.parametrize("kind", ["model", pytest.param("spire", marks=pytest.mark.slow)])
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


def magicdecs_case() -> tuple:
    target = tiny("llama", num_hidden_layers=3, vocab_size=23)
    tokens = torch.randint(0, 23, (3, 38), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return target, tokens, target(tokens[:, :-1], output_hidden_states=True)


@pytest.mark.parametrize(("window", "sinks", "k"), [(5, 1, 3), (9, 2, 4), (4, 0, 1)])
def test_magicdec_is_the_targets_own_blocks_over_its_activations(window, sinks, k):
    """Which is a ``SpireModel`` of all layers without feedback."""
    target, tokens, out = magicdecs_case()
    whole = SpireModel.from_target(target, 3, sinks=sinks, window=window, feedback=False)
    inputs = {layer: out.hidden_states[layer] for layer in whole.layers}
    expected = spire_chances(whole, out.logits, inputs, tokens, 15, k)
    draft = sd.drafts.MagicDec(window=window, sinks=sinks)
    got = magicdec_chances(draft, sd.HFModel(target), out.logits[:, 14:], tokens, 15, k)
    torch.testing.assert_close(got[:, :-k], expected[:, :-k], rtol=0, atol=1e-6)  # norms are in float32
    assert float(got[:, :-k].std()) > 0.03


def test_magicdec_on_a_device():
    """The texts and the target's logits stay on the CPU."""
    target, tokens, out = magicdecs_case()
    draft = sd.drafts.MagicDec(window=4, sinks=1)
    case = (out.logits[:, 14:].clone(), tokens, 15, 2)
    wanted = magicdec_chances(draft, sd.HFModel(target), *case)
    with FakeDevice(), torch.no_grad():
        made = magicdec_chances(draft, sd.HFModel(onto(magicdecs_case()[0])), *case)
    torch.testing.assert_close(made, wanted)


def test_magicdec_with_all_that_it_does_not_see_chosen_is_the_target():
    """At the block start where its pruner chose; later the window has moved on."""
    target, tokens, out = magicdecs_case()
    for pruner, same in ((None, False), (H2O(), True)):
        draft = sd.drafts.MagicDec(window=5, pruner=pruner, budget=40, observation=2)
        made = magicdec_chances(draft, sd.HFModel(target), out.logits[:, 29:], tokens, 30, 3)
        assert torch.allclose(made[:, 0, 0], torch.ones(3).double(), rtol=0, atol=1e-6) == same
        assert float(made[:, 4:].min()) < 0.95


def test_bad_input():
    with pytest.raises(ValueError, match="k is 5"):
        efficiency(torch.rand(1, 4, 4), k=5)
    accept = torch.full((1, 4, 2), 0.6)
    for message, values, settings in (
        ("outside 0", torch.full((1, 4, 2), 1.5), {}),
        ("outside 0", torch.full((1, 4, 2), torch.nan), {}),
        ("siblings sums to more than 1", accept, {"parents": [-1, -1]}),
        (r"parents\[0\] is 0: give -1", accept, {"parents": [0, -1]}),
        ("parents has 3 entries and accept 2", accept, {"parents": [-1, 0, 1]}),
        ("n is 5 to 5: give each of the 1 texts", accept, {"n": torch.tensor([5])}),
        (r"n has shape \[2\]: give each of the 1 texts", accept, {"n": torch.tensor([2, 2])}),
        ("lengths has shape", accept, {"lengths": torch.ones(1, 3, dtype=torch.long)}),
        ("whole numbers, 0 or more", accept, {"lengths": torch.full((1, 4), -1)}),
        ("whole numbers, 0 or more", accept, {"lengths": torch.ones(1, 4)}),
        ("cut is .*: give True, False", accept, {"cut": torch.tensor([1])}),
    ):
        with pytest.raises(ValueError, match=message):
            efficiency(values, **settings)
    with pytest.raises(TypeError, match=r"k is 1\.5: give a whole number"):
        efficiency(accept, k=1.5)
