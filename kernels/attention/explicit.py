"""A plan for slots in any order: what each query sees is said slot by slot, and does not follow from slot numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.plan import additive as additive


class ExplicitPlan(AttentionPlan):
    """Packed queries over slots that hold arbitrary positions.

    Args:
        rows: ``[R]`` buffer row of each row, ascending. counts: ``[R]`` its queries, at least 1.
        seen: ``[T, S]`` bool, which of its row's S slots each query sees.
        distance: ``[T, S]`` how far behind the query the position of a slot is, for layers with a window of their own.
        slots: ``[T]`` flat numbers of the new tokens' slots.
    Attributes:
        layer: which layer is attending, in a subclass whose ``visible`` depends on it.
    """

    ordered: ClassVar[bool] = False
    layer: int = 0

    def __init__(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        seen: np.ndarray,
        distance: np.ndarray,
        slots: Tensor,
    ):
        self.seen, self.distance = seen, distance
        S = seen.shape[1]
        super().__init__(rows, [S - n for n in counts], counts, S, slots=slots)

    def _segments(self) -> list[Segment]:
        return self.runs()  # every row has S slots: nothing is wasted on the longest

    def low(self, segment: Segment, window: int) -> int:
        """0: slots are in no order."""
        return 0

    def visible(self, segment: Segment, window: int | None = None, low: int = 0) -> np.ndarray:
        """``[R, q, S - low]`` bool: which slots from ``low`` on each query of a segment sees."""
        t1 = segment.t0 + (segment.r1 - segment.r0) * segment.queries
        seen = self.seen[segment.t0 : t1]
        if window is not None:
            seen = seen & (self.distance[segment.t0 : t1] < window)
        return seen.reshape(-1, segment.queries, seen.shape[1])[:, :, low:]
