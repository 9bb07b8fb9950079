"""The config of a head's body: from the fields that Llama's and Qwen3's configs have, and back into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import LlamaConfig

from specdec.drafts.heads.formats.fields import Fields

ROPES = ("default", "linear", "llama3", "yarn")
SLIDING = "sliding_attention"


def body_of(fields: Fields, vocab_size: int, blocks: int, windows: bool = False) -> LlamaConfig:
    """The config of a head's body.

    Args:
        vocab_size: of the target, where the config has none. blocks: of the target. windows: whether the format goes on to read ``windows_of``;
            otherwise layers with windows are refused.
    Raises:
        ValueError: a field is missing, or says something for which there is no code.
    """
    fields.only("hidden_act", "silu", "swish")
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    fields.only("partial_rotary_factor", 1.0)
    layers = fields.need("num_hidden_layers")
    if not windows:
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


def windows_of(
    fields: Fields, layers: int, kind: str | None = None, window: int | None = None
) -> list[int | None] | None:
    """For each of ``layers`` its window in positions, or ``None`` for one that sees the whole text; ``None`` if all do.

    Args:
        kind: of all layers where the config does not say; by default as in Qwen3's config. window: the default of the config.
    Raises:
        ValueError: a kind of layer without code, fewer kinds than layers, or layers with windows of no size.
    """
    kinds, size = fields.get("layer_types"), fields.get("sliding_window", window)
    used, first = fields.get("use_sliding_window", False), fields.get("max_window_layers", 28)
    qwen = window is None and fields.get("model_type", "qwen3") == "qwen3"
    if kinds is None:
        full = "full_attention" if kind is None else kind
        # As Qwen3Config.
        sliding = qwen and used and ("sliding_window" not in fields.values or size is not None)
        kinds = [SLIDING if sliding and i >= first else full for i in range(layers)]
    wrong = [one for one in kinds if one not in (SLIDING, "full_attention")]
    if wrong or len(kinds) < layers:
        raise ValueError(
            f"{fields.source}: {fields.where}layer_types is {kinds!r}, and heads are implemented for {SLIDING!r} and 'full_attention', one for each of "
            f"{layers} layers: use another checkpoint"
        )
    kinds = kinds[:layers]
    if SLIDING not in kinds:
        return None
    if qwen and used and "sliding_window" not in fields.values:
        size = 4096  # the default, which a config that was saved does not have
    if (qwen and not used) or type(size) is not int or size < 1:
        lacking = "use_sliding_window is False" if qwen and not used else f"sliding_window is {size!r}"
        raise ValueError(
            f"{fields.source}: some layers have a sliding window in {fields.where}layer_types, and {lacking}, so that they have none: give "
            f"ignore=({fields.where + 'layer_types'!r},) to read them without a window, and also windows=, a size or None for each layer, if they "
            "were trained with one"
        )
    return [size if one == SLIDING else None for one in kinds]


def _full(fields: Fields, layers: int) -> None:
    """Raise ValueError for layers that do not see the whole text."""
    if windows_of(fields, layers) is not None:
        raise ValueError(
            f"{fields.source}: some layers have a sliding window ({fields.where}layer_types), for which this kind of checkpoint has no code here: use "
            "another checkpoint, or, if its layers were trained without one all the same, give "
            f"ignore=({fields.where + 'layer_types'!r}, {fields.where + 'use_sliding_window'!r})"
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


def fields_of(
    config: LlamaConfig, blocks: int, qwen: bool, windows: Sequence[int | None] | None = None
) -> dict[str, Any]:
    """The fields of a Llama or (with norms of queries and keys) Qwen3 config of ``blocks`` layers, for transformers 4 and 5.

    Args:
        windows: of the layers, ``None`` for one without.
    Raises:
        ValueError: windows of several sizes.
    """
    c: Any = config
    windows = [None] * blocks if windows is None else windows
    sizes = sorted({window for window in windows if window is not None})
    if len(sizes) > 1:
        raise ValueError(
            f"windows has {sizes}: the layout of speculators has one size for all layers with a window; export a head that has one"
        )
    kinds = ["full_attention" if window is None else SLIDING for window in windows]
    more: dict[str, Any] = {"layer_types": kinds} if qwen or sizes else {}
    more |= {"sliding_window": sizes[0], "use_sliding_window": True} if sizes else {}
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
        **more,
        **({} if qwen else {"mlp_bias": False}),
    }
