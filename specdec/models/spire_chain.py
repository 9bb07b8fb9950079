"""A SPIRe draft's whole chain as one captured step: as ``models.chains``, over keys and values in a ring.

Where a token goes and what it sees follows from its position, so all of that is computed by the step itself. Rows of the memory that
no row of the batch uses are the padding: they write into their own slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.attention import attention
from specdec.kernels.attention.lowered import Lowered
from specdec.models.chains import Drawn, draw, numbers_of
from specdec.models.lean import norm
from specdec.models.ring import Ring
from specdec.models.spire import SpireModel
from specdec.models.staged import Program, Staged, pad
from specdec.models.static import StaticMemo, StaticPlan, power
from specdec.models.steps import Programs
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context


class Shape(NamedTuple):
    """What a chain is captured for: the first ``rows`` of the memory, and so many ``steps``."""

    rows: int
    steps: int
    sampling: Sampling


class SpireChain(Program):
    """``steps`` draws of every row, each from the forward of the one before.

    Args:
        ring: of the memory that ``memo`` is of.
    """

    def __init__(self, model: SpireModel, ring: Ring, memo: StaticMemo, shape: Shape):
        self.model, self.memo, self.shape = model, memo, shape
        self.sinks, self.size, self.window = ring.sinks, ring.size, ring.window
        R = shape.rows
        fields = {
            **dict.fromkeys(("ids", "base"), ("i8", (R,))),
            "numbers": ("f8", (shape.steps, R)),
        }
        self.staged = Staged(fields, model.device)

    def body(self) -> tuple[Tensor, Tensor | None]:
        """Tokens ``[rows, steps]`` and their laws."""
        on, shape, model = self.staged.on, self.shape, self.model
        device = on["base"].device
        position = on["base"] + torch.arange(shape.steps, device=device)[:, None]  # [steps, R]
        row = torch.arange(shape.rows, device=device)
        slots = row * self.memo.slots + self._slot(position)
        seen = self._visible(position).to(torch.uint8)
        cos, sin = model.rotary(position)
        numbers = torch.arange(shape.rows + 1, dtype=torch.int32, device=device)
        length = torch.full((shape.rows,), seen.shape[-1], dtype=torch.int32, device=device)
        token, tokens, laws = on["ids"], list[Tensor](), list[Tensor]()
        for n in range(shape.steps):
            lowered = Lowered(
                *(numbers, length, numbers[:-1], length, None, None, None),
                seen=seen[n][None],
                max_count=1,
                max_length=seen.shape[-1],
            )
            last = n + 1 == shape.steps
            logits = self._run(token, StaticPlan(lowered, slots[n]), (cos[n], sin[n]), last)
            top, token, law = draw(logits, shape.sampling, None, on["numbers"][n])
            tokens.append(torch.where(torch.isfinite(top), token, -1))
            if law is not None:
                laws.append(law)
        return torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None

    def _run(self, tokens: Tensor, plan: Any, rotary: tuple[Tensor, Tensor], last: bool) -> Tensor:
        """Logits ``[R, V]`` after ``tokens [R]``, as ``SpireSteps`` has them."""
        model = self.model
        x = model.embed(tokens)
        activations = [x]
        self.memo.begin()
        for i in range(len(model.layers)):

            def attend(query: Tensor, key: Tensor, value: Tensor, i: int = i) -> Tensor:
                return attention(query.transpose(0, 1)[None], *self._write(i, plan.slots, key, value), plan)[
                    0
                ]

            x, _, _ = model.run(i, x, rotary, attend)
            activations.append(x)
        if model.memory is not None and not last:
            for i, memory in enumerate(model.memory(activations)):
                self._write(i, plan.slots, *model.keys_values(i, memory, rotary))
        head = model.body.lm_head
        return F.linear(norm(x, model.body.model.norm), head.weight, head.bias)

    def _write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.memo.append(layer, slots, *(t.transpose(0, 1)[None] for t in (keys, values)))

    def _slot(self, position: Tensor) -> Tensor:
        """As ``Ring.slot``."""
        return torch.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.size)

    def _visible(self, position: Tensor) -> Tensor:
        """As ``Ring.visible``."""
        s = torch.arange(self.sinks + self.size, device=position.device)
        q = position[..., None]
        held = torch.where(s < self.sinks, s, q - (q - s) % self.size)
        ring = (held >= self.sinks) & (held > q - self.window)
        return torch.where(s < self.sinks, held <= q, ring)


def propose(
    programs: Programs,
    model: SpireModel,
    ring: Ring,
    context: Context,
    steps: int,
    rng: Rng,
    sampling: Sampling,
) -> Drawn | None:
    """Chains of ``steps`` tokens, as ``drafts.Spire`` draws them token by token.

    Returns:
        ``None`` where a chain cannot be captured or is not captured yet: nothing has happened then.
    """
    if sampling.processors:
        return None
    numbers = None
    if not sampling.greedy:
        numbers = numbers_of(rng, context, steps)
        if numbers is None:
            return None
    B = context.batch
    shape = Shape(min(power(B), ring._whole[0].shape[1]), steps, sampling)

    def make(memo: StaticMemo) -> SpireChain:
        return SpireChain(model, ring, memo, shape)

    def update(chain: Any) -> None:
        array = chain.staged.begin()
        base = context.length - 1
        pad(array["ids"], context.tokens.gather(1, base[:, None])[:, 0])
        pad(array["base"], base)
        array["numbers"][:] = 0
        if numbers is not None:
            array["numbers"][:, :B] = numbers
        chain.staged.send()

    with torch.inference_mode():
        chain = programs.program(ring, shape, make, update)
        if chain is None:
            return None
        tokens, probs = chain.replay()  # the next replay writes over them
        return Drawn(tokens[:B].clone(), None if probs is None else probs[:B].clone())
