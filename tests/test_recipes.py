"""The recipes as a user runs them, at toy size: help, output, and the one JSON shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COLUMNS = {
    "engine",
    "method",
    "batch",
    "context",
    "temperature",
    "tokens_per_second",
    "tau",
    "ratio_to_plain",
    "share_of_ideal",
    "peak_bytes",
}


def run(*words, timeout=300):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("recipe", ["quickstart", "bench", "certify", "train_pocket"])
def test_help_says_what_and_how(recipe):
    said = run(f"recipes/{recipe}.py", "--help")
    assert "--json" in said
    assert len(said) > 400


def report(path):
    said = json.loads(path.read_text())
    assert set(said) == {"meta", "rows"}
    assert {"command", "date", "versions", "machine", "seed"} <= set(said["meta"])
    assert str(ROOT) not in path.read_text()
    return said["rows"]


def test_quickstart(tmp_path):
    file = tmp_path / "q.json"
    said = run(
        "recipes/quickstart.py",
        "--batches",
        "1",
        "2",
        "--context",
        "48",
        "--new-tokens",
        "12",
        "--repeats",
        "1",
        "--json",
        str(file),
    )
    rows = report(file)
    assert [(r["method"], r["batch"]) for r in rows] == [
        (m, b) for b in (1, 2) for m in ("plain", "ngram", "vanilla")
    ]
    assert all(set(r) >= COLUMNS and r["engine"] == "specdec" for r in rows)
    assert {r["same_text_as_plain"] for r in rows} == {"yes"}
    assert all(r["tau"] == 1 for r in rows if r["method"] == "plain")
    assert "One completion" in said


def test_bench(tmp_path):
    file = tmp_path / "b.json"
    sizes = (
        "--batches",
        "1",
        "2",
        "--context",
        "48",
        "--new-tokens",
        "12",
        "--repeats",
        "1",
        "--temperatures",
        "0",
        "1",
    )
    said = run("recipes/bench.py", *sizes, "--json", str(file))
    rows = report(file)
    assert all(set(r) >= COLUMNS and r["tokens_per_second"] > 0 for r in rows)
    assert len(rows) == 2 * 2 * 7
    engines = {(r["engine"], r["method"]) for r in rows}
    assert engines == {
        *(("specdec", m) for m in ("plain", "ngram", "vanilla")),
        *(("transformers", m) for m in ("plain", "assisted", "prompt_lookup")),
    }
    assert all((r["share_of_ideal"] is not None) == (r["method"] == "vanilla") for r in rows)
    assert "bare forwards" in said
