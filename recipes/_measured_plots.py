"""Heat maps of spire_measured.py from its rows alone: measured over modelled multipliers, a column for each method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _spire_plots import short
from matplotlib.colors import TwoSlopeNorm

Row = dict[str, Any]

NAMES = {
    "vanilla": "Vanilla",
    "windowed": "Vanilla, sparse KV",
    "distilled_vanilla": "Vanilla, distilled",
    "magicdec": "MagicDec",
    "spire": "SPIRe",
}


def draw(rows: list[Row], folder: str | Path | None) -> list[str]:
    """Write ``measured_k4.png`` and ``measured_best_k.png``; returns the files."""
    folder = Path(folder or ".")
    folder.mkdir(parents=True, exist_ok=True)
    grid = [r for r in rows if r["part"] == "grid" and r["method"] in NAMES]
    files = []
    for name, title, some in (
        ("measured_k4", "Throughput multiplier at k = 4", [r for r in grid if r["k"] == 4]),
        (
            "measured_best_k",
            "Throughput multiplier at each method's own best k",
            [r for r in grid if r["best_k"]],
        ),
    ):
        with plt.rc_context({"font.size": 10}):
            drawing = maps(some, title, "best" in name)
            file = folder / f"{name}.png"
            drawing.savefig(file, dpi=110, bbox_inches="tight")
            plt.close(drawing)
        files.append(str(file))
    return files


def maps(rows: list[Row], title: str, show_k: bool) -> Any:
    """Two lines of panels on one scale: what was measured, and the model with constants of the same run."""
    batches = sorted({r["batch"] for r in rows})
    contexts = sorted({r["context"] for r in rows})
    lines = [("multiplier", "measured"), ("modelled", "modelled")]
    names = {method: shown for method, shown in NAMES.items() if any(r["method"] == method for r in rows)}
    top = max(r[column] for r in rows for column, _ in lines if r[column] is not None)
    norm = TwoSlopeNorm(
        vcenter=1, vmin=0, vmax=max(2.0, top)
    )  # white is plain decoding's speed, red is slower
    wide, high = 0.75 * len(contexts) + 0.4, 0.42 * len(batches) + 0.6
    drawing, panels = plt.subplots(
        2, len(names), figsize=(wide * len(names), 2 * high), sharex=True, sharey=True, squeeze=False
    )
    for line, (column, label) in zip(panels, lines):
        for axes, (method, shown) in zip(line, names.items()):
            found = {(r["batch"], r["context"]): r for r in rows if r["method"] == method}
            value = {at: float("nan") if r[column] is None else r[column] for at, r in found.items()}
            image = axes.imshow(
                [[value[b, c] for c in contexts] for b in batches],
                cmap="RdBu",
                norm=norm,
                origin="lower",
                aspect="auto",
            )
            for i, b in enumerate(batches):
                for j, c in enumerate(contexts):
                    row, dark = found[b, c], abs(norm(value[b, c]) - 0.5) > 0.3
                    said = f"{value[b, c]:.2f}" + (
                        f"\nk={row['k']}" if show_k and column == "multiplier" else ""
                    )
                    # Italic: a point that the constants were fitted to.
                    style = "italic" if row["fitted"] and column == "modelled" else "normal"
                    axes.text(
                        j, i, said, ha="center", va="center", fontsize=7.5, style=style, linespacing=0.9,
                        color="white" if dark else "black",
                    )  # fmt: skip
            axes.set_xticks(range(len(contexts)), [short(c) for c in contexts], fontsize=9)
            axes.set_yticks(range(len(batches)), [str(b) for b in batches], fontsize=9)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
            if column == "multiplier":
                axes.set_title(shown, loc="left", fontsize=10)
            else:
                axes.set_xlabel("context length")
        line[0].set_ylabel(f"{label}\nbatch size")
    drawing.subplots_adjust(wspace=0.06, hspace=0.1, top=0.87, right=0.93)
    low, up = panels[1][-1].get_position(), panels[0][-1].get_position()
    bar = drawing.colorbar(image, cax=drawing.add_axes((0.94, low.y0, 0.008, up.y1 - low.y0)))
    bar.outline.set_visible(False)
    drawing.suptitle(
        f"{title} (italic: the model's constants were fitted there)", x=0.125, y=0.985, ha="left", fontsize=12
    )
    return drawing
