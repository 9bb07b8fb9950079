"""Where SPIN's parts pay, by a time model: raggedness, draft/target cost, batch and cores, all compared at equal cores.

    python recipes/spin_regime.py --json docs/results/spin_regime.json --plots docs/figures

`specdec.lab.regime` says what the model counts. A server's CPU with a small target (`--target`), and a GPU of 108
multiprocessors with the paper's LLaMA 7B and, `A100, 8 heads`, with Llama 3 8B. Rows: `machine, raggedness, ratio, batch, cores, context`, how many times faster a round is with
selection, decomposition (over packed attention, and `over_padded`) and the pipeline, each alone, which of them gain at least 2 %
(`pays`), selection with a device for every draft (`own_devices`, not at equal cores), `speculation` over plain decoding, the pipeline's `micro_batches`, and whether rows are really `cut`. The head-room of
selection, `--headroom`, is what the best draft of every request is worth in tokens: `spin_selection.py` measures it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import checkout  # noqa: F401
import numpy as np

from specdec import zoo
from specdec.cost import Hardware, Shape
from specdec.lab import plots
from specdec.lab.console import table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted
from specdec.lab.regime import Machine, Regime, grid

LLAMA_7B = Shape(32, 4096, 32, 32, 128, 11008, 32000)
# Fewer key-value heads: fewer items of work in attention.
LLAMA_3_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256)
PARTS = ("selection", "over_padded", "decomposition", "pipeline")


@dataclass(frozen=True)
class Settings(Plotted):
    target: str = option("pocket-target", "name in the zoo: the CPU's target")
    raggedness: tuple[float, ...] = option((0.0, 0.5, 1.0), "standard deviations of the logarithm of lengths")
    ratios: tuple[float, ...] = option((0.02, 0.1, 0.3), "cost of a draft's pass over the target's")
    batches: tuple[int, ...] = option((1, 4, 16, 64), "rows at once")
    cores: tuple[int, ...] = option((1, 2, 8, 32), "cores of the CPU")
    context: int = option(1024, "mean tokens of a row on the CPU")
    gpu_contexts: tuple[int, ...] = option((1024, 16384), "mean tokens of a row on the GPU")
    tau: float = option(2.8, "tokens of a round with the best fixed draft")
    headroom: float = option(1.1, "tokens of a round with each request's best draft over those")
    k: int = option(4, "drafted tokens per round")
    gflops: float = option(60.0, "GFLOP/s of one core")
    gigabytes: float = option(12.0, "GB/s of one core")
    memory: float = option(60.0, "GB/s of all cores")
    overhead: float = option(0.3, "milliseconds of a pass that no core shortens")
    serial: float = option(0.05, "part of a product that one core does alone")
    quick: bool = option(False, "few points, as a smoke test")


def main(s: Settings) -> list[dict[str, Any]]:
    s.begin()
    if s.quick:
        s = replace(s, ratios=(0.1,), batches=(1, 16), cores=(1, 8), gpu_contexts=(16384,))
    rows = grid(points(s))
    shown = (
        "machine",
        "context",
        "cores",
        "raggedness",
        "ratio",
        "batch",
        "speculation",
        *PARTS,
        "cut",
        "pays",
    )
    print(table(rows, shown))
    for machine in dict.fromkeys(r["machine"] for r in rows):
        mine = [r for r in rows if r["machine"] == machine]
        found = Counter(part for r in mine for part in r["pays"] or ("nothing",))
        print(
            f"\n{machine}, {len(mine)} points: "
            + ", ".join(f"{part} pays at {n}" for part, n in found.most_common())
        )
    s.save([{**r, "pays": "+".join(r["pays"])} for r in rows])
    s.draw({"spin_regime": lambda: drawn(s, rows)})
    return rows


def points(s: Settings) -> list[Regime]:
    """The points of both machines."""
    core = Hardware("CPU", s.gflops * 1e9, s.gigabytes * 1e9, s.overhead * 1e-3, 1e-5)
    cpu = Machine(core, s.memory * 1e9, s.serial)
    # 40 multiprocessors can saturate its memory.
    sm = Hardware("A100", 312e12 / 108, 2.039e12 / 40, 1e-5, 1e-5)
    gpu = Machine(sm, 2.039e12, item=2e-7)
    small = Shape.of(zoo.load(s.target)[0].config)
    common = {"k": s.k, "tau": s.tau, "headroom": s.headroom}
    places = [(small, cpu, cores, s.context, 4.0) for cores in s.cores]
    places += [(LLAMA_7B, gpu, 108, context, 2.0) for context in s.gpu_contexts]
    places += [
        (LLAMA_3_8B, replace(gpu, core=replace(sm, name="A100, 8 heads")), 108, s.gpu_contexts[-1], 2.0)
    ]
    return [
        Regime(target, machine, cores, ragged, ratio, batch, context, bytes_per_value=size, **common)
        for (target, machine, cores, context, size), ragged, ratio, batch in product(
            places, s.raggedness, s.ratios, s.batches
        )
    ]


def drawn(s: Settings, rows: list[dict[str, Any]]) -> Any:
    """Gains of each part: a line of panels for each machine and number of cores, batch by raggedness and ratio."""
    places = list(dict.fromkeys((r["machine"], r["cores"], r["context"]) for r in rows))
    size = (3.1 * len(PARTS), 2.2 * len(places))
    drawing, panels = plots.panels(len(places), len(PARTS), size, layout="tight", sharex=True, sharey=True)
    norm = plots.around_one(1.5, 1.5)
    for part, axes in zip(PARTS, panels[0]):
        axes.set_title(part.replace("_", " "), fontsize=9)
    for line, place in zip(panels, places):
        mine = {
            (r["raggedness"], r["ratio"], r["batch"]): r
            for r in rows
            if (r["machine"], r["cores"], r["context"]) == place
        }
        across = list(product(s.raggedness, s.ratios))
        for axes, part in zip(line, PARTS):
            cells = np.array([[mine[(*at, batch)][part] for at in across] for batch in s.batches])
            axes.imshow(cells.clip(0.5, 1.5), cmap="RdBu", norm=norm, origin="lower", aspect="auto")
            for (i, j), value in np.ndenumerate(cells):
                dark = abs(norm(np.clip(value, 0.5, 1.5)) - 0.5) > 0.3
                color = "white" if dark else "black"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=5, color=color)
            axes.set_xticks(range(len(across)), [f"{a:g}, {r:g}" for a, r in across], rotation=60, fontsize=6)
            axes.set_yticks(range(len(s.batches)), [str(b) for b in s.batches], fontsize=6)
        machine, cores, context = place
        line[0].set_ylabel(f"{machine}, {cores}, {context}\nbatch", fontsize=7)
    panels[-1][0].set_xlabel("raggedness, draft/target cost", fontsize=7)
    return drawing


if __name__ == "__main__":
    main(parse(Settings, __doc__))
