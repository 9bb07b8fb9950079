"""The config of a head's body: from the fields that Llama's and Qwen3's configs have, and back into them."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from specdec.drafts.heads.formats.fields import Fields

ROPES = ("default", "linear", "llama3", "yarn")


def body_of(fields: Fields, vocab_size: int, blocks: int) -> LlamaConfig:
    """The config of a head's body.

    Args:
        vocab_size: of the target, where the config has none. blocks: of the target.
    Raises:
        ValueError: a field is missing, or says something for which there is no code.
    """
    fields.only("hidden_act", "silu", "swish")
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    fields.only("partial_rotary_factor", 1.0)
    layers = fields.need("num_hidden_layers")
    _full(fields, layers)
    width = fields.need("hidden_size")
    fields.only("target_hidden_size", width)
    heads = fields.need("num_attention_heads")
    target: dict[str, Any] = {"num_target_layers": blocks}
    return LlamaConfig(
        vocab_size=fields.get("vocab_size", vocab_size),
        hidden_size=width,
        intermediate_size=fields.need("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim", width // heads),
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.get("max_position_embeddings", 2048),
        rope_parameters=_rope(fields),
        bos_token_id=None,
        eos_token_id=None,
        **target,
    )


def _full(fields: Fields, layers: int) -> None:
    """Raise ValueError for layers that do not see the whole text."""
    kinds, window = fields.get("layer_types"), fields.get("sliding_window")
    slides = fields.get("use_sliding_window", False) and window and kinds is None
    if slides or "sliding_attention" in (kinds or ())[:layers]:
        names = tuple(f"{fields.where}{name}" for name in ("layer_types", "use_sliding_window"))
        raise ValueError(
            f"{fields.source}: some layers have a sliding window, and a head has one mask for all its layers: give mask=, for example "
            f"masks.streaming({window or 'window'}, sinks=0), and ignore={names!r} if every layer should have it"
        )


def _rope(fields: Fields) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5, from these or from ``rope_theta`` and ``rope_scaling`` of transformers 4."""
    found = dict(fields.get("rope_parameters", {}))
    theta, scaling = fields.get("rope_theta", 10000.0), fields.get("rope_scaling", {})
    if not found:
        found = {"rope_theta": theta, **scaling}
    kinds = [value for value in found.values() if isinstance(value, dict)]  # one for each kind of layer
    if kinds and all(one == kinds[0] for one in kinds):
        found, kinds = dict(kinds[0]), []
    found.setdefault("rope_theta", theta)
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    if kinds or found["rope_type"] not in ROPES or found.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{fields.source}: rotary positions are {found}, and heads are implemented for whole ones of the types {', '.join(ROPES)}, the same for "
            "all layers: use another checkpoint, or, at the cost of its acceptance, write such rope_parameters into its config.json"
        )
    return found


def fields_of(config: LlamaConfig, blocks: int, qwen: bool) -> dict[str, Any]:
    """The fields of a Llama or (with norms of queries and keys) Qwen3 config of ``blocks`` layers, for transformers 4 and 5."""
    c: Any = config
    rope = dict(c.rope_parameters)
    kind = rope.get("rope_type", "default")
    names = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings"
    return {
        "model_type": "qwen3" if qwen else "llama",
        **{name: c.to_dict()[name] for name in names.split()},
        "num_hidden_layers": blocks,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if kind == "default" else {k: v for k, v in rope.items() if k != "rope_theta"},
        **({"layer_types": ["full_attention"] * blocks} if qwen else {"mlp_bias": False}),
    }
