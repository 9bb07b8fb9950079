"""Settings of a model's generation config."""

from __future__ import annotations

from typing import Any

from specdec.configs import setting


def eos_ids(model: Any) -> tuple[int, ...]:
    """The ids that end a text, by the current config of the transformers ``model``."""
    eos = (setting(model, "generation_config") or model.config).eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def processors(model: Any) -> dict[str, Any]:
    """Settings that transformers turns into processors and this library does not."""
    neutral: dict[str, Any] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0}
    neutral |= dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"))
    asked = {name: setting(setting(model, "generation_config"), name) for name in neutral}
    return {name: value for name, value in asked.items() if value and value != neutral[name]}


def sampling(model: Any) -> dict[str, Any]:
    """Sampling settings, where they differ from drawing from the softmax of the logits."""
    config = setting(model, "generation_config")
    if not setting(config, "do_sample"):
        return {}
    neutral = {"temperature": (None, 1), "top_k": (None, 0), "top_p": (None, 1), "min_p": (None, 0)}
    asked = {name: setting(config, name) for name in neutral}
    return {name: value for name, value in asked.items() if value not in neutral[name]}
