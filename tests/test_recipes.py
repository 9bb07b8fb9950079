"""The recipes as a user runs them, at toy size: help, output, and the one JSON shape."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from doc_tables import tables, wrong
from one_process import each
from tiny import tiny
from transformers import AutoModelForCausalLM

import specdec as sd
from specdec import zoo
from specdec.data.corpus import DOMAINS
from specdec.data.prompts import prompts
from specdec.data.tokens import write_stream
from specdec.drafts.spire import SpireModel
from specdec.training.states import States

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


def quick(*words):
    """As ``run``, in the process that many tests share."""
    (done,) = each([*words])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


RECIPES = [
    "quickstart",
    "bench",
    "compare_checkouts",
    "cpu_floor",
    "cpu_kernels",
    "certify",
    "museum",
    "train_pocket",
    "train_spire",
    "evaluate_tau",
    "compare",
    "replay",
    "optimality",
    "verifier_rounds",
    "spire_ablations",
    "spire_measured",
    "train_pool",
    "train_heads",
    "heads",
    "spin_pool",
    "spin_selection",
    "spin_regime",
    "spin_regret",
    "spin_decompose",
    "spin_pipeline",
    "spin_switching",
    "spin_end_to_end",
    "verifiers",
    "gpu/suite",
]


def test_help_says_what_and_how():
    scripts = {str(p.relative_to(ROOT / "recipes").with_suffix("")) for p in (ROOT / "recipes").glob("*.py")}
    assert not [
        p.name for p in (ROOT / "recipes").rglob("_*.py")
    ]  # what they share is public, in specdec.lab
    assert scripts | {"gpu/suite"} == {*RECIPES, "spire_throughput", "checkout"}
    for name, ran in zip(RECIPES, each(*([f"recipes/{name}.py", "--help"] for name in RECIPES))):
        assert ran.returncode == 0, (name, ran.stderr)
        assert "--json" in ran.stdout, name
        assert len(ran.stdout) > 400, name


def report(path):
    said = json.loads(path.read_text())
    assert set(said) == {"meta", "rows"}
    assert {"command", "date", "versions", "machine", "seed"} <= set(said["meta"])
    assert str(ROOT) not in path.read_text()
    return said["rows"]


def test_quickstart(tmp_path):
    file = tmp_path / "q.json"
    said = quick(
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
        (m, b) for b in (1, 2) for m in ("plain", "ngram", "vanilla", "magicdec", "spire")
    ]
    assert all(set(r) >= COLUMNS and r["engine"] == "specdec" for r in rows)
    assert {r["same_text_as_plain"] for r in rows} == {"yes"}
    assert all(r["tau"] == 1 for r in rows if r["method"] == "plain")
    assert "One completion" in said


@pytest.mark.slow
def test_museum(tmp_path):
    file = tmp_path / "m.json"
    said = run("recipes/museum.py", "--only", "B8", "--json", str(file))
    rows = report(file)
    columns = {"exhibit", "source", "real_code", "total_variation", "expected", "fixed_total_variation"}
    assert len(rows) == 2
    assert all(set(row) == columns | {"branches"} for row in rows)
    assert {round(row["total_variation"], 4) for row in rows} == {0.4, 0.0375}
    assert all(row["fixed_total_variation"] < 1e-9 for row in rows)
    assert "All as expected" in said


@pytest.mark.slow
def test_cpu_floor(tmp_path):
    file = tmp_path / "f.json"
    sizes = ["--batches", "1", "2", "--contexts", "40", "--new-tokens", "4", "--repeats", "1"]
    said = run("recipes/cpu_floor.py", *sizes, "--json", str(file))
    rows = report(file)
    assert [(r["method"], r["batch"]) for r in rows] == [(m, b) for b in (1, 2) for m in ("plain", "vanilla")]
    for r in rows:
        assert r["round_ms"] > r["draft_ms"] + r["target_ms"] > 0
        assert abs(r["floor_ms"] - r["products_ms"] - r["reading_ms"]) < 1e-9
    assert "times floor" in said


@pytest.mark.slow
def test_cpu_kernels(tmp_path):
    file = tmp_path / "k.json"
    sizes = [
        "--tokens",
        "1",
        "5",
        "--widths",
        "64",
        "--batches",
        "1",
        "2",
        "--contexts",
        "40",
        "--queries",
        "1",
        "5",
    ]
    sizes += ["--threads", "1", "2", "--work", "14"]
    said = run("recipes/cpu_kernels.py", *sizes, "--repeats", "1", "--json", str(file))
    rows = report(file)
    parts = {"product": 6, "attention": 8, "step": 16, "product, threads": 2, "attention, threads": 4}
    assert Counter(r["part"] for r in rows) == parts
    assert all(r["ours_ms"] > 0 for r in rows)
    for r in rows:
        other, ratio, none = ("pytorch_ms", "times_faster", "one_thread_ms")
        if r["part"].endswith("threads"):
            other, ratio, none = ("one_thread_ms", "over_one_thread", "pytorch_ms")
            size = r["context"] * 256 if r["context"] else r["work"]
            assert (r["work"], r["threads"]) == (size, 2)
        assert r[ratio] == pytest.approx(r[other] / r["ours_ms"])
        assert r[none] is None
    assert "times faster" in said


@pytest.mark.slow
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
    ours = [r for r in rows if r["engine"] == "specdec"]
    assert all((r["share_while_full"] is not None) == (r["method"] == "vanilla") for r in rows)
    assert all(r[f"{part}_ms"] >= 0 for r in ours for part in ("draft", "target", "verify", "other"))
    vanilla = [r for r in ours if r["method"] == "vanilla"]
    assert all(r["draft_ms"] > 0.3 * r["bare_draft_ms"] > 0 < r["bare_target_ms"] for r in vanilla)
    assert all(0 < r["share_while_full"] < 1.1 for r in vanilla)  # 1.1: bare forwards run at the mean context
    assert "bare forwards" in said


@pytest.mark.slow
def test_train_spire_continues_and_its_draft_is_evaluated(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(prompts(n=9)))
    draft, file = tmp_path / "draft", tmp_path / "t.json"
    words = ["--dataset", str(text), "--length", "64", "--work", str(tmp_path / "work"), "--out", str(draft)]
    words += ["--tokens", "0.002", "--epochs", "1", "--validation", "4", "--no-compile", "--json", str(file)]
    run("recipes/train_spire.py", *words)
    rows = report(file)
    assert rows[-1]["step"] == 15
    assert all(1 <= r["tau"] <= 5 and 0 < r["acceptance"] < 1 for r in rows)
    assert run("recipes/train_spire.py", *words).count("step") == 0  # nothing left to do
    file = tmp_path / "e.json"
    options = ["--drafts", f"vanilla=pocket-vanilla,mine={draft}", "--contexts", "64", "--new-tokens", "8"]
    said = run(
        "recipes/evaluate_tau.py",
        *options,
        "--k",
        "2,4",
        "--count",
        "6",
        "--per-prompt",
        "1",
        "--pruners",
        "H2O",
        "--budget",
        "8",
        "--live",
        "--json",
        str(file),
    )
    rows = [r for r in report(file) if not r["method"].startswith("live")]
    magicdecs = {"magicdec", "magicdec_wider", "magicdec_H2O"}
    assert {r["method"] for r in rows} == {"vanilla", "windowed_vanilla", "mine", *magicdecs}
    assert {r["domain"] for r in rows} == {"all", "code", "prose", "tabular"}
    every = [r for r in rows if r["domain"] == "all"]
    assert all(r["low"] <= r["tau"] <= r["high"] and r["ratio_low"] <= r["ratio_high"] for r in every)
    assert all(r["low"] is None for r in rows if r["domain"] != "all")  # of two sources each
    assert all(r["ratio_to_vanilla"] == 1 for r in rows if r["method"] == "vanilla")
    for k, longest in ((2, 3), (4, 5)):
        mine = [r for r in rows if r["k"] == k]
        assert len(mine) == len(rows) // 2
        assert all(1 <= r["tau"] <= longest and len(r["acceptance"]) == k for r in mine)
    assert said.count("live mine") == 1


def test_compare_on_prompts_of_ones_own(tmp_path):
    texts = [
        {"prompt": text[:200], "category": "ab"[i % 2], "source": str(i)}
        for i, text in enumerate(prompts(n=10))
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, texts)))
    file = tmp_path / "c.json"
    words = ["--prompts", str(tmp_path / "p.jsonl"), "--trace", str(tmp_path / "trace"), "--new-tokens", "8"]
    words += ["--drafts", "vanilla=pocket-vanilla", "ngram", "--k", "2,4", "--json", str(file)]
    first = quick("recipes/compare.py", *words)
    rows = report(file)
    assert len(rows) == 2 * 2 * 3
    names = ("method", "category", "k", "tau", "tau_low", "tau_high", "ratio", "ratio_low", "ratio_high")
    assert all(r[name] is not None for r in rows for name in names)
    assert {(r["category"], r["texts"]) for r in rows} == {("all", 10), ("a", 5), ("b", 5)}
    assert all(r["tau_low"] <= r["tau"] <= r["tau_high"] for r in rows)
    assert "prompts a minute" in first
    before = rows
    quick("recipes/compare.py", *words)  # from the record
    assert report(file) == before
    (tmp_path / "q.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}')
    (failed,) = each(
        ["recipes/compare.py", "--prompts", str(tmp_path / "q.jsonl"), "--trace", str(tmp_path / "u")]
    )
    assert failed.returncode == 1
    assert failed.stderr.strip().startswith("line 2 of q.jsonl is not an object")


@pytest.mark.slow
def test_verifiers_are_compared(tmp_path):
    file = tmp_path / "v.json"
    sizes = ["--count", "6", "--per-prompt", "1", "--context", "32", "--new-tokens", "6", "--repeats", "1"]
    said = run("recipes/verifiers.py", *sizes, "--temperatures", "1", "--json", str(file))
    rows = report(file)
    by = {(r["drafting"], r["verifier"]): r for r in rows}
    assert len(by) == len(rows) == 2 * 3 + 3 * 4 + 2 * 2
    for (drafting, verifier), r in by.items():
        assert 1 <= r["low"] <= r["tau"] <= r["high"] <= 9
        assert r["ratio_low"] <= r["ratio"] <= r["ratio_high"]
        assert (r["ratio"] == 1) or verifier != "rejection"
        assert r["tokens_per_second"] > 0 < r["verify_ms"]
        assert f"{drafting}  " in said
    assert by["4 candidates", "k-SEQ"]["nodes"] == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
def test_an_interrupted_ablation_continues(tmp_path, monkeypatch):
    """It ends after the last step, before the score; the same call trains no step again."""
    target, _ = zoo.load("pocket-target")
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.delitem(sys.modules, "spire_ablations", raising=False)
    import spire_ablations as recipe

    steps, train = [], recipe.train
    monkeypatch.setattr(recipe, "train", lambda *parts, **how: train(*parts, on_step=steps.append, **how))
    settings = recipe.Settings(work=str(tmp_path), tokens=0.005, batch=1)
    layers = recipe.SpireModel.from_target(target).layers
    ids = torch.randint(0, 100, (4, 33), generator=torch.Generator().manual_seed(0))
    data = States.write(tmp_path / "states", target, [ids], layers, progress=False)
    texts = recipe.sample(target, zoo.load("pocket-target")[1], 64, 8, 4, layers, 0, 1, 2)

    def stopped(*_):
        raise KeyboardInterrupt

    score = recipe.score
    for how in (stopped, score):
        monkeypatch.setattr(recipe, "score", how)
        with nullcontext() if how is score else pytest.raises(KeyboardInterrupt):
            recipe.trained(settings, "vanilla", 0, target, data, texts, "data")
        assert [row["step"] for row in steps] == [1, 2, 3, 4]
        kept = [path.suffix for path in (tmp_path / "ablations").iterdir()]
        assert kept == [".pt" if how is score else ".unfinished"]


@pytest.mark.slow
def test_ablations(tmp_path):
    """Two rows, two seeds, on shards made here; the second run trains nothing again."""
    _, tokenizer = zoo.load("pocket-target")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "shards").mkdir()
    for split in ("train", "validation"):
        for domain in DOMAINS:
            write_stream(tmp_path / "shards" / f"{split}-{domain}.npy", tokenizer, prompts(domain, n=6))
    file = tmp_path / "a.json"
    words = [
        "--work",
        str(tmp_path),
        "--methods",
        "spire,vanilla",
        "--tokens",
        "0.005",
        "--seeds",
        "2",
        "--prompts",
        "2",
    ]
    words += ["--per-prompt", "1", "--context", "64", "--new-tokens", "8", "--json", str(file)]
    kept = tmp_path / "drafts"
    words += ["--save", str(kept)]
    run("recipes/spire_ablations.py", *words)
    assert {path.name for path in kept.iterdir()} == {"spire-0", "spire-1", "vanilla-0", "vanilla-1"}
    assert SpireModel.from_pretrained(kept / "spire-0").layers == zoo.load("pocket-spire")[0].layers
    AutoModelForCausalLM.from_pretrained(kept / "vanilla-1")
    rows = {r["method"]: r for r in report(file) if r["part"] == "tau"}
    assert set(rows) == {"spire", "vanilla", "magicdec"}
    assert {r["over"] for r in report(file) if r["part"] == "lead"} == {"vanilla", "magicdec"}
    assert rows["spire"]["seeds"] == len(rows["spire"]["by_seed"]) == 2
    assert rows["spire"]["paper_tau"] == 3.401
    before = {path: path.stat().st_mtime for path in (tmp_path / "ablations").iterdir()}
    assert {path.suffix for path in before} == {".pt"}  # no checkpoint of an unfinished training
    run("recipes/spire_ablations.py", *words)
    assert before == {path: path.stat().st_mtime for path in (tmp_path / "ablations").iterdir()}
    again = {r["method"]: r for r in report(file) if r["part"] == "tau"}
    assert all(again[method] == rows[method] for method in ("spire", "vanilla"))
    whole, parts = {r["method"]: r for r in again.values()}, []
    for i, more in enumerate(
        (["--methods", "spire"], ["--methods", "vanilla", "--first-seed", "1", "--seeds", "1"])
    ):
        parts.append(str(tmp_path / f"part{i}.json"))
        run("recipes/spire_ablations.py", *words, *more, "--json", parts[-1])  # finished trainings
    parts.append(str(file))  # the first seed of vanilla; the others are known
    run("recipes/spire_ablations.py", "--merge", *parts, "--json", str(tmp_path / "merged.json"))
    merged = report(tmp_path / "merged.json")
    assert {r["method"]: r for r in merged if r["part"] == "tau"} == whole
    sources = [r["command"] for r in merged if r["part"] == "merged"]
    assert len(sources) == 3
    # What was merged is merged again: the runs are named, not the merging.
    run(
        "recipes/spire_ablations.py",
        "--merge",
        str(tmp_path / "merged.json"),
        "--json",
        str(tmp_path / "again.json"),
    )
    assert [r["command"] for r in report(tmp_path / "again.json") if r["part"] == "merged"] == sources


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "spin_selection",
        "spin_regime",
        "spin_regret",
        "spin_decompose",
        "spin_pipeline",
        "spin_switching",
        "spin_end_to_end",
    ],
)
def test_spins_recipes_at_toy_size(recipe, tmp_path):
    file = tmp_path / "s.json"
    words = [] if recipe == "spin_switching" else ["--plots", str(tmp_path)]
    run(f"recipes/{recipe}.py", "--quick", "--json", str(file), *words)
    rows = report(file)
    columns = {
        "spin_selection": {
            "part",
            "selector",
            "regret",
            "regret_low",
            "regret_high",
            "request_oracle",
            "times_faster",
        },
        "spin_regime": {
            "machine",
            "raggedness",
            "ratio",
            "batch",
            "cores",
            "selection",
            "decomposition",
            "pipeline",
            "pays",
        },
        "spin_regret": {"scenario", "selector", "slots", "regret", "low", "high"},
        "spin_decompose": {"lengths", "batch", "method", "milliseconds", "peak_bytes"},
        "spin_pipeline": {"mode", "batch", "micro_batches", "milliseconds", "predicted", "gain"},
        "spin_switching": {"executor", "prepared", "context", "stall_milliseconds", "ordinary_milliseconds"},
        "spin_end_to_end": {"configuration", "batch", "ratio_to_plain", "tau"},
    }[recipe]
    assert rows
    assert columns <= {name for row in rows for name in row}
    assert not words or list(tmp_path.glob("*.png"))
    if recipe == "spin_selection":
        worth = [r for r in rows if r["part"] == "worth"]
        assert all(1 - 1e-9 <= r["request_oracle"] <= r["round_oracle"] + 1e-9 for r in worth)
        shares = [{k: v for k, v in r.items() if k.startswith("share:")} for r in worth]
        assert all(sum(s.values()) == pytest.approx(1) and len(s) == 4 for s in shares)
        named = {r["selector"].split(",")[0] for r in rows if r["part"] == "regret"}
        assert named >= set(sd.selectors.__all__)
        assert {r["selector"] for r in rows if r["part"] == "call"} >= {"UCB1", "Spin", "Spin, exploring"}
        text = tmp_path / "tables.md"
        said = quick("recipes/spin_selection.py", "--report", str(file), "--markdown", str(text))
        assert "Oracle's plan" in said
        (tmp_path / "results").mkdir()
        shutil.copy(file, tmp_path / "results")
        made = list(tables(text))
        assert {"=selector", "=step", "=arm", "=batch"} <= {
            t.comment.split("cells: ")[1].split()[0] for t in made
        }
        assert [said for t in made for said in wrong(t, tmp_path)] == []
    if recipe == "spin_pipeline":
        search = [r for r in rows if r["mode"] == "search"]
        assert [r["micro_batches"] for r in search] == [1, 2, 3]
        assert sum(r["tuned"] for r in search) <= 1  # the search may end above 3
        assert all(r["tokens_per_second"] > 0 for r in search)
    if recipe == "spin_end_to_end":
        columns = {"configuration", "batch", "cores", "attention", "goodput", "goodput_low", "goodput_high"}
        assert all(columns <= set(r) and r["goodput"] > 0 for r in rows)
        places = {(r["configuration"], r["attention"], r["cores"]) for r in rows}
        for attention, cores, mine in (
            ("padded", 1, "selection"),
            ("packed", 1, "selection+packed"),
            ("auto", 2, "spin"),
        ):
            wanted = ("plain", "smallest", "best_fixed", "pooled", mine)
            assert {(name, attention, cores) for name in wanted} <= places
        for r in rows:  # every ratio is to a row of the same cores and attention
            for other in ("plain", "smallest", "best_fixed"):
                same = [
                    x
                    for x in rows
                    if x["configuration"] == other
                    and (x["attention"], x["cores"]) == (r["attention"], r["cores"])
                ]
                assert r[f"ratio_to_{other}"] == (
                    pytest.approx(r["goodput"] / same[0]["goodput"]) if same else None
                )
        assert all(sum(r["arms"]) == pytest.approx(1) for r in rows)


def test_the_pools_table(tmp_path):
    file = tmp_path / "p.json"
    words = [
        "--drafts",
        "pocket-tiny,pocket-code",
        "--batch",
        "2",
        "--context",
        "48",
        "--tokens",
        "8",
        "--repeats",
        "1",
    ]
    said = quick("recipes/spin_pool.py", *words, "--json", str(file))
    rows = report(file)
    assert rows[-1]["draft"] == "oracle"
    assert rows[-1]["headroom"] >= 1
    assert "oracle" in said


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


@pytest.mark.slow
def test_the_gpu_suite_at_toy_size(tmp_path):
    """All stages on the CPU, by the code that a GPU would run; Triton's kernels are interpreted."""
    pytest.importorskip("triton")
    file = tmp_path / "g.json"
    said = run("recipes/gpu/suite.py", "--toy", "--minutes", "5", "--json", str(file), timeout=900)
    rows = report(file)
    columns = {"stage", "case", "seconds", "floor_seconds", "share_of_floor", "max_error"}
    assert {r["stage"] for r in rows} == {*"atgpbcsfhde", "bars"}
    measured = [r for r in rows if r["stage"] != "bars"]
    assert all(set(r) >= columns for r in rows)  # bars, too
    assert not [r for r in rows if r.get("failed")]
    assert not [r for r in measured if "not run" in r.get("note", "")]
    correct = {r["case"]: r for r in measured if r["stage"] == "a" and r["max_error"] is not None}
    for case in ("ragged verify", "tree in a window", "pages", "soft cap", "sink logits", "ring: verify", "intervals",
                 "first positions beside a window", "tree of 70 nodes in a window", "ragged verify, heads 8, 1 of 80"):  # fmt: skip
        assert correct[f"{case}, bfloat16: triton"]["max_error"] < 2e-2
    assert correct["rotary embedding and KV store, 3 tokens, bfloat16"]["max_error"] < 2e-2
    assert correct["rejection, logits, temperature 0.7, float32"]["max_error"] < 1e-5
    timed = [r for r in measured if r["stage"] in "bc" and r["floor_seconds"] is not None]
    assert all(r["share_of_floor"] == pytest.approx(r["floor_seconds"] / r["seconds"]) for r in timed)
    assert {r["kind"] for r in timed if "kind" in r} >= {"eager"}
    texts = [r for r in measured if r["case"].startswith("sampled text")]
    assert {r["differ"] for r in texts if r.get("bar") == "invariant"} == {0.0}
    grid = {"plain", "vanilla", "windowed", "distilled_vanilla", "magicdec", "spire"}
    assert {r["case"].partition(",")[0] for r in measured if "multiplier" in r} == grid
    bare = [r for r in measured if r["case"].startswith("bare step")]
    assert {r["case"].split()[2] for r in bare if r["replayed"]} == grid - {"plain"}
    assert all(r["replayed"] or "step, target" in r["case"] for r in bare)
    assert all(r["modelled"] for r in measured if "multiplier" in r)
    assert {"tau", "multiplier", "gain"} <= {name for r in measured for name in r}
    bars = [r for r in rows if r["stage"] == "bars"]
    assert len(bars) == 6
    assert {r["verdict"] for r in bars} == {"not measured"}  # times at toy size are worth nothing
    assert said.count("not measured") == len(bars)
    table = file.with_suffix(".md").read_text()
    assert "| stage | case | seconds | floor_seconds | share_of_floor | max_error | note |" in table


def test_bytes_of_problems_count_keys_and_values_as_they_are_held():
    from recipes.gpu.cases import TINY, slots
    from recipes.gpu.stage import Stage

    stage = Stage("b", "cpu", True, float("inf"), 0, lambda row: None)
    plain, narrow = (
        slots(stage, TINY, torch.bfloat16, [59, 30], [1, 1], kv=kv) for kv in (None, torch.float8_e4m3fn)
    )
    heads, size, slot = TINY.query, TINY.size, TINY.kv * 2 * TINY.size
    assert plain.bytes == 2 * (60 + 31) * slot + 2 * 2 * 2 * heads * size
    assert narrow.bytes == (60 + 31) * slot + 2 * 2 * 2 * heads * size
    assert narrow.held[0] is narrow.held[0]  # converted before it is timed
    assert narrow.held[0].dtype is torch.float8_e4m3fn
    other = narrow.again(stage)
    assert torch.equal(other.held[0].float(), other.keys.to(torch.float8_e4m3fn).float())
    assert not torch.equal(other.held[0].float(), narrow.held[0].float())


def test_the_hosts_time_of_a_round(tmp_path):
    file = tmp_path / "host.json"
    quick("-m", "recipes.gpu.host", "--batches", "2", "--rounds", "20", "--turns", "1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert {(r["case"], r["executor"]) for r in rows} == {
        (case, executor)
        for case in (
            *("plain, greedy", "a draft, greedy", "a draft, sampled"),
            *("SPIRe, greedy", "SPIRe, sampled", "a head, greedy", "a head, sampled"),
        )
        for executor in ("Serial", "Ahead")
    }
    assert all(r["ms"] > 0 and r["rounds"] > 5 for r in rows)


@pytest.mark.slow
def test_the_gpu_suite_stops_in_time_and_goes_on_after_a_failure(tmp_path):
    """A stage that cannot be had is a row and an exit code; the next one, a process of its own, has no time."""
    pytest.importorskip("triton")
    files = tmp_path / "a.json", tmp_path / "b.json"
    code = f"""
import sys
sys.path.insert(0, ".")
import recipes.gpu.suite as g
g.STAGES["a"] = "no_such_module"
common = dict(toy=True, device="cpu", minutes="0.0001")
assert g.main(g.Settings("a", isolated=False, json={str(files[0])!r}, **common)) == 1
assert g.main(g.Settings("b", isolated=True, json={str(files[1])!r}, **common)) == 0
"""
    said = run("-c", code)
    failed, rows = (report(file) for file in files)
    columns = {"stage", "case", "seconds", "floor_seconds", "share_of_floor", "max_error"}
    assert all(set(r) >= columns for r in failed + rows)
    assert [r["case"] for r in failed if r.get("failed")] == ["stage"]
    assert "no_such_module" in failed[0]["note"]
    assert "FAILED a stage" in said
    rows = [r for r in rows if r["stage"] == "b"]
    assert {r["case"] for r in rows} >= {"copy", "matmul bf16"}
    assert all("not run: its share" in r["note"] for r in rows if r["seconds"] is None)


def of_a_bar(case, seconds=1.0, **more):
    return {
        "stage": "b",
        "case": case,
        "seconds": seconds,
        "floor_seconds": 1.0,
        "bar": "verify",
        "clock": "graph",
        **more,
    }


@pytest.mark.parametrize(
    ("rows", "verdict", "note"),
    [
        ([], "not measured", None),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", 1.3)], "met", "2 of 2 points"),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", 1.4)], "not met", "2 of 2 points"),
        ([of_a_bar("even", 1.1)], "partly measured (1 of 2 points)", "1 of 2 points"),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", None)], "partly measured (1 of 2 points)", "1 of 2 points"),
        ([of_a_bar("even", 1.1), of_a_bar("even", 1.1)], "partly measured (1 of 2 points)", "1 of 2 points"),
        ([of_a_bar("even", 1.4)], "not met", "1 of 2 points"),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", failed=True)], "not met", "2 of 2 points; failed: ragged"),
        ([of_a_bar("even", 1.1), of_a_bar("ragged", None, failed=True)], "not met", "1 of 2 points; failed: ragged"),
        ([of_a_bar("even", None, failed=True)], "not met", "0 of 2 points; failed: even"),
        (
            [of_a_bar("even", 1.1), of_a_bar("ragged", clock="events")],
            "met",
            "2 of 2 points; with the host's launches, not replayed: ragged",
        ),
    ],
)  # fmt: skip
def test_a_bar_is_met_by_every_point_and_none_that_failed(rows, verdict, note):
    from recipes.gpu.bars import verdicts

    bar = verdicts(rows, measured=True)[0]
    assert (bar["verdict"], bar["note"]) == (verdict, note)
    assert {b["verdict"] for b in verdicts(rows, measured=True)[1:]} == {"not measured"}
    assert {b["verdict"] for b in verdicts(rows, measured=False)} == {"not measured"}


def test_bars_know_how_many_points_the_suite_has():
    from recipes.gpu import bars, others, steps

    points = {bar.key: bar.points for bar in bars.BARS}
    assert points["decode_step"] == len(steps.POINTS)
    assert points["generate"] == len(others.THEIRS)


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_gpu_suite_that_is_ended_leaves_what_it_has_measured(how, tmp_path):
    """And rows of other stages that the file had stay; those of its own are replaced."""
    pytest.importorskip("triton")
    file = tmp_path / "g.json"
    old = {
        "command": "before",
        "date": "",
        "versions": {},
        "machine": "",
        "seed": 0,
        "stages": "a,b",
        "toy": True,
    }
    rows = [dict.fromkeys(("seconds", "max_error")) | {"stage": stage, "case": "old"} for stage in "ab"]
    file.write_text(json.dumps({"meta": old, "rows": rows}))
    words = [
        sys.executable,
        "recipes/gpu/suite.py",
        "--toy",
        "--isolated",
        "--stages",
        "a",
        "--json",
        str(file),
    ]
    child = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        end = monotonic() + 120
        while len(report(file)) < 15 and monotonic() < end:
            assert child.poll() is None
            sleep(0.05)
        child.send_signal(how)
        code = child.wait(30)
    finally:
        child.kill()
    assert code == (143 if how == signal.SIGTERM else -signal.SIGKILL)
    rows = report(file)
    assert [r["case"] for r in rows if r["stage"] == "b"] == ["old"]
    assert sum(r["max_error"] is not None for r in rows if r["stage"] == "a") > 1
    assert "old" not in {r["case"] for r in rows if r["stage"] == "a"}
    meta = json.loads(file.read_text())["meta"]
    assert (meta["stages"], meta["earlier"]) == ("a", [{**old, "stages": "b"}])
    assert "| a | " in file.with_suffix(".md").read_text()
    if how == signal.SIGTERM:  # nothing is left over
        assert {f.name for f in tmp_path.iterdir()} == {"g.json", "g.md"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a process can be tied to its parent")
def test_the_gpu_suites_tests_end_with_it(tmp_path):
    """Also if its process is killed, which cannot end them."""
    began, slow = tmp_path / "began", tmp_path / "test_slow.py"
    slow.write_text(
        "import os, time\n"
        "def test_slow():\n"
        f"    open({str(began)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    code = f"import time\nfrom recipes.gpu.checks import Tests\nTests({str(slow)!r}, {str(tmp_path)!r})\ntime.sleep(60)"
    suite = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        end = monotonic() + 60
        while not (began.exists() and began.read_text()) and monotonic() < end:
            assert suite.poll() is None
            sleep(0.05)
        child = Path("/proc", began.read_text(), "stat")
    finally:
        suite.kill()
    suite.wait()
    end = monotonic() + 10
    while _runs(child) and monotonic() < end:
        sleep(0.05)
    assert not _runs(child)


def _runs(stat):
    """Whether a process runs, by its file in /proc: it is gone, or not waited for."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "XZ"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_rows_of_captured_steps_fail_where_nothing_was_captured():
    from recipes.gpu.steps import stopped

    model = tiny("llama", 0, torch.float32)
    made = sd.HFModel(model, graphs="eager")
    assert stopped(sd.HFModel(model)) == {}
    assert stopped(made) == {"failed": True, "note": "its steps are not captured: none was"}
    decoder = sd.decoder(made).greedy().build()
    decoder.generate([[1, 2, 3]], 8)
    assert stopped(made) == {}
    made.steps._storages[0].too_large.add("a shape")
    assert stopped(made)["note"].endswith("too little memory")
    made.steps._storages[0].too_large.clear()
    made.steps._storages[0].failed.add("a shape")
    assert "as the warnings say" in stopped(made)["note"]
    made.steps.why = "it waits"
    assert stopped(made)["note"].endswith("it waits")


@pytest.fixture
def suite(monkeypatch):
    from recipes.gpu import suite

    monkeypatch.setattr(suite, "ready", lambda device: None)
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    return suite


def test_what_a_stage_takes_too_long_the_next_one_lacks(suite, monkeypatch):
    """And nothing that one leaves over makes another longer; imports count."""
    now, told = [1000.0], {}
    monkeypatch.setattr(suite, "monotonic", lambda: now[0])
    monkeypatch.setattr(suite, "BEGAN", 970.0)
    spends = {"a": 10.0, "b": 270.0, "c": 30.0}

    def stage(s, name, until, put):
        told[name] = until - now[0]
        now[0] += spends[name]

    monkeypatch.setattr(suite, "stage", stage)
    assert suite.main(suite.Settings("a,b,c", "2,4,3", toy=True, device="cpu")) == 0
    assert told == {"a": 90.0, "b": 240.0, "c": 180.0}
    now[0], told["c"], spends["b"] = 1000.0, 0, 370.0
    assert suite.main(suite.Settings("a,b,c", "2,4,3", toy=True, device="cpu")) == 0
    assert told["c"] == 970 + 540 - 1380


def test_a_stage_that_does_not_stop_is_ended(suite, monkeypatch, tmp_path):
    """What it has said stays, and that it was ended is a failure."""
    start = subprocess.Popen
    row = {"stage": "a", "case": "said before", "seconds": 1.0}
    code = f"import sys, time; open(sys.argv[1], 'a').write({json.dumps(row)!r} + chr(10) + '{{half a r'); time.sleep(60)"

    def popen(words, **how):
        if "--rows" not in words:  # git's, which says the commit
            return start(words, **how)
        return start(
            [
                sys.executable,
                "-S",
                "-c",
                code if "a" in words else "raise SystemExit(3)",
                words[words.index("--rows") + 1],
            ]
        )

    monkeypatch.setattr(suite.subprocess, "Popen", popen)
    monkeypatch.setattr(suite, "BEGAN", monotonic())
    monkeypatch.setattr(suite, "GRACE", 1.0)
    file = tmp_path / "new" / "g.json"
    assert (
        suite.main(suite.Settings("a,b", "0.02", toy=True, device="cpu", isolated=True, json=str(file))) == 1
    )
    notes = [(r["case"], r.get("note", "")) for r in report(file) if r["stage"] in "ab"]
    assert notes[0] == ("said before", "")
    assert [case for case, _ in notes[1:]] == ["stage", "stage"]
    assert "it did not stop in time" in notes[1][1]
    assert "code 3" in notes[2][1]


def test_the_gpu_suites_commands_end_in_nine_minutes_and_leave_no_stage_out(suite):
    names = []
    for stages, minutes in suite.COMMANDS.values():
        each = suite.minutes_of(minutes, stages.split(","))
        assert len(each) == len(minutes.split(","))
        assert sum(each.values()) + suite.GRACE / 60 <= 9
        names += stages.replace("+", ",").split(",")
    assert sorted(names) == sorted(suite.STAGES)
    assert sorted(suite.Settings().stages.replace("+", ",").split(",")) == sorted(names)


def test_stages_run_at_the_same_time_and_share_their_cases(suite, monkeypatch, tmp_path):
    """Each process says which share is its; all rows are in the report."""
    start, asked = subprocess.Popen, []
    code = "import json, sys; open(sys.argv[1], 'a').write(json.dumps({'stage': sys.argv[2], 'case': sys.argv[3]}) + chr(10))"

    def popen(words):
        said = [words[words.index(option) + 1] for option in ("--rows", "--stages", "--share")]
        asked.append(said[1:])
        return start([sys.executable, "-S", "-c", code, *said])

    monkeypatch.setattr(suite.subprocess, "Popen", popen)
    monkeypatch.setattr(suite, "BEGAN", monotonic())
    monkeypatch.setattr(suite, "SHARES", {"a": 2})
    put = []
    suite.processes(suite.Settings(device="cuda"), ["a", "t"], monotonic() + 60, put.append)
    assert asked == [["a", "0/2"], ["a", "1/2"], ["t", "0/1"]]
    assert sorted((r["stage"], r["case"]) for r in put) == [("a", "0/2"), ("a", "1/2"), ("t", "0/1")]


def test_shares_of_a_stage_are_all_of_its_cases():
    from recipes.gpu.stage import Stage

    shares = [Stage("a", "cpu", True, 0.0, 0, print, (number, 3)) for number in range(3)]
    for _ in range(7):
        assert sum(stage.mine() for stage in shares) == 1
    alone = Stage("a", "cpu", True, 0.0, 0, print)
    assert all(alone.mine() for _ in range(3))


def test_what_pytest_said_becomes_rows():
    from recipes.gpu.checks import failures, summary

    said = "..F\nFAILED tests/test_x.py::test_a[1-b] - AssertionError: no\nFAILED tests/test_x.py::test_c\n2 failed, 5 passed in 1.25s\n"
    assert summary(said) == "2 failed, 5 passed in 1.25s"
    assert failures(said) == [
        ("tests/test_x.py::test_a[1-b]", "AssertionError: no"),
        ("tests/test_x.py::test_c", ""),
    ]
    assert summary("Segmentation fault") == "no summary"


def test_the_gpu_suites_reports_are_merged(tmp_path):
    def write(name, stages, toy):
        about = {
            "command": name,
            "date": "",
            "versions": {},
            "machine": "",
            "seed": 0,
            "stages": stages,
            "toy": toy,
        }
        empty = dict.fromkeys(("seconds", "floor_seconds", "share_of_floor", "max_error"))
        rows = [{**empty, "stage": stage, "case": name} for stage in stages.split(",")]
        (tmp_path / name).write_text(json.dumps({"meta": about, "rows": rows}))
        return str(tmp_path / name)

    files, out = [write("x.json", "a,b", True), write("y.json", "b,c", True)], tmp_path / "all.json"
    merge = ["recipes/gpu/suite.py", "--toy", "--stages", "", "--json", str(out), "--merge"]
    full, none = [*merge, write("full.json", "a", False)], [*merge, str(ROOT / "pyproject.toml")]
    wrong = ["recipes/gpu/suite.py", "--toy", "--stages", "a,b", "--minutes"]
    ran = each(
        [*merge, *files],
        full,
        none,
        [*wrong, "1,2,3"],
        [*wrong, "1,0"],
        [*wrong, "x"],
        ["recipes/gpu/suite.py"],
    )
    assert ran[0].returncode == 0, ran[0].stderr
    assert [(r["stage"], r["case"]) for r in report(out) if r["stage"] != "bars"] == [
        ("a", "x.json"),
        ("b", "y.json"),
        ("c", "y.json"),
    ]
    meta = json.loads(out.read_text())["meta"]
    assert [(m["command"], m["stages"]) for m in meta["earlier"]] == [("x.json", "a"), ("y.json", "b,c")]
    assert "has rows of full size, and these are of toy size" in ran[1].stderr
    assert "is no report of this suite" in ran[2].stderr
    for some in ran[3:6]:
        assert "give minutes for all stages, or for each of --stages a,b" in some.stderr
    if not torch.cuda.is_available():
        assert "no CUDA device: run this on a machine with a GPU, or with --toy on the CPU" in ran[6].stderr
    assert all(some.returncode == 1 for some in ran[1:6])


@pytest.mark.slow
def test_optimality(tmp_path):
    file, figures = tmp_path / "o.json", tmp_path / "plots"
    sizes = ["--count", "2", "--new-tokens", "3", "--context", "48", "--k", "2", "--candidates", "1", "2"]
    what = ["--drafts", "tiny=pocket-tiny", "spire=pocket-spire", "--temperatures", "1", "--distinct", "6"]
    said = run("recipes/optimality.py", *sizes, *what, "--json", str(file), "--plots", str(figures))
    rows = report(file)
    names = {"target", "draft", "temperature", "candidates", "verifier", "acceptance", "optimum", "single"}
    assert all(names <= set(r) for r in rows)
    assert {(r["draft"], r["depth"]) for r in rows} == {
        (d, at) for d in ("tiny", "spire") for at in ("all", 1, 2)
    }
    assert all(r["acceptance"] <= r["optimum"] + 1e-9 for r in rows)
    assert {r["positions"] for r in rows if r["depth"] == "all" and r["chosen"] == "independent"} == {12}
    assert "Nothing is above its optimum" in said
    assert (figures / "optimality.png").stat().st_size > 1000


@pytest.mark.slow
def test_verifier_rounds(tmp_path):
    file = tmp_path / "v.json"
    sizes = ["--count", "3", "--new-tokens", "6", "--context", "48", "--k", "2", "--temperatures", "1"]
    what = ["--drafts", "tiny=pocket-tiny", "ngram", "--trees", "2x1", "2x1:distinct"]
    said = run("recipes/verifier_rounds.py", *sizes, *what, "--draws", "2", "--json", str(file))
    rows = [r for r in report(file) if r["category"] == "all"]
    assert [(r["draft"], r["k"], r["verifier"]) for r in rows] == [
        *((d, "2", v) for d in ("tiny", "ngram") for v in ("rejection", "block")),
        *(("tree", "2x1", v) for v in ("rejection", "traversal", "k-SEQ", "optimal transport")),
        *(("tree", "2x1:distinct", v) for v in ("rejection", "traversal")),
    ]
    assert all(1 <= r["tau"] <= 3 and r["ratio_low"] <= r["ratio"] <= r["ratio_high"] for r in rows)
    assert "block over rejection" in said
