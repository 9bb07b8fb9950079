"""Command lines of recipes one after the other in one child process: importing PyTorch and transformers takes longer than most of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CHILD = """
import contextlib, io, json, runpy, sys, traceback
ran = []
for line in json.loads(sys.argv[1]):
    sys.argv, sys.path[0] = line, "recipes"
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(line[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except Exception:
            traceback.print_exc()
            code = 1
    ran.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(ran))
"""


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def each(*lines: list[str], timeout: float = 300) -> list[Ran]:
    """What each command line (a script below the root, and its words) returned and wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(lines)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return [Ran(*ran) for ran in json.loads(done.stdout.splitlines()[-1])]
