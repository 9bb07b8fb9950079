"""A ring of keys and values with the tokens that they came from, and how prompts are fed through it.

A layer's entries depend on the layer below at earlier positions, so with n layers a hidden state depends on n windows of text, and a
prompt cannot be started in the middle. The whole prompt is fed in pieces, of which the ring keeps a constant number of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.cache.token_index import Row, TokenIndex
from specdec.kernels.attention import ExplicitPlan
from specdec.kernels.device import to_device
from specdec.kernels.float8 import bits, rounded
from specdec.masks import Mask
from specdec.masks.sight import check_sight
from specdec.types import Context, Verdict


class RingCache(Ring, TokenIndex):
    """A ring of keys and values, and the index of the tokens that they came from.

    Args:
        capacity: tokens of a text. Only the host's token index grows with it.
        others: as for ``Ring``.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        batch: int,
        capacity: int,
        sinks: int,
        window: int,
        block: int,
        extra: int = 0,
        mask: Mask | None = None,
    ):
        Ring.__init__(self, shapes, batch, sinks, window, block, extra, mask)
        self.empty(batch, capacity)

    def empty(self, batch: int, capacity: int) -> None:
        """Empty the cache, for ``batch`` rows of texts of up to ``capacity`` tokens."""
        TokenIndex.__init__(self, batch, capacity)
        self._high = [-1] * batch  # highest position written to the row since it was last empty

    def wrote(self, b: int, position: int) -> None:
        """Note that row ``b`` was written up to this position."""
        self._high[b] = max(self._high[b], position)

    def matched(self, context: Context) -> list[int]:
        """As ``TokenIndex.matched``; a row that was rolled back further than the ring reaches becomes empty."""
        held = super().matched(context)
        for b, query in enumerate(held):
            if not self.safe(self._high[b], query):
                self._lengths[b], self._fed[b], self._high[b], held[b] = 0, 0, -1, 0
        return held

    def fill(self, other: RingCache) -> None:
        """Copy the entries and the token index of ``other``, a ring of the same sizes, which does not change."""
        for mine, theirs in zip(self._blocks, other._blocks, strict=True):
            mine.copy_(theirs)
        self._hold(*other._rows(list(range(other.batch))))
        self._high = list(other._high)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Take the accepted nodes of the chain that was scored last, in this ``context``, into the token index; their entries are in place."""
        self.accept(verdict, self.accepted(context, verdict))

    def select(self, rows: Tensor) -> RingCache:
        """The cache of some rows, in the given order; the old object must not be used again."""
        order = rows.tolist()
        if order == list(range(self.batch)):
            return self
        new: Any = super().select(rows)
        new._hold(*self._rows(order))
        new._high = [self._high[b] for b in order]
        return new

    def join(self, other: RingCache) -> RingCache:
        """A cache of both caches' rows, these first; neither may be used again."""
        new: Any = self.followed_by(other)
        new._hold_both(self, other)
        new._high = [*self._high, *other._high]
        return new

    def place(self, rows: list[Row], device: torch.device) -> tuple[Any, ExplicitPlan]:
        """Where the keys and values of new tokens go, and what their queries see. Call it just before the forward.

        Returns:
            the ring itself, or, where a row has more new tokens than ``block``, a store that returns the ring's entries and the new
            ones, and keeps the latest.
        """
        counts = [r.end - r.first for r in rows]
        for r in rows:  # before the forward, because one that fails may have written
            self.wrote(r.b, r.end - 1)
        if max(counts) > self.block:
            stage = Stage(self, rows)
            return stage, stage.plan
        queries = np.concatenate([np.arange(r.first, r.end) for r in rows])
        owner = np.repeat([r.b for r in rows], counts)
        at = self.at(torch.from_numpy(owner), torch.from_numpy(queries), device)
        return self, self.plan([r.b for r in rows], counts, queries, at)

    def plan(self, rows: list[int], counts: list[int], queries: np.ndarray, at: Tensor) -> ExplicitPlan:
        """The plan for ``queries [T]`` (positions) over the ring; their own entries go to flat slots ``at``."""
        seen = self.visible(queries)
        if self.narrower:
            check_sight(self.mask, seen, queries)
        return ExplicitPlan(rows, counts, seen, queries[:, None] - self.held(queries), at)


class Stage(KVStore):
    """Stands in for a ring while many tokens of a row are fed: they see the ring as it was before, and each other."""

    def __init__(self, ring: RingCache, rows: list[Row]):
        S, W = ring.sinks + ring.size, ring.size
        counts = [r.end - r.first for r in rows]
        wide = S + max(counts)
        self.ring, self.rows, self.used, self.spare = ring, torch.tensor([r.b for r in rows]), S, wide - S
        seen, distance, slots = [], [], []
        stay, at = [], []  # which new tokens stay in the ring, and where
        packed = 0
        for i, r in enumerate(rows):
            # Positions from r.end on are padding, above every query.
            new = np.arange(r.first, r.first + self.spare)
            old = ring.held(np.array(r.first - 1))
            slot = np.arange(S)
            exists = np.where(slot < ring.sinks, old < r.first, old >= ring.sinks)
            held = np.concatenate([np.where(exists, old, -1), new])
            q = np.arange(r.first, r.end)[:, None]
            recent = (held > q - ring.window) | (held < ring.sinks)
            seen.append((held >= 0) & (held <= q) & recent)
            if ring.narrower:
                seen[-1] &= ring.sees(q, held)
                check_sight(ring.mask, seen[-1], q[:, 0])
            distance.append(q - held)
            slots.append(i * wide + S + np.arange(r.end - r.first))
            kept = np.flatnonzero((new >= r.end - W) | (new < ring.sinks))
            kept = kept[new[kept] < r.end]
            stay.append(packed + kept)
            at.append(r.b * ring.slots + ring.slot(new[kept]))
            packed += r.end - r.first
        self.stay, self.at = (torch.from_numpy(np.concatenate(part)) for part in (stay, at))
        flat = torch.from_numpy(np.concatenate(slots))
        self.plan = ExplicitPlan(
            range(len(rows)), counts, np.concatenate(seen), np.concatenate(distance), flat
        )

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Slots.append``: returns what the queries see, ``[R, S + new, H, D]``."""
        shown = []
        rows, stay, at = (to_device(t, key.device) for t in (self.rows, self.stay, self.at))
        fresh = [t[0].transpose(0, 1) for t in (key, value)]
        for buffer, new in zip(self.ring.layers[layer], fresh):
            both = torch.nn.functional.pad(
                bits(buffer).index_select(0, rows)[:, : self.used], (0, 0, 0, 0, 0, self.spare)
            )
            both.view(-1, *both.shape[2:]).index_copy_(0, slots, bits(rounded(new, buffer.dtype)))
            shown.append(both.view(buffer.dtype))
        self.ring.put(layer, at, *(new.index_select(0, stay) for new in fresh))
        return shown[0], shown[1]
