"""The GPU suite: correctness, kernels, steps, the paper's shapes, SPIN and batch-invariant bf16 on one GPU, in stages.

    python recipes/gpu_suite.py --stages a,b --json docs/results/gpu_suite.json    # on a machine with a GPU
    python recipes/gpu_suite.py --toy                                              # the same code on a CPU, tiny

a  correctness of every attention backend and of the verification kernels against float64
b  kernels: time and bytes beside a copy and a matrix product measured in the same run; a table of Triton configurations
c  steps of a Llama-3-8B-shaped model with random weights: plain and verify, beside their floor and transformers' generate
d  the paper's shapes: train a 67 M target and drafts on local Python source, tau, and the measured grid beside the model
e  SPIN's decomposition, and its pipeline on streams
f  batch-invariant bf16: sampled speculative output equal to plain decoding's to the bit, and what that costs

A stage stops when --minutes are over (its parts have fixed shares of that) and its process is ended soon after; rows are written as
they come. seconds are medians; floor_seconds is what nothing can beat (bytes at the rate of a copy, or FLOPs at that of a matrix
product); share_of_floor = floor_seconds / seconds; max_error = |out - reference| / |reference|. --json also writes a table
beside itself (.md). A failure is a row, the rest goes on, and the exit code is 1. Works in a checkout that is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from _gpu_bars import COLUMNS, Row, verdicts
from _gpu_ready import ready

STAGES = {
    "a": "_gpu_correct",
    "b": "_gpu_kernels",
    "c": "_gpu_steps",
    "d": "_gpu_paper",
    "e": "_gpu_spin",
    "f": "_gpu_invariant",
}
GRACE = 20.0  # seconds beyond --minutes until a stage's process is ended


@dataclass
class Settings:
    stages: str = "a,b,c,d,e,f"
    minutes: float = 7.0
    toy: bool = False
    device: str = ""
    isolated: bool | None = None
    seed: int = 0
    json: str | None = None
    rows: str | None = None  # of a stage's own process: where its rows go


def main(s: Settings) -> int:
    names = s.stages.split(",")
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise SystemExit(f"--stages {s.stages}: there is no stage {unknown[0]!r}, but {', '.join(STAGES)}")
    if not s.minutes > 0:
        raise SystemExit(f"--minutes {s.minutes}: give minutes for each stage, more than 0")
    if s.rows is not None:
        with open(s.rows, "a", encoding="utf-8") as file:
            stage(s, names[0], lambda row: _keep(file, row))
        return 0
    isolated = s.device == "cuda" if s.isolated is None else s.isolated
    rows: list[Row] = []
    for name in names:
        began = monotonic()
        if isolated:
            process(s, name, rows)
        else:
            stage(s, name, lambda row: _shown(rows, row))
        print(f"stage {name}: {monotonic() - began:.0f} s", flush=True)
        if s.json:
            write_all(s, rows)
    bars = verdicts(rows, measured=not s.toy and s.device == "cuda")
    print("\nbars:")
    for bar in bars:
        value = "" if bar["value"] is None else f" ({bar['value']:.3g}, bound {bar['bound']:g})"
        print(f"  {bar['case']}: {bar['verdict']}{value}")
    rows += bars
    if s.json:
        write_all(s, rows)
    failed = [r for r in rows if r.get("failed")]
    for r in failed:
        print(f"FAILED {r['stage']} {r['case']}: {r.get('note')}", flush=True)
    return 1 if failed else 0


def stage(s: Settings, name: str, put: Callable[[Row], None]) -> None:
    """One stage in this process; an exception is a row."""
    ready(s.device)
    import torch
    from _gpu_lab import Lab

    lab = Lab(name, s.device, s.toy, 60 * s.minutes, s.seed, put)
    with lab.case("stage"), torch.inference_mode(name not in "de"):
        importlib.import_module(STAGES[name]).run(lab)


def process(s: Settings, name: str, rows: list[Row]) -> None:
    """One stage in a process of its own, so that neither an error of the device nor a hang touches the others."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        words = [
            sys.executable,
            __file__,
            "--stages",
            name,
            "--minutes",
            str(s.minutes),
            "--seed",
            str(s.seed),
        ]
        words += ["--device", s.device, "--rows", str(file), *(["--toy"] if s.toy else [])]
        child = subprocess.Popen(words)
        try:
            code = child.wait(60 * s.minutes + GRACE)
            why = None if code == 0 else f"its process ended with code {code}"
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            why = "it did not stop in time: its process was ended, and the rows so far are kept"
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            rows.append(json.loads(line))
        if why:
            _shown(rows, {"stage": name, "case": "stage", "failed": True, "note": why})


def _keep(file: Any, row: Row) -> None:
    _shown([], row)
    file.write(json.dumps(_plain(row)) + "\n")
    file.flush()


def _shown(rows: list[Row], row: Row) -> None:
    rows.append(_plain(row))
    print(line(row), flush=True)


def _plain(row: Row) -> Row:
    from _report import plain

    return dict.fromkeys(COLUMNS) | {name: plain(value) for name, value in row.items()}


def line(row: Row) -> str:
    """A row as text."""
    parts = [f"{row['stage']}  {row['case']:<66}"]
    if row.get("seconds") is not None:
        parts.append(f"{1e6 * row['seconds']:12.1f} us")
    if row.get("share_of_floor") is not None:
        parts.append(f"{row['share_of_floor']:6.1%} of floor")
    if row.get("max_error") is not None:
        parts.append(f"error {row['max_error']:.1e}")
    if row.get("note"):
        parts.append(f"[{row['note']}]")
    return "  ".join(parts)


def write_all(s: Settings, rows: list[Row]) -> None:
    """The JSON, and beside it the tables."""
    from _report import write

    assert s.json is not None
    write(s.json, rows, s.seed, packages=("triton", "flash_attn"))
    Path(s.json).with_suffix(".md").write_text(markdown(rows, Path(s.json)), encoding="utf-8")


def markdown(rows: list[Row], file: Path) -> str:
    """What is in the JSON file as tables."""
    meta = json.loads(file.read_text(encoding="utf-8"))["meta"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    out = [f"`{meta['command']}` — {meta['date']}, {meta['machine']}, {versions}", ""]
    columns = (*COLUMNS, "note")
    out += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in rows:
        if r["stage"] != "bars":
            out.append("| " + " | ".join(_cell(r.get(c)) for c in columns) + " |")
    if any(r["stage"] == "bars" for r in rows):
        out += ["", "| bar | bound | value | verdict |", "|---|---|---|---|"]
        for r in rows:
            if r["stage"] == "bars":
                out.append(
                    "| " + " | ".join(_cell(r[c]) for c in ("case", "bound", "value", "verdict")) + " |"
                )
    return "\n".join(out) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument(
        "--stages", default=d.stages, help="which, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=d.minutes, help="for each stage (default: %(default)s)"
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
        help="a process for each stage (default: on a GPU)",
    )
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument(
        "--json", metavar="FILE", help="write the rows as JSON, and as tables beside it (.md)"
    )
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    s = Settings(**vars(parser.parse_args()))
    s.device = s.device or ("cpu" if s.toy else "cuda")
    return s


if __name__ == "__main__":
    sys.exit(main(settings()))
