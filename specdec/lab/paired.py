"""Paired statistics: τ and its ratios with bootstrap intervals over clusters of texts that share a source."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specdec.audit.tau import Efficiency
from specdec.lab.bootstrap import Clusters, interval
from specdec.lab.tau import Texts

FEW = 6


def mean_interval(values: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of ``values [n]``; the range of fewer than ``FEW``, which no bootstrap makes an interval."""
    if len(values) < FEW:
        return float(min(values)), float(max(values))
    means = np.random.default_rng(0).choice(values, (draws, len(values))).mean(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def part(made: Efficiency, which: np.ndarray) -> Efficiency:
    """The efficiency on the texts ``which``."""
    return Efficiency(*(t[torch.from_numpy(which)] for t in made))


def intervals(
    mine: Efficiency, other: Efficiency | None, documents: np.ndarray, draws: int = 2000, seed: int = 0
) -> dict[str, float | None]:
    """τ, and its ratio to ``other``'s on the same texts, with 95 % intervals by bootstrap over source files (paired).

    With fewer than ``bootstrap.LEAST`` sources there are no intervals: their ends are ``None``.

    Args:
        documents: ``[C]``: the source of each text.
    """
    clusters = Clusters(documents, draws, seed)

    def taus(e: Efficiency) -> np.ndarray:
        return clusters.ratios(e.tokens.numpy(), e.rounds.numpy())

    def ends(values: np.ndarray) -> tuple[float | None, float | None]:
        return interval(values) if clusters.enough else (None, None)

    ours = taus(mine)
    row: dict[str, float | None] = {"tau": mine.tau, **dict(zip(("low", "high"), ends(ours)))}
    ratio: dict[str, float | None] = dict.fromkeys(("ratio_to_vanilla", "ratio_low", "ratio_high"))
    if other is not None:
        low, high = ends(ours / taus(other))
        ratio = {"ratio_to_vanilla": mine.tau / other.tau, "ratio_low": low, "ratio_high": high}
    return {**row, **ratio}


def rows_of(
    scores: dict[str, Efficiency], texts: Texts, domains: bool = True, reference: str = "vanilla"
) -> list[dict[str, Any]]:
    """One row per method and domain; acceptance by position, given that the position was reached."""
    out = []
    groups = ["all", *sorted(set(texts.domain))] if domains else ["all"]
    for domain in groups:
        which = np.flatnonzero([domain in ("all", d) for d in texts.domain])
        for method, made in scores.items():
            mine, base = part(made, which), scores.get(reference)
            other = None if base is None else part(base, which)
            figures = intervals(mine, other, texts.prompt[which])
            position = (mine.accepted.sum(0) / mine.reached.sum(0)).tolist()
            place = {"method": method, "context": texts.context, "k": texts.k, "domain": domain}
            out.append({**place, **figures, "acceptance": position, "texts": len(which)})
    return out
