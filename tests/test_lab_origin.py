"""Where a report's figures come from: the commit of the code, and the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from specdec.kernels.native import build
from specdec.lab import options, origin, report

INTEL = """processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu sse2 avx2 avx512f avx512bw avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
AMD = "model name\t: AMD EPYC 7763\nflags\t\t: fpu avx avx2 avx512_bf16_not\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd evtstrm\n"
SETS = {
    INTEL: ["AMX", "AVX-512", "AVX-512-BF16", "AVX2"],
    AMD: ["AVX2"],
    ARM: ["NEON"],
    "model name\t: something\n": None,  # no list of flags: unknown, which is not "none"
    "flags\t\t: fpu sse2\n": [],
}


@pytest.fixture
def repository(tmp_path):
    """A git checkout with a tracked package, and a function that runs git in it."""
    package = tmp_path / "repository" / "specdec"
    package.mkdir(parents=True)
    who = {
        f"GIT_{role}_{what}": "someone@x.org"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=package.parent,
            env=os.environ | who,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    for file in ("specdec/__init__.py", "docs/results/x.json"):
        path = package.parent / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one\n")
    git("init", "-q")
    git("add", "specdec", "docs")
    git("commit", "-qm", "one")
    return package, git


def fresh(package: Path) -> dict:
    """``origin.code`` as another process would find it."""
    return origin.code.__wrapped__(package)


def test_a_clean_checkout_is_named_by_its_commit(repository):
    package, git = repository
    assert fresh(package) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert len(fresh(package)["commit"]) == 40


def test_tracked_changes_make_it_dirty_and_others_do_not(repository):
    package, git = repository
    (package / "untracked.py").write_text("two\n")
    (package.parent / "docs/results/x.json").write_text("the last measurement's report\n")
    assert fresh(package)["dirty"] is False
    for stage in (False, True):
        (package / "__init__.py").write_text("two\n")
        if stage:
            git("add", "specdec/__init__.py")
        assert fresh(package) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
    first = git("rev-parse", "HEAD")
    git("commit", "-qm", "two")
    assert fresh(package)["commit"] == git("rev-parse", "HEAD") != first
    (package.parent / "other.py").write_text("")
    git("add", "other.py")  # outside the package, where recipes are
    assert fresh(package)["dirty"] is True


def test_there_is_no_commit_outside_a_checkout_or_in_another_ones(repository, tmp_path, monkeypatch):
    monkeypatch.delenv("SPECDEC_COMMIT", raising=False)
    nothing = {"commit": None, "dirty": None}
    assert fresh(tmp_path) == nothing
    package, _ = repository
    installed = package.parent / ".venv" / "site-packages" / "specdec"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert fresh(installed) == nothing
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert fresh(package) == nothing
    monkeypatch.setenv("SPECDEC_COMMIT", "abc")
    assert fresh(package) == {"commit": "abc", "dirty": None}


def test_a_process_keeps_the_commit_that_it_started_with(repository):
    package, git = repository
    first = origin.code(package)
    git("commit", "-q", "--allow-empty", "-m", "while it runs")
    assert origin.code(package) == first != fresh(package)


def test_a_report_says_which_c_kernels_there_were_and_compiles_none(monkeypatch):
    never = lru_cache(maxsize=1)(lambda: pytest.fail("compiled"))
    monkeypatch.setattr(build, "_made", never)
    assert report.meta()["c_kernels"] is None
    monkeypatch.undo()
    used = build.library() is not None
    monkeypatch.setattr(origin, "threaded", lambda: False)
    assert report.meta()["c_kernels"] == ("one thread" if used else None)


def test_a_script_asks_at_its_start(monkeypatch):
    """Before it measures, and so before anyone commits."""
    monkeypatch.setattr(sys, "argv", ["a script"])
    origin.code.cache_clear()
    options.parse(dataclass(frozen=True)(type("Settings", (), {})), None)
    assert origin.code.cache_info().currsize == 1


@pytest.mark.parametrize("text", SETS, ids=["intel", "amd", "arm", "unknown", "old"])
def test_instruction_sets_are_read_as_the_system_lists_them(text, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(origin, "CPUINFO", file)
    said = origin.processor()
    assert said["instruction_sets"] == SETS[text]
    if text is INTEL:
        assert said["processor"] == "Intel(R) Xeon(R) Platinum 8488C"
        assert said["generation"] == "cpu family 6, model 143"
    assert said["cores"] >= 1


def test_a_system_without_cpuinfo_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(origin, "CPUINFO", tmp_path / "nothing")
    assert origin.processor()["instruction_sets"] is None
    assert origin.processor()["generation"] is None
    assert report.machine()  # the line for people still has cores and memory


def test_a_report_says_where_it_comes_from(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    said = report.meta(seed=1)
    assert {name: said[name] for name in ("commit", "dirty")} == origin.code()
    assert said["processor"] in said["machine"]
    assert said["threads"]["OMP_NUM_THREADS"] == "3"
    assert said["threads"]["torch"] >= 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert report.meta()["threads"]["OMP_NUM_THREADS"] is None
