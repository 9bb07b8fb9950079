"""Multimodal models as targets for text: their language model on the same parameters, loaded, decoded and saved like any other."""

from __future__ import annotations

import pytest
import torch
from tiny import byte_tokenizer, tiny
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import specdec as sd
from specdec.models import OwnCache, UnsupportedModel, text_only

TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3},
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 8},
}
SPECIAL = dict.fromkeys(("image_token_id", "image_token_index"), 90) | {
    "boi_token_index": 91,
    "eoi_token_index": 92,
}
GEMMA4 = {
    **{"global_head_dim": 8, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
    **{"layer_types": ["sliding_attention", "full_attention"]},
}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
FLOAT32 = ("qwen3_vl_moe",)  # its experts' kernels have no float64
MORE = {
    "gemma3": {"sliding_window": 8},
    "gemma4": {**GEMMA4, "sliding_window": 8, "use_bidirectional_attention": "vision"},
    "lfm2_vl": {"block_ff_dim": 48, "layer_types": ["conv", "full_attention"]},
    "qwen2_5_vl": {"rope_parameters": AXES},
    "qwen3_vl": {"rope_parameters": {**AXES, "mrope_interleaved": True}},
    "qwen3_vl_moe": {
        **{
            "rope_parameters": {**AXES, "mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        **{"moe_intermediate_size": 24},
    },
}
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


def seeing(family, dtype=torch.float64, **settings):
    """A tiny multimodal model of a family."""
    torch.manual_seed(0)
    text = {**TEXT, **MORE.get(family, {})}
    kind = type(CONFIG_MAPPING[family]())
    config = kind(text_config=text, vision_config=dict(VISION), **SPECIAL, **settings)
    return AutoModelForImageTextToText.from_config(config).to(dtype).eval()


def theirs(model, tokens=16):
    ids = torch.tensor([PROMPT])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "mistral3", "lfm2_vl", "qwen3_vl"),
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in (
                "gemma4",
                "llava",
                "internvl",
                "smolvlm",
                "idefics2",
                "got_ocr2",
                "qwen2_5_vl",
                "qwen3_vl_moe",
            )
        ),
    ],
)
def test_text_is_what_the_whole_model_writes(family):
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers lacks it")
    dtype = torch.float32 if family in FLOAT32 else torch.float64
    model = seeing(family, dtype, tie_word_embeddings=False).train()  # tied ones repeat a token
    before = {name: p.clone() for name, p in model.named_parameters()}
    training = [part.training for part in model.modules()]
    config = model.config.to_dict()
    decoder = sd.decoder(model).draft(sd.drafts.NGram(), 4).greedy().build()
    assert isinstance(decoder.target, OwnCache) == (family == "lfm2_vl")
    assert decoder.target.eos_token_ids == (2,)
    found = decoder.generate([PROMPT, PROMPT[:3]], 16, eos_token_id=()).ids[0]
    assert [part.training for part in model.modules()] == training
    assert model.config.to_dict() == config
    assert found == theirs(model.eval())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with torch.no_grad():  # later changes in place take effect
        for p in model.parameters():
            p.copy_(torch.randn_like(p) / 2)
    changed = theirs(model)
    assert changed != found
    assert decoder.generate([PROMPT], 16, eos_token_id=()).ids[0] == changed


@pytest.mark.parametrize(
    "family", ["mistral3", "qwen3_vl"]
)  # with the whole model's modules, and with others
def test_the_model_stays_the_users(family):
    model = seeing(family).requires_grad_(False)
    decoder = sd.decoder(torch.compile(model, backend="eager")).greedy().build()
    assert not any(p.requires_grad for p in model.parameters())
    model.generation_config.eos_token_id = [2, 77]
    assert decoder.target.eos_token_ids == (2, 77)
    with pytest.raises(ValueError, match=r"call decoder\.target\.model\.generate"):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=4, custom_generate=decoder.as_generate())
    own = decoder.target.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=4, custom_generate=decoder.as_generate()
    )
    assert own[0, len(PROMPT) :].tolist() == decoder.generate([PROMPT], 4).ids[0]


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])  # loaded by AutoModelForCausalLM, and not by it
def test_a_folder_is_loaded_and_a_decoder_saved(family, tmp_path):
    model = seeing(family, torch.float32)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    target = sd.HFModel.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert target.model.name_or_path == str(tmp_path / "model")
    sizes = {p.numel() for p in target.model.parameters()}
    assert sum(sizes) < sum(p.numel() for p in model.parameters())  # the part that sees is gone
    decoder = sd.decoder(target).draft(sd.drafts.NGram(), 3).greedy().build()
    text = decoder.generate([PROMPT], 12, eos_token_id=()).ids[0]
    assert text == theirs(model, 12)
    decoder.save(tmp_path / "saved")
    assert sd.load(tmp_path / "saved").build().generate([PROMPT], 12, eos_token_id=()).ids[0] == text


def test_a_small_text_model_drafts_for_it():
    target = sd.HFModel(text_only(seeing("mistral3")))
    small = tiny("mistral", 3)
    out = sd.decoder(target).draft(small, 3).greedy().build().generate([PROMPT], 10, eos_token_id=())
    assert out.ids == sd.decoder(target).greedy().build().generate([PROMPT], 10, eos_token_id=()).ids


def test_what_has_no_language_model_of_its_own_is_refused():
    with pytest.raises(UnsupportedModel, match=r"give models\.text_only"):
        sd.HFModel(seeing("mistral3"))
    with pytest.raises(TypeError, match="a LlamaForCausalLM: give a multimodal model"):
        text_only(tiny("llama"))
    with pytest.raises(UnsupportedModel, match="no causal LM for its language model"):
        sd.decoder(seeing("glm4v"))
    with pytest.raises(UnsupportedModel, match="its logits differ from those of Cohere2ForCausalLM"):
        text_only(seeing("cohere2_vision"))  # which leaves out the scale of the logits
