"""Tiny random models and a byte tokenizer for the tests: every supported family at the smallest useful size."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch
from more_families import EXPERTS, MORE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_GPT = {"vocab_size": 97, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen2": _BASE,
    "qwen3": {**_BASE, "head_dim": 8},
    "mistral": {**_BASE, "sliding_window": 8},
    "gemma": {**_BASE, "head_dim": 8},
    "gemma2": {**_BASE, "head_dim": 8, "sliding_window": 8},
    "gemma3_text": {**_BASE, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6},
    "phi3": {**_BASE, "pad_token_id": 0},
    "olmo2": _BASE,
    "starcoder2": _BASE,
    "gpt_neox": {**{k: v for k, v in _BASE.items() if k != "num_key_value_heads"}},
    "opt": {**_BASE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": _GPT,
    "mixtral": {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_BASE, **_MOE},
    "gpt_oss": {
        **_BASE,
        "head_dim": 8,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "olmo3": {**_BASE, "sliding_window": 8, "num_hidden_layers": 4},
    "smollm3": {**_BASE, "no_rope_layer_interval": 2, "pad_token_id": 0},
    "granite": {
        **_BASE,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "logits_scaling": 1.5,
    },
    "cohere2": {**_BASE, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 4},
    "glm4": {**_BASE, "head_dim": 8, "pad_token_id": 0},
    "seed_oss": {**_BASE, "head_dim": 8},
    "exaone4": {**_BASE, "sliding_window": 8, "sliding_window_pattern": 2},
    "apertus": {**_BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phi": _BASE,
    "ernie4_5": {**_BASE, "head_dim": 8},
    "hunyuan_v1_dense": {**_BASE, "head_dim": 8},
    "helium": {**_BASE, "head_dim": 8},
    "arcee": _BASE,
    "falcon": {**_BASE, "alibi": False, "new_decoder_architecture": False},
    "mpt": {
        "vocab_size": 97,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "expansion_ratio": 2,
        "max_seq_len": 256,
    },
    "codegen": {**_GPT, "rotary_dim": 8},
    "gptj": {**_GPT, "rotary_dim": 8},
    "gpt_neo": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 256,
    },
    **MORE,
}
FAMILIES = {name: c for name, c in CONFIGS.items() if name in CONFIG_MAPPING}  # older transformers lack some
LIKE_OTHERS = {  # their forwards are tested with the others'; what is slower runs in the slow tier
    *("apertus", "arcee", "cohere2", "ernie4_5", "exaone4", "glm4", "granite"),
    *("helium", "hunyuan_v1_dense", "olmo3", "phi", "seed_oss", "smollm3"),
    *MORE,
}
FLOAT32 = {  # their expert kernels have no float64; Cohere's norms, Granite's sinks and XGLM's positions are in float32
    *("mixtral", "qwen3_moe", "gpt_oss", "cohere", "granite_swa", "xglm"),
    *(EXPERTS.keys() - {"dbrx", "jetmoe"}),
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
}


def slow(families: Iterable[str], which: Container[str] = tuple(MORE)) -> list[Any]:
    """Parameters of a test: the families, of which those in ``which`` run in the slow tier."""
    return [pytest.param(f, marks=pytest.mark.slow) if f in which else f for f in families]


def tiny(family: str = "llama", seed: int = 0, dtype: torch.dtype | None = None, **changes: Any) -> Any:
    """A random model of a family, with logits spread enough for greedy text not to hang on rounding."""
    torch.manual_seed(seed)
    settings = {**FAMILIES[family], **changes}
    for name in ("layer_types", "num_attention_heads_per_layer"):
        if name in settings and name not in changes:
            settings[name] = (settings[name] * settings["num_hidden_layers"])[: settings["num_hidden_layers"]]
    config = AutoConfig.for_model(family, **settings)
    if family not in ("cwm", "modernbert-decoder"):  # which must have such ids
        config.bos_token_id = config.eos_token_id = None
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4)
    model.generation_config.eos_token_id = None
    return model.to(dtype or (torch.float32 if family in FLOAT32 else torch.float64))


def byte_tokenizer(eos: bool = True) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character (95) and two specials: 97 in all."""
    characters = [chr(c) for c in range(32, 127)]
    vocab = {c: i for i, c in enumerate([*characters, "<s>", "</s>"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>" if eos else None,
        clean_up_tokenization_spaces=False,
    )
