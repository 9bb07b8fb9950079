"""Reading settings of transformers' configs, generation configs and modules. Families have different settings, so a missing one reads as ``None``."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch


def setting(config: Any, *names: str) -> Any:
    """The first of the settings ``names`` that ``config`` (or a module) has and that is not ``None``; ``None`` if there is none.

    Raises:
        RuntimeError: transformers refuses to read a setting that differs from layer to layer.
    """
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def parallel_token(config: Any) -> int | None:
    """The id that a config names for parallel drafting (``pard_token``, as AMD and vLLM call it); ``None`` if it names none
    (or -1, which AMD's trainer writes without one)."""
    found = setting(config, "pard_token")
    return None if found is None or found < 0 else found


def cache_name(model: Any) -> str:
    """What the forward of a model calls its cache, as argument and in its result: ``"cache"`` since transformers 5.24."""
    takes = signature(type(model).forward).parameters
    names = ("cache", "past_key_values", "cache_params", "state")
    return next((name for name in names if name in takes), "past_key_values")


def body_of(model: Any) -> Any:
    """What a causal LM has below its output matrix: transformers' ``base_model``, or ``model`` where that is the causal LM itself."""
    base = model.base_model
    return base.model if base is model else base


def blocks_of(model: Any) -> torch.nn.ModuleList:
    """The decoder blocks of a model: the list of as many modules as the config has layers, each of which is made of others, as norms are not.

    Of several such lists, which are not inside one another as experts are, it is the one whose blocks know their numbers, as those do that
    keep keys or states in a cache.

    Raises:
        ValueError: there is no such list, or there are several.
    """
    layers = model.config.get_text_config().num_hidden_layers
    found = dict(_lists(model.base_model, layers, ""))
    if not found:
        raise ValueError(f"no list of {layers} decoder blocks found in a {type(model).__name__}")
    if len(found) > 1:
        known = [name for name, blocks in found.items() if all(map(_knows, blocks, range(layers)))]
        if len(known) != 1:
            raise ValueError(
                f"which are the {layers} decoder blocks of a {type(model).__name__}, {' or '.join(known or found)}? Give those and no others a "
                "layer_idx, counted from 0"
            )
        return found[known[0]]
    return next(iter(found.values()))


def _lists(module: torch.nn.Module, layers: int, path: str) -> Iterator[tuple[str, torch.nn.ModuleList]]:
    """The outermost lists of ``layers`` modules that have parts, by name."""
    for name, child in module.named_children():
        blocks = child if isinstance(child, torch.nn.ModuleList) and len(child) == layers else None
        if blocks is not None and all(next(block.children(), None) is not None for block in blocks):
            yield path + name, blocks
        else:
            yield from _lists(child, layers, f"{path}{name}.")


def _knows(block: torch.nn.Module, number: int) -> bool:
    return any(setting(module, "layer_idx") == number for module in block.modules())


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
