"""Which Hugging Face families are supported, by which path, and why the others are not."""

from __future__ import annotations

from typing import Any

from specdec.configs import setting

_PACKED = (
    "apertus arcee cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm4 gpt2 gpt_neox gpt_oss granite helium hunyuan_v1_dense llama "
    "mistral mixtral olmo2 olmo3 opt phi phi3 qwen2 qwen3 qwen3_moe seed_oss smollm3 starcoder2"
)
SUPPORTED: dict[str, str] = {
    **dict.fromkeys(_PACKED.split(), "packed"),
    **dict.fromkeys(("codegen", "falcon", "gpt_neo", "gptj"), "padded"),
    "mpt": "padded, chains only",
}
"""``model_type`` -> how its forward is run: packed tokens without padding, or padded rows with a mask."""

_RECURRENT = (
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h olmo_hybrid "
    "qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
)
_LATENT = "deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite kimi_k2 longcat_flash minicpm3 youtu"
_WHY: dict[str, str] = {
    **dict.fromkeys(
        _RECURRENT.split(), "it keeps a recurrent state, which cannot be rolled back by changing a length"
    ),
    **dict.fromkeys(_LATENT.split(), "its latent attention does not keep keys and values of whole heads"),
    "bloom": "ALiBi makes its biases from a padding mask and not from positions",
    "gemma3n_text": "its last layers share keys and values with earlier ones",
    "llama4_text": "its chunked attention layers cut the text at multiples of the chunk",
}


ONE_BY_ONE = ("falcon_mamba", "jamba", "mamba", "minimax", "zamba")
"""Of ``OWN_CACHE``, those whose forward goes on from a state with one token at a time only."""
_STATES = (
    "bamba falcon_h1 granitemoehybrid kimi_linear lfm2 lfm2_moe mamba2 nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next "
    "zamba2"
)
_OTHERS = "bloom diffllama gemma3n_text gpt_neox_japanese llama4_text phimoe xglm"
OWN_CACHE: tuple[str, ...] = tuple(sorted([*ONE_BY_ONE, *_STATES.split(), *_OTHERS.split()]))
"""The families that run with their own forward and cache (``models.OwnCache``)."""
_NOT_EVEN = {
    "recurrent_gemma": "it keeps its state in its modules, where all rows would share it",
    "rwkv": "its first forward rescales its weights in place, and they are yours",
}


class UnsupportedModel(ValueError):
    """A model that cannot be run exactly; the message names the family, the reason where known, and what is supported."""


def refuse(model_type: str, why: str | None = None, unlisted: bool = False) -> UnsupportedModel:
    """The error for a family."""
    text = f"{model_type!r} models are not supported"
    text += f": {why}." if why else "."
    if model_type in OWN_CACHE:
        return UnsupportedModel(
            f"{text} Give models.OwnCache(model, tokenizer), which runs it with transformers' own forward and cache."
        )
    if unlisted:
        text += (
            " If its attention goes through transformers' AttentionInterface, HFModel(model, unlisted='packed') tries it; "
            "otherwise models.OwnCache(model, tokenizer) does, row by row. Both compare it with the model's own forward first."
        )
    return UnsupportedModel(f"{text} Supported: {', '.join(sorted(SUPPORTED))}.")


def path_of(config: Any, unlisted: str | None = None) -> str:
    """``"packed"``, ``"padded"`` or ``"padded, chains only"`` for a model's config.

    Raises:
        UnsupportedModel: the family, or this configuration of it, cannot be run exactly.
    """
    if unlisted not in (None, "packed"):
        raise ValueError(f"unlisted is {unlisted!r}: give None or 'packed'")
    family = config.model_type
    _check_kind(config)
    if family in _WHY:
        raise refuse(family, _WHY[family])
    if family == "falcon" and config.alibi:
        raise refuse(
            family, "this one uses ALiBi, which makes its biases from a padding mask and not from positions"
        )
    if family in SUPPORTED:
        return SUPPORTED[family]
    if unlisted is None:
        raise refuse(family, unlisted=True)
    return unlisted


def own_cache(config: Any) -> bool:
    """Whether a model is of a family that ``OwnCache`` is tested with; others are compared with their own forward.

    Raises:
        UnsupportedModel: it is no causal LM of text.
    """
    _check_kind(config)
    if config.model_type in _NOT_EVEN:
        raise refuse(config.model_type, _NOT_EVEN[config.model_type])
    return config.model_type in OWN_CACHE


def _check_kind(config: Any) -> None:
    family = config.model_type
    if setting(config, "is_encoder_decoder"):
        raise refuse(family, "it is an encoder-decoder; only decoder-only language models are run")
    if setting(config, "vision_config", "audio_config") is not None:
        raise refuse(family, "it is multimodal; its language model alone may be supported")
    if setting(config, "use_bidirectional_attention"):
        raise refuse(family, "this one attends in both directions")


def positions_of(config: Any) -> int | None:
    """How many positions a model supports, or ``None`` when its config does not say.

    With dynamic or LongRoPE scaling the rotation of *all* positions changes once a text is longer than the original
    length, so cached keys would be wrong from there on. Such models are supported up to their original length.
    """
    text = config.get_text_config()
    limit = setting(text, "max_position_embeddings", "max_seq_len")
    rope = setting(text, "rope_parameters") or {}
    for one in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if one.get("rope_type") in ("longrope", "dynamic"):
            name = "original_max_position_embeddings"
            original = one.get(name) or setting(text, name)
            limit = min((n for n in (limit, original) if n), default=None)
    return limit
