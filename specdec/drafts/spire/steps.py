"""The forward of SPIRe's draft for the tokens of a block, one after the other, over keys and values in a ring."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.drafts.spire.layers import remember, run_layers
from specdec.drafts.spire.model import SpireModel
from specdec.kernels.attention import ExplicitPlan
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
