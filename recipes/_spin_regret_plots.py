"""PNGs of spin_regret.py, from its rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]

TITLES = {
    "stationary": "stationary, requests alike",
    "heterogeneous": "three types, binding capacities",
    "drifting_slow": "means drift slowly",
    "drifting_abrupt": "means change abruptly",
    "too_little_exploration": "two arms 2 % apart",
    "stationary_theorem": "wide gaps, capacities that just fit",
}
COLOURS = {
    "Fixed(2)": "#bbbbbb",
    "Random": "#777777",
    "EpsilonGreedy": "#d98b2b",
    "UCB1": "#2a9d8f",
    "Thompson": "#90be6d",
    "Thompson, spread 0.2": "#43702a",
    "EXP3": "#c8a2c8",
    "UCBSpec": "#c44e52",
    "EXP3Spec": "#e79aa0",
    "Hedge": "#8172b2",
    "Spin": "#1f77b4",
    "Spin, learns always": "#0b3d66",
}


def draw(rows: list[Row], folder: str | Path | None) -> list[str]:
    """Write ``spin_regret.png``, ``spin_regret_theorem.png`` and ``spin_regret_churn.png``; returns the files."""
    folder = Path(folder or ".")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, make in (
        ("spin_regret", curves),
        ("spin_regret_theorem", theorem),
        ("spin_regret_churn", churn),
    ):
        with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
            drawing = make(rows)
            file = folder / f"{name}.png"
            drawing.savefig(file, dpi=110, bbox_inches="tight")
            plt.close(drawing)
        files.append(str(file))
    return files


def of(rows: list[Row], scenario: str) -> dict[str, list[Row]]:
    """Selector -> its rows of a scenario, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["scenario"] == scenario:
            found.setdefault(row["selector"], []).append(row)
    return found


def lines(axes: Any, some: dict[str, list[Row]], column: str, colours: dict[str, Any]) -> None:
    """A line and an interval for every selector."""
    for name, seen in some.items():
        seen = [r for r in seen if r["slots"] >= 30]
        slots = [r["slots"] for r in seen]
        colour = colours[name]
        axes.plot(slots, [r[column] for r in seen], color=colour, lw=1.8, label=name)
        if column == "regret":
            axes.fill_between(
                slots, [r["low"] for r in seen], [r["high"] for r in seen], color=colour, alpha=0.15, lw=0
            )
    axes.set_xscale("log")
    axes.set_xlabel("slots (rounds of each request)")


def curves(rows: list[Row]) -> Any:
    """Regret of every selector over slots, a panel for each scenario without churn."""
    shown = ("stationary", "heterogeneous", "drifting_slow", "drifting_abrupt")
    drawing, panels = plt.subplots(2, 2, figsize=(11, 8.4), layout="constrained")
    for axes, scenario in zip(panels.flat, shown):
        lines(axes, of(rows, scenario), "regret", COLOURS)
        axes.set_yscale("log")
        axes.set_title(TITLES[scenario], loc="left")
        axes.set_ylabel("regret, seconds a request")
    handles, names = panels[0, 0].get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return drawing


def theorem(rows: list[Row]) -> Any:
    """Regret over ln T: flat where regret is logarithmic."""
    drawing, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, scenario in zip(panels, ("stationary_theorem", "too_little_exploration")):
        some = of(rows, scenario)
        palette = [plt.get_cmap("tab10")(i) for i in range(10)]
        lines(axes, some, "regret_over_log", dict(zip(some, palette)))
        axes.set_title(TITLES[scenario], loc="left")
        axes.set_ylabel("regret / ln T, seconds a request")
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=9)
    return drawing


def churn(rows: list[Row]) -> Any:
    """How much longer than the oracle's the run with arrivals and departures took, every selector."""
    last = sorted((seen[-1] for seen in of(rows, "churn").values()), key=lambda r: r["overhead"])
    drawing, axes = plt.subplots(figsize=(7.5, 0.3 * len(last) + 1))
    colours = ["#1f77b4" if r["selector"].startswith("Spin") else "#b5c7d3" for r in last]
    bars = axes.barh([r["selector"] for r in last], [100 * r["overhead"] for r in last], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds beyond the oracle's, %")
    axes.set_title("requests of 30 to 60 rounds, three types", loc="left")
    return drawing
