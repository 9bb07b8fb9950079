"""A step in one call of C: what is refused; test_blocks.py has the comparison with one call an operator."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.forward import llama_c
from specdec.kernels.native import library, reason
from specdec.kernels.native.ops import unchecked_linear
from specdec.kernels.native.step import step
from specdec.models import StackedModel, stacked
from specdec.types import Context

pytestmark = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
ROWS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture
def case(monkeypatch):
    return made(monkeypatch)


def made(monkeypatch, **settings):
    """The reader of the next token of both rows, over a cache that holds ``ROWS``; and this cache."""
    model, readers = sd.HFModel(tiny("llama", 0, torch.float32, **SIZES, **settings)), []
    with monkeypatch.context() as patch:
        patch.setattr(llama_c, "step", lambda some, *given: readers.extend(some) or step(some, *given))
        cache = model.cache(2, 20)
        model.score(cache, Context.of(ROWS, capacity=20))
        model.score(cache, Context.of([[*row, 1] for row in ROWS], capacity=20))
    assert [len(r.slots) for r in readers] == [12, 2]
    return readers[1]._replace(keep=None), cache


TOKENS = torch.tensor([3, 4])


def test_bad_input(case):
    reader, _ = case
    assert step([reader], TOKENS, 2).shape == (2, 96)
    with pytest.raises(ValueError, match="reader of 2 of 1 ids"):
        step([reader], TOKENS[:1], 2)
    for bad in (TOKENS.int(), TOKENS[None]):
        with pytest.raises(ValueError, match="give one dimension of int64"):
            step([reader], bad, 2)
    for bad in (-1, 96):
        with pytest.raises(IndexError, match="not all tokens"):
            step([reader], torch.tensor([3, bad]), 2)


def test_readers_that_do_not_fit(case, monkeypatch):
    reader, _ = case
    for wrong in (
        {"rows": torch.tensor([0, 2])},  # the batch has two
        {"source": torch.tensor([0, -1])},
        {"source": torch.tensor([0])},  # it reads two
        {"keep": torch.tensor([2])},
        {"plans": reader.plans[:1]},
        {"bias": torch.zeros(16)},
    ):
        with pytest.raises(ValueError, match="does not go with the others, or with itself"):
            step([reader._replace(**wrong)], TOKENS, 2)
    with pytest.raises(ValueError, match="do not go together"):
        step([reader._replace(cos=reader.cos[1:])], TOKENS, 2)
    _, other = made(monkeypatch, num_hidden_layers=1)
    with pytest.raises(ValueError, match="cache's layer"):
        step([reader._replace(held=other.buffers)], TOKENS, 2)
    short = {"norm": reader.norm[:32], "head": reader.head[:, :32].contiguous()}
    wide = {
        name: torch.zeros(*getattr(reader, name).shape[:-1], 128) for name in ("embedding", "norm", "head")
    }
    cast = [{name: getattr(reader, name).double()} for name in ("embedding", "head", "norm")]
    for wrong in ({"norm": short["norm"]}, {"head": short["head"]}, wide, *cast):
        with pytest.raises(RuntimeError, match="cast"):
            step([reader._replace(**wrong)], TOKENS, 2)


def test_rows_that_nobody_writes_are_zero(case):
    logits = step([case[0]._replace(rows=torch.tensor([1, 1]))], TOKENS, 2)
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
    calls = []
    monkeypatch.setattr(stacked, "step", lambda *given: calls.append(1) or step(*given))
    context = Context.of(ROWS, capacity=20)
    at_once = stack.score(stack.cache(2, 20), context).logits
    assert len(calls) == 1
    for lean in stack._path.natives:
        lean._whole = None
    assert torch.equal(at_once, stack.score(stack.cache(2, 20), context).logits)
    assert len(calls) == 1


def test_a_slot_that_is_not_there_writes_nothing(case):
    reader, cache = case
    before = [t.clone() for pair in cache.layers for t in pair]
    with pytest.raises(IndexError, match="slots are not all in the buffers"):
        step([reader._replace(slots=torch.full_like(reader.slots, 10**6))], TOKENS, 2)
    assert all(map(torch.equal, before, [t for pair in cache.layers for t in pair]))


def test_how_many_tokens_products_in_c_take(monkeypatch):
    def most(*dtypes, **found):
        for name, value in found.items():
            monkeypatch.setattr(llama_c, name, lambda v=value: v)
        return [llama_c.most(dtype) for dtype in dtypes]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    both, every = (torch.float32, torch.bfloat16), sys.maxsize
    assert most(*both, threaded=True, tiles=True, half_units=True) == [llama_c.STEP, llama_c.STEP]
    assert most(*both, tiles=False) == [llama_c.STEP, llama_c.FEW]
    assert most(*both, half_units=False) == [llama_c.STEP, every]
    assert most(torch.float64, torch.float16) == [0, 0]
    assert most(*both, threaded=False) == [llama_c.ALONE] * 2  # PyTorch's products use both threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert most(*both) == [llama_c.STEP, every]


def test_bfloat16_prompts_in_c_where_pytorch_has_no_products_for_them(monkeypatch):
    monkeypatch.setattr(llama_c, "half_units", lambda: False)
    monkeypatch.setattr(llama_c, "tiles", lambda: False)
    seen = set()

    def spy(x, weight, bias):
        seen.add((len(x), x.shape[1]))
        return unchecked_linear(x, weight, bias)

    monkeypatch.setattr(llama_c, "unchecked_linear", spy)
    sizes = {**SIZES, "intermediate_size": llama_c.WIDE + 16}
    model = tiny("llama", 0, torch.bfloat16, **sizes)
    row = [(7 * i) % 96 for i in range(llama_c.STEP + 40)]  # more than a block of rows
    wrapped, whole = sd.HFModel(model), copy.deepcopy(model).float()
    logits = wrapped.score(wrapped.cache(1, 400), Context.of([row], capacity=400)).logits[0, 0]
    assert {(len(row), 64), (len(row), llama_c.WIDE + 16)} <= seen
    expected = whole(torch.tensor([row])).logits[0, -1]
    assert (logits.float() - expected).norm() < 3e-2 * expected.norm()
