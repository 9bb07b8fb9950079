"""Targets that libraries quantised or adapted: torchao, quanto, bitsandbytes, compressed-tensors, PEFT. Each is tested where it is installed."""

from __future__ import annotations

import pytest
import torch
from test_quantised import PROMPTS, own_text
from tiny import tiny
from tiny_states import stateful
from transformers import AutoModelForCausalLM

import specdec as sd
from specdec.models import OwnCache


def torchao(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def quanto(model, bits):
    lib = pytest.importorskip("optimum.quanto")
    lib.quantize(model, weights=getattr(lib, f"qint{bits}"))
    lib.freeze(model)
    return model


def bitsandbytes(model):
    bnb = pytest.importorskip("bitsandbytes")
    for layer in model.model.layers:
        for part, name in ((layer.self_attn, "q_proj"), (layer.mlp, "down_proj")):
            old = getattr(part, name)
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            new.load_state_dict(old.state_dict())
            setattr(part, name, new.to("cpu"))
    return model


def lora(model):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings).eval().base_model.model


LIBRARIES = {
    "torchao": torchao,
    "quanto-8": lambda model: quanto(model, 8),
    "quanto-4": lambda model: quanto(model, 4),
    "bitsandbytes": bitsandbytes,
    "peft": lora,
}


@pytest.fixture(params=LIBRARIES)
def quantised(request):
    torch.manual_seed(0)
    model = tiny("llama", 1, torch.float32, hidden_size=64, intermediate_size=128)
    return LIBRARIES[request.param](model).requires_grad_(False)


def test_decodes_the_models_own_text(quantised):
    target, small = sd.HFModel(quantised), sd.HFModel(tiny("llama", 2, torch.float32))
    own = [own_text(quantised, prompt) for prompt in PROMPTS]
    base = sd.decoder(target).greedy()
    plain = base.build()
    assert plain.generate(PROMPTS, max_new_tokens=16).ids == own
    drafts = (
        sd.drafts.Model(small),
        sd.drafts.Tree(small, widths=(2, 1)),
        sd.drafts.MagicDec(window=4, sinks=1),
    )
    for draft in drafts:
        assert base.draft(draft).build().generate(PROMPTS, max_new_tokens=16).ids == own
    for row in sd.log_probs(plain, plain.generate(PROMPTS, max_new_tokens=16)):
        assert bool(torch.isfinite(torch.as_tensor(row)).all())


@pytest.mark.parametrize("family", ["gptj", "falcon"])
def test_four_bits_run_in_padded_families(family):
    model = tiny(family, 1, torch.float32)
    quanto(model, 4)
    own = [own_text(model, prompt) for prompt in PROMPTS]
    assert sd.decoder(model).greedy().build().generate(PROMPTS, max_new_tokens=16).ids == own


def test_four_bits_are_refused_where_states_are_kept():
    with pytest.raises(ValueError, match="cannot be viewed in inference mode"):
        OwnCache(quanto(stateful("lfm2"), 4))


@pytest.mark.parametrize(("bits", "format"), [(8, "int-quantized"), (4, "pack-quantized")])
def test_a_packed_checkpoint_is_unpacked(bits, format, tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(num_bits=bits, strategy="channel")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen", format=format
    )
    model = tiny("llama", 1, torch.float32)
    quantization.apply_quantization_config(model, config)
    for layer in model.modules():
        if "weight_scale" in layer._parameters:
            scale = layer.weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            layer.weight_scale.data = scale.data
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)

    in_memory = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="packed weights"):
        sd.HFModel(in_memory)
    own = [own_text(in_memory, prompt) for prompt in PROMPTS]  # its first forward unpacks them
    for target in (sd.HFModel(in_memory), sd.HFModel.from_pretrained(tmp_path)):
        decoder = sd.decoder(target).draft(sd.drafts.NGram(), 3).greedy().build()
        assert decoder.generate(PROMPTS, max_new_tokens=16).ids == own
