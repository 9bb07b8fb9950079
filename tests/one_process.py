"""Command lines of recipes one after the other in one child process: importing PyTorch and transformers takes longer than most of them."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from threading import Timer
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CHILD = """
import contextlib, io, json, os, runpy, sys, traceback
tell, told = os.fdopen(int(sys.argv[1]), "w"), sys.stdin
for words in told:
    modules = dict(sys.modules)
    sys.argv = json.loads(words)
    module = sys.argv[0] == "-m"
    sys.argv, sys.path[0] = sys.argv[module:], "" if module else "recipes"
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run = runpy.run_module if module else runpy.run_path
            run(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except Exception:
            traceback.print_exc()
            code = 1
    for name in [name for name, module in sys.modules.items() if module is None and name not in modules]:
        del sys.modules[name]  # a script may say that something is not installed
    sys.modules.update(modules)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=tell, flush=True)
"""


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Child:
    """A process that runs one command line after the other until the tests end."""

    def __init__(self):
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(write)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[write],
            text=True,
        )
        os.close(write)
        self.heard = os.fdopen(read)
        atexit.register(self.end)

    def run(self, line: list[str], timeout: float) -> Ran:
        watch = Timer(timeout, self.process.kill)
        watch.start()
        print(json.dumps(line), file=self.process.stdin, flush=True)
        said = self.heard.readline()
        watch.cancel()
        if not said:
            child.cache_clear()
            raise AssertionError(f"{line} ended its process, or took more than {timeout} seconds")
        return Ran(*json.loads(said))

    def end(self) -> None:
        self.process.stdin.close()
        self.heard.close()
        self.process.wait()


child = cache(Child)


def each(*lines: list[str], timeout: float = 300) -> list[Ran]:
    """What each command line (a script below the root or ``-m`` and a module, and its words) returned and wrote."""
    return [child().run(line, timeout) for line in lines]
