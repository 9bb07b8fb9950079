"""Requests of different temperatures in one batch: each is drawn as it would be alone."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import distributed, lab, selectors
from specdec.drafts.siblings import Distinct, Independent, TopAndOne
from specdec.executors import Optimistic, Pipelined, Serial
from specdec.lab.verifying import accepted_by
from specdec.verifiers import DistinctTransport, KSeq, Traversal


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", 0, torch.float64))


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5, "min_p": 0.01}, {"processors": (lambda i, s: s / 1.3,)}]
)
def test_every_request_may_have_its_own_temperature(settings):
    draw = torch.Generator().manual_seed(0)
    logits, temperatures = torch.randn(4, 3, 9, generator=draw), (0.7, 0.0, 1, 2.5)
    context = sd.Context.of([[1]] * 4, request=torch.tensor([2, 1, 3, 1]))  # rows in another order
    probs = sd.Sampling(temperatures, **settings)(logits, context)
    for b, request in enumerate(context.request.tolist()):
        own = sd.Sampling(temperatures[request], **settings)
        assert torch.equal(probs[b : b + 1], own(logits[b : b + 1], context.select(torch.tensor([b]))))
    assert not torch.equal(probs, sd.Sampling(0.7, **settings)(logits, context))
    for at, bad in ((1, "nan"), (2, "inf")):  # a greedy row, and one that is drawn
        broken = logits.clone()
        broken[at, 1, 0] = float(bad)
        with pytest.raises(ValueError, match=f"row {at}, entry 1 contain {bad}"):
            sd.Sampling(temperatures, **settings)(broken, context)
    with pytest.raises(ValueError, match="temperature has 3 entries and there is a request 3"):
        sd.Sampling([1.0, 2.0, 0.0])(logits, context)


@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"processors": (lambda i, s: s / 1.3,)}])
def test_distributions_of_nodes_that_exist_are_those_of_the_request_alone(settings, layout):
    temperatures, size = (0.7, 0.0, 1.0), torch.tensor([1, 3, 0])
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    if layout == "transposed":
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    before = logits.clone()
    context, proposal = sd.Context.of([[1]] * 3), sd.Proposal.chain(torch.zeros(3, 3).long(), size)
    sampling = sd.Sampling(temperatures, **settings)
    probs, later = (sampling(logits[:, 1 + n :], context, proposal, n) for n in (-1, 1))
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 4))  # also where there is no node
    for b, (temperature, n) in enumerate(zip(temperatures, size.tolist())):
        row = torch.tensor([b])
        alone = sd.Sampling(temperature, **settings)
        own = alone(logits[row], context.select(row), proposal.select(row))[0, : n + 1]
        assert torch.equal(probs[b, : n + 1], own)
        assert torch.equal(later[b, : max(n - 1, 0)], own[2:])
    assert torch.equal(logits, before)


def test_logits_that_a_temperature_makes_infinite_are_refused():
    logits = torch.tensor([[[1e9, 0.0]], [[1.0, 0.0]]])
    with pytest.raises(ValueError, match="row 0, entry 0 contain inf"):
        sd.Sampling((1e-30, 0.0))(logits, sd.Context.of([[1]] * 2))


@pytest.mark.parametrize("wrong", [[], [0.5, -1.0], [float("nan")], [1.0, None], ["1"]])
def test_wrong_temperatures_of_requests_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="temperature"):
        sd.Sampling(wrong)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_too_few_temperatures_are_noticed_before_anything_is_decoded(call, target):
    decoder = sd.decoder(target).sampling(temperature=[0, 1, 1]).build()
    more = {"batch_size": 2} if call == "generate" else {}
    seen = []
    with pytest.raises(ValueError, match="temperature has 3 entries and there are 4 prompts"):
        getattr(decoder, call)([[1]] * 4, 9, on_round=seen.append, **more)
    assert not seen


@pytest.mark.parametrize("executor", [Serial(), Pipelined(2), Optimistic()], ids=repr)
def test_requests_of_all_temperatures_share_a_batch(executor, target):
    """Under ``Coupled`` a row's text is that of the row alone, at its own temperature, also when others have left."""
    prompts, temperatures = [[1, 2], [3], [4, 5, 6], [7]], (1.0, 0.0, 0.5, 0.0)
    arms = {"model": sd.drafts.Model(target), "n-gram": sd.drafts.NGram(), "none": None}
    base = sd.decoder(target).verifier(sd.Coupled()).executor(executor)
    mixed = base.pool(arms, selectors.Random(), 3).sampling(temperature=temperatures).build()
    found = mixed.generate(prompts, [24, 6, 20, 12], seed=[0, 1, 2, 3]).ids
    for b, temperature in enumerate(temperatures):
        alone = sd.decoder(target).sampling(temperature=temperature).verifier(sd.Coupled()).build()
        assert found[b] == alone.generate([prompts[b]], [24, 6, 20, 12][b], seed=[b]).ids[0]
    hot = sd.decoder(target).verifier(sd.Coupled()).build().generate([prompts[1]], 6, seed=[1]).ids[0]
    assert found[1] != hot  # so that a temperature that is not looked up would be seen


def test_requests_that_are_numbered_anew_need_one_temperature(target, tmp_path, monkeypatch):
    sampling = sd.Sampling((1.0, 0.5))
    with pytest.raises(
        ValueError, match="sampling has a temperature for each request: record a trace for each"
    ):
        lab.record(target, [[1], [2]], tmp_path / "t", 4, 2, sampling=sampling)
    state = type("Two", (), {"num_processes": 2, "process_index": 0})
    monkeypatch.setattr(distributed, "PartialState", lambda **_: state)
    monkeypatch.setattr(distributed, "gather_object", lambda said: said)
    with pytest.raises(ValueError, match="sampling settings for each request"):
        distributed.generate(sd.decoder(target).sampling(sampling).build(), [[1], [2]], 4)
    own = sd.drafts.Model(target, sampling)
    pool = sd.decoder(target).pool({"own": own, "none": None}, selectors.Random(), 2)
    for mine in (sd.decoder(target).draft(own, 2), pool):
        with pytest.raises(ValueError, match="the draft has sampling settings for each request"):
            distributed.generate(mine.build(), [[1], [2]], 4)


def test_a_lab_that_numbers_texts_anew_needs_one_temperature_of_a_draft(target, tmp_path):
    own = sd.drafts.Tree(target, (2,), sd.Sampling((1.0, 0.5)))
    trace = lab.record(target, [[1], [2]], tmp_path / "t", 4, 2, progress=False)
    for ask in (
        lambda: lab.replay(trace, own, 1),
        lambda: lab.simulate(trace, own, target, 1),
        lambda: accepted_by(sd.decoder(target).draft(own, 1).build(), [[1]], {"r": sd.Rejection()}),
    ):
        with pytest.raises(
            ValueError, match=r"sampling settings for each request, and (texts|requests) are numbered"
        ):
            ask()


@pytest.mark.parametrize(
    ("verifier", "siblings"),
    [
        (sd.Rejection(), Independent()),
        (sd.Rejection(), TopAndOne()),
        (Traversal(), Distinct()),
        (KSeq(), Independent()),
        (DistinctTransport(), Distinct()),
    ],
    ids=repr,
)
def test_a_tree_has_distinct_children_in_rows_of_temperature_0(verifier, siblings):
    """Such a row drafts, accepts and commits what a greedy decoder would; also where ``top_k`` leaves fewer tokens than there are children."""
    target, small = (sd.TableModel.random(6, 1, seed=seed) for seed in (0, 1))
    tree = sd.drafts.Tree(small, (3, 2), siblings=siblings)
    base = sd.decoder(target).draft(tree, length=2).verifier(verifier)
    prompts, budgets, temperatures = [[0], [1, 2], [3], [4]], [14, 9, 12, 3], (1.0, 0.0, 0.7, 0.0)
    top_k = 2 if isinstance(siblings, Independent) else None
    mixed = base.sampling(temperature=temperatures, top_k=top_k).build()
    found = mixed.generate(prompts, budgets, seed=[0, 1, 2, 3])
    for b in (1, 3):
        alone = base.greedy().build().generate([prompts[b]], budgets[b], seed=[b])
        assert found.ids[b] == alone.ids[0]
        assert found.row_stats[b] == alone.row_stats[0]
    assert found.row_stats[1].accepted > 0
    same = [base.sampling(temperature=t, top_k=top_k).build() for t in (1.0, 0.7)]
    for b, decoder in zip((0, 2), same):  # rows that are drawn do not notice the others
        assert found.ids[b] == decoder.generate([prompts[b]], budgets[b], seed=[b]).ids[0]
    cold = base.sampling(temperature=(0.0, 0.0)).build().generate(prompts[:2], budgets[:2], seed=0)
    assert cold.ids[1] == found.ids[1]
