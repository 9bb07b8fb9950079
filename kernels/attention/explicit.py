"""A plan for slots in any order: what each query sees is said slot by slot, and does not follow from slot numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.plan import additive as additive
from specdec.kernels.attention.reach import Reach, Streaming

Interval = tuple[int, int]


class ExplicitPlan(AttentionPlan):
    """Packed queries over slots that hold arbitrary positions.

    Args:
        rows: ``[R]`` buffer row of each row, in any order. counts: ``[R]`` its queries, at least 1.
        seen: ``[T, S]`` bool, which of its row's S slots each query sees.
        distance: ``[T, S]`` how far behind the query the position of a slot is, for layers with a window of their own; without it
            windows are refused.
        slots: ``[T]`` flat numbers of the new tokens' slots; by default the last ones of each row.
    Attributes:
        layer: which layer is attending, in a subclass whose ``visible`` depends on it.
    Raises:
        ValueError: ``seen`` or ``distance`` is no array of two dimensions or of another type, or does not have as many queries as
            ``counts`` say; a row has more of them than slots.
    """

    ordered: ClassVar[bool] = False

    def __init__(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        seen: np.ndarray,
        distance: np.ndarray | None = None,
        slots: Tensor | None = None,
    ):
        self.seen, self.distance = seen, distance
        _check("seen", seen, "b", "bool")  # others' bytes are read, too
        T, S = sum(counts), seen.shape[1]
        if distance is not None:
            _check("distance", distance, "iuf", "numbers")
        for name, given in (("seen", seen), ("distance", distance)):
            if given is not None and given.shape != (T, S):
                raise ValueError(
                    f"{name} is {given.shape}: give [queries, slots], ({T}, {S}) for these counts"
                )
        if max(counts, default=0) > S:
            raise ValueError(
                f"counts has a row of {max(counts)} queries and seen {S} slots: a new token takes a slot"
            )
        super().__init__(rows, [S - n for n in counts], counts, S, slots=slots)

    @staticmethod
    def of_intervals(
        rows: Sequence[int],
        counts: Sequence[int],
        intervals: Sequence[Sequence[Interval]],
        capacity: int,
        *,
        distance: np.ndarray | None = None,
        slots: Tensor | None = None,
    ) -> ExplicitPlan:
        """The plan of queries that see a few ranges of slots each, as ``specdec.masks.intervals`` says them.

        Args:
            rows, counts, distance, slots: as for the class.
            intervals: ``[T]`` of each packed query, half-open ``(start, end)``, ascending and apart; none for a query that sees
                nothing.
            capacity: slots of a buffer row.
        Raises:
            ValueError: not one list for each query, or an interval that is empty, overlaps the one before it, or leaves the row.
        """
        T = sum(counts)
        if len(intervals) != T:
            raise ValueError(
                f"intervals has {len(intervals)} lists and counts say {T} queries: give one list for each packed query"
            )
        seen = np.zeros((T, capacity), dtype=bool)
        for t, own in enumerate(intervals):
            before = 0
            for start, end in own:
                if not before <= start < end <= capacity:
                    raise ValueError(
                        f"intervals[{t}] is {list(own)}: give (start, end) with start below end, ascending, apart, and within the "
                        f"row's {capacity} slots"
                    )
                seen[t, start:end] = True
                before = end
        return ExplicitPlan(rows, counts, seen, distance, slots)

    def _segments(self) -> list[Segment]:
        return self.runs()  # every row has S slots: nothing is wasted on the longest

    def low(self, segment: Segment, window: int | Streaming) -> int:
        """0: slots are in no order."""
        return 0

    def visible(self, segment: Segment, window: Reach = None, low: int = 0) -> np.ndarray:
        """``[R, q, S - low]`` bool: which slots from ``low`` on each query of a segment sees.

        Raises:
            ValueError: a window, and the plan knows of no distances; or first positions beside it.
        """
        t1 = segment.t0 + (segment.r1 - segment.r0) * segment.queries
        seen = self.seen[segment.t0 : t1]
        if isinstance(window, Streaming):
            raise ValueError(
                f"initial is {window.initial}, and this plan says slot by slot what is seen: let it say so of the first ones"
            )
        if window is not None:
            if self.distance is None:
                raise ValueError(
                    f"window is {window}, and this plan does not know how far behind slots are: give it distance, or leave out of "
                    "it what is beyond the window"
                )
            seen = seen & (self.distance[segment.t0 : t1] < window)
        return seen.reshape(-1, segment.queries, seen.shape[1])[:, :, low:]


def _check(name: str, given: object, kinds: str, what: str) -> None:
    """Refuse what is no array ``[queries, slots]`` of one of NumPy's ``kinds``."""
    if not isinstance(given, np.ndarray):
        raise ValueError(
            f"{name} is a {type(given).__name__}: give a NumPy array of {what}, [queries, slots]; a tensor's is .numpy()"
        )
    if given.dtype.kind not in kinds or given.ndim != 2:
        raise ValueError(f"{name} is {given.dtype} of {given.ndim} dimensions: give {what}, [queries, slots]")
