"""Which Hugging Face families are supported, by which path, and why the others are not."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from specdec.configs import setting

_DENSE = (
    "apertus arcee biogpt bitnet cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4 gpt2 "
    "gpt_bigcode gpt_neox granite granite_swa helium hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 llama ministral ministral3 "
    "mistral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2 vaultgemma"
)
_EXPERTS = (
    "afmoe aria_text cohere2_moe dbrx dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe gpt_oss granitemoe granitemoe_swa "
    "granitemoeshared hunyuan_v1_moe hy_v3 jetmoe kolibri1 laguna mellum mimo_v2_flash minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe "
    "solar_open"
)
_LATENT = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 youtu"
SUPPORTED: dict[str, str] = {
    **dict.fromkeys(f"{_DENSE} {_EXPERTS} {_LATENT}".split(), "packed"),
    **dict.fromkeys(("codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "xglm"), "padded"),
    "mpt": "padded, chains only",
}
"""``model_type`` -> how its forward is run: packed tokens without padding, or padded rows with a mask."""

_RECURRENT = (
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h olmo_hybrid "
    "qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
)
_INDEXED = "axk2 deepseek_v32 deepseek_v4 dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text"
_UNTOLD = ("phimoe", "qwen2_moe")  # their windows are in transformers' masks alone, and no mask is made here
_WHY: dict[str, str] = {
    **dict.fromkeys(
        _RECURRENT.split(), "it keeps a recurrent state, which cannot be rolled back by changing a length"
    ),
    **dict.fromkeys(
        _INDEXED.split(),
        "an indexer or a compressor, with a cache of its own, chooses the keys that a query sees",
    ),
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
_OTHERS = "bloom diffllama gemma3n_text llama4_text"
OWN_CACHE: tuple[str, ...] = tuple(sorted([*ONE_BY_ONE, *_STATES.split(), *_OTHERS.split()]))
"""The families that run with their own forward and cache (``models.OwnCache``)."""
_NOT_EVEN = {
    "recurrent_gemma": "it keeps its state in its modules, where all rows would share it",
    "rwkv": "its first forward rescales its weights in place, and they are yours",
}


class UnsupportedModel(ValueError):
    """A model that cannot be run exactly; the message names the family, the reason where known, and what is supported."""


def refuse(
    model_type: str, why: str | None = None, unlisted: bool = False, other: bool = True
) -> UnsupportedModel:
    """The error for a family; ``other``: name the class that runs it."""
    text = f"{model_type!r} models are not supported"
    text += f": {why}." if why else "."
    if other and model_type in OWN_CACHE:
        return UnsupportedModel(
            f"{text} Give models.OwnCache(model, tokenizer), which runs it with transformers' own forward and cache."
        )
    if unlisted:
        text += (
            " If its attention goes through transformers' AttentionInterface, HFModel(model, unlisted='packed') tries it; "
            "otherwise models.OwnCache(model, tokenizer) does, row by row. Both compare it with the model's own forward first."
        )
    near = [name for name in get_close_matches(model_type, SUPPORTED) if name != model_type]
    text += f" Supported families with similar names: {', '.join(near)}." if near else ""
    return UnsupportedModel(f"{text} specdec.models.SUPPORTED lists all {len(SUPPORTED)} supported families.")


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
    if family in _UNTOLD and _slides(config):
        raise refuse(
            family,
            f"this one has a sliding window of {config.sliding_window}, which its layers do not pass to the attention function",
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


def multimodal(config: Any) -> bool:
    """Whether a model takes images or sounds, too, by its config."""
    return setting(config, "vision_config", "audio_config", "vision_tower_config") is not None


def _check_kind(config: Any) -> None:
    family = config.model_type
    if setting(config, "is_encoder_decoder"):
        raise refuse(family, "it is an encoder-decoder; only decoder-only language models are run")
    if multimodal(config):
        raise refuse(
            family, "it is multimodal: give models.text_only(model), its language model", other=False
        )
    attends = setting(config, "use_bidirectional_attention")
    if attends in (True, "all"):  # "vision": only the patches of an image, to each other
        raise refuse(family, "this one attends in both directions")


def _slides(config: Any) -> bool:
    """Whether some layers have a window that is shorter than the texts that the model supports."""
    kinds, window = setting(config, "layer_types"), setting(config, "sliding_window")
    longest = positions_of(config)
    return bool(
        window and (kinds is None or "sliding_attention" in kinds) and (longest is None or window < longest)
    )


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
