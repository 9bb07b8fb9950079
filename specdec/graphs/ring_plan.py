"""Where the tokens of a captured chain are in a ring, and what they see. Both follow from a token's position, so the step computes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.graphs.static import StaticPlan, attend
from specdec.kernels.attention.lowered import Lowered, RingSight
from specdec.masks import Mask, sees

FAR = 2**31 - 1  # no limit


class RingPlan(StaticPlan):
    """What the queries of one step at ``position [R]`` see of their rings: all within the ring's reach, or ``seen [R, S]`` of slots whose
    positions are ``behind [R, S]`` the query's, where a mask shows less. ``each``: neighbouring queries of one row."""

    bounded = True

    def __init__(
        self,
        ring: RingSight,
        slots: Tensor,
        seen: Tensor | None = None,
        behind: Tensor | None = None,
        each: int = 1,
    ):
        rows, size = len(ring.position), ring.sinks + ring.size
        device = ring.position.device
        number = torch.arange(rows + 1, dtype=torch.int32, device=device)
        length = torch.full((rows,), size, dtype=torch.int32, device=device)
        parts = (number, length, number[:-1] // each, length, None, None, None, None)
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


class RingPlans:
    """The plans of chains over a ring.

    Args:
        ring: in the memory of ``store``, whose first rows are those of the chains. whole: it never wraps: a slot is a position, also one of
            the extra slots.
    """

    def __init__(self, ring: Ring, store: StaticStore, whole: bool = False):
        self.row = store.slots
        self.sinks, self.size, self.window = ring.sinks, ring.size, ring.window
        if whole:
            self.size = self.window = ring.slots
        self.mask = ring.mask if ring.narrower else None

    def of(self, position: Tensor, each: int = 1) -> list[RingPlan]:
        """A plan for each of N forwards whose tokens are at ``position [N, R * each]``, ``each`` tokens of every row."""
        position = position.contiguous()  # the kernel reads each forward's as they lie in memory
        slots = self.slots(position, each)
        sight = None
        if self.mask is not None:
            sight = self.seen(position, self.mask), position[..., None] - self.held(position)
        plans = []
        for n in range(len(position)):
            ring = RingSight(position[n], self.sinks, self.size, self.window, FAR)
            seen, behind = (None, None) if sight is None else (part[n] for part in sight)
            plans.append(RingPlan(ring, slots[n], seen, behind, each))
        return plans

    def slots(self, position: Tensor, each: int = 1) -> Tensor:
        """``[N, R * each]`` flat slots of ``position [N, R * each]``, as ``Ring.at``."""
        ring = self.sinks + (position - self.sinks) % self.size
        first = torch.arange(position.shape[1], device=position.device) // each * self.row
        return first + torch.where(position < self.sinks, position, ring)

    def seen(self, position: Tensor, mask: Mask | None, last: Tensor | None = None) -> Tensor:
        """``[..., S]`` which slots queries at ``position [...]`` see, as ``Ring.visible``.

        Args:
            mask: what they see within the ring's reach (``None``: all). last: ``[...]`` the last position that exists, in a block that attends in both
                directions: positions after a query's own are seen, whatever the mask says. By default the query's own.
        """
        s, q, end = self._numbers(position), position[..., None], position if last is None else last
        held = self.held(end)
        exists = torch.where(
            s < self.sinks, held <= end[..., None], (held >= self.sinks) & (held > q - self.window)
        )
        return exists if mask is None else exists & sees(mask, q, torch.minimum(held.clamp(min=0), q))

    def held(self, position: Tensor) -> Tensor:
        """``[..., S]`` as ``Ring.held``."""
        s, q = self._numbers(position), position[..., None]
        return torch.where(s < self.sinks, s, q - (q - s) % self.size)

    def _numbers(self, position: Tensor) -> Tensor:
        return torch.arange(self.sinks + self.size, device=position.device)
