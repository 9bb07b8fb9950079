"""The blocks of SPIRe's draft over stored keys and values: in one call of C, by few launches, or operator by operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.drafts.spire.launches import SpireLaunches
from specdec.drafts.spire.model import SpireModel
from specdec.kernels.attention import AttentionPlan, attention
from specdec.kernels.attention.native import lowered

Rotary = tuple[Tensor, Tensor]


def run_layers(
    model: SpireModel, x: Tensor, rotary: Rotary, store: KVStore, plan: AttentionPlan
) -> Sequence[Tensor] | Tensor:
    """``x [T, E]`` through all blocks, whose keys and values go to ``store``: the input of the first, and the output of each."""
    count, slots = len(model.layers), plan.slots_on(x.device)
    if (fast := model.fast(x)) is not None and store.buffers is not None:
        out = x.new_empty(count + 1, *x.shape)
        fast(x, *_flat(rotary), slots, store.buffers, [lowered(plan, None)] * count, dict(enumerate(out)))
        return out
    if (launches := _launches(model)) is not None:
        made = launches.run(x, rotary, store, plan)
        return made if model.memory is None else torch.stack(made)  # its mixtures are one product then
    activations = [x]
    for i in range(count):

        def attend(query: Tensor, key: Tensor, value: Tensor, i: int = i) -> Tensor:
            layer = _append(store, i, slots, key, value)
            return attention(query.transpose(0, 1)[None], *layer, plan)[0]

        x, _, _ = model.run(i, x, rotary, attend)
        activations.append(x)
    return activations


def remember(
    model: SpireModel, store: KVStore, slots: Tensor, memory: Sequence[Tensor] | Tensor, rotary: Rotary
) -> None:
    """Write each layer's keys and values of ``memory [T, E]`` (or of the target's activations) to flat ``slots [T]``."""
    fast, launches = model.fast(memory[0]), _launches(model)
    for i, x in enumerate(memory):
        if fast is not None and store.buffers is not None:
            fast.remember(i, x.contiguous(), *_flat(rotary), slots, store.buffers)
        elif launches is not None:
            launches.remember(i, x, rotary, slots, store)
        else:
            _append(store, i, slots, *model.keys_values(i, x, rotary))


def _launches(model: SpireModel) -> SpireLaunches | None:
    return None if torch.is_grad_enabled() else model.launches


def _append(store: KVStore, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Put ``keys [T, H, D]`` and ``values [T, H, Dv]`` into flat ``slots [T]``; returns the layer's buffers."""
    return store.append(layer, slots, *(t.transpose(0, 1)[None] for t in (keys, values)))


def _flat(rotary: Rotary) -> Rotary:
    """Cosines and sines for the C kernels, ``[T, D]`` in float32."""
    cos, sin = (t.squeeze(-2).float().contiguous() for t in rotary)
    return cos, sin
