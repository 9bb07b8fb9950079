"""A model of the Llama family as a GGUF file, for llama.cpp, with matrices in float32 or bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Of a block's weights, in GGUF."""


def write_gguf(model: Any, tokenizer: Any, path: str | Path, bfloat16: bool = False) -> Path:
    """Write a model for llama.cpp.

    The pairs of a rotary embedding lie half a head apart in transformers, and beside each other in llama.cpp, so rows of queries' and keys' weights
    are interleaved. llama.cpp's own converter takes all models, but no tokenizer that it does not know.

    Args:
        model: a ``LlamaForCausalLM`` without biases and with plain rotary angles. tokenizer: a byte-level BPE. path: of the file.
        bfloat16: store matrices in bfloat16, which loses nothing if the weights were saved in it. By default all weights are float32.
    Raises:
        ValueError: another kind of model or tokenizer. ModuleNotFoundError: the package gguf is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError("GGUF files need the package gguf: pip install gguf") from None
    c, parts = model.config, json.loads(tokenizer.backend_tokenizer.to_str())
    _check(c, parts)
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_dimension_count(c.head_dim)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    _add_tokenizer(w, gguf, c, parts)
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}
    for name, weight in tensors(model).items():
        values = weight.detach().float().cpu()
        if (kind := name.split(".")[-2]) in heads:
            values = values.unflatten(0, (heads[kind], 2, -1)).transpose(1, 2).flatten(0, 2)
        if bfloat16 and values.ndim == 2:
            raw = values.bfloat16().contiguous().view(torch.uint8).numpy()
            w.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            w.add_tensor(name, np.ascontiguousarray(values.numpy()))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return Path(path)


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The weights by their names in GGUF; one that input and output share once."""
    body, found = model.model, {}
    found["token_embd.weight"], found["output_norm.weight"] = body.embed_tokens.weight, body.norm.weight
    if model.lm_head.weight is not body.embed_tokens.weight:
        found["output.weight"] = model.lm_head.weight
    for number, block in enumerate(body.layers):
        found |= {
            f"blk.{number}.{to}.weight": block.get_parameter(f"{of}.weight") for of, to in NAMES.items()
        }
    return found


def _check(config: Any, tokenizer: dict[str, Any]) -> None:
    plain = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    found = {name: value for name, value in config.to_dict().items() if name in plain}
    found["rope_type"] = (config.rope_parameters or {}).get("rope_type")
    other = {name: value for name, value in found.items() if value != plain.get(name, "default")}
    split = tokenizer["pre_tokenizer"] or {}
    if tokenizer["model"]["type"] != "BPE" or split.get("type") != "ByteLevel":
        other["tokenizer"] = "not a byte-level BPE"
    elif split["add_prefix_space"] or not split["use_regex"]:
        other["tokenizer"] = "not split like that of GPT-2"
    if tokenizer["normalizer"] is not None:
        other["normalizer"] = tokenizer["normalizer"].get("type")
    if (tokenizer["post_processor"] or {}).get("special_tokens"):
        other["post_processor"] = "that adds tokens"
    if not isinstance(config.eos_token_id, int):
        other["eos_token_id"] = config.eos_token_id
    highest = max(
        [*tokenizer["model"]["vocab"].values(), *(added["id"] for added in tokenizer["added_tokens"])]
    )
    if highest >= config.vocab_size:
        other["vocab_size"] = config.vocab_size
    if other:
        shown = ", ".join(f"{name} {value!r}" for name, value in other.items())
        raise ValueError(
            f"a model with {shown} is not written: convert it with llama.cpp's convert_hf_to_gguf.py"
        )


def _add_tokenizer(w: Any, gguf: Any, config: Any, tokenizer: dict[str, Any]) -> None:
    tokens = [f"<unused {i}>" for i in range(config.vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * config.vocab_size
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], kinds[i] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    w.add_add_bos_token(False)
    w.add_eos_token_id(config.eos_token_id)
    if isinstance(config.bos_token_id, int):
        w.add_bos_token_id(config.bos_token_id)
