"""A draft's whole chain as one captured step, as ``graphs.chain``, over keys and values in a ring.

A token's slot and what it sees follow from its position, so the step computes both. Rows of the memory that no row of the batch uses are
padding: they write to their own slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.graphs.chain import Drawn, Draws, uniforms_of
from specdec.graphs.programs import Programs
from specdec.graphs.staging import Program, Staged, pad
from specdec.graphs.static import StaticPlan, attend, power
from specdec.kernels.attention.lowered import Lowered, RingSight
from specdec.masks import Mask, sees
from specdec.masks.text import known
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context

Forward = Callable[[int, Tensor, "RingPlan"], Tensor | None]
FAR = 2**31 - 1  # no limit


class Shape(NamedTuple):
    """What a chain is captured for: the first ``rows`` of the memory, and ``steps`` draws.

    ``earlier``: a forward before them, for rows that lack two tokens of the text; in other rows the last token is fed twice.
    """

    rows: int
    steps: int
    sampling: Sampling
    vocab_size: int | None = None
    earlier: bool = False
    mask: Mask | None = None


class RingPlan(StaticPlan):
    """What the queries of one step at ``position [R]`` see of their rings: all within the ring's reach, or ``seen [R, S]`` of slots whose
    positions are ``behind [R, S]`` the query's, where a mask shows less."""

    ordered = False

    def __init__(
        self,
        ring: RingSight,
        slots: Tensor,
        seen: Tensor | None = None,
        behind: Tensor | None = None,
    ):
        rows, size = len(ring.position), ring.sinks + ring.size
        device = ring.position.device
        number = torch.arange(rows + 1, dtype=torch.int32, device=device)
        length = torch.full((rows,), size, dtype=torch.int32, device=device)
        parts = (number, length, number[:-1], length, None, None, None, None)
        super().__init__(Lowered(*parts, max_count=1, max_length=size), slots)
        self.ring, self.seen, self.behind = ring, seen, behind
        self.known: dict[int | None, Lowered] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, *more: Any) -> Tensor:
        """As ``StaticPlan.attend``; a layer's own ``window`` counts positions."""
        window, *others = more
        if window not in self.known:
            self.known[window] = self._lowered(window)
        return attend(query, keys, values, self.known[window], scale, None, *others)

    def _lowered(self, window: int | None) -> Lowered:
        ring = self.ring
        if self.seen is None:
            if window is not None:
                ring = ring._replace(window=min(ring.window, window), far=min(ring.far, window))
            return replace(self.lowered, ring=ring)
        assert self.behind is not None
        seen = self.seen if window is None else self.seen & (self.behind < window)
        return replace(self.lowered, seen=seen[None].to(torch.uint8))


class RingChain(Program):
    """``steps`` draws of every row, each from the forward of the one before.

    Args:
        ring: in the memory of ``store``.
    """

    def __init__(self, ring: Ring, store: StaticStore, shape: Shape, device: torch.device):
        self.store, self.shape = store, shape
        self.sinks, self.size, self.window = ring.sinks, ring.size, ring.window
        self.mask = ring.mask if ring.narrower else None
        R = shape.rows
        fields = {
            **dict.fromkeys(("ids", "base", "limit", "earlier", "before"), ("i8", (R,))),
            "uniforms": ("f8", (shape.steps, R)),
        }
        self.staged = Staged(fields, device)

    @abstractmethod
    def forward(self, position: Tensor) -> Forward:
        """For tokens at ``position [N, R]``: the n-th forward ``(n, tokens [R], plan) -> logits [R, V]``; for the earlier one, logits are not used."""

    def body(self) -> tuple[Tensor, Tensor | None]:
        """Tokens ``[rows, steps]`` and their distributions."""
        on, shape = self.staged.on, self.shape
        device = on["base"].device
        position = on["base"] + torch.arange(shape.steps, device=device)[:, None]  # [steps, R]
        if shape.earlier:
            position = torch.cat([on["before"][None], position])
        slots = torch.arange(shape.rows, device=device) * self.store.slots + self._slot(position)
        sight = None if self.mask is None else self._sight(position, self.mask)
        forward, token = self.forward(position), on["ids"]
        draws = Draws(on, shape.sampling, shape.vocab_size)
        for n in range(-int(shape.earlier), shape.steps):
            i = n + int(shape.earlier)
            self.store.begin()
            ring = RingSight(position[i], self.sinks, self.size, self.window, FAR)
            plan = RingPlan(ring, slots[i], *(() if sight is None else (part[i] for part in sight)))
            logits = forward(i, on["earlier"] if n < 0 else token, plan)
            if logits is not None:
                token = draws.draw(logits)
        return draws.made()

    def _slot(self, position: Tensor) -> Tensor:
        """As ``Ring.slot``."""
        ring = self.sinks + (position - self.sinks) % self.size
        return torch.where(position < self.sinks, position, ring)

    def _sight(self, position: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """As ``Ring.visible``, and how far each slot's position is behind the query's."""
        s = torch.arange(self.sinks + self.size, device=position.device)
        q = position[..., None]
        held = torch.where(s < self.sinks, s, q - (q - s) % self.size)
        exists = torch.where(s < self.sinks, held <= q, (held >= self.sinks) & (held > q - self.window))
        return exists & sees(mask, q, held.clamp(min=0)), q - held


def drawn(
    programs: Programs,
    ring: Ring,
    context: Context,
    budget: Tensor,
    rng: Rng,
    sampling: Sampling,
    make: Callable[[StaticStore, Shape], RingChain],
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
    uniforms, B, steps = None, context.batch, int(budget.max())
    if not sampling.greedy:
        uniforms = uniforms_of(rng, context, steps)
        if uniforms is None:
            return None
    base = context.length - 1
    first = base if first is None else first
    rows = min(power(B), ring._whole[0].shape[1])
    shape = Shape(rows, steps, sampling, vocab_size, earlier=bool((first < base).any()), mask=ring.mask)

    def update(chain: Any) -> None:
        array = chain.staged.begin()
        for ids, positions, at in (("ids", "base", base), ("earlier", "before", first)):
            pad(array[ids], context.tokens.gather(1, at[:, None])[:, 0])
            pad(array[positions], at)
        pad(array["limit"], budget)
        array["uniforms"][:] = 0
        if uniforms is not None:
            array["uniforms"][:, :B] = uniforms
        chain.staged.send()

    with torch.inference_mode():
        chain = programs.program(ring, shape, lambda store: make(store, shape), update)
        if chain is None:
            return None
        tokens, probs = chain.replay()  # the next replay overwrites them
        return Drawn(tokens[:B].clone(), None if probs is None else probs[:B].clone())
