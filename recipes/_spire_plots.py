"""PNGs of the figures of spire_throughput.py, from its rows alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import TwoSlopeNorm

Row = dict[str, Any]

NAMES = {
    "autoregressive": "target, plain step",
    "verify": "target, verify step",
    "vanilla": "Vanilla",
    "magicdec": "MagicDec",
    "spire": "SPIRe",
}
COLOURS = {"vanilla": "#7a7a7a", "magicdec": "#d98b2b", "spire": "#1f77b4"}
VARIANTS = {
    "spire": "SPIRe",
    "distillation_only": "distillation loss only",
    "no_feedback": "no feedback memory",
    "random_init": "random initialisation",
    "hard_target_loss": "hard-target loss",
    "no_feedback_no_activations": "no feedback memory,\nno target activations",
    "no_sparse_kv": "no sparse KV cache",
}
HEAT = {
    "fig4": "Throughput multiplier (modelled)",
    "fig6": "Throughput multiplier, Llama 3 70B (modelled)",
    "growing": "Throughput multiplier of a generation of {new_tokens} tokens, by the context that it starts from",
    "not_overlapped": "Throughput multiplier, compute and memory not overlapped",
    "full_terms": "Throughput multiplier with (un)embedding, attention, KV writes and KV refresh",
}


def draw(rows: list[Row], folder: str | Path | None) -> list[str]:
    """Write ``<figure>.png`` for every figure; returns the files."""
    folder = Path(folder or ".")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for figure in dict.fromkeys(r["figure"] for r in rows):
        some = [r for r in rows if r["figure"] == figure]
        special: dict[str, Callable[[list[Row]], Any]] = {
            "fig1": lines,
            "fig3": intensity,
            "fig5": bars,
            "cost": units,
        }
        with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
            drawing = special[figure](some) if figure in special else heat(some, HEAT[figure])
            file = folder / f"{figure}.png"
            drawing.savefig(file, dpi=110, bbox_inches="tight")
            plt.close(drawing)
        files.append(str(file))
    return files


def short(n: int) -> str:
    """1024 as 1k, 1048576 as 1M."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if n >= size and n % size == 0:
            return f"{n // size}{letter}"
    return str(n)


def methods(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in rows))


def lines(rows: list[Row]) -> Any:
    drawing, axes = plt.subplots(figsize=(6, 4))
    for method in methods(rows):
        points = sorted((r["context"], r["multiplier"]) for r in rows if r["method"] == method)
        x, y = zip(*points)
        axes.plot(x, y, "o-", ms=4, color=COLOURS[method])
        axes.annotate(
            NAMES[method], (x[-1], y[-1]), (7, 0), "data", "offset points", color=COLOURS[method], va="center"
        )
    axes.axhline(1, color="black", lw=0.8, ls=":")
    axes.annotate("plain decoding", (x[-1], 1), (0, -4), "data", "offset points", ha="right", va="top")
    context_axis(axes, x)
    axes.set_ylim(0)
    axes.set_ylabel("throughput multiplier")
    axes.set_title(f"Modelled throughput at batch size {rows[0]['batch']}", loc="left")
    axes.grid(alpha=0.25)
    return drawing


def context_axis(axes: Any, values: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [short(v) for v in values])
    axes.set_xlabel("context length")


def intensity(rows: list[Row]) -> Any:
    names = methods(rows)
    contexts = sorted({r["context"] for r in rows})
    drawing, panels = plt.subplots(1, len(names), figsize=(3 * len(names), 3.6), sharey=True)
    shades = plt.get_cmap("viridis")
    for axes, method in zip(panels, names):
        for i, context in enumerate(contexts):
            points = sorted(
                (r["batch"], r["intensity"]) for r in rows if (r["method"], r["context"]) == (method, context)
            )
            x, y = zip(*points)
            axes.plot(x, y, color=shades(0.9 * i / (len(contexts) - 1)), label=f"L = {short(context)}")
        axes.axhline(600, color="crimson", lw=1, ls="--")
        axes.set_title(NAMES[method] + (", draft step" if method in COLOURS else ""), loc="left", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x[::2], [short(v) for v in x[::2]])
        axes.set_yscale("log")
        axes.set_xlabel("batch size")
        axes.grid(alpha=0.25)
    panels[0].annotate("H100: 600", (x[0], 600), (0, 3), "data", "offset points", color="crimson", fontsize=9)
    panels[0].set_ylabel("FLOPs a byte")
    panels[-1].legend(fontsize=8, loc="lower right")
    drawing.suptitle(
        "Operational intensity: below the line a step waits for memory", x=0.125, ha="left", fontsize=12
    )
    drawing.subplots_adjust(wspace=0.08, top=0.83)
    return drawing


def heat(rows: list[Row], title: str) -> Any:
    names = methods(rows)
    batches = sorted({r["batch"] for r in rows})
    contexts = sorted({r["context"] for r in rows})
    top = max(r["multiplier"] for r in rows)
    # White is plain decoding's speed, red is slower; the same scale in every figure that stays below 3.5.
    norm = TwoSlopeNorm(vcenter=1, vmin=0, vmax=max(3.5, top))
    drawing, panels = plt.subplots(1, len(names), figsize=(5.4 * len(names), 3.9), sharey=True)
    for axes, method in zip(panels, names):
        value = {(r["batch"], r["context"]): r["multiplier"] for r in rows if r["method"] == method}
        cells = [[value[b, c] for c in contexts] for b in batches]
        image = axes.imshow(cells, cmap="RdBu", norm=norm, origin="lower", aspect="auto")
        for i, line in enumerate(cells):
            for j, cell in enumerate(line):
                dark = abs(norm(cell) - 0.5) > 0.3
                axes.text(
                    j,
                    i,
                    f"{cell:.2f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else "black",
                )
        axes.set_xticks(range(len(contexts)), [short(c) for c in contexts], fontsize=9)
        axes.set_yticks(range(len(batches)), [str(b) for b in batches])
        axes.set_xlabel("context length")
        axes.set_title(NAMES[method], loc="left")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    panels[0].set_ylabel("batch size")
    drawing.subplots_adjust(wspace=0.04, top=0.84, right=0.93)
    place = panels[-1].get_position()
    bar = drawing.colorbar(image, cax=drawing.add_axes((0.945, place.y0, 0.009, place.height)))
    bar.outline.set_visible(False)
    drawing.suptitle(title.format(**rows[0]), x=0.125, ha="left", fontsize=12)
    return drawing


def bars(rows: list[Row]) -> Any:
    drawing, axes = plt.subplots(figsize=(6.4, 3.6))
    values = [r["multiplier"] for r in rows]
    colours = [COLOURS["spire"] if r["method"] == "spire" else "#9ec5e3" for r in rows]
    marks = axes.barh([VARIANTS[r["method"]] for r in rows], values, color=colours)
    for label, r in zip(axes.bar_label(marks, fmt="%.2f", padding=-30), rows):
        label.set_color("white" if r["method"] == "spire" else "black")
    axes.axvline(values[0], color=COLOURS["spire"], lw=0.8, ls=":")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("throughput multiplier")
    axes.set_title(
        f"SPIRe without its parts, batch size {rows[0]['batch']}, context {rows[0]['context']}", loc="left"
    )
    return drawing


def units(rows: list[Row]) -> Any:
    drawing, axes = plt.subplots(figsize=(6.4, 3.0))
    names = methods(rows)
    shown = {"invested": "#c44e52", "saved": "#9ec5e3", "net": "#1f77b4"}
    for i, (quantity, colour) in enumerate(shown.items()):
        values = [
            next(r["units"] for r in rows if (r["method"], r["quantity"]) == (n, quantity)) for n in names
        ]
        marks = axes.barh(
            [n + 0.27 * (i - 1) for n in range(len(names))], values, 0.25, color=colour, label=quantity
        )
        axes.bar_label(marks, fmt="%.2f", padding=3, fontsize=9)
    axes.set_yticks(range(len(names)), [NAMES[n] for n in names])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 8)
    axes.set_xlabel("units of the target's training")
    axes.set_title("Cost of the draft and what it saves of 10 units of serving", loc="left")
    axes.legend(fontsize=9, loc="upper right", frameon=False)
    return drawing
