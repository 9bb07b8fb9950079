"""SPIN in a stream of requests: what it is worth to let requests of one kind join one after another.

    python recipes/spin_stream.py --json docs/results/spin_stream.json

The requests of `spin_end_to_end.py` (three domains, greedy and sampled ones in turn, ragged prompts), more of them than rows, are all there
from the start. A row that has ended makes room for the next request, so the batch stays full until the last requests. `admission`: `in order`, as they arrive, or
`by kind`: those of one temperature one after another, where at most `--patience` later ones join before a request (`serving.ByKind`). Each configuration has rows for both.

Rows: `configuration, admission, batch, attention, cores`, and

- `goodput`: tokens a second after the target's prefills, whose seconds are left out. A draft that is a model of its own reads a new text in the round after the
  prefill, which is not left out; SPIRe, which reads the target's activations, begins with the prefill.
- `ratio_to_plain`, `ratio_to_best_fixed`: of goodputs, with the same admission. `ratio_to_best_of_all`: to the best fixed draft in the faster of its two orders.
- `throughput`: tokens a second with everything. `latency`, `latency_p95`: mean and 95th percentile of the requests, in seconds.
- `tau`; `arms`: the share of rounds of each, over rows; `drafts_a_round`: how many different arms the rows of a round have.

Intervals (`_low`, `_high`) are 95 % bootstraps over streams; with fewer than 5 streams there are none.

- `plain`, `fixed:NAME`, `best_fixed`, `selection` (the paper's selector), `pooled` and `planned` are those of `spin_end_to_end.py`, and learn and are measured
  beforehand as there. `best_fixed` is the best in hindsight over all streams, in order, and is run again with the others. All drafts are run on the
  first stream, and on the others those that had at least 0.8 of the fastest one's tokens a second there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from time import perf_counter
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch
from spin_end_to_end import POOL, Parts, Place
from spin_end_to_end import Settings as EndToEnd

import specdec as sd
from specdec.lab import console
from specdec.lab.arms import PoolRun, goodput
from specdec.lab.clock import shuffled
from specdec.lab.options import option, parse
from specdec.lab.workload import Workload, temperatures
from specdec.serving import ByKind
from specdec.types import Round

COLUMNS = ("configuration", "admission", "is", "goodput", "ratio_to_plain", "ratio_to_best_fixed", "ratio_to_best_of_all", "ratio_to_best_of_all_low",
           "ratio_to_best_of_all_high", "drafts_a_round", "throughput", "latency", "tau")  # fmt: skip
ADMISSIONS = ("in order", "by kind")
Runs = dict[tuple[str, str], list["StreamRun"]]


@dataclass(frozen=True)
class Settings(EndToEnd):
    places: tuple[str, ...] = option(("auto/1",), "attention/cores; one")
    repeats: int = option(5, "streams, each run by all configurations")
    requests: int = option(144, "requests of a stream")
    configurations: tuple[str, ...] = option(
        ("plain", "best_fixed", "pooled", "planned"), "of plain, best_fixed, selection, pooled, planned"
    )
    patience: int = option(256, "how many later requests may join before one")


@dataclass(frozen=True)
class StreamRun(PoolRun):
    """A ``PoolRun`` of a stream. latency: of the requests, in seconds. different: arms of a round, on average."""

    latency: tuple[float, ...] = ()
    different: float = 0.0


def stream_run(
    decoder: Any,
    work: Workload,
    kinds: Sequence[Any],
    s: Settings,
    batch: int,
    seed: int,
    admission: ByKind | None,
    selection: Any,
) -> StreamRun:
    """Serve all requests, ``batch`` at a time."""
    prefills, made, arms, different = 0.0, 0, Counter[int](), list[int]()

    def note(round: Round) -> None:
        nonlocal prefills, made
        if round.number:
            made += int(round.committed.sum())
            arms.update(round.arm.tolist())
            different.append(len(round.arm.unique()))
        else:
            prefills += round.seconds["total"]

    if selection is None and decoder.selecting is not None:
        selection = decoder.begin(batch)
    requests = [sd.Request(row, s.tokens, eos_token_id=(), key=kind) for row, kind in zip(work.rows, kinds)]
    began, before = perf_counter(), selection.seconds if selection else 0.0
    done = list(
        decoder.serve(requests, batch, seed=seed, on_round=note, selection=selection, admission=admission)
    )
    whole = perf_counter() - began
    stats = sum((one.stats for one in done[1:]), done[0].stats)
    ids = [one.ids for one in sorted(done, key=lambda one: one.index)]
    spent = selection.seconds - before if selection else 0.0
    latency = tuple(one.latency for one in done)
    rounds = len(different)
    about: Any = {"latency": latency, "different": mean(different)}
    return StreamRun(made, whole - prefills, stats, arms, ids, spent, rounds, whole, **about)


class Streams:
    """The decoders of the configurations for one batch, and what they learned or measured beforehand."""

    def __init__(self, s: Settings, parts: Parts, batch: int):
        self.s, self.parts, self.batch = s, parts, batch
        (self.place,) = parts.places
        self.temperatures = temperatures(s.temperatures, s.requests)
        parts.profile(batch)
        self.taught = parts.taught(batch)
        self.planned = parts.planned(self.place, batch, s.requests)

    def play(self, name: str, order: str, work: Workload, seed: int) -> StreamRun:
        """A run of a configuration."""
        s, parts, N, at = self.s, self.parts, self.s.requests, self.place.attention
        kinds, selection = list[Any](self.temperatures), None
        if name == "plain":
            decoder = parts.plain(N, at).build()
        elif name == "planned":
            decoder = self.planned
        elif name == "selection":
            decoder = parts.paper(N, at, self.batch).build()
        elif name == "pooled":
            decoder = parts.pooled(N, at)
            selection = decoder.begin(self.batch)
            selection.state = self.taught.state  # states are values, so this can be shared
        else:
            decoder = parts.fixed(name.removeprefix("fixed:"), N, at)
        admission = ByKind(lambda request: request.key, s.patience, N) if order == "by kind" else None
        torch.set_num_threads(self.place.cores)
        run = stream_run(decoder, work, kinds, s, self.batch, seed, admission, selection)
        torch.set_num_threads(1)
        names = decoder.selecting.names if decoder.selecting is not None else (name,)
        arms: Counter[Any] = Counter({names[a]: n for a, n in run.arms.items()})
        return replace(run, arms=arms)


def main(s: Settings) -> list[dict[str, Any]]:
    if s.quick:
        s = replace(s, batches=(3,), repeats=1, learn=3, tokens=16, calibrate=1, requests=12)
        s = replace(s, configurations=("plain", "best_fixed", "selection", "pooled", "planned"))
        s = replace(s, pool=(POOL[0], f"{POOL[1]}/2", "ngram", "none"))
    if not {"plain", "best_fixed"} <= set(s.configurations):
        raise SystemExit("--configurations needs plain and best_fixed, with which the others are compared")
    if len(s.places) != 1:
        raise SystemExit("--places: give one, such as auto/1")
    s.begin()
    parts = Parts(s)
    works = [parts.workload(s.requests, turn) for turn in range(s.repeats)]
    rows: list[dict[str, Any]] = []
    for batch in s.batches:
        streams, runs = Streams(s, parts, batch), Runs()
        best = alone(streams, works, runs)
        names = {"best_fixed": f"fixed:{best}"}
        plans = [(name, order) for name in s.configurations for order in ADMISSIONS]
        runs |= {plan: [] for plan in plans}
        for turn, work in enumerate(works):
            for name, order in shuffled(plans, turn):
                console.progress(f"stream {turn + 1} of {s.repeats}: {name}, {order}")
                run = streams.play(names.get(name, name), order, work, s.seed + turn)
                runs[name, order].append(run)
        rows += table(runs, streams.place, batch, best)
        print(f"\nbatch {batch}\n" + console.table([r for r in rows if r["batch"] == batch], COLUMNS))
    s.save(rows)
    return rows


def alone(streams: Streams, works: Sequence[Workload], runs: Runs) -> str:
    """Add the runs of each draft alone, in order; the name of the fastest. Slow ones are given up after the first stream."""
    drafts = [name for name, arm in streams.parts.arms.items() if arm.draft is not None]
    speed: dict[str, float] = {}
    for turn, work in enumerate(works):
        for name in drafts:
            console.progress(f"stream {turn + 1} of {len(works)}: {name}")
            mine = runs.setdefault((f"fixed:{name}", ADMISSIONS[0]), [])
            mine.append(streams.play(f"fixed:{name}", ADMISSIONS[0], work, streams.s.seed + turn))
            speed[name] = goodput(mine)[0]
        drafts = [name for name in drafts if turn or speed[name] >= 0.8 * max(speed.values())]
    return max(drafts, key=lambda name: speed[name])


def table(runs: Runs, place: Place, batch: int, best: str) -> list[dict[str, Any]]:
    """A row per configuration and admission."""
    fastest = max(ADMISSIONS, key=lambda order: goodput(runs["best_fixed", order])[0])
    out = []
    for (name, order), mine in runs.items():
        row: dict[str, Any] = {"configuration": name, "admission": order, "batch": batch}
        row |= {"cores": place.cores, "attention": place.attention}
        row["is"] = best if name == "best_fixed" else None
        row |= zip(("goodput", "goodput_low", "goodput_high"), goodput(mine))
        for what, base in (
            ("plain", ("plain", order)),
            ("best_fixed", ("best_fixed", order)),
            ("best_of_all", ("best_fixed", fastest)),
        ):
            alike = len(runs[base]) == len(mine)  # not of a draft that was given up
            found = goodput(mine, runs[base]) if alike else (None, None, None)
            row |= zip((f"ratio_to_{what}", f"ratio_to_{what}_low", f"ratio_to_{what}_high"), found)
        tokens = sum(sum(map(len, run.ids)) for run in mine)
        row["throughput"] = tokens / sum(run.call for run in mine)
        latency = [seconds for run in mine for seconds in run.latency]
        row |= {"latency": mean(latency), "latency_p95": float(np.quantile(latency, 0.95))}
        row["drafts_a_round"] = mean(run.different for run in mine)
        row |= {"tau": mean(run.stats.tau for run in mine), "streams": len(mine)}
        arms: Counter[Any] = sum((run.arms for run in mine), Counter())
        row["arms"] = {str(arm): n / arms.total() for arm, n in arms.items()}
        out.append(row)
    return out


if __name__ == "__main__":
    main(parse(Settings, __doc__))
