"""Where figures come from: the commit of the code that ran, and the processor that it ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from specdec.kernels.native import build
from specdec.kernels.native.ops import threaded

PACKAGE = Path(__file__).resolve().parents[1]
CPUINFO = Path("/proc/cpuinfo")
FLAGS = {
    "AMX": {"amx_tile"},
    "AVX-512": {"avx512f"},
    "AVX-512-BF16": {"avx512_bf16"},
    "AVX2": {"avx2"},
    "NEON": {"asimd", "neon"},
}
"""Instruction sets, and the words by which Linux lists them."""
GENERATION = ("cpu family", "model", "stepping", "CPU implementer", "CPU part")
"""Linux's words for a processor's generation."""


@cache
def code(package: Path = PACKAGE) -> dict[str, Any]:
    """``commit``: the HEAD of the git checkout that tracks ``package``. ``dirty``: whether a tracked file outside ``docs`` differs from it.

    Both are ``None`` outside a checkout, and in a package that is installed inside the checkout of something else; then the environment may name the
    commit, in ``SPECDEC_COMMIT`` (for a copy of the files on another machine). Reports are written
    below ``docs``, so that a report does not make the next one dirty. The first call decides for the whole process: a commit that is
    made while a measurement runs does not contain the code that runs.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)docs")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": os.environ.get("SPECDEC_COMMIT") or None, "dirty": None}


def processor() -> dict[str, Any]:
    """The ``processor``; its ``generation``, since one name may be that of several; its ``instruction_sets``; the ``cores`` that this process may use.

    What the system does not say is ``None``.
    """
    said = _cpuinfo()
    flags = {word for key in ("flags", "Features") for word in said.get(key, "").split()}
    return {
        "processor": said.get("model name") or platform.processor() or platform.machine(),
        "generation": ", ".join(f"{key} {said[key]}" for key in GENERATION if key in said) or None,
        "instruction_sets": [name for name, words in FLAGS.items() if words & flags] if flags else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    }


def threads() -> dict[str, Any]:
    """Threads of PyTorch's operators now, and the environment's ``OMP_NUM_THREADS`` (``None``: not set)."""
    import torch

    return {"torch": torch.get_num_threads(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}


def c_kernels() -> str | None:
    """How many threads the C kernels can use: ``"several threads"`` or ``"one thread"``; ``None`` if this process (a child may have) has not loaded them."""
    if not build.loaded():
        return None
    return "several threads" if threaded() else "one thread"


def _cpuinfo() -> dict[str, str]:
    """The first value of every key; empty where there is no such file."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found
