"""A head's keys and values while it decodes: committed positions are in a ring, and the block being drafted is in slots beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.kernels.attention import ExplicitPlan, attention
from specdec.kernels.device import to_device
from specdec.masks import Mask, sees

PIECE = 64  # positions of a row that are read at once under a mask of limited reach
ENTRIES = 2**23  # and, in all rows, at most this many pairs of a query and a slot


class HeadState(NamedTuple):
    """What a head remembers of ``B`` rows.

    Attributes:
        ring: keys and values of committed positions; ``None`` for heads without any. known: ``[B]`` on the host, how many positions have
            been read. carry: ``[B, ...]`` what the head returned for the last position read.
    """

    ring: Ring | None
    known: Tensor
    carry: Tensor | None

    def select(self, rows: Tensor) -> HeadState:
        ring = None if self.ring is None else self.ring.select(rows)
        carry = None if self.carry is None else self.carry[to_device(rows, self.carry.device)]
        return HeadState(ring, self.known[rows], carry)

    def join(self, other: HeadState) -> HeadState:
        """The state of the rows of both batches, this one's first."""
        ring = None if self.ring is None or other.ring is None else self.ring.followed_by(other.ring)
        carries = [c for c in (self.carry, other.carry) if c is not None]
        return HeadState(
            ring, torch.cat([self.known, other.known]), torch.cat(carries) if len(carries) == 2 else None
        )


class SlotPass:
    """``contract.Pass`` over slots: new entries go into ``slots [T]``, and ``plan`` says what each of the T queries sees."""

    def __init__(self, ring: Ring, plan: ExplicitPlan, slots: Tensor, positions: Tensor):
        self.ring, self.plan, self.slots, self.positions = ring, plan, slots, positions

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """As ``contract.Pass.store``."""
        self.ring.put(layer, self.slots, *(t.reshape(-1, *t.shape[-2:]) for t in (key, value)))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As ``contract.Pass.__call__``."""
        self.store(layer, key, value)
        flat = query.reshape(-1, *query.shape[-2:]).transpose(0, 1)[None]
        return attention(flat, *self.ring.layers[layer], self.plan)[0].reshape(*query.shape[:-2], -1)


def empty(shapes: Sequence[KVShape], batch: int, capacity: int, mask: Mask | None) -> Ring | None:
    """A ring for ``batch`` rows of texts of up to ``capacity`` tokens; of constant size where the mask has a reach."""
    if not shapes:
        return None
    reach = None if mask is None else mask.reach
    if reach is None:
        return Ring(shapes, batch, 0, max(capacity, 1), 1)
    return Ring(shapes, batch, reach.sinks, max(reach.window, 1), PIECE)


def pieces(row: np.ndarray, position: np.ndarray, ring: Ring | None) -> list[np.ndarray]:
    """Groups of indices of new positions ``[F]``, to be read one after another, so that the ring still holds what a group's queries see."""
    if not len(row) or ring is None:
        return [np.arange(len(row))] if len(row) else []
    start = np.full(int(row.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(start, row, position)
    size = max(ENTRIES // (ring.slots * len(np.unique(row))), 1)
    number = (position - start[row]) // (size if ring.block == 1 else min(size, ring.block))
    return [np.flatnonzero(number == n) for n in range(int(number.max()) + 1)]


def reading(
    ring: Ring, row: np.ndarray, position: np.ndarray, mask: Mask | None, device: torch.device
) -> SlotPass:
    """The pass over newly committed positions ``[F]``: each sees the committed positions up to its own."""
    rows, counts = np.unique(row, return_counts=True)
    seen = _visible(ring, position[:, None], position, mask)
    seen = np.pad(seen, ((0, 0), (0, ring.extra)))
    at = ring.at(torch.from_numpy(row), torch.from_numpy(position), device)
    plan = ExplicitPlan(rows.tolist(), counts.tolist(), seen, None, at)
    return SlotPass(ring, plan, at, to_device(torch.from_numpy(position), device))


class SlotAnchors:
    """``contract.Anchors`` with one anchor per row: the first position that has not been read, for the rows ``rows`` of a ring.

    Attributes:
        ring: the rows' keys and values. If a draft needs more slots, a larger ring replaces it.
    """

    def __init__(
        self, ring: Ring | None, rows: Tensor, anchor: Tensor, mask: Mask | None, device: torch.device
    ):
        self.ring, self.rows, self.mask, self.device = ring, rows.numpy(), mask, device
        self.anchor = anchor.numpy()[:, None]
        self.near = np.zeros((len(self.rows), 0, 0), dtype=bool)  # [R, slots so far, slots so far]
        self.offsets = np.zeros((len(self.rows), 0), dtype=np.int64)
        self.parents: np.ndarray | None = None

    def under(self, parents: np.ndarray) -> None:
        """Give the next pass a slot after each of ``parents [R, W]``, slots of this block. It sees its parent and its parent's ancestors."""
        self.parents = parents

    def slots(self, first: int, count: int | None = None, full: bool = False) -> SlotPass:
        """As ``contract.Anchors.slots``."""
        R, used = self.near.shape[:2]
        parents, self.parents = self.parents, None
        wide = parents.shape[1] if parents is not None else 1 if count is None else count
        own = np.zeros((R, wide, used + wide), dtype=bool)
        if parents is not None:
            if used:
                own[..., :used] = self.near[np.arange(R)[:, None], parents]
            own[..., used:] = np.eye(wide, dtype=bool)
        else:
            own[..., :used] = True
            own[..., used:] = True if full else np.tri(wide, dtype=bool)
        offset = (
            np.full((R, wide), first) if parents is not None else np.tile(first + np.arange(wide), (R, 1))
        )
        near = np.zeros((R, used + wide, used + wide), dtype=bool)
        near[:, :used, :used], near[:, used:] = self.near, own
        self.near, self.offsets = near, np.concatenate([self.offsets, offset], 1)
        return self._pass(own, offset, used, count is None and parents is None)

    def _pass(self, own: np.ndarray, offset: np.ndarray, used: int, single: bool) -> SlotPass:
        R, wide = offset.shape
        ring, query = self.ring, self.anchor + offset  # [R, wide]
        assert ring is not None, "a head without layers has no slots"
        if ring.extra < used + wide:
            self.ring = ring = ring.resized(ring.window, max(16, 2 * (used + wide)))
        begin = ring.slots - ring.extra
        seen: np.ndarray = np.zeros((R, wide, ring.slots), dtype=bool)
        seen[..., :begin] = _visible(ring, query[..., None], self.anchor - 1, self.mask)
        if self.mask is not None:
            own = own & _shown(self.mask, query[..., None], (self.anchor + self.offsets)[:, None])
        seen[..., begin : begin + used + wide] = own
        at = to_device(
            torch.from_numpy((self.rows[:, None] * ring.slots + begin + used + np.arange(wide)).ravel()),
            self.device,
        )
        plan = ExplicitPlan(self.rows.tolist(), [wide] * R, seen.reshape(R * wide, -1), None, at)
        positions = torch.from_numpy(query[:, 0] if single else query)
        return SlotPass(ring, plan, at, to_device(positions, self.device))


def _visible(ring: Ring, query: np.ndarray, last: np.ndarray, mask: Mask | None) -> np.ndarray:
    """``[..., S]``: which slots of the ring hold positions up to ``last [...]`` that queries at ``query [..., 1]`` see."""
    held = ring.held(last)
    exists = np.where(np.arange(held.shape[-1]) < ring.sinks, held <= last[..., None], held >= ring.sinks)
    return exists if mask is None else exists & _shown(mask, query, held)


def _shown(mask: Mask, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """What a mask shows, and also all positions after the query's own, which are in a block that attends in both directions."""
    at = np.minimum(key.clip(min=0), query)
    return sees(mask, torch.from_numpy(query), torch.from_numpy(at)).numpy()
