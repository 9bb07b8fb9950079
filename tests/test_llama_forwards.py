"""The eager and the C forward of llama-like models against transformers' own modules: the same bits or up to rounding, or out of the way."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.forward.llama_c import LlamaC
from specdec.forward.llama_eager import LlamaEager
from specdec.kernels.native import library, reason


def both(model, context, proposal=None, kind=LlamaEager):
    """Logits by the lean path and by transformers' modules, prompts of different lengths in slots."""
    wrapped = sd.HFModel(model)
    out = []
    for lean in (kind(wrapped.clone), None):
        wrapped._path.lean = lean
        cache = wrapped.cache(context.batch, context.tokens.shape[1])
        wrapped.prefill(cache, context)
        out.append(wrapped.score(cache, context, proposal).logits)
    return out


@pytest.mark.parametrize("kind", [LlamaEager, LlamaC])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ["default", "linear"])
def test_same_numbers_as_the_modules(family, rope, kind):
    if kind is LlamaC and library() is None:
        assert not LlamaC.suits(tiny(family, 0, torch.float32))
        assert reason()
        return
    changes = (
        {}
        if rope == "default"
        else {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    )
    if family == "llama":
        changes |= {"mlp_bias": True, "attention_bias": True}
    model = tiny(family, 0, torch.float32, **changes)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_()
    rows = [[1], list(range(20)), [5, 6, 7] * 5]
    context = sd.Context.of(rows, capacity=32)
    nodes = torch.tensor([[3, 4, 5, 6]] * 3)
    chain = sd.Proposal.chain(nodes, torch.tensor([4, 2, 0]))
    tree = sd.Proposal(nodes, torch.tensor([[-1, -1, 0, 2]] * 3), torch.tensor([4, 3, 4]))
    for proposal in (None, chain, tree):
        lean, own = both(model, context, proposal, kind)
        if kind is LlamaC:
            torch.testing.assert_close(lean, own, rtol=0, atol=5e-6 * float(own.abs().max()))
        else:
            assert torch.equal(lean, own)


def test_it_stays_out_of_the_way():
    assert sd.HFModel(tiny("llama", 0))._path.lean is None  # float64: transformers normalises in float32
    assert sd.HFModel(tiny("gemma", 0, torch.float32))._path.lean is None
    hooked = tiny("llama", 0, torch.float32)
    hooked.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    wrapped = sd.HFModel(hooked)
    assert wrapped._path.lean is None
    logits = wrapped.score(wrapped.cache(1, 8), sd.Context.of([[1, 2, 3]])).logits[0, 0]
    expected = hooked(torch.tensor([[1, 2, 3]])).logits[0, -1]
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-4, atol=1e-5)


def test_taps_go_through_the_modules():
    model = tiny("llama", 0, torch.float32)
    wrapped = sd.HFModel(model)
    context = sd.Context.of([[1, 2, 3, 4]])
    fed = wrapped.score(wrapped.cache(1, 8), context, taps=(0, 1)).fed
    expected = model(torch.tensor([[1, 2, 3, 4]]), output_hidden_states=True).hidden_states
    for tap in (0, 1):
        torch.testing.assert_close(fed.layers[tap], expected[tap][0].detach(), rtol=1e-5, atol=1e-6)


def test_later_changes_of_the_users_weights_are_seen():
    model = tiny("llama", 0, torch.float32)
    wrapped = sd.HFModel(model)
    context = sd.Context.of([[1, 2, 3]])
    before = wrapped.score(wrapped.cache(1, 8), context).logits
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2)
    after = wrapped.score(wrapped.cache(1, 8), context).logits
    assert not torch.equal(before, after)
    torch.testing.assert_close(
        after[0, 0], model(torch.tensor([[1, 2, 3]])).logits[0, -1].detach(), rtol=1e-4, atol=1e-5
    )
