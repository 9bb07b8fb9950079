"""Steps of a chain in one call of C: against the models' own forwards, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts.cpu_chain import cpu_chain
from specdec.kernels.native import library, reason
from specdec.kernels.native.step import Steps
from specdec.models import StackedModel
from specdec.types import Context, Proposal

pytestmark = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
ROWS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@dataclass
class Made:
    """A model whose cache holds ``ROWS``, and the steps after them."""

    model: sd.HFModel
    cache: object
    context: Context
    steps: Steps


def made(dtype=torch.float32, family="llama", **settings):
    model = sd.HFModel(tiny(family, 0, dtype, **SIZES, **settings))
    context = Context.of(ROWS, capacity=20)
    cache = model.cache(2, 20)
    model.score(cache, context)
    found = cpu_chain(model, cache, context.length, torch.tensor([4, 4]))
    assert found is not None
    ((steps, _), *_) = found.steps
    return Made(model, cache, context, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_are_those_of_scoring_to_the_bit(family, dtype):
    case = made(dtype, family)
    tokens = torch.tensor([[3, 4, 5], [9, 8, 7]])
    logits = [case.steps(n, tokens[:, n]) for n in range(3)]
    again = case.model.cache(2, 20)
    case.model.score(again, case.context)
    for n in range(3):
        proposal = Proposal.chain(tokens[:, : n + 1], torch.full((2,), n + 1))
        expected = case.model.score(again, case.context, proposal, start=n).logits[:, 0]
        assert torch.equal(logits[n], expected)
    for (k, v), (k2, v2) in zip(case.cache.layers, again.layers):
        assert torch.equal(k, k2)
        assert torch.equal(v, v2)


def test_bad_input():
    case = made()
    tokens = torch.tensor([3, 4])
    with pytest.raises(ValueError, match="step 3 of 3"):
        case.steps(3, tokens)
    with pytest.raises(ValueError, match="give 2 as int64"):
        case.steps(0, tokens[:1])
    with pytest.raises(ValueError, match="give 2 as int64"):
        case.steps(0, tokens.int())
    for bad in (-1, 96):
        with pytest.raises(IndexError, match="not all tokens"):
            case.steps(0, torch.tensor([3, bad]))


def test_readers_that_do_not_fit():
    case = made()
    ((reader,),) = case.steps._alive[:1]
    assert Steps([reader], 2, 2, 3)(0, torch.tensor([3, 4])).shape == (2, 96)
    for wrong in (
        {"rows": torch.tensor([0, 2])},  # the batch has two
        {"source": torch.tensor([0, -1])},
        {"source": torch.tensor([0])},  # it reads two
        {"keep": torch.tensor([2])},
        {"plans": reader.plans[:1]},
        {"bias": torch.zeros(16)},
    ):
        with pytest.raises(ValueError, match="does not go with the others, or with itself"):
            Steps([reader._replace(**wrong)], 2, 2, 3)
    with pytest.raises(ValueError, match="do not go together"):
        Steps([reader._replace(cos=reader.cos[1:])], 2, 2, 3)
    with pytest.raises(ValueError, match="cache's layer"):
        Steps([reader._replace(held=made(num_hidden_layers=1).cache.buffers)], 2, 2, 3)
    short = {"norm": reader.norm[:32], "head": reader.head[:, :32].contiguous()}
    wide = {
        name: torch.zeros(*getattr(reader, name).shape[:-1], 128) for name in ("embedding", "norm", "head")
    }
    cast = [{name: getattr(reader, name).double()} for name in ("embedding", "head", "norm")]
    for wrong in ({"norm": short["norm"]}, {"head": short["head"]}, wide, *cast):
        with pytest.raises(RuntimeError, match="cast"):
            Steps([reader._replace(**wrong)], 2, 2, 3)


def test_rows_that_nobody_writes_are_zero():
    case = made()
    ((reader,),) = case.steps._alive[:1]
    logits = Steps([reader._replace(rows=torch.tensor([1, 1]))], 2, 2, 3)(0, torch.tensor([3, 4]))
    assert not logits[0].any()
    assert logits[1].any()


def test_an_embedding_that_does_not_lie_together():
    plain = tiny("llama", 0, torch.float32, **SIZES, tie_word_embeddings=False)
    strided = tiny("llama", 0, torch.float32, **SIZES, tie_word_embeddings=False)
    table = strided.model.embed_tokens
    table.weight = torch.nn.Parameter(table.weight.detach().t().contiguous().t())
    prompts = [[5, 6, 7], [1, 2]]
    said = [
        sd.decoder(sd.HFModel(model))
        .greedy()
        .draft(sd.HFModel(model), length=3)
        .build()
        .generate(prompts, 8)
        .ids
        for model in (plain, strided)
    ]
    assert said[0] == said[1]


def test_a_stack_is_one_call(monkeypatch):
    stack = StackedModel([sd.HFModel(tiny("llama", seed, torch.float32, **SIZES)) for seed in (0, 3)])
    stack.read_as(torch.tensor([1, 0]))
    calls, step = [], Steps.__call__
    monkeypatch.setattr(Steps, "__call__", lambda self, *args: calls.append(1) or step(self, *args))
    context = Context.of(ROWS, capacity=20)
    at_once = stack.score(stack.cache(2, 20), context).logits
    assert len(calls) == 1
    for lean in stack._path.natives:
        lean._whole = None
    assert torch.equal(at_once, stack.score(stack.cache(2, 20), context).logits)
    assert len(calls) == 1


def test_a_slot_that_is_not_there_writes_nothing():
    case = made()
    ((reader,),) = case.steps._alive[:1]
    before = [t.clone() for pair in case.cache.layers for t in pair]
    far = Steps([reader._replace(slots=torch.full_like(reader.slots, 10**6))], 2, 2, 3)
    with pytest.raises(IndexError, match="slots are not all in the buffers"):
        far(0, torch.tensor([3, 4]))
    assert all(map(torch.equal, before, [t for pair in case.cache.layers for t in pair]))
