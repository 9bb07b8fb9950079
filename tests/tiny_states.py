"""Tiny random models of the families that run with transformers' own cache."""

from __future__ import annotations

from typing import Any

import torch
from tiny import _BASE
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from specdec.models import OwnCache

_LAYERS = ["linear_attention", "linear_attention", "full_attention"]
_PURE = {"vocab_size": 97, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_MAMBA = {
    **_BASE,
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_DELTA = {
    **_BASE,
    "num_hidden_layers": 3,
    "layer_types": _LAYERS,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_CONV = {
    **_BASE,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}

STATES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "diffllama": {**_BASE, "head_dim": 8},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "falcon_mamba": _PURE,
    "gemma3n_text": {
        **_BASE,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "jamba": {
        **_BASE,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        **_BASE,
        "num_hidden_layers": 3,
        "layer_types": _LAYERS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "lfm2": {**_CONV, "block_ff_dim": 48},
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "llama4_text": {
        **_BASE,
        "head_dim": 8,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "intermediate_size_mlp": 48,
    },
    "mamba": _PURE,
    "mamba2": {**_PURE, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "minimax": {
        **_BASE,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {
        **_BASE,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "use_mamba_kernels": False,
    },
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "zamba": {
        **_BASE,
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        **_BASE,
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "use_mamba_kernels": False,
        "num_mem_blocks": 1,
    },
}
HERE = [family for family in STATES if family in CONFIG_MAPPING_NAMES]  # older transformers have fewer


def stateful(family: str, seed: int = 0, spread: float = 3.0) -> Any:
    """A random float32 model of a family. ``spread`` multiplies its matrices, so that logits depend on the text and not only on its last token."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **STATES[family])
    config.bos_token_id = config.eos_token_id = None
    config.pad_token_id = 0
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(spread)
    model.generation_config.eos_token_id = None
    return model


def reads(monkeypatch):
    """How many tokens each reading of a text takes."""
    counts, read = [], OwnCache._read

    def counted(self, state, tokens, keep):
        counts.append(len(tokens) - len(state.tokens))
        return read(self, state, tokens, keep)

    monkeypatch.setattr(OwnCache, "_read", counted)
    return counts
