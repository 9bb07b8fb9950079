"""Rows of a measured grid: measured and modelled multipliers, constants and model errors; and the same as text."""

from __future__ import annotations

from statistics import median
from typing import Any

from specdec.lab.calibrated import Bare, Calibrated
from specdec.lab.console import table
from specdec.lab.multipliers import Taus, interval, ratio, speed
from specdec.lab.steady import Measured

K = 4
"""The paper's k, at which every method is measured besides its best k."""

Point = tuple[int, int]
Row = dict[str, Any]


def grid_rows(
    found: dict[Point, list[Measured]],
    corners: set[Point],
    calibrated: Calibrated | None,
    new_tokens: int,
    taus: Taus | None = None,
) -> list[Row]:
    """A row for every measured method and k, grid points in order; with ``taus``, then a row for every pair of methods."""
    rows, pairs = [], []
    for (batch, context), cases in sorted(found.items()):
        plain = next(m for m in cases if m.method == "plain")
        best = {m.method: m for m in sorted(cases, key=lambda m: speed(m, context, taus))}
        pairs += [] if taus is None else pair_rows(batch, context, cases, best, taus)
        for m in cases:
            tau, own = m.tau, speed(m, context, taus)
            row: Row = {
                "part": "grid", "method": m.method, "batch": batch, "context": context, "k": m.k,
                "multiplier": own / speed(plain, context, taus), "modelled": None, "fitted": (batch, context) in corners,
                "best_k": m is best[m.method], "tau": tau, "tokens_per_second": batch * own,
                "round_seconds": m.round_seconds, "modelled_round_seconds": None,
                "spread": max(r.round_seconds for r in m.runs) / min(r.round_seconds for r in m.runs) - 1,
                "repeats": len(m.runs),
            }  # fmt: skip
            if taus is not None:
                tau = taus.tau(m.method, context, m.k)
                low, high = ratio(m, plain, context, taus)[1:]
                tau_low, tau_high = interval(taus.drawn(m.method, context, m.k))
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


def constants(calibrated: Calibrated | None, bare: list[Bare]) -> list[Row]:
    """Rows of the fitted constants, and of the bare steps that they were fitted to."""
    rows: list[Row] = [
        {"part": "bare", "method": b.what, "batch": b.batch, "context": b.context, "tokens": b.tokens}
        | {"seconds": b.seconds, "modelled_seconds": calibrated.machine.time(b.step) if calibrated else None}
        | ({"replayed": True} if b.replayed else {})
        for b in bare
    ]
    if calibrated is None:
        return rows
    machine = calibrated.machine
    names = (
        "flops",
        "bytes_per_second",
        "cached_bytes_per_second",
        "cache_bytes",
        "overhead",
        "overhead_per_layer",
        "overlapped",
    )
    values = {name: getattr(machine, name) for name in names} | {"median_error_on_bare_steps": machine.error}
    rows += [{"part": "constant", "quantity": name, "value": value} for name, value in values.items()]
    for method, around in calibrated.hosts.items():
        for where, host in around._asdict().items():
            for name, value in vars(host).items():
                quantity = f"host_{where}_{name}_seconds"
                rows.append({"part": "constant", "method": method, "quantity": quantity, "value": value})
    return rows


def at_k(rows: list[Row], best: bool) -> dict[Point, dict[str, Row]]:
    """By grid point and method: rows at k = 4, or at each method's own best; plain decoding in both."""
    out: dict[Point, dict[str, Row]] = {}
    for r in rows:
        if r["part"] == "grid" and (r["method"] == "plain" or (r["best_k"] if best else r["k"] == K)):
            out.setdefault((r["batch"], r["context"]), {})[r["method"]] = r
    return out


def winner(methods: dict[str, Row], column: str) -> str:
    """The method with the largest value of a column."""
    return max(methods, key=lambda name: methods[name][column])


def summary(rows: list[Row], seconds: float) -> list[Row]:
    """The model's errors at points that it was not fitted to, and SPIRe's rank. Units are in the names."""
    values: dict[str, Any] = {"wall_seconds": seconds}
    for name, best in (("k4", False), ("best_k", True)):
        points = at_k(rows, best)
        unseen = {p: m for p, m in points.items() if not m["plain"]["fitted"] and m["plain"]["modelled"]}
        if unseen:
            right = [winner(m, "multiplier") == winner(m, "modelled") for m in unseen.values()]
            # The loss from following the model: the best method's speed over that of the model's choice.
            lost = [
                m[winner(m, "multiplier")]["multiplier"] / m[winner(m, "modelled")]["multiplier"] - 1
                for m in unseen.values()
            ]
            errors = [
                abs(r["modelled"] / r["multiplier"] - 1)
                for m in unseen.values()
                for r in m.values()
                if r["method"] != "plain"
            ]
            values |= {
                f"unfitted_points_{name}": len(unseen),
                f"winner_predicted_share_{name}": sum(right) / len(right),
                f"winner_predicted_or_within_3_percent_share_{name}": sum(x <= 0.03 for x in lost)
                / len(lost),
                f"largest_loss_by_following_the_model_{name}": max(lost),
                f"median_relative_error_{name}": median(errors),
            }
        values[f"spire_largest_multiplier_{name}"] = max(m["spire"]["multiplier"] for m in points.values())
        large = [m for (b, c), m in points.items() if b * c >= 16 * 1024]
        if large:
            values[f"spire_wins_from_16x1024_{name}"] = all(winner(m, "multiplier") == "spire" for m in large)
            values[f"spire_over_next_from_16x1024_{name}"] = min(
                m["spire"]["multiplier"] / max(r["multiplier"] for n, r in m.items() if n != "spire")
                for m in large
            )
    return [{"part": "summary", "quantity": name, "value": value} for name, value in values.items()]


def report(rows: list[Row]) -> None:
    """Print measured multipliers, modelled ones in brackets; * marks points that the model was fitted to."""
    for title, best in (("k = 4", False), ("each method's best k", True)):
        lines: list[Row] = []
        for (batch, context), methods in at_k(rows, best).items():
            plain = methods["plain"]
            line: Row = {"batch": batch, "context": f"{context}{'*' if plain['fitted'] else ''}"}
            line["plain tokens/s"] = plain["tokens_per_second"]
            for name, r in methods.items():
                if name != "plain":
                    shown = "-" if r["modelled"] is None else f"{r['modelled']:.2f}"
                    line[name] = f"{r['multiplier']:.2f} [{shown}]" + (f" {r['k']}" if best else "")
            line["fastest"] = winner(methods, "multiplier")
            line["modelled"] = None if plain["modelled"] is None else winner(methods, "modelled")
            lines.append(line)
        print(f"\n{title}: multiplier [modelled]{', k' if best else ''}\n")
        print(table(lines, tuple(lines[0])))
    for part, title in (
        ("constant", "constants"),
        ("summary", "summary of the points that the model was not fitted to"),
    ):
        some = [r | {"value": f"{r['value']:.6g}" if isinstance(r["value"], float) else r["value"]}
                for r in rows if r["part"] == part]  # fmt: skip
        print(f"\n{title}:\n{table(some, ('quantity', 'method', 'value'))}")
