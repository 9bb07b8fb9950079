"""Bootstrap over clusters: texts that share a source are drawn together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEAST = 5  # clusters for an interval


class Clusters:
    """Draws of clusters with replacement; two statistics with the same draws are paired.

    Args:
        sources: ``[C]`` the cluster of each text. draws, seed: of the bootstrap.
    """

    def __init__(self, sources: Sequence[str] | np.ndarray, draws: int = 2000, seed: int = 0):
        self.names, self._place = np.unique(np.asarray(sources), return_inverse=True)
        self._picks = np.random.default_rng(seed).integers(0, len(self), (draws, len(self)))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def enough(self) -> bool:
        """Whether there are enough clusters for an interval."""
        return len(self) >= LEAST

    def sums(self, values: np.ndarray) -> np.ndarray:
        """``[draws]`` the sum of ``values [C]`` in every draw."""
        return np.bincount(self._place, values, len(self))[self._picks].sum(1)

    def ratios(self, above: np.ndarray, below: np.ndarray) -> np.ndarray:
        """``[draws]`` the ratio of two sums, such as tokens and rounds."""
        return self.sums(above) / self.sums(below)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 2.5 % and the 97.5 % quantile of bootstrap draws."""
    low, high = np.quantile(values, [0.025, 0.975]).tolist()
    return low, high
