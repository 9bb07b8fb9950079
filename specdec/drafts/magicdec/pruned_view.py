"""Attention over a view with entries chosen for each KV head and layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.kernels.attention import ExplicitPlan
from specdec.kernels.attention.explicit import additive
from specdec.kernels.attention.plan import Segment
from specdec.kernels.attention.reach import Reach, Streaming
from specdec.kernels.device import to_device


class PrunedPlan(ExplicitPlan):
    """A plan over a ring and the chosen slots after it, which differ between heads and layers.

    Args:
        ring: the plan over the ring alone. queries: ``[T]`` positions.
        kept: for each layer the positions ``[B, H, K]`` in the chosen slots, -1 for none. heads: query heads of a layer.
        shows: whether the ring shows positions to queries, ``(queries, positions) -> bool`` of tensors that broadcast.
    """

    def __init__(
        self,
        ring: ExplicitPlan,
        queries: Tensor,
        kept: Sequence[Tensor],
        heads: int,
        shows: Callable[[Tensor, Tensor], Tensor],
    ):
        wide = ((0, 0), (0, kept[0].shape[2]))
        assert ring.slots is not None
        assert ring.distance is not None
        super().__init__(
            ring.rows, ring.counts, np.pad(ring.seen, wide), np.pad(ring.distance, wide), ring.slots
        )
        self.queries, self.kept, self.heads, self.shows, self.layer = queries, kept, heads, shows, 0

    def chosen(self, segment: Segment, window: Reach) -> Tensor:
        """``[R, Hq, q, K]`` bool: which chosen slots are seen; those that the ring shows are seen there."""
        s = segment
        kept = self.kept[self.layer][s.b0 : s.b0 + s.r1 - s.r0, :, None]  # [R, H, 1, K]
        t1 = s.t0 + (s.r1 - s.r0) * s.queries
        q = to_device(self.queries[s.t0 : t1], kept.device).view(-1, 1, s.queries, 1)
        seen = (kept >= 0) & (kept <= q) & ~self.shows(q, kept)
        if window is not None:
            assert not isinstance(window, Streaming)  # refused where slots are unordered
            seen &= kept > q - window
        return seen.repeat_interleave(self.heads // kept.shape[1], 1)

    def visible(self, segment: Segment, window: Reach = None, low: int = 0) -> Any:
        """``[R, Hq, q, S]`` bool: which slots each query of a segment sees."""
        chosen = self.chosen(segment, window)
        seen = torch.from_numpy(super().visible(segment, window, low))[:, None].repeat(1, self.heads, 1, 1)
        seen = to_device(seen, chosen.device)
        seen[..., seen.shape[-1] - chosen.shape[-1] :] = chosen
        return seen

    def mask(
        self, segment: Segment, window: Reach, low: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """``[R, Hq, q, S]`` to be added to scores; computed once per layer."""
        key = (segment.r0, window, low, dtype, device, self.layer)
        if key not in self._masks:
            self._masks[key] = to_device(additive(self.visible(segment, window, low), dtype), device)
        return self._masks[key]


class PrunedView(KVStore):
    """A view's store for one forward, which tells the plan the current layer."""

    def __init__(self, store: KVStore, plan: PrunedPlan):
        self.store, self.plan = store, plan

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.plan.layer = layer
        return self.store.append(layer, slots, key, value)
