"""All blocks in one call of C against the same kernels called one by one, and against PyTorch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.kernels.native import library, reason
from specdec.kernels.native.blocks import Blocks, buffers
from specdec.models.spire import SpireModel
from specdec.models.spire_steps import SpireSteps
from specdec.types import Context, Proposal

pytestmark = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
}


def made(family="llama", dtype=torch.float32, **more):
    return tiny(family, **SIZES, **more).to(dtype)


def scores(model, taps=()):
    """A prefill, a verification of a tree and the logits of ragged rows, with activations."""
    text = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]
    cache = model.cache(2, 24)
    model.prefill(cache, Context.of([row[:-2] for row in text]))
    proposal = Proposal(
        torch.tensor([[7, 8, 9], [1, 2, 3]]), torch.tensor([[-1, 0, 0]] * 2), torch.tensor([3, 3])
    )
    found = model.score(cache, Context.of(text), proposal, taps=taps)
    return [found.logits, *(found.fed.layers[t] for t in taps), *(t for pair in cache.layers for t in pair)]


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_one_call_gives_the_bits_of_many(family, dtype, page, monkeypatch):
    model = sd.HFModel(made(family, dtype), page=page, invariant=True)
    lean = model._path.lean
    assert lean._whole is not None
    calls = []
    monkeypatch.setattr(Blocks, "__call__", counted(Blocks.__call__, calls))
    taps = (0, 1, len(lean.blocks))
    at_once = scores(model, taps)
    assert calls
    lean._whole, before = None, len(calls)
    one_by_one = scores(model, taps)
    assert len(calls) == before
    for a, b in zip(at_once, one_by_one, strict=True):
        assert torch.equal(a, b)


def counted(function, calls):
    def call(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_spire_drafts_the_same_with_and_without(family, feedback, monkeypatch):
    target = made(family, num_hidden_layers=3)
    model = SpireModel.from_target(target, layers=2, window=4, feedback=feedback)
    if feedback:
        torch.nn.init.normal_(model.memory.weights)
    context = Context.of([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8]])
    ids = torch.tensor([[1, 2], [7, 3], [9, 9]])

    def rolled_out():
        ring = sd.drafts.Spire(model).ring(2, 24)
        for keys, values in ring.layers:
            torch.manual_seed(0)
            keys.normal_(), values.normal_()
        step = SpireSteps(model, ring, context, 3)
        return [step(n, ids[n]) for n in range(3)], ring.layers

    with torch.inference_mode():
        assert model.fast(model.embed(ids[0])) is not None
        out, held = rolled_out()
        monkeypatch.setattr(SpireModel, "fast", lambda self, x: None)
        expected, other = rolled_out()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(held, other, rtol=1e-4, atol=1e-5)


def test_gradients_and_other_dtypes_go_through_pytorch():
    model = SpireModel.from_target(made(num_hidden_layers=2), layers=1)
    x = torch.zeros(2, 64)
    assert model.fast(x) is None  # gradients are on
    with torch.no_grad():
        assert model.fast(x) is not None
        assert model.fast(x.double()) is None


def test_copies_and_pickles_have_addresses_of_their_own():
    model = SpireModel.from_target(made(num_hidden_layers=2), layers=1)
    context, ids = Context.of([[3, 1, 4]]), torch.tensor([5])

    def logits(model):
        ring = sd.drafts.Spire(model).ring(1, 16)
        return SpireSteps(model, ring, context, 1)(0, ids)

    with torch.inference_mode():
        first = logits(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(logits(other), first)
            for p in other.parameters():
                p.zero_()
            assert not logits(other).any()
        assert torch.equal(logits(model), first)


def test_weights_that_are_replaced_in_place_are_seen():
    model = sd.HFModel(made())
    before = scores(model)[0]
    for p in model.model.parameters():
        p.data = p.data * 0.5
    assert not torch.equal(scores(model)[0], before)
    lean = model._path.lean
    whole, lean._whole = lean._whole, None
    expected = scores(model)[0]
    lean._whole = whole
    assert torch.equal(scores(model)[0], expected)


def test_what_does_not_fit_is_refused():
    lean = sd.HFModel(made())._path.lean
    layers = [(torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16)) for _ in lean.blocks]
    x, turn, slots = torch.zeros(2, 64), torch.zeros(2, 16), torch.tensor([0, 1])
    with torch.no_grad():
        with pytest.raises(IndexError, match="slots"):
            lean._whole.remember(0, x, turn, turn, torch.tensor([0, 8]), buffers(layers))
        with pytest.raises(ValueError, match="do not go together"):
            lean._whole.remember(0, x, turn[:1], turn, slots, buffers(layers))
        with pytest.raises(ValueError, match="buffers"):
            lean._whole(x, turn, turn, slots, buffers(layers[:1]), [])
        with pytest.raises(RuntimeError, match="cast"):
            lean._whole.remember(0, x.bfloat16(), turn, turn, slots, buffers(layers))
    assert buffers([(torch.zeros(1, 8, 16, 4).transpose(2, 3), torch.zeros(1, 8, 4, 16))]) is None


def test_training_and_validation_have_more_dimensions():
    model = SpireModel.from_target(made(num_hidden_layers=2), layers=1)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(x)[1], model.logits(x[1]), rtol=1e-5, atol=1e-5)
