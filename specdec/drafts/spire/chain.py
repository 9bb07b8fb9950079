"""A SPIRe draft's forward in a captured chain: as ``SpireSteps``, in operators that can be captured."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.drafts.spire.model import SpireModel
from specdec.forward.block import rms_norm
from specdec.graphs.ring_chain import Forward, RingChain, RingPlan, Shape
from specdec.kernels.attention import AttentionPlan, attention


class SpireChain(RingChain):
    """The chain of a ``SpireModel``."""

    def __init__(self, model: SpireModel, ring: Ring, store: StaticStore, shape: Shape):
        super().__init__(ring, store, shape, model.device)
        self.model = model

    def forward(self, position: Tensor) -> Forward:
        """As ``RingChain.forward``."""
        model = self.model
        cos, sin = model.rotary(position)

        def run(n: int, tokens: Tensor, plan: RingPlan) -> Tensor:
            x, rotary = model.embed(tokens), (cos[n], sin[n])
            activations = [x]
            for i in range(len(model.layers)):

                def attend(query: Tensor, key: Tensor, value: Tensor, i: int = i) -> Tensor:
                    layer = self._write(i, plan.slots, key, value)
                    return attention(query.transpose(0, 1)[None], *layer, cast(AttentionPlan, plan))[0]

                x, _, _ = model.run(i, x, rotary, attend)
                activations.append(x)
            if model.memory is not None and n + 1 < self.shape.steps:
                for i, memory in enumerate(model.memory(activations)):
                    self._write(i, plan.slots, *model.keys_values(i, memory, rotary))
            head = model.body.lm_head
            return F.linear(rms_norm(x, model.body.model.norm), head.weight, head.bias)

        return run

    def _write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.store.append(layer, slots, *(t.transpose(0, 1)[None] for t in (keys, values)))
