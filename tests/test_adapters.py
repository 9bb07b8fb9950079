"""Folders of PEFT's adapters: transformers loads them with their base model where peft is installed, and otherwise the message names it."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec.models import load as loading


@pytest.fixture
def adapter(tmp_path):
    """The folder of an adapter, which has no model of its own, beside that of its base."""
    tiny("llama", 0).save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    about = {"base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA", "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def peft(monkeypatch):
    """As if peft were installed: what transformers was asked to load, and a model in its place."""
    asked = []

    class Loader:
        @staticmethod
        def from_pretrained(name, **options):
            asked.append(str(name))
            return tiny("llama", 1), {"missing_keys": set()}

    monkeypatch.setattr(loading, "is_peft_available", lambda: True)
    monkeypatch.setattr(loading, "AutoModelForCausalLM", Loader)
    return asked


def test_without_peft_the_message_names_it(adapter, monkeypatch):
    monkeypatch.setattr(loading, "is_peft_available", lambda: False)
    says = r"adapter' is an adapter of '.*base', and peft, which reads it, is not installed: pip install peft; or .*merge_and_unload"
    for call in (
        lambda: sd.HFModel.from_pretrained(adapter),
        lambda: sd.decoder(str(adapter)),
        lambda: sd.decoder(tiny("llama")).draft(str(adapter)),
        lambda: sd.models.OwnCache.from_pretrained(adapter),
    ):
        with pytest.raises(ImportError, match=says):
            call()


@pytest.mark.parametrize("part", ["target", "draft"])
def test_a_model_with_an_adapter_is_not_saved(tmp_path, part):
    """Layers that PEFT has put into a model keep the weights under other names."""
    model, other = tiny("llama", 0), tiny("llama", 1)
    layer = model.model.layers[0].self_attn
    lora = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    layer.q_proj, old = lora(layer.q_proj.in_features, layer.q_proj.out_features, bias=False), layer.q_proj
    target, draft = (model, other) if part == "target" else (other, model)
    decoder = sd.decoder(target).draft(draft, length=2).build()
    folder = tmp_path / "decoder"
    with pytest.raises(TypeError, match=rf"{part}\S* has an adapter of PEFT's, .*merge_and_unload\(\)$"):
        decoder.save(folder)
    assert not folder.exists()
    layer.q_proj = old
    sd.decoder(target).draft(draft, length=2).build().save(folder)
    assert (folder / "decoder.json").is_file()


def test_transformers_loads_it_with_its_base(adapter, peft):
    target = sd.HFModel.from_pretrained(adapter)
    assert peft == [str(adapter)]
    assert target.tokenizer is None
    out = sd.decoder(str(adapter)).draft(str(adapter), length=2).greedy().build().generate([[1, 2]], 6)
    assert out.ids == sd.decoder(tiny("llama", 1)).greedy().build().generate([[1, 2]], 6).ids
    assert peft == [str(adapter)] * 3


def test_the_tokenizer_is_its_own_or_that_of_its_base(adapter, peft):
    byte_tokenizer().save_pretrained(adapter.parent / "base")
    assert sd.HFModel.from_pretrained(adapter).tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    other = byte_tokenizer()
    other.add_tokens(["new"])
    other.save_pretrained(adapter)
    assert sd.HFModel.from_pretrained(adapter).tokenizer.get_vocab() == other.get_vocab()


@pytest.mark.parametrize("base", ["/nowhere/base", None])
def test_a_base_that_is_not_there(adapter, peft, base):
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    error, says = (FileNotFoundError, "there is no such folder: correct base_model_name_or_path")
    if base is None:
        error, says = ValueError, r"adapter_config\.json' names no base_model_name_or_path"
    with pytest.raises(error, match=says):
        sd.HFModel.from_pretrained(adapter)
    assert peft == []


def test_missing_files(adapter, peft):
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter' has no weights \(adapter_model\.safetensors\)"):
        sd.HFModel.from_pretrained(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="names no base_model_name_or_path"):
        sd.HFModel.from_pretrained(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        sd.HFModel.from_pretrained(adapter)


def test_a_whole_model_beside_an_adapter_is_loaded_as_it_is(adapter):
    base = adapter.parent / "base"
    (base / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    assert sd.HFModel.from_pretrained(base).vocab_size == 97
