"""Tiny configs of families that resemble others: layers of each kind, windows of eight tokens, experts of which two are chosen."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_ONE = {k: v for k, v in _BASE.items() if k != "num_key_value_heads"}  # one head of keys for each of queries
_HEAD = {**_BASE, "head_dim": 8}
_WINDOW = {**_HEAD, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    **{**_BASE, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
}
_MUP = {
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.5,
}
_TWO = {"num_experts_per_tok": 2}
_MOE = {"num_experts": 4, **_TWO, "moe_intermediate_size": 24}
_SHARED = {**_MOE, "num_shared_experts": 1}
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_ROUTED = {**_TWO, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1, **_GROUPS}
_LOCAL = {"num_local_experts": 4, **_TWO}
_PAD = {"pad_token_id": 0}

DENSE: dict[str, dict[str, Any]] = {
    "biogpt": _BASE,
    "bitnet": {**_BASE, **_PAD},
    "cohere": {**_BASE, **_PAD, "use_qk_norm": True},
    "cwm": {**_WINDOW, **_PAD},
    "gemma4_text": {  # the last layers read the keys and values of earlier ones
        **{**_HEAD, **_PAD, "sliding_window": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
        **{"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2},
    },
    "gemma4_unified_text": {
        **{**_HEAD, **_PAD, "sliding_window": 8, "num_hidden_layers": 3, "global_head_dim": 16},
        **{"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "attention_k_eq_v": True},
    },
    "glm": {**_HEAD, **_PAD},
    "gpt_bigcode": {"vocab_size": 97, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "gpt_neox_japanese": {k: v for k, v in _ONE.items() if k != "intermediate_size"},
    "granite_swa": {**_WINDOW, **_MUP},
    "hyperclovax": {**_HEAD, **_MUP, "use_post_norm": True},
    "internlm3": {**_HEAD, **_PAD, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": _HEAD,
    "jais2": _HEAD,
    "ministral": _WINDOW,
    "ministral3": {
        **{**_HEAD, "sliding_window": 8},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"mscale": 1.0, "mscale_all_dim": 1.0},
            **{
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },  # scales queries from 16 on
        },
    },
    "modernbert-decoder": {
        **{**_ONE, "layer_types": _WINDOW["layer_types"]},
        **{"local_attention": 16, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2, **_PAD},
    },
    "nanochat": _BASE,
    "nemotron": _HEAD,
    "olmo": {**_BASE, "clip_qkv": 2.0},
    "persimmon": _ONE,
    "stablelm": {**_BASE, "qk_layernorm": True},
    "vaultgemma": _WINDOW,
    "xglm": {
        **{"vocab_size": 97, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
        "max_position_embeddings": 256,
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "afmoe": {**_WINDOW, **_SHARED, "num_dense_layers": 1},
    "aria_text": {**_HEAD, **_PAD, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "cohere2_moe": {**_WINDOW, "num_experts": 4, **_TWO, **_PAD},
    "dbrx": {
        **{"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {**_WINDOW, **_ROUTED},
    "ernie4_5_moe": {
        **{**_BASE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
        **{"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    },
    "exaone_moe": {**_WINDOW, **_SHARED, **_GROUPS},
    "flex_olmo": {**_BASE, **_PAD, "num_experts": 4, **_TWO},
    "flint": {**_WINDOW, **_MOE, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "glm4_moe": {**_HEAD, **_ROUTED, "use_qk_norm": True},
    "granitemoe": {**_BASE, **_LOCAL, **_MUP},
    "granitemoe_swa": {**_WINDOW, **_LOCAL, **_MUP, "shared_intermediate_size": 24},
    "granitemoeshared": {**_BASE, **_LOCAL, **_MUP, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {**_HEAD, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {**_HEAD, **_SHARED, "first_k_dense_replace": 1},
    "jetmoe": {**_BASE, **_LOCAL, "kv_channels": 8},
    "kolibri1": {**_WINDOW, **_MOE, "shared_expert_intermediate_size": 24},
    "laguna": {
        **{**_WINDOW, **_MOE, "shared_expert_intermediate_size": 24},
        "num_attention_heads_per_layer": [4, 2],
    },
    "mellum": {**_WINDOW, **_MOE},
    "mimo_v2_flash": {**_WINDOW, **_TWO, "moe_intermediate_size": 24, "n_routed_experts": 4, "v_head_dim": 6},
    "minimax_m2": {**_HEAD, **_LOCAL},
    "olmoe": {**_BASE, "num_experts": 4, **_TWO, "clip_qkv": 2.0},
    "phimoe": {**_BASE, **_LOCAL},
    "qwen2_moe": {**_BASE, **_MOE, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "solar_open": {**_HEAD, **{k: v for k, v in _ROUTED.items() if k != "first_k_dense_replace"}},
}
LATENT: dict[str, dict[str, Any]] = {
    "axk1": {**_LATENT, **_ROUTED, **_PAD},
    "deepseek_v2": {**_LATENT, **_ROUTED, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT, **_ROUTED},
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "minicpm3": {**_LATENT, **_PAD},
    "youtu": _LATENT,
}
MORE = {**DENSE, **EXPERTS, **LATENT}
