"""The GPU suite: correctness, kernels, steps, the paper's shapes, SPIN and batch-invariant bf16 on one GPU, in stages.

    python recipes/gpu/suite.py --command 1 --json docs/results/gpu_suite.json     # on a machine with a GPU: about 7 minutes
    python recipes/gpu/suite.py --stages a+t,g --json docs/results/gpu_suite.json  # some stages, here two of them at the same time
    python recipes/gpu/suite.py --toy                                              # the same code on a CPU, tiny

a  correctness of every attention backend and of the verification kernels against float64, by several processes (which compile in parallel)
t  the tests that need a GPU
g  logits of two layers of the Llama-3-8B shape against transformers', and texts with graphs against texts without
p  profiles of plain and speculative rounds
b  kernels: time and bytes beside a copy and a matrix product measured in the same run; a table of Triton configurations
c  steps of a Llama-3-8B-shaped model with random weights: plain and verify, beside their floor
s  speculative rounds of that model, and their tokens a second at a prescribed acceptance
h  greedy decoding of that model
i  transformers' generate, compiled and not, in a process of its own
f  batch-invariant bf16: sampled speculative output equal to plain decoding's to the bit, and what that costs
d  the paper's shapes: train a 67 M target and drafts on local Python source, tau, and the measured grid beside the model
e  SPIN's decomposition, and its pipeline on streams

A stage stops when its --minutes are over (its parts have fixed shares of them), counted from the end of the stage before, and its
process is ended at most 45 seconds later; time that a stage overruns is taken from the next one, so the whole run ends at most 45
seconds after the sum. seconds are medians; floor_seconds is a lower bound (bytes at the rate of a copy, or FLOPs at that of a matrix
product); share_of_floor = floor_seconds / seconds; max_error is the largest, over the vectors of an output, of
|out - reference| / |reference|. --json rewrites FILE, and a table beside it (.md), after every row, so that an aborted run keeps its
measurements. If FILE has rows of other stages, they stay; rows of the stages that are run are replaced.
A failure gives a row, the run continues, and the exit code is 1. The suite works in a checkout that is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

Row = dict[str, Any]
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:  # this checkout's ``recipes.gpu`` and ``specdec``, installed or not
    sys.path.insert(0, ROOT)
BEGAN = monotonic()  # before torch is imported, which is slow on a machine that has just started
STAGES = {
    "a": "correct", "t": "checks", "g": "whole", "p": "profiles", "b": "kernels", "c": "steps", "s": "rounds",
    "h": "ours", "i": "others", "f": "invariant", "d": "paper", "e": "spin",
}  # fmt: skip
SHARES = {"a": 6}  # processes of a stage on a GPU
COMMANDS = {"1": ("a+t+g,b,c,s,h,i", "1.75,1,1,0.85,0.95,1.5"), "2": ("d,e,f,p", "3,1,0.6,0.6")}
"""Stages and minutes of two runs. If no stage needs its grace, both take 15 minutes at most, the starts of a machine included."""
GRACE = 45.0  # seconds beyond --minutes until a stage's process is ended
POLL = 0.5  # seconds between reads of the rows of a stage's process


@dataclass
class Settings:
    stages: str = "a+t+g,p,b,c,s,f,h,i,d,e"
    minutes: str = "7"
    command: str = ""
    toy: bool = False
    device: str = ""
    isolated: bool | None = None
    seed: int = 0
    json: str | None = None
    merge: tuple[str, ...] = ()
    untimed: bool = False
    rows: str | None = None  # in a stage's own process: the file for its rows
    share: str = "0/1"  # in a stage's own process: which of how many shares of its cases


def main(s: Settings) -> int:
    together = [part for part in s.stages.split(",") if part]
    names = [name for part in together for name in part.split("+")]
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise SystemExit(f"--stages {s.stages}: there is no stage {unknown[0]!r}, but {', '.join(STAGES)}")
    minutes = minutes_of(s.minutes, together)
    ready(s.device)
    if s.rows is not None:
        from recipes.gpu.tied import tie

        tie()
        with suppress(Exception):  # while the stage before it runs; the stage itself reports what is wrong
            importlib.import_module(f"recipes.gpu.{STAGES[names[0]]}")
        said = sys.stdin.readline()
        if said:
            with open(s.rows, "a", encoding="utf-8") as file:
                stage(s, names[0], float(said), _keeper(file))
        return 0
    if s.device == "cuda" and names:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device: run this on a machine with a GPU, or with --toy on the CPU")
    from recipes.gpu.report import Report

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a stage's process is ended with this one
    report = Report(s.json, s.seed, s.toy, not s.toy and s.device == "cuda", s.merge, s.untimed)
    isolated = s.device == "cuda" if s.isolated is None else s.isolated
    end = BEGAN
    first, *others = [*together, ""]
    children = started(s, first) if isolated else []
    try:
        for part, after in zip(together, others):
            began, end = monotonic(), end + 60 * minutes[part]
            until = min(end, began + 60 * minutes[part])
            if isolated:
                now, children = children, started(s, after)
                processes(now, until, report.add)
            else:
                for name in part.split("+"):
                    stage(s, name, until, report.add)
            print(f"stage {part}: {monotonic() - began:.0f} s", flush=True)
    finally:
        for child in children:
            child.close()
    report.write()
    print("\nbars:")
    for bar in report.bars:
        value = "" if bar["value"] is None else f" ({bar['value']:.3g}, bound {bar['bound']:g})"
        print(f"  {bar['case']}: {bar['verdict']}{value}{'; ' + bar['note'] if bar.get('note') else ''}")
    failed = [r for r in report.rows if r.get("failed")]
    for r in failed:
        print(f"FAILED {r['stage']} {r['case']}: {r.get('note')}", flush=True)
    return 1 if failed else 0


def ready(device: str) -> None:
    """Must be called before torch, triton and specdec are imported: Triton decides once whether kernels are interpreted."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # training would use a visible GPU


def minutes_of(said: str, names: list[str]) -> dict[str, float]:
    """Minutes by stage (or by stages that run together), from one number for all, or one for each."""
    try:
        each = [float(word) for word in said.split(",")]
    except ValueError:
        each = []
    if len(each) not in (1, len(names) or 1) or not all(m > 0 for m in each):
        raise SystemExit(
            f"--minutes {said}: give minutes for all stages, or for each of --stages {','.join(names)}, separated by "
            "commas and more than 0"
        )
    return dict(zip(names, each * len(names) if len(each) == 1 else each))


def stage(s: Settings, name: str, until: float, put: Callable[[Row], None]) -> None:
    """Run one stage in this process; an exception gives a row."""
    ready(s.device)
    import torch

    from recipes.gpu.stage import Stage

    number, of = map(int, s.share.split("/"))
    beside = s.json or s.rows
    folder = None if beside is None else Path(beside).parent
    one = Stage(name, s.device, s.toy, until, s.seed, put, (number, of), folder)
    with one.case("stage"), torch.inference_mode(name not in "de"):
        importlib.import_module(f"recipes.gpu.{STAGES[name]}").run(one)


def started(s: Settings, part: str) -> list[Child]:
    """The processes of a part's stages, which import what they need and wait; none for no part."""
    of = {name: SHARES.get(name, 1) if s.device == "cuda" else 1 for name in part.split("+") if name}
    return [Child(s, name, f"{number}/{count}") for name, count in of.items() for number in range(count)]


def processes(children: list[Child], until: float, put: Callable[[Row], None]) -> None:
    """Run stages at the same time, each in its own process or in several, so that neither a device error nor a hang affects the others."""
    try:
        for child in children:
            child.begin(until)
        running = children
        while running:
            sleep(POLL)
            running = [child for child in running if child.read(until, put)]
    finally:  # this process is terminated, or a file cannot be written
        for child in children:
            child.close()


class Child:
    """A stage, or a share of its cases, in a process of its own; its rows come through a temporary file."""

    def __init__(self, s: Settings, name: str, share: str):
        self.name, self.rest = name, ""
        self.file = tempfile.NamedTemporaryFile("r", suffix=f".{name}.jsonl", encoding="utf-8")  # noqa: SIM115
        words = [sys.executable, "-X", "faulthandler", __file__]
        words += ["--stages", name, "--seed", str(s.seed), "--device", s.device]
        words += ["--rows", self.file.name, "--share", share]
        words += [] if s.json is None else ["--json", s.json]  # files beside the report
        # Several processes share the cores with those of another stage.
        few = {} if share.endswith("/1") else {"OMP_NUM_THREADS": "2"}
        self.process = subprocess.Popen(
            [*words, *(["--toy"] if s.toy else [])],
            env={**os.environ, **few},
            stdin=subprocess.PIPE,
            text=True,
        )

    def begin(self, until: float) -> None:
        """Run the stage, with this deadline by the system-wide monotonic clock."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and ``read`` says how
            print(until, file=self.process.stdin, flush=True)

    def read(self, until: float, put: Callable[[Row], None]) -> bool:
        """Put the new rows, and whether it is still running."""
        code, why = self.process.poll(), None
        if code is None and monotonic() > until + GRACE:
            self.process.kill()
            code = self.process.wait()
            why = "it did not stop in time: its process was ended, and the rows so far are kept"
        *lines, self.rest = (self.rest + self.file.read()).split("\n")
        for line in lines:
            put(json.loads(line))
        if code:
            after = ", after an error of the device: its other cases were not run" if code == 3 else ""
            why = why or f"its process ended with code {code}{after}"
            put({"stage": self.name, "case": "stage", "failed": True, "note": why})
        return code is None

    def close(self) -> None:
        """End the process if it runs, and delete its file."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self.file.close()


def _keeper(file: Any) -> Callable[[Row], None]:
    """Writes rows for the parent process, and ends this process if the parent has gone."""
    from recipes.gpu.report import full

    parent = os.getppid()

    def keep(row: Row) -> None:
        if os.getppid() != parent:
            print("the process that reads the rows is gone", file=sys.stderr)
            sys.exit(1)
        file.write(json.dumps(full(row)) + "\n")
        file.flush()

    return keep


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument(
        "--stages",
        default=d.stages,
        help="stages to run, separated by commas; a + joins those that run at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        default=d.minutes,
        help="minutes per stage: one number for all, or one for each of --stages, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--command",
        choices=sorted(COMMANDS),
        default=d.command,
        help="the stages and minutes of one of two runs, of 15 minutes together",
    )
    parser.add_argument(
        "--toy", action="store_true", help="tiny sizes, on the CPU unless --device says otherwise"
    )
    parser.add_argument(
        "--device", default=d.device, choices=["", "cpu", "cuda"], help="default: cuda; cpu with --toy"
    )
    parser.add_argument(
        "--isolated",
        action=argparse.BooleanOptionalAction,
        default=d.isolated,
        help="run each stage in its own process (default: on a GPU)",
    )
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the rows as JSON, and as tables beside it (.md), after every row; rows of other stages in FILE are kept",
    )
    parser.add_argument(
        "--merge",
        metavar="FILE",
        nargs="+",
        default=(),
        help="include the rows of other reports; with --stages '' nothing is run",
    )
    parser.add_argument(
        "--untimed",
        action="store_true",
        help="leave times out of the report: the stages run, or ran, beside others",
    )
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--share", default=d.share, help=argparse.SUPPRESS)
    s = Settings(**vars(parser.parse_args()))
    if s.command:
        s.stages, s.minutes = COMMANDS[s.command]
    s.device, s.merge = s.device or ("cpu" if s.toy else "cuda"), tuple(s.merge)
    return s


if __name__ == "__main__":
    sys.exit(main(settings()))
