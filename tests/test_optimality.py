"""Acceptance beside its optimum: known pairs, the theory's bounds, and recorded texts against plain forwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny

import specdec as sd
from specdec import lab
from specdec.drafts.spire import SpireModel
from specdec.lab import bounds as module
from specdec.lab.bounds import along, optimality, plot, violations
from specdec.verifiers import acceptance

T3, T6 = (([0.45, 0.45, 0.1], [0.2, 0.3, 0.5]), ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]))


def tensors(*pairs):
    return tuple(torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in (0, 1))


def row_of(found, **wanted):
    (row,) = (row for row in found.rows if all(row[name] == value for name, value in wanted.items()))
    return row


@pytest.mark.parametrize(
    ("pair", "recursive", "kseq", "best", "distinct", "best_distinct", "greedy", "top"),
    [
        (T6, 0.68, 0.7081, 0.76, 0.76, 0.885714, 0.8, 0.4),
        (T3, 0.80, 0.8150, 0.85, 0.91, 1.0, 0.95, 0.55),
    ],
)
def test_known_pairs(pair, recursive, kseq, best, distinct, best_distinct, greedy, top):
    found = optimality(*tensors(pair), candidates=(2,))
    for chosen, verifier, accepted, optimum in (
        ("independent", "recursive rejection", recursive, best),
        ("independent", "k-SEQ", kseq, best),
        ("distinct", "recursive rejection", distinct, best_distinct),
        ("greedy set", "recursive rejection", greedy, greedy),
        ("most probable", "recursive rejection", top, top),
    ):
        row = row_of(found, chosen=chosen, verifier=verifier)
        assert row["acceptance"] == pytest.approx(accepted, abs=6e-5)
        assert row["optimum"] == pytest.approx(optimum, abs=1e-6)
        assert row["independent"] == pytest.approx(best, abs=1e-6)
        assert row["single"] == pytest.approx(0.6, abs=1e-12)
        assert (row["depth"], row["positions"], row["exact"]) == ("all", 1, True)
    assert "k-SEQ" in repr(found)
    assert len(found.frame()) == len(found.rows) == 5


@st.composite
def laws(draw):
    V = draw(st.integers(2, 5))
    weights = st.lists(st.integers(0, 5), min_size=V, max_size=V).filter(any)
    made = torch.tensor([draw(weights) for _ in range(4)], dtype=torch.float64)
    return (made / made.sum(1, keepdim=True)).split(2)


@settings(max_examples=25, deadline=None)
@given(laws())
def test_nothing_contradicts_the_theory(pair):
    found = optimality(*pair, candidates=(1, 2, 3), draws=4)
    assert violations([row for row in found.rows if row["exact"]]) == []
    for row in found.rows:
        assert row["share"] <= 1 + 1e-6 or not row["exact"]
        assert row["single"] <= row["independent"] + 1e-9
        assert row["verifier"] != "k-SEQ" or row["acceptance"] >= row["single"] - 1e-9


def test_what_contradicts_it_is_found():
    rows = optimality(*tensors(T6, T3), candidates=(2,)).rows
    assert violations(rows) == []
    kseq = row_of(optimality(*tensors(T6), candidates=(2,)), verifier="k-SEQ")
    (said,) = violations([kseq | {"excess": 1e-6}])
    assert said == "k-SEQ of 2 independent candidates, depth all: 1.00e-06 above its optimum"
    assert "0.7400 of its optimum" in violations([kseq | {"share": 0.74}])[0]
    assert violations([kseq | {"share": 0.76}]) == []
    # An estimate is compared in the mean.
    assert violations([kseq | {"exact": False, "excess": 0.1}]) == []
    assert len(violations([kseq | {"exact": False, "acceptance": kseq["optimum"] + 1e-6}])) == 1


def test_distinct_candidates_are_estimated_and_sampled_by_position():
    draw = torch.Generator().manual_seed(0)
    p, q = (torch.rand(40, 5, generator=draw, dtype=torch.float64) ** 2 for _ in range(2))
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    q[::4, 0] = 0
    q /= q.sum(1, keepdim=True)
    some = row_of(optimality(p, q, (3,), distinct=4, draws=400), chosen="distinct")
    exact = acceptance.recursive(p[::4], q[::4], 3, replacement=False).mean()
    assert not some["exact"]
    assert some["positions"] == 10
    assert some["acceptance"] == pytest.approx(float(exact), abs=0.01)
    assert some["optimum"] == pytest.approx(
        float(acceptance.optimum(p[::4], q[::4], 3, False).mean()), abs=1e-9
    )
    assert some["independent"] == pytest.approx(float(acceptance.optimum(p[::4], q[::4], 3).mean()), abs=1e-9)
    assert not [row for row in optimality(p, q, (3,), distinct=0).rows if row["chosen"] == "distinct"]


def test_positions_are_averaged_by_depth_over_chunks(monkeypatch):
    draw = torch.Generator().manual_seed(1)
    p, q = torch.rand(2, 3, 5, 6, generator=draw, dtype=torch.float64)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    depth = torch.arange(5).expand(3, 5)
    whole = optimality(p, q, (2, 3), depth, distinct=2)
    monkeypatch.setattr(module, "CHUNK", 4)
    parts = optimality(p, q, (2, 3), depth, distinct=2)
    for one, other in zip(whole.rows, parts.rows, strict=True):
        if one["exact"]:  # an estimate's draws depend on the chunk
            assert one == pytest.approx(other, abs=1e-9)
    third = row_of(whole, depth=3, candidates=2, verifier="k-SEQ")
    assert third["positions"] == 3
    assert third["acceptance"] == pytest.approx(float(acceptance.kseq(p[:, 2], q[:, 2], 2).mean()))
    assert {row["depth"] for row in whole.rows} == {"all", 1, 2, 3, 4, 5}


V, K = 17, 3


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3, vocab_size=V))


@pytest.fixture(scope="module")
def trace(target, tmp_path_factory):
    prompts = [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]]
    sampling = sd.Sampling(temperature=0.7)
    folder = tmp_path_factory.mktemp("trace") / "t"
    return lab.record(target, prompts, folder, 5, K, sampling, (1, 2), eos_token_id=(), progress=False)


def test_recorded_texts_give_the_laws_of_plain_forwards(target, trace):
    draft = sd.HFModel(tiny("llama", seed=1, vocab_size=V))
    found = along(trace, draft, K, candidates=(1, 2), distinct=1, batch=2)
    p, q, depth = [], [], []
    for text in trace.texts:
        with torch.no_grad():
            both = [model.model(torch.tensor([text.ids])).logits[0] / 0.7 for model in (target, draft)]
        for start in range(5):
            for d in range(K):
                at = text.prompt + 1 + start + d  # the token's place, and its law is after the one before
                p.append(both[0][at - 1].softmax(-1))
                q.append(both[1][at - 1].softmax(-1))
                depth.append(d)
    expected = optimality(torch.stack(p), torch.stack(q), (1, 2), torch.tensor(depth))
    assert len(found.rows) == len(expected.rows) == (1 + K) * 9
    for row in found.rows:
        key = {name: row[name] for name in ("depth", "candidates", "chosen", "verifier")}
        other = row_of(expected, **key)
        for name in ("positions", *module.FIGURES):
            assert row[name] == pytest.approx(other[name], abs=1e-5)
    replayed = lab.replay(trace, draft, K)
    assert len(replayed.accept) == 3  # watching changes nothing


def test_a_draft_of_activations_has_other_laws_at_other_depths(target, trace):
    model = SpireModel.from_target(target.model, 2, window=5, sinks=1)
    torch.nn.init.normal_(model.memory.weights, generator=torch.Generator().manual_seed(0))
    found = along(trace, sd.drafts.Spire(model), K, target, candidates=(2,))
    shown = [row_of(found, depth=d, verifier="k-SEQ") for d in (1, 2, 3)]
    assert [row["positions"] for row in shown] == [15, 15, 15]
    assert len({round(row["acceptance"], 6) for row in shown}) == 3
    assert not violations(found.rows)


def test_what_has_no_laws_is_refused(target, trace, tmp_path):
    with pytest.raises(ValueError, match=r"draft 'n-?gram' does not draw chains from distributions"):
        along(trace, sd.drafts.NGram(), K)
    draft = sd.HFModel(tiny("llama", seed=1, vocab_size=V))
    with pytest.raises(ValueError, match="does not draw chains from distributions: give one that does"):
        along(trace, sd.drafts.Tree(draft, (2, 1)), 2)
    few = lab.record(target, [[1, 2]], tmp_path / "few", 3, 2, keep=4, eos_token_id=(), progress=False)
    with pytest.raises(ValueError, match=r"has the 4 largest probabilities, .* record with keep=17"):
        along(few, draft)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.full((1, 2), 0.5)}, r"p is \[1, 3\] and q \[1, 2\]: give distributions"),
        ({"p": torch.tensor([[1.0, 2.0, 0.0]])}, "p has a row that is no distribution"),
        ({"q": torch.tensor([[1.5, -0.5, 0.0]])}, "q has a row that is no distribution"),
        ({"p": torch.tensor([[torch.nan, 0.5, 0.5]])}, "p has a row that is no distribution"),
        ({"candidates": (2, 0)}, "candidates is 0: give numbers of candidates, at least 1"),
        ({"distinct": -1}, "distinct is -1"),
        ({"draws": 0}, "draws is 0"),
        ({"p": torch.zeros(0, 3), "q": torch.zeros(0, 3)}, "p and q are empty"),
    ],
)
def test_bad_input_is_named(change, says):
    p, q = tensors(T6)
    with pytest.raises(ValueError, match=says):
        optimality(**{"p": p, "q": q} | change)


def test_the_figure_has_a_line_for_every_way():
    found = optimality(*tensors(T6, T3), candidates=(1, 2))
    figure = plot({"a": found.rows, "b": found.rows})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b"]
    assert [len(axes.lines) for axes in figure.axes] == [7, 7]
    (bound,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert bound.get_ydata() == pytest.approx([0.6, 0.805])
    assert len(found.plot().axes) == 1
    assert len(plot(dict.fromkeys("abcd", found.rows)).axes) == 4
