"""Top-p over large vocabularies keeps the tokens that transformers keeps, without sorting all of them."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

import specdec as sd
from specdec.graphs import recorded
from specdec.kernels.nucleus import WIDE, nucleus

NONE = torch.empty(0, 0, dtype=torch.long)
INF = float("inf")


def large(rows: int, vocab_size: int = 20_000, spread: float = 3.0) -> torch.Tensor:
    """Distinct scores in random order: which of equal scores a sort puts first is not defined."""
    made = torch.linspace(-3 * spread, 3 * spread, vocab_size, dtype=torch.float64).expand(rows, -1)
    order = torch.rand(rows, vocab_size, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return made.gather(-1, order)


@pytest.mark.parametrize("mass", [0.001, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0], ids=["flat", "usual", "sharp"])
def test_it_keeps_what_transformers_keeps(spread, mass):
    scores = large(3, spread=spread)
    wanted = TopPLogitsWarper(mass)(NONE, scores)
    assert torch.equal(nucleus(scores, mass), wanted)
    assert torch.equal(nucleus(scores.float(), mass) > -INF, wanted > -INF)


def test_wide_and_narrow_nuclei_in_one_batch():
    scores = torch.cat([large(1, spread=0.1), large(1, spread=30.0)])
    wanted = TopPLogitsWarper(0.9)(NONE, scores)
    assert (wanted > -INF).sum(-1)[0] > WIDE > (wanted > -INF).sum(-1)[1] > 1
    assert torch.equal(nucleus(scores, 0.9), wanted)
    assert torch.equal(nucleus(scores[1:], 0.9), wanted[1:])


@pytest.mark.parametrize("wide", [4, 100], ids=["sorted", "not sorted"])
def test_of_equal_scores_the_highest_ids_are_kept(wide):
    scores = torch.zeros(1, 100)
    scores[0, 7] = 5.0  # as probable as 148 others
    alone, some = nucleus(scores, 0.5, wide)[0], nucleus(scores, 0.62, wide)[0]
    assert (alone > -INF).nonzero()[:, 0].tolist() == [7]
    kept = (some > -INF).nonzero()[:, 0].tolist()
    assert kept == [7, *range(100 - (len(kept) - 1), 100)]
    assert len(kept) == int((TopPLogitsWarper(0.62)(NONE, scores) > -INF).sum()) > 1


def test_masked_tokens_stay_masked():
    scores = large(2)
    scores[:, 100:] = -INF
    assert torch.equal(nucleus(scores, 0.9), TopPLogitsWarper(0.9)(NONE, scores))


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_rows_without_a_distribution_are_refused(bad):
    scores = large(2).float()
    scores[1, 5 if bad != -INF else slice(None)] = bad
    sampling = sd.Sampling(top_p=0.9)
    with pytest.raises(ValueError, match="logits of row 1"):
        sampling(scores[:, None], sd.Context.of([[0]] * 2))


def test_sampling_does_not_sort_a_large_vocabulary(monkeypatch):
    def sort(*_args, **_named):
        raise AssertionError("the vocabulary was sorted")

    scores, sampling = large(2).float()[:, None], sd.Sampling(temperature=0.8, top_p=0.9)
    wanted = TopPLogitsWarper(0.9)(NONE, scores[:, 0] / 0.8).softmax(-1)
    monkeypatch.setattr(torch, "sort", sort)
    made = sampling(scores, sd.Context.of([[0]] * 2))[:, 0]
    assert torch.allclose(made, wanted)
    assert torch.equal(made > 0, wanted > 0)


def test_a_recorded_step_is_transformers_own():
    scores, sampling = large(1).float()[:, None], sd.Sampling(top_p=0.9)
    nowhere = sd.Context.of([[0]])
    wanted = sampling.scores(scores, nowhere, None)
    out = {}
    recorded.record(lambda: out.update(made=sampling.scores(scores, nowhere, None)))
    assert torch.equal(out["made"], wanted)
