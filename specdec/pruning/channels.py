"""FFN channels by the size of their activation (Minitron, Muralidharan et al., arXiv 2407.14679)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.configs import blocks_of
from specdec.pruning.each_layer import check_each_layer
from specdec.pruning.observe import observe
from specdec.pruning.rebuild import llama_like, named_tensors, rebuild


def channel_means(activations: Tensor) -> Tensor:
    """``[C]`` mean absolute activation of each channel, from ``[T, C]`` or more leading axes.

    Raises:
        ValueError: no tokens.
    """
    if not activations.numel():
        raise ValueError(f"activations are {list(activations.shape)}; they must be [T, C], T at least 1")
    return activations.abs().reshape(-1, activations.shape[-1]).mean(0)


def channel_importance(model: Any, tokens: Tensor, length: Tensor | None = None) -> Tensor:
    """``[layers, C]`` mean absolute input of the down projection per FFN channel, on a calibration batch.

    In a gated FFN the input is the product of gate and up projection, after the nonlinearity.

    Args:
        tokens: ``[B, L]`` right-padded. length: ``[B]``; by default all of ``L``.
    Raises:
        TypeError, ValueError: a model without Llama's projections, tokens that do not fit.
    """
    model = llama_like(model, "channel_importance")
    blocks: Any = blocks_of(model)
    modules = [block.mlp.down_proj for block in blocks]
    return observe(model, modules, lambda given, made: channel_means(given), tokens, length)


def keep_channels(model: Any, channels: Sequence[Sequence[int]]) -> Any:
    """A model of the same class with some of the FFN channels of each layer; it shares no memory with ``model``.

    Args:
        model: a Llama-like transformers causal LM; it is only read.
        channels: the channels to keep in each layer, counted from 0, ascending, equally many in all layers.
    Raises:
        TypeError: not a transformers model.
        ValueError: a family without Llama's projections, or channels that do not fit.
    """
    model = llama_like(model, "keep_channels")
    blocks = blocks_of(model)
    config = copy.deepcopy(model.config)
    config.intermediate_size = check_each_layer(
        "channels", channels, len(blocks), model.config.intermediate_size
    )
    tensors = named_tensors(model)
    prefix = next(name for name, module in model.named_modules() if module is blocks)
    for i, kept in enumerate(channels):
        at, block = torch.as_tensor(kept), f"{prefix}.{i}.mlp."
        for name, axis in (
            ("gate_proj.weight", 0),
            ("up_proj.weight", 0),
            ("gate_proj.bias", 0),
            ("up_proj.bias", 0),
            ("down_proj.weight", 1),
        ):
            if block + name in tensors:
                tensor = tensors[block + name]
                tensors[block + name] = tensor.index_select(axis, at.to(tensor.device))
    return rebuild(model, config, tensors, "keep_channels")
