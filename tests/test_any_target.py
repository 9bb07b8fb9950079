"""Drafts of a target for the same target in another form: refused by its weights, and taken by its sizes where that is asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from test_quantised import PROMPTS, Adapted, Int4, changed
from tiny import tiny
from torch import nn

import specdec as sd
from specdec.drafts import heads
from specdec.drafts.spire import SpireModel
from specdec.models.fingerprint import fingerprint

BASE = tiny("llama", 1, torch.float32)


def text_of(decoder):
    return decoder.greedy().build().generate(PROMPTS, 16).ids


@pytest.fixture(scope="module", params=["eagle", "mtp", "spire"])
def saved(request, tmp_path_factory):
    """The folder of a draft of the base, and the function that loads it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "spire":
        SpireModel.from_target(BASE, 2, window=8).save_pretrained(folder)

        def load(target, **named):
            return sd.drafts.Spire(SpireModel.from_pretrained(folder, target, **named).eval())

    else:
        kind = heads.Eagle3 if request.param == "eagle" else heads.MTP
        kind.from_target(BASE, *([(1, 2)] if request.param == "eagle" else [])).save_pretrained(folder)

        def load(target, **named):
            return sd.drafts.Head(heads.load(folder, target, **named))

    return folder, load


def merged():
    model = tiny("llama", 1, torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(1.05)
    return model


@pytest.mark.parametrize("form", ["quantised", "adapted", "merged"])
def test_another_form_of_the_target(saved, form):
    folder, load = saved
    model = merged() if form == "merged" else changed({"quantised": Int4, "adapted": Adapted}[form])
    target = sd.HFModel(model)
    says = r"was made for target \w+, and this target is .*same target in another form .*any_target=True"
    for refused in (lambda: load(target), lambda: sd.decoder(target).draft(folder).build()):
        with pytest.raises(ValueError, match=says):
            refused()
    before = copy.deepcopy(model.state_dict())
    decoder = sd.decoder(target).draft(load(target, any_target=True), 3)
    assert text_of(decoder) == text_of(sd.decoder(target))
    assert decoder.build().generate(PROMPTS, 8, seed=0).stats.drafted > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"hidden_size": 64}, "hidden_size is 64 and the .* 32"),
        ({"vocab_size": 90}, "vocab_size is 90 and the .* 97"),
        (
            {"num_hidden_layers": 1},
            r"block 1 of its target, and this target has 0 to 0|layer 2 does not exist|has 1 blocks and the head .* with 2",
        ),
    ],
)
def test_sizes_are_checked(saved, sizes, says):
    other = sd.HFModel(tiny("llama", 1, torch.float32, **sizes))
    with pytest.raises(ValueError, match=says):
        sd.decoder(other).draft(saved[1](other, any_target=True)).build()


def test_a_saved_draft_or_decoder_remembers_it(saved, tmp_path):
    target = sd.HFModel(merged())
    draft = saved[1](target, any_target=True)
    draft.model.save_pretrained(tmp_path / "draft")
    again = sd.decoder(target).draft(tmp_path / "draft", 3)
    assert text_of(again) == text_of(sd.decoder(target))
    again.build().save(tmp_path / "decoder")
    assert text_of(sd.load(tmp_path / "decoder")) == text_of(sd.decoder(target))


class Closed(torch.Tensor):
    """As torchao's tensors: a class whose values are neither flattened nor indexed."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("flatten", "reshape", "dequantize", "__getitem__"):
            raise NotImplementedError(f"{cls.__name__} has no {name}")
        if name == "detach":
            return super().__torch_function__(function, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Packed(Closed):
    """One that can be dequantised."""

    def dequantize(self):
        return self.as_subclass(torch.Tensor) * 2


def packed(kind, factor=1.0):
    model = tiny("llama", 1, torch.float32)
    up = model.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter((up.weight.data * factor).as_subclass(kind), requires_grad=False)
    return model


def test_weights_of_a_tensor_class_of_their_own_have_a_fingerprint():
    """That of the values that they stand for, so models that differ in them alone differ."""
    plain = tiny("llama", 1, torch.float32)
    assert fingerprint(packed(Packed, 0.5)) == fingerprint(plain)
    assert fingerprint(packed(Packed)) != fingerprint(plain)


def test_weights_that_cannot_be_read_are_named(saved):
    model = packed(Closed)
    with pytest.raises(
        TypeError, match=r"parameter 'model.layers.0.mlp.up_proj.weight' is a Closed.*any_target=True"
    ):
        fingerprint(model)
    saved[1](model, any_target=True)
