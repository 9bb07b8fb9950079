"""All blocks in one call of C against the same kernels called one by one, and against PyTorch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny import tiny
from torch.nn.utils import prune

import specdec as sd
from specdec.drafts.spire import SpireModel
from specdec.drafts.spire.steps import SpireSteps
from specdec.forward import llama_c
from specdec.kernels.native import library, reason
from specdec.kernels.native.blocks import buffers
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
    return tiny(family, **{**SIZES, **more}).to(dtype)


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
    monkeypatch.setattr(llama_c, "step", counted(llama_c.step, calls))
    taps = (0, 1, len(lean.blocks))
    at_once = scores(model, taps)
    assert len(calls) == 2  # prefill and verification
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
        with pytest.raises(ValueError, match="cache"):
            lean._whole(x, turn, turn, slots, buffers(layers[:1]), [])
        plans = [None] * len(layers)  # not reached
        with pytest.raises(ValueError, match=r"reads \(2, 32\) .* make it \(2, 64\)"):
            lean._whole(x, turn, turn, slots, buffers(layers), plans, read=x[:, :32].contiguous())
        with pytest.raises(ValueError, match="block reads 64"):
            lean._whole.remember(0, x[:, :32].contiguous(), turn, turn, slots, buffers(layers), normed=True)
        with pytest.raises(RuntimeError, match="cast"):
            lean._whole.remember(0, x.bfloat16(), turn, turn, slots, buffers(layers))
    assert buffers([(torch.zeros(1, 8, 16, 4).transpose(2, 3), torch.zeros(1, 8, 4, 16))]) is None


def test_training_and_validation_have_more_dimensions():
    model = SpireModel.from_target(made(num_hidden_layers=2), layers=1)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(x)[1], model.logits(x[1]), rtol=1e-5, atol=1e-5)


def test_a_cache_of_another_model_or_dtype_is_refused():
    ours, theirs = sd.HFModel(made()), sd.HFModel(made(num_key_value_heads=1))
    context = Context.of([[3, 1, 4]])
    with pytest.raises(ValueError, match="cache"):
        ours.score(theirs.cache(1, 8), context)
    with pytest.raises(ValueError, match="buffer"):
        ours.score(sd.HFModel(made(dtype=torch.bfloat16)).cache(1, 8), context)


def test_weights_of_another_layout_or_shape_are_refused():
    for change in (lambda w: w.t(), lambda w: w[:48]):
        model = sd.HFModel(made())
        before = scores(model)
        assert before[0].isfinite().all()
        weight = model.clone.model.layers[0].self_attn.q_proj.weight
        weight.data = change(weight.data)
        with pytest.raises(RuntimeError, match="new HFModel"):
            scores(model)


def test_replaced_and_parametrised_weights_of_a_spire_draft_are_seen():
    model = SpireModel.from_target(made(num_hidden_layers=2), layers=1)
    context, ids = Context.of([[3, 1, 4]]), torch.tensor([5])

    def logits():
        ring = sd.drafts.Spire(model).ring(1, 16)
        return SpireSteps(model, ring, context, 1)(0, ids)

    with torch.inference_mode():
        before = logits()
    state = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    for change in (
        lambda: None,
        lambda: prune.l1_unstructured(model.blocks[0].up, "weight", 0.5),
    ):
        change()
        with torch.inference_mode():
            assert (model.fast(model.embed(ids)) is None) == hasattr(model.blocks[0].up, "weight_orig")
            found = logits()
            assert not torch.equal(found, before)
            expected = model.__dict__.pop("_fast", None)
            model.__dict__["_fast"] = None
            torch.testing.assert_close(found, logits(), rtol=1e-4, atol=1e-4)
            model.__dict__["_fast"] = expected


def test_used_caches_can_be_copied():
    model, context = sd.HFModel(made()), Context.of([[3, 1, 4]])
    cache = model.cache(1, 8)
    expected = model.score(cache, context).logits
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(model.score(other, context).logits, expected)


def test_positions_beyond_the_models_own():
    ids = [(7 * i) % 96 for i in range(300)]  # the model says 256
    wide, fast = (sd.HFModel(made(dtype=dtype)) for dtype in (torch.float64, torch.float32))
    a, b = (m.score(m.cache(1, 301), Context.of([ids])).logits for m in (wide, fast))
    torch.testing.assert_close(b.double(), a, rtol=1e-3, atol=1e-3)


def test_bfloat16_heads_that_matrix_units_take():
    model = sd.HFModel(made("qwen3", torch.bfloat16, head_dim=64), invariant=True)
    at_once = scores(model, (0,))
    model._path.lean._whole = None
    for a, b in zip(at_once, scores(model, (0,)), strict=True):
        assert torch.equal(a, b)
