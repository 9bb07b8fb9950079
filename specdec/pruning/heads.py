"""Attention heads by the norm of their outputs (Minitron, Muralidharan et al., arXiv 2407.14679); whole KV groups are kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.configs import blocks_of
from specdec.pruning.each_layer import check_each_layer
from specdec.pruning.observe import observe
from specdec.pruning.rebuild import llama_like, named_tensors, rebuild


def head_norms(outputs: Tensor, heads: int) -> Tensor:
    """``[heads]`` mean L2 norm of each head's output, from ``[T, heads * D]`` or more leading axes.

    If ``heads`` is the number of *KV* heads, a head is the group of query heads that share one. Their outputs are adjacent,
    and the norm is over the whole group.

    Raises:
        ValueError: a width that is not a multiple of ``heads``, or no tokens.
    """
    if heads < 1 or outputs.shape[-1] % heads or not outputs.numel():
        raise ValueError(
            f"outputs are {list(outputs.shape)} for {heads} heads; they must be [T, heads * D], T at least 1"
        )
    return outputs.reshape(-1, heads, outputs.shape[-1] // heads).norm(dim=-1).mean(0)


def head_importance(model: Any, tokens: Tensor, length: Tensor | None = None) -> Tensor:
    """``[layers, KV heads]`` mean norm of each head group's input to the output projection, on a calibration batch.

    Args:
        tokens: ``[B, L]`` right-padded. length: ``[B]``; by default all of ``L``.
    Raises:
        TypeError, ValueError: a model without Llama's projections, tokens that do not fit.
    """
    model = llama_like(model, "head_importance")
    heads = partial(head_norms, heads=model.config.num_key_value_heads)
    blocks: Any = blocks_of(model)
    modules = [block.self_attn.o_proj for block in blocks]
    return observe(model, modules, lambda given, made: heads(given), tokens, length)


def keep_heads(model: Any, heads: Sequence[Sequence[int]]) -> Any:
    """A model of the same class with some of the KV heads of each layer and all of their query heads; it shares no memory with ``model``.

    Args:
        model: a Llama-like transformers causal LM; it is only read.
        heads: the KV heads to keep in each layer, counted from 0, ascending, equally many in all layers.
    Raises:
        TypeError: not a transformers model.
        ValueError: a family without Llama's projections, or heads that do not fit.
    """
    model = llama_like(model, "keep_heads")
    old = model.config
    blocks: Any = blocks_of(model)
    count = check_each_layer("heads", heads, len(blocks), old.num_key_value_heads)
    size = blocks[0].self_attn.head_dim
    group = old.num_attention_heads // old.num_key_value_heads
    config = copy.deepcopy(old)
    config.num_attention_heads, config.num_key_value_heads = count * group, count
    config.head_dim = size  # no longer hidden size / heads
    tensors = named_tensors(model)
    prefix = next(name for name, module in model.named_modules() if module is blocks)
    for i, kept in enumerate(heads):
        at, block = torch.as_tensor(kept), f"{prefix}.{i}.self_attn."
        for part, width, axis in (("q", group, 0), ("k", 1, 0), ("v", 1, 0), ("o", group, 1)):
            span = width * size
            index = (at[:, None] * span + torch.arange(span)).flatten()
            weight, bias = f"{block}{part}_proj.weight", f"{block}{part}_proj.bias"
            tensors[weight] = tensors[weight].index_select(axis, index.to(tensors[weight].device))
            if bias in tensors and axis == 0:
                tensors[bias] = tensors[bias].index_select(0, index.to(tensors[bias].device))
    return rebuild(model, config, tensors, "keep_heads")
