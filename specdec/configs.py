"""Reading settings of transformers' configs and modules. Families have different settings, so a missing one reads as ``None``."""

from __future__ import annotations

from typing import Any

import torch


def setting(config: Any, *names: str) -> Any:
    """The first of the settings ``names`` that ``config`` (or a module) has and that is not ``None``; ``None`` if there is none.

    Raises:
        RuntimeError: transformers refuses to read a setting that differs from layer to layer.
    """
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


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
