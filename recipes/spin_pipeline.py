"""The pipeline against its time model: rounds measured serially, with a barrier, and in the steady state, for 1, 2, ... micro-batches.

    python recipes/spin_pipeline.py --json docs/results/spin_pipeline.json --plots docs/figures

DraftRunner ``d(b)`` and verification ``v(b)`` are fitted to serial rounds of other sizes in the same run (``cost.pipeline.TimeModel``; on
a GPU the host waits between the two, in these rounds alone); the other rounds are predicted from them. Two cores: the target's process and, for ``workers=processes``, a drafting process. Rows:
`draft, batch, mode, workers, micro_batches, milliseconds` (a round of all rows, median of interleaved repeats), `predicted`, `ratio`,
`gain` (serial / this), `predicted_gain`, `share_of_gain`, and `draft_slowdown`, `verify_slowdown`: a stage's seconds over the model's.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from _measure import quiet
from _report import write
from _spin_workload import workload

import specdec as sd
from specdec import zoo
from specdec.cost.pipeline import TimeModel
from specdec.executors import Pipelined, Serial, Timeline
from specdec.types import Round


@dataclass
class Settings:
    """Every setting of a run."""

    drafts: str = "pocket-code,pocket-vanilla"
    batches: str = "8,16"
    micro_batches: str = "2,4"
    workers: str = "processes,threads"
    rounds: int = 12
    k: int = 4
    longest: int = 600
    repeats: int = 3
    seed: int = 0
    quick: bool = False
    json: str | None = None
    plots: str | None = None


class _Enough(Exception):
    """The timed rounds are over: no others are needed."""


class _Waited:
    """Mixed into a draft: a proposal is there when ``propose`` returns, so that its seconds are those of the device's work."""

    def propose(self, *args: Any) -> Any:
        answer = super().propose(*args)  # type: ignore[misc]
        torch.cuda.synchronize()
        return answer


def waited(decoder: Any) -> Any:
    """A decoder whose rounds' seconds are the stages' own, on a GPU, too; there a draft otherwise only hands its work over."""
    if getattr(decoder.target, "device", torch.device("cpu")).type != "cuda":
        return decoder
    draft = object.__new__(type("Waited" + type(decoder.draft).__name__, (_Waited, type(decoder.draft)), {}))
    vars(draft).update(vars(decoder.draft))
    return replace(decoder, draft=draft)


def timed(
    decoder: Any, rows: list[list[int]], rounds: int, micro: int, seed: int
) -> tuple[float, list[tuple[int, float, float]]]:
    """Seconds of a round of all rows, over the middle of a run in which no row ends, and (rows, draft, verify) of its parts."""
    marks: list[float] = []
    parts: list[tuple[int, float, float]] = []

    def mark(round: Round) -> None:
        if round.number > 1:
            marks.append(perf_counter())
            s = round.seconds
            parts.append((len(round.kept), s["draft"], s["target"] + s["verify"]))
        if len(marks) > rounds * micro:
            raise _Enough

    with suppress(_Enough):
        decoder.generate(rows, (decoder.length + 1) * (rounds + 4), seed=seed, eos_token_id=(), on_round=mark)
    return (marks[-1] - marks[0]) / (len(marks) - 1) * micro, parts[1:]


def main(s: Settings) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    quiet()
    target = sd.HFModel(*zoo.load("pocket-target"))
    out: list[dict[str, Any]] = []
    for name in s.drafts.split(","):
        decoder = sd.decoder(target).draft(sd.HFModel(*zoo.load(name)), s.k).build()
        for batch in [int(b) for b in s.batches.split(",")]:
            rows = workload(target.tokenizer, batch, s.longest, s.seed).rows
            out += one(s, name, decoder, rows)
            show(out[-1]["batch"], name, out)
    if s.json:
        write(s.json, out, s.seed)
    if s.plots:
        picture(s, Path(s.plots), target)
    return out


def one(s: Settings, name: str, decoder: Any, rows: list[list[int]]) -> list[dict[str, Any]]:
    """All modes for one draft and batch, interleaved."""
    batch = len(rows)
    modes: dict[tuple[str, str, int], Any] = {("serial", "", 1): Serial()}
    for workers in s.workers.split(","):
        for m in [int(m) for m in s.micro_batches.split(",")]:
            if m <= batch:
                modes["steady", workers, m] = Pipelined(m, workers=workers, ahead=False)
                if workers == "processes":
                    modes["barrier", workers, m] = Pipelined(m, workers=workers, ahead=False, barrier=True)
    times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    parts: dict[tuple[str, str, int], list[tuple[int, float, float]]] = defaultdict(list)
    samples: list[tuple[int, float, float]] = []
    serial = replace(decoder, executor=Serial())
    for turn in range(s.repeats + 1):
        for size in sorted({max(1, batch // part) for part in (2, 4, 8)}):
            found = timed(waited(serial), rows[:: batch // size][:size], s.rounds // 2, 1, s.seed + turn)[1]
            samples += found if turn else []
        order = list(modes.items())
        for key, executor in order[turn % len(order) :] + order[: turn % len(order)]:
            seconds, found = timed(replace(decoder, executor=executor), rows, s.rounds, key[2], s.seed + turn)
            if turn:
                times[key].append(seconds)
                parts[key] += found
    model = TimeModel.fit(samples)
    base = median(times["serial", "", 1])
    out = []
    for (mode, workers, m), seconds in times.items():
        predicted = {
            "serial": model.serial(batch),
            "barrier": model.barrier(batch, m),
            "steady": model.steady(batch, m),
        }[mode]
        measured, said = median(seconds), model.serial(batch) / predicted
        gain = median(a / b for a, b in zip(times["serial", "", 1], seconds))
        d, v = (median(p[i] for p in parts[mode, workers, m]) for i in (1, 2))
        out.append(
            {
                "draft": name,
                "batch": batch,
                "mode": mode,
                "workers": workers or None,
                "micro_batches": m,
                "milliseconds": 1e3 * measured,
                "predicted": 1e3 * predicted,
                "ratio": measured / predicted,
                "gain": gain,
                "predicted_gain": said,
                "share_of_gain": (gain - 1) / (said - 1) if said > 1.001 else None,
                "draft_slowdown": d / model.d(batch / m),
                "verify_slowdown": v / model.v(batch / m),
                "serial_milliseconds": 1e3 * base,
                "draft_model": list(model.draft),
                "verify_model": list(model.verify),
            }
        )
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
    draft = sd.HFModel(*zoo.load(s.drafts.split(",")[-1]))
    executor = Pipelined(2, workers="processes", timeline=line)
    sd.decoder(target).draft(draft, s.k).executor(executor).build().generate(
        rows, 40, seed=s.seed, eos_token_id=()
    )
    end = line.seconds
    line.plot(folder / "spin_timeline.png", (0.4 * end, 0.8 * end))
    line.chrome(folder / "spin_timeline.json")


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument("--drafts", default=d.drafts, help="names in the zoo (default %(default)s)")
    parser.add_argument("--batches", default=d.batches)
    parser.add_argument("--micro-batches", default=d.micro_batches)
    parser.add_argument("--workers", default=d.workers)
    parser.add_argument("--rounds", type=int, default=d.rounds, help="timed rounds of a run")
    parser.add_argument("--k", type=int, default=d.k)
    parser.add_argument("--longest", type=int, default=d.longest)
    parser.add_argument("--repeats", type=int, default=d.repeats)
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--plots", help="folder for the time line")
    s = Settings(**vars(parser.parse_args()))
    if s.quick:
        s.drafts, s.batches, s.micro_batches, s.rounds, s.repeats = "pocket-vanilla", "4", "2", 4, 1
    return s


if __name__ == "__main__":
    main(settings())
