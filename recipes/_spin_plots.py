"""Drawing of spin_decompose.py from its rows alone: time and memory of a verify pass over batches, a column for each distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import ScalarFormatter

Row = dict[str, Any]

STYLES = {"padded": ("#b0413e", "o"), "packed": ("#4f6d7a", "s"), "decomposed": ("#2a9d5c", "^")}
LINES = (
    ("milliseconds", "whole pass, ms", 1.0),
    ("attention_milliseconds", "attention alone, ms", 1.0),
    ("peak_bytes", "allocated at the peak, MiB", 2.0**20),
)


def draw(rows: list[Row], folder: str | Path | None) -> list[str]:
    """Write ``spin_decompose.png``; returns the files."""
    folder = Path(folder or ".")
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(r["lengths"] for r in rows))
    with plt.rc_context({"font.size": 10}):
        drawing, panels = plt.subplots(
            len(LINES), len(names), figsize=(2.9 * len(names), 2.5 * len(LINES)), sharex=True, sharey="row"
        )
        for (column, label, unit), line in zip(LINES, panels):
            for name, panel in zip(names, line):
                for method, (colour, marker) in STYLES.items():
                    some = [r for r in rows if r["lengths"] == name and r["method"] == method]
                    panel.plot(
                        [r["batch"] for r in some],
                        [r[column] / unit for r in some],
                        color=colour,
                        marker=marker,
                        markersize=5,
                        label=method,
                    )
                panel.set_xscale("log", base=2)
                if column != "peak_bytes":
                    panel.set_yscale("log", base=2)
                    panel.yaxis.set_major_formatter(ScalarFormatter())
                panel.grid(alpha=0.3)
            line[0].set_ylabel(label)
            if column == "peak_bytes":
                line[0].set_ylim(bottom=0)  # after all are drawn: it fixes the top as well
        batches = sorted({r["batch"] for r in rows})
        for name, top, bottom in zip(names, panels[0], panels[-1]):
            top.set_title(name.replace("_", " "))
            bottom.set_xlabel("batch")
            bottom.set_xticks(batches, [str(b) for b in batches])
        panels[0][0].legend(frameon=False)
        drawing.suptitle("A verify pass over rows of different lengths: padded, packed, decomposed")
        drawing.tight_layout()
        file = folder / "spin_decompose.png"
        drawing.savefig(file, dpi=110, bbox_inches="tight")
        plt.close(drawing)
    return [str(file)]
