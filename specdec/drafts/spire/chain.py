"""A SPIRe draft's forwards in a captured chain: as ``SpireSteps``, in operators that can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.drafts.spire.model import SpireModel
from specdec.forward.block import rms_norm
from specdec.graphs.ring_chain import Forward, RingChain, RingShape
from specdec.graphs.ring_plan import RingPlan
from specdec.kernels.attention import AttentionPlan, attention


class SpireChain(RingChain):
    """The chain of a ``SpireModel``."""

    def __init__(self, model: SpireModel, ring: Ring, store: StaticStore, shape: RingShape):
        super().__init__(ring, store, shape, model.device)
        self.model = model

    def forward(self, position: Tensor) -> Forward:
        """As ``RingChain.forward``."""
        return forwards(self.model, self.store, position, self.shape.steps)


def forwards(
    model: SpireModel, store: StaticStore, position: Tensor, steps: int
) -> Callable[[int, Tensor, RingPlan], Tensor]:
    """The forwards of a chain of ``steps`` tokens at ``position [steps, R]``: ``(n, tokens [R], plan) -> logits [R, V]``, with their writes to ``store``."""
    cos, sin = model.rotary(position)

    def run(n: int, tokens: Tensor, plan: RingPlan) -> Tensor:
        x, rotary = model.embed(tokens), (cos[n], sin[n])
        activations = [x]
        for i in range(len(model.layers)):

            def attend(query: Tensor, key: Tensor, value: Tensor, i: int = i) -> Tensor:
                layer = write(store, i, plan.slots, key, value)
                return attention(query.transpose(0, 1)[None], *layer, cast(AttentionPlan, plan))[0]

            x, _, _ = model.run(i, x, rotary, attend)
            activations.append(x)
        if model.memory is not None and n + 1 < steps:
            for i, memory in enumerate(model.memory(activations)):
                write(store, i, plan.slots, *model.keys_values(i, memory, rotary))
        if type(model).logits is not SpireModel.logits:
            return model.logits(x)
        head = model.body.lm_head
        return F.linear(rms_norm(x, model.body.model.norm), head.weight, head.bias)

    return run


def write(
    store: StaticStore, layer: int, slots: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Put ``keys [T, H, D]`` and ``values [T, H, Dv]`` into flat ``slots [T]``; returns the layer's buffers."""
    return store.append(layer, slots, *(t.transpose(0, 1)[None] for t in (keys, values)))
