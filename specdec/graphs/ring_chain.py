"""A draft's whole chain as one captured step, as ``graphs.chain``, over keys and values in a ring.

Rows of the memory that no row of the batch uses are padding: they write to their own slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.graphs.chain import Drawn, Draws, first_rows, uniforms_of
from specdec.graphs.programs import Programs
from specdec.graphs.ring_plan import RingPlan, RingPlans
from specdec.graphs.staging import Program, Staged, pad
from specdec.graphs.static import power
from specdec.masks import Mask
from specdec.masks.text import known
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context

Forward = Callable[[int, Tensor, RingPlan], Tensor | None]
Forwards = Callable[[StaticStore, Tensor, int], Forward]
"""``(store, position [N, R], steps)``, for tokens at ``position`` -> the n-th forward, ``(n, tokens [R], plan) -> logits [R, V]``. If N is more than ``steps``,
the first is the earlier one, whose logits are not used."""


class RingShape(NamedTuple):
    """What a chain is captured for: the first ``rows`` of the memory, and ``steps`` draws.

    ``earlier``: a forward before them, for rows that lack two tokens of the text; in other rows the last token is fed twice.
    """

    rows: int
    steps: int
    sampling: Sampling
    vocab_size: int | None = None
    earlier: bool = False
    mask: Mask | None = None


class RingChain(Program):
    """``steps`` draws of every row, each from the forward of the one before.

    Args:
        ring: in the memory of ``store``, which ``forwards`` must not hold.
    """

    def __init__(
        self, ring: Ring, store: StaticStore, shape: RingShape, device: torch.device, forwards: Forwards
    ):
        self.store, self.shape, self.plans, self.forwards = store, shape, RingPlans(ring, store), forwards
        R = shape.rows
        fields = {
            **dict.fromkeys(("ids", "base", "limit", "earlier", "before"), ("i8", (R,))),
            "uniforms": ("f8", (shape.steps, R)),
        }
        self.staged = Staged(fields, device)

    def body(self) -> tuple[Tensor, Tensor | None]:
        """Tokens ``[rows, steps]`` and their distributions."""
        on, shape = self.staged.on, self.shape
        position = on["base"] + torch.arange(shape.steps, device=on["base"].device)[:, None]  # [steps, R]
        if shape.earlier:
            position = torch.cat([on["before"][None], position])
        plans = self.plans.of(position)
        forward, token = self.forwards(self.store, position, shape.steps), on["ids"]
        draws = Draws(on, shape.sampling, shape.vocab_size)
        for n in range(-int(shape.earlier), shape.steps):
            i = n + int(shape.earlier)
            self.store.begin()
            logits = forward(i, on["earlier"] if n < 0 else token, plans[i])
            if logits is not None:
                token = draws.draw(logits)
        return draws.made()


def drawn(
    programs: Programs,
    ring: Ring,
    context: Context,
    budget: Tensor,
    rng: Rng,
    sampling: Sampling,
    forwards: Forwards,
    vocab_size: int | None = None,
    first: Tensor | None = None,
) -> Drawn | None:
    """Chains of ``budget [B]`` tokens in rows whose ring holds the text except its last token, or all before ``first [B]`` (at most two tokens
    are missing).

    All rows are written up to the end of the longest chain.

    Returns:
        ``None``, without side effects, where a chain cannot be captured or is not captured yet.
    """
    if sampling.reads_context or not known(ring.mask):  # a user's mask need not consist of operators
        return None
    B, steps = context.batch, int(budget.max())
    uniforms = uniforms_of(rng, context, steps, sampling)
    if uniforms is None:
        return None
    base = context.length - 1
    first = base if first is None else first
    rows = min(power(B), ring._whole[0].shape[1])
    shape = RingShape(rows, steps, sampling, vocab_size, earlier=bool((first < base).any()), mask=ring.mask)

    def update(chain: Any) -> None:
        array = chain.staged.begin()
        for ids, positions, at in (("ids", "base", base), ("earlier", "before", first)):
            pad(array[ids], context.tokens.gather(1, at[:, None])[:, 0])
            pad(array[positions], at)
        pad(array["limit"], budget)
        array["uniforms"][:] = 0
        array["uniforms"][:, :B] = uniforms
        chain.staged.send()

    def make(store: StaticStore) -> RingChain:
        return RingChain(ring, store, shape, programs.device, forwards)

    with torch.inference_mode():
        return first_rows(programs.program(ring, shape, make, update), B)
