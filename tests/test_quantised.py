"""Targets whose linear layers are not plain ones: quantised, or with adapters. They run as they are, and never by a path that reads weights itself."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import tiny
from torch import nn
from torch.nn import functional as F

import specdec as sd
from specdec.configs import blocks_of
from specdec.forward.llama_eager import LlamaEager

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9]]


class Int4(nn.Module):
    """A linear layer with a scale for each output and weights of four bits, stored in eight."""

    def __init__(self, of):
        super().__init__()
        scale = of.weight.abs().amax(1, keepdim=True) / 7
        self.register_buffer("weight", (of.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.in_features, self.out_features = of.in_features, of.out_features

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Adapted(nn.Module):
    """A linear layer with a product of low rank beside it (LoRA)."""

    def __init__(self, of, rank=2):
        super().__init__()
        self.base = of
        self.down = nn.Parameter(torch.randn(rank, of.in_features) / 4)
        self.up = nn.Parameter(torch.randn(of.out_features, rank) / 4)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def changed(kind, family="llama"):
    torch.manual_seed(0)
    model = tiny(family, 1, torch.float32)
    for layer in model.model.layers:
        layer.mlp.up_proj = kind(layer.mlp.up_proj)
        layer.self_attn.q_proj = kind(layer.self_attn.q_proj)
    return model.requires_grad_(False)


def own_text(model, prompt):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", [Int4, Adapted])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_other_layers_run_as_they_are(kind, family):
    model, ids = changed(kind, family), torch.tensor(PROMPTS[:1])
    target = sd.HFModel(model)
    assert LlamaEager.suits(tiny(family, 1, torch.float32))  # and C and Triton where it does
    assert not LlamaEager.suits(model)
    decoder = sd.decoder(target).draft(sd.drafts.NGram(), 3).greedy().build()
    texts = [own_text(model, prompt) for prompt in PROMPTS]
    assert decoder.generate(PROMPTS, 16).ids == texts
    plain = tiny(family, 1, torch.float32)
    assert not torch.allclose(plain(ids).logits, model(ids).logits, rtol=0.05)  # the layers matter


def test_weights_of_a_class_of_their_own_are_not_read():
    """As torchao's, whose layers are plain and whose dtype is that of the results."""

    class Packed4(torch.Tensor):
        pass

    model = tiny("llama", 1, torch.float32)
    up = model.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(up.weight.data.as_subclass(Packed4))
    assert not LlamaEager.suits(model)


@pytest.mark.parametrize(("family", "part"), [("llama", "mlp.up_proj"), ("gpt_neo", "mlp.c_fc")])
def test_weights_of_a_class_of_their_own_run_outside_inference_mode(family, part):
    """quanto's of four bits cannot be viewed in it."""

    class Packed4(torch.Tensor):
        pass

    model, seen = tiny(family, 1, torch.float32), []
    own = own_text(model, PROMPTS[0])
    up = blocks_of(model)[0].get_submodule(part)
    up.weight = nn.Parameter(up.weight.data.as_subclass(Packed4), requires_grad=False)
    up.register_forward_pre_hook(
        lambda *_: seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
    )
    assert sd.decoder(sd.HFModel(model)).greedy().build().generate(PROMPTS[:1], 16).ids == [own]
    assert set(seen) == {(False, False)}


@pytest.mark.parametrize("family", ["llama", "gpt_neo"])
def test_hooks_before_the_models_own_forward_run_in_every_chunk(family):
    model, fed = tiny(family, 1, torch.float32), []

    def plus_50(module, args, options):
        return args, {**options, "input_ids": options["input_ids"] + 50}

    model.register_forward_pre_hook(plus_50, with_kwargs=True)
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(args[0]))
    target = sd.HFModel(model, prefill_chunk=4)
    fed.clear()
    sd.decoder(target).greedy().build().generate([list(range(11))], 1)
    assert len(fed) > 2
    assert all(int(ids.min()) >= 50 for ids in fed)


def test_packed_weights_are_refused_by_name():
    """As those of compressed-tensors, which replaces them in the first forward."""
    model = tiny("llama", 1, torch.float32)
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"call model\(torch.tensor\(\[\[0\]\]\)\)"):
        sd.HFModel(model)


def test_an_adapter_may_be_trained_in_place():
    model = changed(Adapted)
    decoder = sd.decoder(model).draft(sd.drafts.NGram(), 3).greedy().build()
    before = decoder.generate(PROMPTS, 16).ids
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.up.mul_(-3)
    after = decoder.generate(PROMPTS, 16).ids
    assert after == [own_text(model, prompt) for prompt in PROMPTS]
    assert after != before
    assert sd.decoder(copy.deepcopy(model)).greedy().build().generate(PROMPTS, 16).ids == after
