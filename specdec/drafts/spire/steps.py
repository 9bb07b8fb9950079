"""The forward of SPIRe's draft for the tokens of a block, one after the other, over keys and values in a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.drafts.spire.model import SpireModel
from specdec.kernels.attention import ExplicitPlan, attention
from specdec.kernels.attention.native import lowered
from specdec.kernels.device import to_device
from specdec.masks.sight import check_length, check_sight
from specdec.types import Context

Rotary = tuple[Tensor, Tensor]


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
        slots = plan.slots_on(model.device)
        activations = self._run(model.embed(tokens), plan, slots, rotary)
        # The next steps see memory here instead of the layers' own inputs.
        if model.memory is not None and n + 1 < self.steps:
            remember(model, self.ring, slots, model.memory(activations), rotary)
        return model.logits(activations[-1])

    def _run(self, x: Tensor, plan: ExplicitPlan, slots: Tensor, rotary: Rotary) -> Sequence[Tensor] | Tensor:
        """``x [B, E]`` through all blocks: the input of the first, and the output of each."""
        model, ring = self.model, self.ring
        fast, count = model.fast(x), len(model.layers)
        if fast is not None and ring.buffers is not None:
            out = x.new_empty(count + 1, *x.shape)
            plans = [lowered(plan, None)] * count
            fast(x, *_flat(rotary), slots, ring.buffers, plans, dict(enumerate(out)))
            return out
        activations = [x]
        for i in range(count):

            def attend(query: Tensor, key: Tensor, value: Tensor, i: int = i) -> Tensor:
                ring.write(i, slots, key, value)
                return attention(query.transpose(0, 1)[None], *ring.layers[i], plan)[0]

            x, _, _ = model.run(i, x, rotary, attend)
            activations.append(x)
        return activations


def remember(
    model: SpireModel, ring: Ring, slots: Tensor, memory: Sequence[Tensor] | Tensor, rotary: Rotary
) -> None:
    """Write each layer's keys and values of ``memory [T, E]`` (or of the target's activations) to flat ``slots [T]`` of the ring."""
    fast = model.fast(memory[0])
    for i, x in enumerate(memory):
        if fast is not None and ring.buffers is not None:
            fast.remember(i, x.contiguous(), *_flat(rotary), slots, ring.buffers)
        else:
            ring.write(i, slots, *model.keys_values(i, x, rotary))


def _flat(rotary: Rotary) -> Rotary:
    """Cosines and sines for the C kernels, ``[T, D]`` in float32."""
    cos, sin = (t.squeeze(-2).float().contiguous() for t in rotary)
    return cos, sin
