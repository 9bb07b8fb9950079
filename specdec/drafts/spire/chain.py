"""A SPIRe draft's forwards in a captured chain: as ``SpireSteps``, in operators that can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.drafts.spire.layers import remember, run_layers
from specdec.drafts.spire.model import SpireModel
from specdec.forward.block import rms_norm
from specdec.graphs.ring_chain import Forward, RingChain, RingShape
from specdec.graphs.ring_plan import RingPlan
from specdec.kernels.attention import AttentionPlan


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
        rotary, sees = (cos[n], sin[n]), cast(AttentionPlan, plan)
        activations = run_layers(model, model.embed(tokens), rotary, store, sees)
        if model.memory is not None and n + 1 < steps:
            remember(model, store, plan.slots, model.memory(activations), rotary)
        if type(model).logits is not SpireModel.logits:
            return model.logits(activations[-1])
        head = model.body.lm_head
        return F.linear(rms_norm(activations[-1], model.body.model.norm), head.weight, head.bias)

    return run
