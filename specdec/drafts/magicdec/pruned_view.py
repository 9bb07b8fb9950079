"""Attention over a view with entries that were chosen per KV head and layer: what each head sees of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention import ExplicitPlan
from specdec.kernels.attention.explicit import additive
from specdec.kernels.attention.plan import Segment
from specdec.kernels.attention.reach import Reach, Streaming
from specdec.kernels.device import to_device
from specdec.masks import sees

if TYPE_CHECKING:
    from specdec.drafts.magicdec.view import ViewCache


class PrunedPlan(ExplicitPlan):
    """Adds to a plan over a ring the chosen slots behind it, which differ between heads and layers.

    Args:
        ring: the plan over the ring alone. queries: ``[T]`` positions.
    """

    def __init__(self, ring: ExplicitPlan, cache: ViewCache, queries: Tensor):
        wide = ((0, 0), (0, cache.extra))
        assert ring.slots is not None
        assert ring.distance is not None
        super().__init__(
            ring.rows, ring.counts, np.pad(ring.seen, wide), np.pad(ring.distance, wide), ring.slots
        )
        self.cache, self.queries, self.layer = cache, queries, 0
        self.heads: int = cache.view.clone.config.get_text_config().num_attention_heads

    def chosen(self, segment: Segment, window: Reach) -> Tensor:
        """``[R, Hq, q, K]`` bool: which chosen slots are seen; those that the mask shows are seen in the ring."""
        s, cache = segment, self.cache
        kept = cache.kept[self.layer][s.b0 : s.b0 + s.r1 - s.r0, :, None]  # [R, H, 1, K]
        t1 = s.t0 + (s.r1 - s.r0) * s.queries
        q = to_device(self.queries[s.t0 : t1], kept.device).view(-1, 1, s.queries, 1)
        seen = (kept >= 0) & (kept <= q) & ~sees(cache.mask, q, kept.clamp(min=0))
        if window is not None:
            assert not isinstance(window, Streaming)  # refused where slots are in no order
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
        """``[R, Hq, q, S]`` to add to scores; made once per layer."""
        key = (segment.r0, window, low, dtype, device, self.layer)
        if key not in self._masks:
            self._masks[key] = to_device(additive(self.visible(segment, window, low), dtype), device)
        return self._masks[key]


class PrunedView:
    """A view's memo for one forward: tells the plan which layer is attending."""

    def __init__(self, ring: ExplicitPlan, cache: ViewCache, queries: Tensor):
        self.cache, self.plan = cache, PrunedPlan(ring, cache, queries)

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.plan.layer = layer
        return self.cache.append(layer, slots, key, value)
