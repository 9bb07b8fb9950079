"""The tabular model: every number can be checked by hand."""

import pytest
import torch

import specdec as sd
from specdec.types import Context, Proposal

TABLE = sd.TableModel.random(3, 2, seed=0, zeros=0.2)


def test_scores_are_the_log_distributions_of_the_true_prefixes():
    rows = [[2], [0, 1], [1, 2, 0, 1]]
    context = Context.of(rows)
    parents = torch.tensor([[-1, 0, -1, 1], [-1, -1, 1, 2], [-1, 0, 0, 0]])
    tokens = torch.tensor([[2, 1, 0, 2], [0, 1, 1, 0], [2, 2, 0, 1]])
    size = torch.tensor([4, 3, 0])
    scores = TABLE.score(TABLE.cache(3, 8), context, Proposal(tokens, parents, size)).logits
    assert scores.shape == (3, 5, 3)
    assert scores.dtype == torch.float64
    for b, row in enumerate(rows):
        assert torch.allclose(scores[b, 0].exp(), TABLE.distribution(row))
        for n in range(4):
            path, m = [], n
            while m >= 0:
                path, m = [int(tokens[b, m]), *path], int(parents[b, m])
            want = TABLE.distribution(row + path) if n < size[b] else torch.ones(3, dtype=torch.float64)
            assert torch.allclose(scores[b, 1 + n].exp(), want)


def test_start_and_rows_choose_what_is_scored():
    context = Context.of([[0, 1], [2, 2]])
    proposal = Proposal.chain(torch.tensor([[1, 2, 0], [0, 0, 1]]), torch.tensor([3, 3]))
    whole = TABLE.score(TABLE.cache(2, 8), context, proposal).logits
    assert torch.equal(TABLE.score(TABLE.cache(2, 8), context, proposal, start=1).logits, whole[:, 2:])
    cache = TABLE.cache(2, 8)
    some = TABLE.score(cache, context, proposal, rows=torch.tensor([1])).logits
    assert torch.equal(some[1], whole[1])
    assert not bool(some[0].any())
    assert cache.length.tolist() == [0, 2]


def test_short_prefixes_are_padded_with_token_0_on_the_left():
    assert torch.equal(TABLE.distribution([1]), TABLE.probs[0, 1])
    assert torch.equal(TABLE.distribution([]), TABLE.probs[0, 0])
    assert torch.equal(TABLE.distribution([2, 1, 0]), TABLE.probs[1, 0])


def test_the_joint_distribution_sums_to_one_and_is_the_product():
    joint = TABLE.joint([2, 1], 3)
    assert joint.shape == (3, 3, 3)
    assert float(joint.sum()) == pytest.approx(1)
    want = TABLE.distribution([2, 1])[0] * TABLE.distribution([1, 0])[2] * TABLE.distribution([0, 2])[1]
    assert float(joint[0, 2, 1]) == pytest.approx(float(want))
    assert float(TABLE.joint([0], 0)) == 1


def test_random_tables_are_seeded_and_may_have_zeros():
    assert torch.equal(sd.TableModel.random(4, 1, 7).probs, sd.TableModel.random(4, 1, 7).probs)
    sparse = sd.TableModel.random(5, 2, 0, zeros=0.9).probs
    assert bool((sparse == 0).any())
    assert torch.allclose(sparse.sum(-1), torch.ones(5, 5, dtype=torch.float64))
    assert repr(TABLE) == "TableModel(vocab_size=3, order=2)"


def test_the_cache_counts_and_selects():
    cache = TABLE.cache(2, 8)
    context = Context.of([[0, 1], [2]])
    TABLE.score(cache, context)
    assert cache.length.tolist() == [2, 1]
    assert cache.select(torch.tensor([1])).length.tolist() == [1]
    assert cache.sync(Context.of([[0], [2]])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ([0.5, 0.4], "sums to 0.9"),
        ([[0.5, 0.5], [0.5, 0.6]], r"probs\[1\] sums to 1.1"),
        ([1.5, -0.5], "negative"),
        ([float("nan"), 1.0], "NaN"),
        ([[0.5, 0.5]], "shape"),
        (1.0, "shape"),
    ],
)
def test_bad_tables_are_refused(probs, message):
    with pytest.raises(ValueError, match=message):
        sd.TableModel(probs)


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="token 3 is outside"):
        TABLE.score(TABLE.cache(1, 4), Context.of([[3]]))
    with pytest.raises(ValueError, match="token 7 is outside"):
        TABLE.score(
            TABLE.cache(1, 4), Context.of([[0]]), Proposal.chain(torch.tensor([[7]]), torch.tensor([1]))
        )
    with pytest.raises(ValueError, match="no layers to tap"):
        TABLE.score(TABLE.cache(1, 4), Context.of([[0]]), taps=(1,))
