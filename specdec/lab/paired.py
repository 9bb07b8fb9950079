"""Paired statistics: τ and its ratios with bootstrap intervals over clusters of texts that share a source."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specdec.audit.tau import Efficiency
from specdec.lab.bootstrap import DRAWS, FIGURES, Clusters, figures, interval
from specdec.lab.tau import Texts


def mean_interval(values: np.ndarray, draws: int = DRAWS) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of ``values [n]``; the range of fewer than ``bootstrap.LEAST``, which no bootstrap makes an interval."""
    clusters = Clusters(np.arange(len(values)), draws)
    if not clusters.enough:
        return float(min(values)), float(max(values))
    return interval(clusters.sums(values) / len(values))


def part(made: Efficiency, which: np.ndarray) -> Efficiency:
    """The efficiency on the texts ``which``."""
    return Efficiency(*(t[torch.from_numpy(which)] for t in made))


def intervals(
    mine: Efficiency, other: Efficiency | None, documents: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> dict[str, float | None]:
    """τ, and its ratio to ``other``'s on the same texts, with 95 % intervals by bootstrap over source files (paired).

    With fewer than ``bootstrap.LEAST`` sources there are no intervals: their ends are ``None``.

    Args:
        documents: ``[C]``: the source of each text.
    """
    ours, theirs = (torch.stack(e[:2]).numpy() for e in (mine, mine if other is None else other))
    made = figures(ours, theirs, Clusters(documents, draws, seed))
    names = {"tau": "tau", "tau_low": "low", "tau_high": "high", "ratio": "ratio_to_vanilla"}
    known = FIGURES[:3] if other is None else FIGURES[:6]
    return {names.get(name, name): made[name] if name in known else None for name in FIGURES[:6]}


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
