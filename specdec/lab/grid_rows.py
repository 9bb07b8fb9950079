"""Rows of a measured grid: measured and modelled multipliers, and ratios between drafts."""

from __future__ import annotations

from typing import Any

from specdec.lab.bootstrap import ends
from specdec.lab.calibrated import Calibrated
from specdec.lab.multipliers import Taus, ratio, speed
from specdec.lab.steady import Measured, executor_of

K = 4
"""The paper's k, at which every method is measured besides its best k."""

Point = tuple[int, int]
Row = dict[str, Any]


def grid_rows(
    found: dict[Point, list[Measured]],
    fitted: set[Point],
    calibrated: Calibrated | None,
    new_tokens: int,
    taus: Taus | None = None,
) -> list[Row]:
    """A row for every measured method and k, grid points in order; with ``taus``, then SPIRe's speed over every other draft's.

    Raises:
        ValueError: methods ran under several executors.
    """
    rows, pairs = [], []
    executor = executor_of(m for cases in found.values() for m in cases)
    for (batch, context), cases in sorted(found.items()):
        plain = next(m for m in cases if m.method == "plain")
        best = {m.method: m for m in sorted(cases, key=lambda m: speed(m, context, taus))}
        if taus is not None:
            pairs += [{**row, "executor": executor} for row in pair_rows(batch, context, cases, best, taus)]
        for m in cases:
            tau, own = m.tau, speed(m, context, taus)
            row: Row = {
                "part": "grid", "executor": executor, "method": m.method, "batch": batch, "context": context, "k": m.k,
                "multiplier": own / speed(plain, context, taus), "modelled": None, "fitted": (batch, context) in fitted,
                "best_k": m is best[m.method], "tau": tau, "tokens_per_second": batch * own,
                "round_seconds": m.round_seconds, "modelled_round_seconds": None,
                "spread": max(r.round_seconds for r in m.runs) / min(r.round_seconds for r in m.runs) - 1,
                "repeats": len(m.runs),
            }  # fmt: skip
            if taus is not None:
                tau = taus.tau(m.method, context, m.k)
                low, high = ratio(m, plain, context, taus)[1:]
                tau_low, tau_high = ends(taus.drawn(m.method, context, m.k))
                row |= {"multiplier_low": low, "multiplier_high": high, "live_tau": row["tau"], "tau": tau}
                row |= {"tau_low": tau_low, "tau_high": tau_high}
            row |= {f"{stage}_seconds": m.stage(stage) for stage in ("draft", "target", "verify", "other")}
            if calibrated:
                at = context + new_tokens / 2
                row["modelled"] = calibrated.multiplier(m.method, batch, at, m.k, tau)
                row["modelled_round_seconds"] = calibrated.seconds(m.method, batch, at, m.k)
            rows.append(row)
    return rows + pairs


def pair_rows(
    batch: int, context: int, cases: list[Measured], best: dict[str, Measured], taus: Taus
) -> list[Row]:
    """SPIRe's speed over every other draft's at a grid point, at k = 4 and at the best k of each."""
    rows = []
    at_four = {m.method: m for m in cases if m.k == K}
    for where, some in (("k4", at_four), ("best_k", best)):
        for method, other in some.items():
            if method in ("plain", "spire") or "spire" not in some:
                continue
            mine = some["spire"]
            value, low, high = ratio(mine, other, context, taus)
            place = {"part": "ratio", "method": "spire", "over": method, "batch": batch, "context": context}
            rows.append({**place, "at": where, "k": mine.k, "over_k": other.k, "ratio": value, "ratio_low": low, "ratio_high": high})  # fmt: skip
    return rows
