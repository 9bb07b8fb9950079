"""Reads the arguments of a ``Shape`` from a transformers config: grouped queries, tied embeddings, windows, experts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from specdec.configs import setting

# Families whose feed-forward layers have two matrices, which configs do not say. All others have three.
_TWO_MATRICES = (
    "apertus arcee biogpt bloom codegen falcon gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj jais2 mpt nanochat "
    "nemotron opt persimmon phi starcoder2 xglm"
)
# Families of plain multi-head attention, whatever ``num_key_value_heads`` says.
_ONE_KV_A_HEAD = "biogpt bloom codegen gpt2 gpt_neo gpt_neox gpt_neox_japanese gptj mpt opt xglm"
_STATE = "its layers keep a state and no keys and values"
_REFUSED_FIELDS = {
    "kv_lora_rank": "latent attention projects keys and values down and up again",
    "linear_num_key_heads": _STATE,
    "ssm_state_size": _STATE,
    "mamba_d_state": _STATE,
    "state_size": _STATE,
    "conv_L_cache": _STATE,
    "H_cycles": "its layers run several times",
    "hidden_size_per_layer_input": "every layer reads an embedding of its own",
    "num_kv_shared_layers": "some layers read the keys and values of others",
    "attention_k_eq_v": "keys are values in some layers",
}
_REFUSED_FAMILIES = {
    "doge": "its experts are rows of a table",
    "git": "images are part of its text",
    "jetmoe": "its attention has experts too",
    "moshi": "it is two models",
}
_KINDS = {"full_attention", "sliding_attention", "attention", "global", "local"}


def read(config: Any) -> dict[str, Any]:
    """The arguments of ``Shape``, by name, for a decoder-only config or a model that has one; ``experts`` are those of ``Experts``.

    Biases, learned positions, norms of queries and keys, and the last norm are left out (below a percent of the body). Every
    expert layer is assumed to choose its experts uniformly.

    Raises:
        TypeError: ``config`` is a name or a dictionary.
        ValueError: a field is missing; the layers cache something other than keys and values; the model is an encoder-decoder.
    """
    if setting(config, "config") is None:
        config = setting(config, "model") or config  # an HFModel's
    config = setting(config, "config") or config
    if config is None or isinstance(config, (str, os.PathLike, Mapping)):
        raise TypeError(
            f"config is a {type(config).__name__}: give a transformers config (AutoConfig.from_pretrained(folder)), or a model"
        )
    text = setting(config, "get_text_config")
    config = config if text is None else text()
    family = setting(config, "model_type") or type(config).__name__
    # The configs of BERT-like models deny being decoders; so does GPT-NeoX's, which is one.
    encoder = setting(config, "is_decoder") is False and not family.startswith("gpt_neox")
    if encoder or setting(config, "is_encoder_decoder"):
        raise ValueError(f"{family!r} is not decoder-only: only decoder-only models have a shape here")
    why = _REFUSED_FAMILIES.get(family) or next(
        (why for field, why in _REFUSED_FIELDS.items() if _first(config, field)), None
    )
    if why:
        raise ValueError(f"{family!r} models have no Shape: {why}; write terms of your own")
    layers = _need(config, family, "num_hidden_layers")
    d_model = _need(config, family, "hidden_size")
    heads = _need(config, family, "num_attention_heads")
    if len(set(_first(config, "num_attention_heads_per_layer") or ())) > 1:
        raise ValueError(f"{family!r} has layers with different numbers of heads: write terms of your own")
    d_head = int(_first(config, "head_dim") or d_model // heads)
    if _first(config, "v_head_dim") not in (None, d_head):
        raise ValueError(f"{family!r} has keys and values of different sizes: write terms of your own")
    window, windowed = _window(config, family, layers)
    return {
        "layers": layers,
        "d_model": d_model,
        "heads": heads,
        "kv_heads": _kv_heads(config, family, heads),
        "d_head": d_head,
        "d_ff": _width(config, family, d_model),
        "vocab": _need(config, family, "vocab_size"),
        "tied": bool(setting(config, "tie_word_embeddings")),
        "gated": family not in _TWO_MATRICES.split(),
        "experts": _experts(config, family, layers),
        "window": window,
        "windowed_layers": windowed,
    }


def _first(config: Any, *names: str) -> Any:
    try:
        return setting(config, *names)
    except RuntimeError as error:  # transformers: the field differs from layer to layer
        raise ValueError(
            f"{names[0]} differs from layer to layer: make the Shape by hand ({error})"
        ) from None


def _need(config: Any, family: str, *names: str) -> int:
    value = _first(config, *names)
    if value is None:
        raise ValueError(f"the config of {family!r} has no {' or '.join(names)}: make the Shape by hand")
    if not isinstance(value, int):
        raise ValueError(
            f"{' or '.join(names)} of {family!r} is {value!r}, not one number: make the Shape by hand"
        )
    return value


def _kv_heads(config: Any, family: str, heads: int) -> int:
    if family in _ONE_KV_A_HEAD.split():
        return heads
    if family in ("falcon", "gpt_bigcode") and not setting(config, "new_decoder_architecture"):
        return 1 if config.multi_query else heads
    return int(_first(config, "num_key_value_heads", "num_kv_heads") or heads)


def _width(config: Any, family: str, d_model: int) -> int:
    if family == "mpt":  # its code multiplies by 4, whatever ``expansion_ratio`` says
        return 4 * d_model
    names = ("ffn_dim", "ffn_hidden_size", "n_inner", "intermediate_size", "moe_intermediate_size")
    if _first(config, *names) is None and family in _TWO_MATRICES.split():
        return 4 * d_model  # the default of these families
    return _need(config, family, *names)


def _window(config: Any, family: str, layers: int) -> tuple[int | None, int]:
    """Positions that windowed layers keep, and how many layers those are."""
    size = _first(config, "sliding_window", "window_size")
    kinds = _first(config, "layer_types", "attention_layers", "layers_block_type", "block_types")
    if kinds is not None:
        strange = sorted(set(kinds) - _KINDS)
        if strange:
            raise ValueError(f"{family!r} has layers of kind {', '.join(strange)}: write terms of your own")
        windowed = sum(kind in ("sliding_attention", "local") for kind in kinds)
    else:
        windowed = 0 if setting(config, "use_sliding_window") is False else layers
    return (int(size), windowed) if size and windowed else (None, 0)


def _experts(config: Any, family: str, layers: int) -> dict[str, Any] | None:
    count = _first(config, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    if not count or count < 2:
        return None
    width = _need(config, family, "moe_intermediate_size", "intermediate_size")
    shared = _first(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    if family == "hunyuan_v1_moe":  # one is always shared, and its config does not say so
        shared = width
    if shared is None:
        shared = width * (
            _first(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0
        )
    sparse = sum(_is_sparse(config, layer, layers) for layer in range(layers))
    return {
        "count": int(count),
        "chosen": _need(config, family, "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"),
        "d_ff": width,
        "shared_d_ff": int(shared),
        "layers": sparse if sparse < layers else None,
    }


def _is_sparse(config: Any, layer: int, layers: int) -> bool:
    """Whether a layer has experts: families mark dense layers in different ways."""
    kinds = _first(config, "mlp_layer_types")
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    if layer in (_first(config, "mlp_only_layers") or ()):
        return False
    first = _first(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
    last = _first(config, "moe_layer_end_index")
    end = layers - 1 if last is None or last < 0 else last
    every = _first(config, "decoder_sparse_step", "moe_layer_interval") or 1
    return bool(first <= layer <= end and (layer + 1) % every == 0)
