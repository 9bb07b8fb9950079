"""Reading settings of transformers' configs, generation configs and modules. Families have different settings, so a missing one reads as ``None``."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch


def setting(config: Any, *names: str) -> Any:
    """The first of the settings ``names`` that ``config`` (or a module) has and that is not ``None``; ``None`` if there is none.

    Raises:
        RuntimeError: transformers refuses to read a setting that differs from layer to layer.
    """
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def cache_name(model: Any) -> str:
    """What the forward of a model calls its cache, as argument and in its result: ``"cache"`` since transformers 5.24."""
    takes = signature(type(model).forward).parameters
    names = ("cache", "past_key_values", "cache_params", "state")
    return next((name for name in names if name in takes), "past_key_values")


def blocks_of(model: Any) -> torch.nn.ModuleList:
    """The decoder blocks of a model.

    Raises:
        ValueError: there is no list with as many modules as the config has layers.
    """
    layers = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
            return module
    raise ValueError(f"taps: no list of {layers} blocks found in a {type(model).__name__}")


def runs_on(model: Any) -> torch.device:
    """The device of a transformers model's input ids and logits."""
    device: torch.device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    # Accelerate may keep the weights elsewhere; its hooks have the device where modules run.
    hooks = [setting(module, "_hf_hook") for module in model.modules()]
    where = next((w for hook in hooks if (w := setting(hook, "execution_device")) is not None), device)
    return torch.device(where)


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
