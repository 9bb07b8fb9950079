"""A head's keys and values while it decodes: committed positions are in a ring, and the block being drafted is in slots beside it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.drafts.heads.contract import Sight
from specdec.forward.block import Angles
from specdec.kernels.attention import AttentionPlan, ExplicitPlan, attention
from specdec.kernels.device import to_device
from specdec.masks import Mask, sees, streaming
from specdec.models.masked import masked

PIECE = 64  # positions of a row that are read at once under a mask of limited reach
ENTRIES = 2**23  # the most pairs of a query and a slot in any pass over committed positions
NO_KERNELS: Mapping[Any, Any] = {}


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
    """``contract.Pass`` over slots: new entries go into ``slots [T]``, and ``plan`` says what each of the T queries sees; ``narrow`` makes the plan of
    layers that see less."""

    def __init__(
        self,
        ring: Ring,
        plan: AttentionPlan,
        slots: Tensor,
        positions: Tensor,
        kernels: Mapping[Any, Any],
        narrow: Callable[[Sight], AttentionPlan],
    ):
        self.ring, self.plan, self.slots, self.positions, self.kernels = ring, plan, slots, positions, kernels
        self._narrow = narrow
        self._turns: tuple[Angles, Angles] | None = None

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """As ``contract.Pass.store``."""
        self.ring.put(layer, self.slots, *(t.reshape(-1, *t.shape[-2:]) for t in (key, value)))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As ``contract.Pass.__call__``."""
        self.store(layer, key, value)
        flat = query.reshape(-1, *query.shape[-2:]).transpose(0, 1)[None]
        return attention(flat, *self.ring.layers[layer], self.plan)[0].reshape(*query.shape[:-2], -1)

    def narrowed(self, sight: Sight) -> SlotPass:
        """As ``contract.Pass.narrowed``."""
        made = copy.copy(self)
        made.plan = self._narrow(sight)
        return made

    def turns(self, angles: Angles) -> Angles:
        """``angles`` as C kernels take them: cosines and sines ``[T, D]`` in float32."""
        if self._turns is None or self._turns[0] is not angles:
            cos, turn = (t.reshape(-1, t.shape[-1]).float().contiguous() for t in angles)
            half = turn.shape[-1] // 2
            self._turns = angles, (cos, torch.cat([-turn[:, :half], turn[:, half:]], -1))
        return self._turns[1]


def empty(
    shapes: Sequence[KVShape],
    batch: int,
    capacity: int,
    mask: Mask | None,
    lend: Callable[[int, Callable[[Ring], bool]], Ring | None] | None = None,
    block_slots: int = 0,
) -> Ring | None:
    """A ring for ``batch`` rows of texts of up to ``capacity`` tokens; of constant size where the mask has a reach.

    Args:
        lend: ``Programs.lent``, of memory that was used before. block_slots: of the head; with ``lend``, there are extra slots for its block.
    """
    if not shapes:
        return None
    reach = None if mask is None else mask.reach
    if reach is None:
        window = max(capacity, 1)
        # As in the target's cache with graphs, so that both change at once: captured rounds hold both.
        if lend is not None:
            window += 64 - window % 64
        sinks, block = 0, 1
    else:
        sinks, window, block = reach.sinks, max(reach.window, 1), PIECE
    lent, extra = None, 0
    if lend is not None:
        wide = [window, sys.maxsize] if reach is None else [window, window]
        extra = extra_for(block_slots) if block_slots else 0
        lent = lend(batch, lambda ring: wide[0] <= ring.window <= wide[1] and ring.extra >= extra)
    return lent or Ring(shapes, batch, sinks, window, block, extra)


def extra_for(used: int) -> int:
    """Extra slots of a ring whose rows need so many."""
    return max(16, 2 * used)


def whole(ring: Ring) -> bool:
    """Whether a ring of ``empty`` holds all of a text, so that slots are positions; else the latest of it, with ``PIECE`` in flight."""
    return ring.block == 1


def ends(row: np.ndarray) -> np.ndarray:
    """The index of each row's last position, for positions ``[F]`` in order, row after row."""
    return np.flatnonzero(np.append(row[1:] != row[:-1], True))


def pieces(row: np.ndarray, position: np.ndarray, ring: Ring | None) -> list[np.ndarray]:
    """Groups of indices of new positions ``[F]``, to be read one after another, so that the ring still holds what a group's queries see."""
    if not len(row) or ring is None:
        return [np.arange(len(row))] if len(row) else []
    if whole(ring):
        size = max(ENTRIES // (int(position.max()) + 1), 1)
        return [np.arange(at, min(at + size, len(row))) for at in range(0, len(row), size)]
    start = np.full(int(row.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(start, row, position)
    size = max(ENTRIES // (ring.slots * len(np.unique(row))), 1)
    number = (position - start[row]) // min(size, ring.block)
    return [np.flatnonzero(number == n) for n in range(int(number.max()) + 1)]


def reading(
    ring: Ring,
    row: np.ndarray,
    position: np.ndarray,
    mask: Mask | None,
    device: torch.device,
    kernels: Mapping[Any, Any] = NO_KERNELS,
) -> SlotPass:
    """The pass over newly committed positions ``[F]``: each sees the committed positions up to its own.

    Where all of the text is held, rows are causal, which no mask has to say slot by slot.
    """
    last = ends(row)
    rows, counts = row[last].tolist(), np.diff(last, prepend=-1)
    at = ring.at(torch.from_numpy(row), torch.from_numpy(position), device)
    if whole(ring):
        plan = AttentionPlan(
            rows, (position[last] + 1 - counts).tolist(), counts.tolist(), ring.slots, slots=at
        )
        whole_text, plan = plan, plan if mask is None else masked(plan, mask)

        def narrow(sight: Sight) -> AttentionPlan:
            window = streaming(sight.window, sinks=0)
            return masked(whole_text, window if mask is None else window & mask)
    else:
        used = int(position.max()) + 1  # no slot has a higher number than its position
        seen = _visible(ring, position[:, None], position, mask)[:, :used]
        plan = ExplicitPlan(rows, counts.tolist(), seen, None, at)

        def narrow(sight: Sight) -> AttentionPlan:
            near = ring.held(position)[:, :used] > position[:, None] - sight.window
            return ExplicitPlan(rows, counts.tolist(), seen & near, None, at)

    return SlotPass(ring, plan, at, to_device(torch.from_numpy(position), device), kernels, narrow)


class SlotAnchors:
    """``contract.Anchors`` with one anchor per row: the first position that has not been read, for the rows ``rows`` of a ring.

    Attributes:
        ring: the rows' keys and values. If a draft needs more slots, a larger ring replaces it. used: slots of each row so far. wanted: the steps that will be
            taken; ``None``: not known.
    """

    def __init__(
        self,
        ring: Ring | None,
        rows: Tensor,
        anchor: Tensor,
        mask: Mask | None,
        device: torch.device,
        kernels: Mapping[Any, Any] = NO_KERNELS,
        wanted: int | None = None,
    ):
        self.wanted = wanted
        self.ring, self.rows, self.mask, self.device, self.kernels = ring, rows.numpy(), mask, device, kernels
        self.anchor, self.used = anchor.numpy()[:, None], 0
        self._near = np.zeros((len(self.rows), 0, 0), dtype=bool)  # [R, slots, slots]: which see which
        self._offsets = np.zeros((len(self.rows), 0), dtype=np.int64)
        self._text: np.ndarray | None = None  # what all queries see of the text, where that is the same
        self._parents: np.ndarray | None = None

    def count(self, most: int) -> int:
        """As ``contract.Anchors.count``."""
        return most if self.wanted is None else min(self.wanted, most)

    def under(self, parents: Tensor) -> None:
        """Give the next pass a slot after each of ``parents [R, W]``, slots of this block. It sees its parent and its parent's ancestors."""
        self._parents = parents.cpu().numpy()

    def slots(self, first: int, count: int | None = None, full: bool = False) -> SlotPass:
        """As ``contract.Anchors.slots``."""
        parents, self._parents = self._parents, None
        wide = parents.shape[1] if parents is not None else 1 if count is None else count
        used = self.used
        self.used = end = used + wide
        self._reserve(end)
        own, offset = self._near[:, used:end, :end], self._offsets[:, used:end]
        if parents is not None:
            own[..., :used] = self._near[np.arange(len(own))[:, None], parents, :used]
            own[..., used:] = np.eye(wide, dtype=bool)
            offset[:] = first
        else:
            own[..., :used] = True
            own[..., used:] = True if full or wide == 1 else np.tri(wide, dtype=bool)
            offset[:] = first if wide == 1 else np.arange(first, first + wide)
        return self._pass(own, offset, count is None and parents is None)

    def _reserve(self, used: int) -> None:
        """Make room for so many slots of each row."""
        ring, R, room = self.ring, len(self.rows), self._offsets.shape[1]
        assert ring is not None, "a head without layers has no slots"
        if room < used:
            near, offsets, before = self._near, self._offsets, self._offsets.shape[1]
            room = max(16, 2 * used)
            self._near, self._offsets = np.zeros((R, room, room), dtype=bool), np.zeros((R, room), np.int64)
            self._near[:, :before, :before], self._offsets[:, :before] = near, offsets
        if ring.extra < used:
            self.ring = ring.resized(ring.window, extra_for(used))

    def _pass(self, own: np.ndarray, offset: np.ndarray, single: bool) -> SlotPass:
        (R, wide), end, ring = offset.shape, self.used, self.ring
        assert ring is not None
        begin, query = ring.slots - ring.extra, self.anchor + offset  # [R, wide]
        if self.mask is not None:
            seen_text = _visible(ring, query[..., None], self.anchor - 1, self.mask)
            own = own & _shown(self.mask, query[..., None], (self.anchor + self._offsets[:, :end])[:, None])
        elif self._text is None:
            seen_text = self._text = _visible(ring, query[..., None], self.anchor - 1, None)
        else:
            seen_text = self._text
        seen = np.zeros((R, wide, ring.slots), dtype=bool)
        seen[..., :begin] = seen_text
        seen[..., begin : begin + end] = own
        flat = (self.rows * ring.slots + (begin + end - wide))[:, None] + np.arange(wide)
        at = to_device(torch.from_numpy(flat.ravel()), self.device)
        rows, offsets = self.rows.tolist(), self._offsets[:, None, :end]

        def planned(seen: np.ndarray) -> AttentionPlan:
            return ExplicitPlan(rows, [wide] * R, seen.reshape(R * wide, -1), None, at)

        def narrow(sight: Sight) -> AttentionPlan:
            some = seen.copy()
            lowest = self.anchor if sight.fixed else query + 1
            some[..., :begin] &= ring.held(self.anchor - 1) >= (lowest - sight.window)[..., None]
            if sight.causal:
                some[..., begin : begin + end] &= offsets <= offset[..., None]
            return planned(some)

        positions = torch.from_numpy(query[:, 0] if single else query)
        return SlotPass(ring, planned(seen), at, to_device(positions, self.device), self.kernels, narrow)


def _visible(ring: Ring, query: np.ndarray, last: np.ndarray, mask: Mask | None) -> np.ndarray:
    """``[..., S]``: which slots of the ring hold positions up to ``last [...]`` that queries at ``query [..., 1]`` see."""
    held = ring.held(last)
    exists = np.where(np.arange(held.shape[-1]) < ring.sinks, held <= last[..., None], held >= ring.sinks)
    return exists if mask is None else exists & _shown(mask, query, held)


def _shown(mask: Mask, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """What a mask shows, and also all positions after the query's own, which are in a block that attends in both directions."""
    at = np.minimum(key.clip(min=0), query)
    return sees(mask, torch.from_numpy(query), torch.from_numpy(at)).numpy()
