"""Bootstrap over clusters: texts that share a source are drawn together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST = 5
"""The fewest clusters (sources, packages, workloads, repeats) whose bootstrap is an interval: four have 35 samples."""
DRAWS = 2000
FIGURES = ("tau", "tau_low", "tau_high", "ratio", "ratio_low", "ratio_high", "texts", "sources")


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of ``values [n]``; the range of fewer than ``LEAST``, which no bootstrap makes an interval."""
    clusters = Clusters(np.arange(len(values)))
    if not clusters.enough:
        return float(min(values)), float(max(values))
    return interval(clusters.sums(values) / len(values))


def geometric(ratios: np.ndarray) -> dict[str, float]:
    """The geometric mean of ratios ``[n]`` of paired repeats, with ``mean_interval`` of their logarithms: ``ratio``, ``ratio_low`` and ``ratio_high``."""
    logs = np.log(ratios)
    return dict(zip(FIGURES[3:6], np.exp([logs.mean(), *mean_interval(logs)]).tolist()))


class Clusters:
    """Draws of clusters with replacement; two statistics with the same draws are paired.

    Args:
        sources: ``[C]`` the cluster of each text. draws, seed: of the bootstrap.
    """

    def __init__(self, sources: Sequence[str] | np.ndarray, draws: int = DRAWS, seed: int = 0):
        self.names, self._place = np.unique(np.asarray(sources), return_inverse=True)
        self._picks = np.random.default_rng(seed).integers(0, len(self), (draws, len(self)))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def enough(self) -> bool:
        """Whether there are enough clusters for an interval."""
        return len(self) >= LEAST

    def by_cluster(self, values: np.ndarray) -> np.ndarray:
        """``[len(self)]`` the sum of ``values [C]`` in every cluster."""
        return np.bincount(self._place, values, len(self))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """``[draws]`` the sum of ``values [C]`` in every draw."""
        return self.by_cluster(values)[self._picks].sum(1)

    def ratios(self, above: np.ndarray, below: np.ndarray) -> np.ndarray:
        """``[draws]`` the ratio of two sums, such as tokens and rounds."""
        return self.sums(above) / self.sums(below)


def interval(drawn: np.ndarray) -> tuple[float, float]:
    """The 2.5 % and the 97.5 % quantile of bootstrap draws."""
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return low, high


def ends(drawn: np.ndarray | None) -> tuple[float | None, float | None]:
    """As ``interval``; ``None`` of no draws, where there are too few clusters."""
    return (None, None) if drawn is None else interval(drawn)


def bounded_figures(
    mine: Sequence[np.ndarray], other: Sequence[np.ndarray], clusters: Clusters, least: int = LEAST
) -> dict[str, Any]:
    """``FIGURES``: τ and its ratio to another method's, with intervals for ``least`` clusters or more.

    Args:
        mine, other: tokens and rounds ``[2, C]`` for the lower and the upper bound of τ.
    """
    low, high, other_low, other_high = (float(s[0].sum() / s[1].sum()) for s in (*mine, *other))
    row: dict[str, Any] = dict.fromkeys(FIGURES)
    row |= {"tau": (low + high) / 2, "ratio": (low + high) / (other_low + other_high)}
    row |= {"texts": mine[0].shape[1], "sources": len(clusters)}
    if len(clusters) >= least:
        ours, theirs = ([clusters.ratios(*sums) for sums in bounds] for bounds in (mine, other))
        row |= {"tau_low": interval(ours[0])[0], "tau_high": interval(ours[1])[1]}
        row |= {"ratio_low": interval(ours[0] / theirs[1])[0], "ratio_high": interval(ours[1] / theirs[0])[1]}
    return row


def figures(mine: np.ndarray, other: np.ndarray, clusters: Clusters, least: int = LEAST) -> dict[str, Any]:
    """As ``bounded_figures``, from tokens and rounds ``[2, C]`` that are exact."""
    return bounded_figures([mine] * 2, [other] * 2, clusters, least)
