"""The duration of a round: serial, in micro-batches with a barrier, and in a pipeline's steady state.

A derivation for SPIN's pipeline (arXiv 2503.15921, section 6) that is not the paper's: drafting ``b`` rows takes ``d(b)`` seconds
and verifying them ``v(b)``, each a constant plus a part per row. ``B`` rows run in ``m`` micro-batches of ``b = B / m`` on one
drafting and one verifying worker:

- serial: ``d(B) + v(B)``;
- a barrier after each round: ``d + (m - 1) max(d, v) + v`` at ``b``;
- without one: ``max(m d, m v, d + v)`` at ``b``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TimeModel:
    """Seconds of drafting and of verification: ``(fixed, per_row)`` each."""

    draft: tuple[float, float]
    verify: tuple[float, float]

    def __post_init__(self) -> None:
        if min(*self.draft, *self.verify) < 0:
            raise ValueError(f"draft is {self.draft} and verify {self.verify}: seconds are not negative")

    def d(self, rows: float) -> float:
        return self.draft[0] + self.draft[1] * rows

    def v(self, rows: float) -> float:
        return self.verify[0] + self.verify[1] * rows

    def serial(self, batch: int) -> float:
        """Seconds of a round of all rows, one stage after the other."""
        return self.d(batch) + self.v(batch)

    def barrier(self, batch: int, micro_batches: int) -> float:
        """Seconds of a round of all rows when every micro-batch waits for the others."""
        d, v = self.d(batch / micro_batches), self.v(batch / micro_batches)
        return d + (micro_batches - 1) * max(d, v) + v

    def steady(self, batch: int, micro_batches: int) -> float:
        """Seconds of a round of all rows when no micro-batch waits for another."""
        d, v = self.d(batch / micro_batches), self.v(batch / micro_batches)
        return max(micro_batches * d, micro_batches * v, d + v)

    def gain(self, batch: int, micro_batches: int) -> float:
        """The predicted speed-up of the pipeline over the serial round."""
        return self.serial(batch) / self.steady(batch, micro_batches)

    def best(self, batch: int, limit: int = 16) -> int:
        """The number of micro-batches with the shortest steady round; ties go to the fewest."""
        return min(range(1, min(limit, batch) + 1), key=lambda m: (self.steady(batch, m), m))

    @staticmethod
    def fit(samples: Iterable[tuple[int, float, float]]) -> TimeModel:
        """From ``(rows, draft seconds, verify seconds)`` of rounds: the least-squares line through the median of each size.

        Raises:
            ValueError: fewer than two sizes.
        """
        by_rows: dict[int, list[tuple[float, float]]] = {}
        for rows, draft, verify in samples:
            by_rows.setdefault(rows, []).append((draft, verify))
        if len(by_rows) < 2:
            raise ValueError(f"samples have {len(by_rows)} batch sizes: a line needs at least 2")
        sizes = np.array(sorted(by_rows), dtype=float)
        medians = np.array([np.median(by_rows[int(n)], axis=0) for n in sizes])
        return TimeModel(_line(sizes, medians[:, 0]), _line(sizes, medians[:, 1]))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope of least relative squares, neither negative."""
    weight = 1 / np.maximum(y, 1e-9)
    slope, fixed = np.polyfit(x, y, 1, w=weight)
    if fixed < 0:
        fixed, slope = 0.0, float((x * y * weight**2).sum() / (x * x * weight**2).sum())
    if slope < 0:
        fixed, slope = float(np.average(y, weights=weight**2)), 0.0
    return float(fixed), float(slope)
