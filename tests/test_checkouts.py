"""Recipes in other checkouts: two are compared, and one is not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from one_process import each
from recipe_runs import ROOT, report, run

CHANGED = """
__path__ = [{real!r}]
exec(open({real!r} + "/__init__.py").read())
from time import sleep
from specdec.decoder import Decoder
from specdec.models import HFModel
generate, score = Decoder.generate, HFModel.score
def seeded(self, *given, seed, **options):
    return generate(self, *given, seed=seed + (type(self.draft).__name__ != "NoDraft"), **options)
def slower(self, *given, **options):
    sleep(0.02)
    return score(self, *given, **options)
Decoder.generate, HFModel.score = seeded, slower
"""


@pytest.mark.slow
def test_checkouts_are_compared(tmp_path):
    """A planted change is found: the other checkout sleeps in every forward, and its drafts' texts have another seed."""
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec/__init__.py").write_text(CHANGED.format(real=str(ROOT / "specdec")))
    sizes = ["--methods", "plain,vanilla", "--batches", "1,2", "--contexts", "24", "--new-tokens", "6"]
    found = []
    for new, pairs in ((ROOT, 2), (tmp_path, 1)):
        file, folders = tmp_path / "c.json", ["--base", str(ROOT), "--new", str(new)]
        run(
            "recipes/compare_checkouts.py",
            *sizes,
            *folders,
            "--repeats",
            "2",
            "--pairs",
            str(pairs),
            "--json",
            str(file),
        )
        found.append(report(file))
    equal, changed = found
    assert [(r["method"], r["batch"]) for r in equal] == [
        (m, b) for b in (1, 2) for m in ("plain", "vanilla")
    ]
    for r in equal:
        assert r["low"] <= r["ratio"] <= r["high"]
        assert r["same_ids"]
        assert r["base_tau"] == r["new_tau"] >= 1
        assert r["base_tokens_per_second"] > 0
    assert [r["same_ids"] for r in changed] == [True, False] * 2
    assert all(r["high"] < 0.8 for r in changed)
    empty = tmp_path / "empty"
    empty.mkdir()
    (ran,) = each(["recipes/compare_checkouts.py", "--new", str(empty)])
    assert ran.returncode == 1
    assert "give the folder of a checkout" in ran.stderr or "is it a checkout" in ran.stderr


@pytest.mark.slow
def test_a_checkout_that_is_not_installed(tmp_path):
    """Tests need no installation: ``specdec`` is found, and through a link ``specdec.kernels``."""
    for folder, but in (("specdec", ("*.safetensors", "__pycache__")), ("kernels", ("__pycache__",))):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns(*but))
    for file in ("tests/conftest.py", "pyproject.toml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    paths = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    code = "import specdec.kernels.attention as a, specdec as s; print(s.__file__, a.__file__)"
    (tmp_path / "tests/test_here.py").write_text(f"def test_here():\n    {code}\n")

    def said(*words):  # -S: no editable installations; -P: nor the working directory
        return subprocess.run(
            [sys.executable, "-S", "-P", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )

    if said("-c", "import importlib.util as i; assert i.find_spec('specdec')").returncode == 0:
        pytest.skip("specdec is installed as a copy, which comes first")
    done = said("-m", "pytest", "-n", "0", "-s", "tests/test_here.py")
    assert done.returncode == 0, done.stdout + done.stderr
    files = ("specdec/__init__.py", "specdec/kernels/attention/__init__.py")
    assert done.stdout.split()[:2] == [str(tmp_path / file) for file in files]
