"""Recipes as a user runs them, and their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from one_process import each

ROOT = Path(__file__).parents[1]


@contextmanager
def imported(name):
    """A recipe as a module."""
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        yield import_module(name)
    finally:
        sys.path.remove(str(ROOT / "recipes"))


def run(*words, timeout=300):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def quick(*words):
    """As ``run``, in the process that many tests share."""
    (done,) = each([*words])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def written(value, figures=1):
    """``value`` up to the rounding of ``figures`` numbers to the six significant digits that a report has."""
    return pytest.approx(value, rel=5.001e-6 * figures, abs=0)


def report(path):
    said = json.loads(path.read_text())
    assert set(said) == {"meta", "rows"}
    assert {"command", "date", "versions", "machine", "seed"} <= set(said["meta"])
    assert str(ROOT) not in path.read_text()
    return said["rows"]
