"""The forward of SPIRe's draft for the tokens of a block, one after the other, over keys and values in a ring, and the same as captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.drafts.spire.layers import remember, run_layers
from specdec.drafts.spire.model import SpireModel
from specdec.forward.block import rms_norm
from specdec.graphs.ring_plan import RingPlan
from specdec.kernels.attention import AttentionPlan, ExplicitPlan
from specdec.kernels.device import to_device
from specdec.masks.sight import check_length, check_sight
from specdec.types import Context


class SpireSteps:
    """The forward for the n-th token of a block, for all rows at once.

    Args:
        context: the text that the block follows. steps: the most tokens of the block. rows: ``[B]`` the context's rows in the ring; ``None``: the first B.
    """

    def __init__(
        self, model: SpireModel, ring: Ring, context: Context, steps: int, rows: Tensor | None = None
    ):
        self.model, self.ring, self.steps = model, ring, steps
        positions = context.length[:, None] - 1 + torch.arange(steps)  # [B, steps]
        queries, of = positions.numpy(), torch.arange(context.batch) if rows is None else rows
        at = ring.at(of.repeat_interleave(steps), positions.flatten(), model.device)
        seen, behind = ring.visible(queries), queries[..., None] - ring.held(queries)
        if ring.narrower:
            check_length(ring.mask, int(context.length.max()))
            check_sight(ring.mask, seen, queries)
        self.plans = [
            ExplicitPlan(of.tolist(), [1] * context.batch, seen[:, n], behind[:, n], slots)
            for n, slots in enumerate(at.view(-1, steps).t().contiguous())
        ]
        cos, sin = model.rotary(to_device(positions.t().contiguous(), model.device))
        self.rotary = list(zip(cos, sin))

    @torch.no_grad()
    def __call__(self, n: int, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` after ``tokens [B]``."""
        model, plan, rotary = self.model, self.plans[n], self.rotary[n]
        activations = run_layers(model, model.embed(tokens), rotary, self.ring, plan)
        # The next steps see memory here instead of the layers' own inputs.
        if model.memory is not None and n + 1 < self.steps:
            remember(model, self.ring, plan.slots_on(model.device), model.memory(activations), rotary)
        return model.logits(activations[-1])


def forwards(
    model: SpireModel, store: StaticStore, position: Tensor, steps: int
) -> Callable[[int, Tensor, RingPlan], Tensor]:
    """As ``ring_chain.Forwards``: what ``SpireSteps`` does, in operators that can be captured."""
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
