"""Stage t of the GPU suite: the test files with tests that need a GPU, each in a process of its own, at the same time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from recipes.gpu.stage import Stage

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tests/test_triton_attention.py",
    "tests/test_rejection_kernel.py",
    "tests/test_philox_kernel.py",
    "tests/test_pointwise.py",
    "tests/test_static_attention.py",
    "tests/test_triton_static_pages.py",
    "tests/test_capture.py",
    "tests/test_waits.py",
    "tests/test_pipelined.py",
    "tests/test_ahead_fused.py",
)
# What the interpreter runs is tested elsewhere.
ONLY = dict.fromkeys(FILES, "not interpreted") | {"tests/test_ahead_fused.py": "on_a_gpu"}
TOY_FILES = ("tests/test_splitting.py",)
LONG = {"tests/test_triton_attention.py": 4}  # processes: most of its time, one thread compiles
# The project's settings turn the plugins' warnings into errors, and say -q.
OPTIONS = ("-rf", "--tb=short", "-p", "no:benchmark", "-p", "no:cacheprovider")
TAIL = 3000  # characters of the output of tests that failed


def run(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        running = {name: Tests(name, folder) for name in (TOY_FILES if stage.toy else FILES)}
        try:
            while running:
                sleep(0.2)
                late = monotonic() > stage.deadline
                for name in [name for name, tests in running.items() if late or tests.done]:
                    with stage.case(name):
                        running.pop(name).report(stage)
        finally:
            for tests in running.values():
                tests.process.kill()


class Tests:
    """A test file that runs."""

    def __init__(self, name: str, folder: str):
        self.name, self.file = name, Path(folder, Path(name).name + ".txt")
        self.began = monotonic()
        count = LONG.get(name, 0) if find_spec("xdist") else 0
        several = ("-n", str(count)) if count else ("-p", "no:xdist")
        only = ("-k", ONLY[name]) if name in ONLY else ()
        words = [sys.executable, "-m", "recipes.gpu.tied", "pytest", *OPTIONS, *several, *only, name]
        with open(self.file, "wb") as file:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    @property
    def done(self) -> bool:
        return self.process.poll() is not None

    def report(self, stage: Stage) -> None:
        """Rows of the file and of its tests that failed; it is ended if it still runs."""
        done = self.done
        if not done:
            self.process.kill()
        code, said = self.process.wait(), self.file.read_text(encoding="utf-8", errors="replace")
        for test, why in failures(said):
            stage.row(test, failed=True, note=why[:300])
        more: dict[str, Any] = {"note": summary(said) if done else f"ended after its time: {said[-100:]!r}"}
        more |= {"bar": "tests", "missed": missed(more["note"]) if done else None}
        if code:
            more |= {"failed": True, "output": said[-TAIL:]}
        stage.row(self.name, monotonic() - self.began, **more)


def summary(said: str) -> str:
    """The last line of pytest's output, such as ``3 passed, 1 skipped in 2.05s``."""
    lines = [line.strip(" =") for line in said.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    return lines[-1] if lines else "no summary"


def missed(line: str) -> int | None:
    """How many tests failed or were skipped, by the last line of pytest's output; ``None`` if it counts none."""
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", line)}
    return sum(n for kind, n in counts.items() if kind != "passed") if counts else None


def failures(said: str) -> list[tuple[str, str]]:
    """The tests that failed, and their messages, by pytest's short summary."""
    return re.findall(r"^FAILED (\S+)(?: - (.*))?$", said, re.MULTILINE)
