"""The pipeline against its time model: rounds measured serially, with a barrier, and in the steady state, for 1, 2, ... micro-batches.

    python recipes/spin_pipeline.py --json docs/results/spin_pipeline.json --plots docs/figures

Drafting ``d(b)`` and verification ``v(b)`` are fitted to serial rounds of other sizes in the same run (``cost.pipeline.TimeModel``; on
a GPU the host waits between the two in these rounds only); the other rounds are predicted from them. It needs two cores: the target's
process and, for ``workers=processes``, a drafting process. Rows: `draft, batch, mode, workers, micro_batches, milliseconds` (a round of
all rows, median of interleaved repeats), `predicted`, `ratio`, `gain` (serial / this), `predicted_gain`, `share_of_gain`, and
`draft_slowdown`, `verify_slowdown`: a stage's seconds over the model's.

Rows with `mode = "search"` are whole runs with every number of micro-batches up to `--most`: `tokens_per_second` (medians of interleaved
repeats after one that is not counted), the `predicted_gain` of the model that `executors.tune` fits to its own serial rounds, and `tuned`,
whether its search ended at this number. The paper's search found about 5 on Alpaca and 3 on CP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import checkout  # noqa: F401

import specdec as sd
from specdec import zoo
from specdec.executors import Pipelined, Serial, Timeline, tune
from specdec.lab.arms import pool_run
from specdec.lab.clock import shuffled
from specdec.lab.console import progress, short_errors, table
from specdec.lab.options import option, parse
from specdec.lab.pipeline import PipelineComparison
from specdec.lab.recipe import Plotted
from specdec.lab.workload import workload

COLUMNS = [
    "draft",
    "mode",
    "workers",
    "batch",
    "micro_batches",
    "milliseconds",
    "predicted",
    "ratio",
    "gain",
    "predicted_gain",
    "share_of_gain",
    "draft_slowdown",
    "verify_slowdown",
]
SEARCHED = [
    "draft",
    "batch",
    "micro_batches",
    "tokens_per_second",
    "low",
    "high",
    "gain",
    "predicted_gain",
    "tuned",
]


@dataclass(frozen=True)
class Settings(Plotted):
    drafts: tuple[str, ...] = option(("pocket-900k", "pocket-vanilla"), "names in the zoo")
    batches: tuple[int, ...] = option((8, 16), "rows at a time")
    micro_batches: tuple[int, ...] = option((2, 4), "micro-batches of a batch")
    workers: tuple[str, ...] = option(("processes", "threads"), "what drafts")
    rounds: int = option(12, "timed rounds of a run")
    most: int = option(8, "micro-batches of the search; 0: no search")
    tokens: int = option(64, "new tokens of a row in the search")
    k: int = option(4, "drafted tokens per round")
    longest: int = option(600, "tokens of the longest prompt")
    repeats: int = option(3, "timed runs")
    quick: bool = option(False, "a small batch and one repeat, as a smoke test")


def main(s: Settings) -> list[dict[str, Any]]:
    s.begin()
    if s.quick:
        s = replace(
            s,
            drafts=("pocket-vanilla",),
            batches=(4,),
            micro_batches=(2,),
            rounds=4,
            repeats=1,
            most=3,
            tokens=16,
        )
    target = sd.HFModel(*zoo.load("pocket-target"))
    if min(s.batches) < 4:
        raise SystemExit(
            f"--batches {min(s.batches)}: give 4 rows or more, since the time model is fitted to a half and a quarter of them"
        )
    with short_errors():
        compare = PipelineComparison(s.micro_batches, s.workers, s.rounds, s.repeats, s.seed)
    out: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for name in s.drafts:
        decoder = sd.decoder(target).draft(sd.HFModel(*zoo.load(name)), s.k).build()
        for batch in s.batches:
            progress(f"{name}, batch {batch}", stays=True)
            rows = workload(target.tokenizer, batch, s.longest, s.seed).rows
            out += compare.rows(name, decoder, rows)
            if s.most:
                found += searched(s, name, decoder, rows)
    s.save(out + found)
    print(table(out, COLUMNS), "\n\n" + table(found, SEARCHED) if found else "")
    errors = [
        abs(r["ratio"] - 1) for r in out if r["mode"] != "serial"
    ]  # the model is fitted to serial rounds
    print(f"median error of the time model, serial rounds left out: {median(errors):.1%}")
    if s.plots:
        picture(s, Path(s.plots), target)
    return out + found


def searched(s: Settings, name: str, decoder: Any, rows: list[list[int]]) -> list[dict[str, Any]]:
    """A row for every number of micro-batches: goodput, and whether ``tune`` chose it. 1 is the serial executor."""
    how, batch = Pipelined(workers=s.workers[0]), len(rows)
    tuned = tune(decoder, rows, s.tokens, executor=how, repeats=s.repeats, seed=s.seed)
    chosen = tuned.executor.micro_batches if isinstance(tuned.executor, Pipelined) else 1
    counts = range(1, min(s.most, batch) + 1)
    runs: dict[int, list[float]] = {m: [] for m in counts}
    for turn in range(s.repeats + 1):
        for m in shuffled(counts, turn):
            executor = Serial() if m == 1 else replace(how, micro_batches=m)
            run = pool_run(replace(decoder, executor=executor), rows, s.tokens, s.seed + turn)
            runs[m] += [run.goodput] if turn else []
    return [
        {
            "draft": name, "batch": batch, "mode": "search", "workers": how.workers, "micro_batches": m,
            "tokens_per_second": median(speeds), "low": min(speeds), "high": max(speeds),
            "gain": median(a / b for a, b in zip(speeds, runs[1])), "predicted_gain": tuned.model.gain(batch, m) if m > 1 else 1.0,
            "tuned": m == chosen, "observed": tuned.observed.get(m),
        }
        for m, speeds in runs.items()
    ]  # fmt: skip


def picture(s: Settings, folder: Path, target: Any) -> None:
    """The timeline of a pipeline of two micro-batches."""
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
