"""Bootstrap over clusters: texts that share a source are drawn together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def efficiency(
    mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray], clusters: Clusters, least: int = LEAST
) -> dict[str, Any]:
    """τ and its ratio to another method's, with intervals for ``least`` clusters or more.

    Args:
        mine, theirs: tokens and rounds ``[2, C]`` for the lower and the upper bound of τ.
    """
    low, high, other_low, other_high = (float(s[0].sum() / s[1].sum()) for s in (*mine, *theirs))
    row: dict[str, Any] = {"tau": (low + high) / 2, "tau_low": None, "tau_high": None}
    row |= {"ratio": row["tau"] * 2 / (other_low + other_high), "ratio_low": None, "ratio_high": None}
    row |= {"texts": mine[0].shape[1], "sources": len(clusters)}
    if len(clusters) >= least:
        ours, others = ([clusters.ratios(*sums) for sums in bounds] for bounds in (mine, theirs))
        row |= {"tau_low": interval(ours[0])[0], "tau_high": interval(ours[1])[1]}
        row |= {"ratio_low": interval(ours[0] / others[1])[0], "ratio_high": interval(ours[1] / others[0])[1]}
    return row
