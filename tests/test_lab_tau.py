"""The lab's τ: blocks of every length from one pass, and paired intervals over sources."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny

from specdec.audit.tau import efficiency
from specdec.drafts.spire import SpireModel
from specdec.lab.bootstrap import Clusters, figures, mean_interval
from specdec.lab.tau import Texts, each_k, score
from specdec.training.forward import Parallel


@pytest.mark.parametrize("kind", ["vanilla", "windowed", "spire", "no feedback", "all layers"])
def test_every_k_from_one_pass_is_each_k_on_its_own(kind):
    """A block's first tokens do not depend on how many are to come, windows as narrow as the longest block included."""
    target, (L, n, longest) = tiny("llama", num_hidden_layers=3, vocab_size=23), (12, 17, 6)
    tokens = torch.randint(0, 23, (3, L + 1 + n + longest), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = target(tokens[:, :-1], output_hidden_states=True)
    hidden = {layer: out.hidden_states[layer] for layer in range(3)}
    texts = Texts(tokens, L, n, longest, torch.arange(3).numpy(), out.logits[:, L:], hidden)
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


def made(seed, texts=12):
    draw = torch.Generator().manual_seed(seed)
    return efficiency(torch.rand(texts, 9, 3, generator=draw))


def compared(mine, other, sources):
    ours, theirs = (torch.stack(e[:2]).numpy() for e in (mine, other))
    return figures(ours, theirs, Clusters(sources))


def test_intervals_are_of_ratios_of_sums_over_sources():
    mine, other = made(0), made(1)
    sources = np.arange(12) // 2
    found = compared(mine, other, sources)
    assert found["tau"] == pytest.approx(float(mine.tokens.sum() / mine.rounds.sum()))
    assert found["tau_low"] < found["tau"] < found["tau_high"]
    assert found["ratio"] == pytest.approx(mine.tau / other.tau)
    # Texts of one source count together: three times the same texts tell no more than once.
    again = type(mine)(*(t.repeat(3, *[1] * (t.ndim - 1)) for t in mine))
    assert compared(again, again, np.tile(sources, 3))["tau_low"] == pytest.approx(found["tau_low"])
    alone = compared(again, again, np.arange(36))
    assert alone["tau_high"] - alone["tau_low"] < found["tau_high"] - found["tau_low"]


def test_few_sources_give_no_intervals():
    """As everywhere in the lab: four sources have 35 bootstrap samples, and their quantiles are no interval."""
    mine, other = made(0), made(1)
    found = compared(mine, other, np.arange(12) // 3)
    assert found["tau"] == pytest.approx(mine.tau)
    assert found["ratio"] == pytest.approx(mine.tau / other.tau)
    assert {found[end] for end in ("tau_low", "tau_high", "ratio_low", "ratio_high")} == {None}
    assert None not in compared(mine, other, np.arange(12) % 5).values()


def test_a_method_against_itself_has_no_doubt_about_the_ratio():
    found = compared(made(0), made(0), np.arange(12))
    assert (found["ratio_low"], found["ratio_high"]) == (1, 1)


def test_an_interval_of_a_mean():
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    low, high = mean_interval(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.15)
    few = np.array([3.0, 1.0, 2.0, 2.5])
    assert mean_interval(few) == (1.0, 3.0)  # of few values: their range
    low, high = mean_interval(np.append(few, 1.5))
    assert 1.0 < low < 2.0 < high < 3.0
