"""The pipeline against its time model: rounds measured serially, with a barrier, and in the steady state, for 1, 2, ... micro-batches.

    python recipes/spin_pipeline.py --json docs/results/spin_pipeline.json --plots docs/figures

Drafting ``d(b)`` and verification ``v(b)`` are fitted to serial rounds of other sizes in the same run (``cost.pipeline.TimeModel``; on
a GPU the host waits between the two, in these rounds alone); the other rounds are predicted from them. Two cores: the target's process and, for ``workers=processes``, a drafting process. Rows:
`draft, batch, mode, workers, micro_batches, milliseconds` (a round of all rows, median of interleaved repeats), `predicted`, `ratio`,
`gain` (serial / this), `predicted_gain`, `share_of_gain`, and `draft_slowdown`, `verify_slowdown`: a stage's seconds over the model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import specdec as sd
from specdec import zoo
from specdec.executors import Pipelined, Timeline
from specdec.lab.console import quiet
from specdec.lab.options import option, parse
from specdec.lab.pipeline import Comparison
from specdec.lab.report import write
from specdec.lab.workload import workload


@dataclass(frozen=True)
class Settings:
    drafts: tuple[str, ...] = option(("pocket-code", "pocket-vanilla"), "names in the zoo")
    batches: tuple[int, ...] = option((8, 16), "rows at a time")
    micro_batches: tuple[int, ...] = option((2, 4), "parts of a batch")
    workers: tuple[str, ...] = option(("processes", "threads"), "what drafts")
    rounds: int = option(12, "timed rounds of a run")
    k: int = option(4, "drafted tokens a round")
    longest: int = option(600, "tokens of the longest prompt")
    repeats: int = option(3, "timed runs")
    seed: int = option(0)
    quick: bool = option(False, "a small batch, one repeat: to see that it runs")
    json: str | None = option(None, "write the rows as JSON", metavar="FILE")
    plots: str | None = option(None, "folder for the time line", metavar="DIR")


def main(s: Settings) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    quiet()
    if s.quick:
        s = replace(s, drafts=("pocket-vanilla",), batches=(4,), micro_batches=(2,), rounds=4, repeats=1)
    target = sd.HFModel(*zoo.load("pocket-target"))
    compare = Comparison(s.micro_batches, s.workers, s.rounds, s.repeats, s.seed)
    out: list[dict[str, Any]] = []
    for name in s.drafts:
        decoder = sd.decoder(target).draft(sd.HFModel(*zoo.load(name)), s.k).build()
        for batch in s.batches:
            out += compare.rows(name, decoder, workload(target.tokenizer, batch, s.longest, s.seed).rows)
            show(batch, name, out)
    if s.json:
        write(s.json, out, s.seed)
    if s.plots:
        picture(s, Path(s.plots), target)
    return out


def show(batch: int, name: str, rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{name}, batch {batch}: mode            m   ms/round  predicted  ratio   gain  (said)  share   d x   v x"
    )
    for r in rows:
        if (r["draft"], r["batch"]) == (name, batch):
            share = "" if r["share_of_gain"] is None else f"{r['share_of_gain']:6.0%}"
            print(
                f"{r['mode'] + ' ' + (r['workers'] or ''):38}{r['micro_batches']:3} {r['milliseconds']:9.1f} {r['predicted']:10.1f}"
                f" {r['ratio']:6.2f} {r['gain']:6.2f} {r['predicted_gain']:6.2f}  {share:6} {r['draft_slowdown']:5.2f} {r['verify_slowdown']:5.2f}"
            )
    errors = sorted(abs(r["ratio"] - 1) for r in rows)
    print(f"median error of the time model so far: {errors[len(errors) // 2]:.0%}")


def picture(s: Settings, folder: Path, target: Any) -> None:
    """The time line of a pipeline of two micro-batches."""
    folder.mkdir(parents=True, exist_ok=True)
    line = Timeline()
    rows = workload(target.tokenizer, 8, s.longest, s.seed).rows
    draft = sd.HFModel(*zoo.load(s.drafts[-1]))
    executor = Pipelined(2, workers="processes", timeline=line)
    sd.decoder(target).draft(draft, s.k).executor(executor).build().generate(
        rows, 40, seed=s.seed, eos_token_id=()
    )
    end = line.seconds
    line.plot(folder / "spin_timeline.png", (0.4 * end, 0.8 * end))
    line.chrome(folder / "spin_timeline.json")


if __name__ == "__main__":
    main(parse(Settings, __doc__))
