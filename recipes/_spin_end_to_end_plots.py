"""Drawing of spin_end_to_end.py from its rows alone: goodput by configuration, and who was chosen by domain over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specdec.data.corpus import DOMAINS


def draw(rows: list[dict[str, Any]], folder: Path, pool: Sequence[str], window: int) -> None:
    """Write ``spin_end_to_end.png`` and ``spin_choices.png``; choices are of ``window`` rounds each, among the drafts of ``pool``."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = sorted({r["batch"] for r in rows})
    order = [
        "smallest, 2 threads",
        "best_fixed_packed, 2 threads",
        "selection+decomposition, 2 threads",
        "smallest",
        "smallest_packed",
        "best_fixed",
        "best_fixed_packed",
        "best_fixed_auto",
        "selection_auto",
        "oracle",
        "selection_per_request",
        "selection_cold",
        "selection",
        "selection+decomposition",
        "selection+decomposition+pipeline",
        "spin",
    ]
    figure = Figure(figsize=(9, 4.2))
    axes = figure.subplots(1, len(batches), squeeze=False)[0]
    for axis, batch in zip(axes, batches):
        found = {r["configuration"]: r for r in rows if r["batch"] == batch}
        values = [found[name]["goodput"] for name in order]
        low = [found[name]["goodput"] - found[name]["low"] for name in order]
        high = [found[name]["high"] - found[name]["goodput"] for name in order]
        colors = [
            "C0" if name in ("smallest", "selection", "selection+decomposition", "spin") else "0.7"
            for name in order
        ]
        axis.barh(
            order[::-1], values[::-1], xerr=[low[::-1], high[::-1]], color=colors[::-1], error_kw={"lw": 0.8}
        )
        axis.set_title(f"batch {batch}", fontsize=9)
        axis.set_xlabel("tokens/s", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(folder / "spin_end_to_end.png", dpi=150)
    batch = batches[-1]
    figure = Figure(figsize=(9, 2.8))
    axes = figure.subplots(1, len(DOMAINS), sharey=True)
    for axis, domain in zip(axes, DOMAINS):
        mine = [
            r
            for r in rows
            if r["configuration"] == "choice" and r["batch"] == batch and r["domain"] == domain
        ]
        windows = sorted({r["round"] for r in mine})
        repeats = max((r["repeat"] for r in mine), default=1)
        bottom = [0.0] * len(windows)
        for i, name in enumerate(pool):
            part = [sum(r["share"] for r in mine if r["round"] == w and r["draft"] == name) for w in windows]
            total = [sum(r["share"] for r in mine if r["round"] == w) or repeats for w in windows]
            share = [p / t for p, t in zip(part, total)]
            axis.bar(
                windows,
                share,
                window * 0.9,
                bottom,
                color=f"C{i}",
                align="edge",
                label=name.removeprefix("pocket-"),
            )
            bottom = [b + x for b, x in zip(bottom, share)]
        axis.set_title(domain, fontsize=9)
        axis.set_xlabel("round", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of rows", fontsize=8)
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "spin_choices.png", dpi=150)
