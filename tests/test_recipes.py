"""The recipes as a user runs them, at toy size: help, output, and the one JSON shape."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from doc_tables import tables, wrong
from one_process import each
from recipe_runs import ROOT, quick, report, run, written
from transformers import AutoModelForCausalLM

import specdec as sd
from specdec import zoo
from specdec.data.corpus import DOMAINS
from specdec.data.prompts import prompts
from specdec.data.tokens import write_stream
from specdec.drafts.spire import SpireModel
from specdec.training.states import States

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


RECIPES = [
    "quickstart",
    "auto",
    "decide",
    "untrained",
    "bench",
    "llama_cpp",
    "compare_checkouts",
    "cpu_floor",
    "prefix_cache",
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
    "stop_rules",
    "spire_ablations",
    "spire_measured",
    "train_pool",
    "train_heads",
    "train_head",
    "train_parallel",
    "answers",
    "endpoint",
    "heads",
    "spin_pool",
    "spin_selection",
    "spin_regime",
    "spin_regret",
    "spin_decompose",
    "spin_pipeline",
    "spin_switching",
    "spin_end_to_end",
    "spin_stream",
    "verifiers",
    "gpu/suite",
]


@pytest.mark.slow
def test_help_says_what_and_how():
    scripts = {str(p.relative_to(ROOT / "recipes").with_suffix("")) for p in (ROOT / "recipes").glob("*.py")}
    assert not [
        p.name for p in (ROOT / "recipes").rglob("_*.py")
    ]  # what they share is public, in specdec.lab
    assert scripts | {"gpu/suite"} == {*RECIPES, "spire_throughput", "checkout"}
    for name, ran in zip(RECIPES, each(*([f"recipes/{name}.py", "--help"] for name in RECIPES))):
        assert ran.returncode == 0, (name, ran.stderr)
        assert ("--json" in ran.stdout) != (name == "endpoint"), name  # it measures nothing itself
        assert len(ran.stdout) > 400, name


@pytest.mark.slow
def test_untrained(tmp_path, monkeypatch):
    """On a corpus of its own prompts: that of the training packages takes minutes to build."""
    sys.path.insert(0, str(ROOT / "recipes"))
    import untrained

    texts = {"text": prompts(n=6)}
    monkeypatch.setattr(untrained.sd.data, "corpus", lambda: texts)
    file = tmp_path / "u.json"
    settings = untrained.Settings(
        batches=(1, 2), temperatures=(0.0,), context=40, new_tokens=12, repeats=2, json=str(file)
    )
    rows = untrained.main(settings)
    assert len([row for row in rows if row["part"] == "speed"]) == 2 * 14
    taus = {row["method"]: row["tau"] for row in rows if row["part"] == "speed" and row["batch"] == 2}
    assert taus["plain"] == taus["plain again"] == 1
    assert taus["lookup before pocket-vanilla, 6 tokens"] == taus["pocket-vanilla, 6 tokens"]
    saved = {row["inner"]: row for row in report(file) if row["part"] == "forwards"}
    assert saved["lookup"]["tau"] == saved["none"]["tau"]
    assert saved["lookup"]["forwards"] < saved["none"]["forwards"]


@pytest.mark.slow
def test_auto(tmp_path):
    file = tmp_path / "a.json"
    options = "--temperatures 0 --batches 1 2 --context 40 --tokens 40 --lengths 1 2 --lookups 2 --repeats 4 --calibration 1"
    said = quick("recipes/auto.py", *options.split(), "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    parts = [(row["part"], row["batch"]) for row in rows]
    assert [
        parts.count((part, batch)) for part in ("measured", "speed", "hindsight") for batch in (1, 2)
    ] == [5, 5, 7, 7, 2, 2]
    assert all(
        row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in rows if row["part"] != "measured"
    )
    best = next(row for row in rows if row["part"] == "hindsight")
    assert {best["best"], *best["chosen"]} <= {"plain", "small/1", "small/2", "lookup/2"}
    assert "auto, fixed over the best" in str(said)


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


def test_prefix_cache(tmp_path):
    file = tmp_path / "p.json"
    sizes = [
        "--conversations",
        "2",
        "--turns",
        "2",
        "--system",
        "80",
        "--turn",
        "70",
        "--answer",
        "4",
        "--repeats",
        "1",
        "--spire",
    ]
    said = quick("recipes/prefix_cache.py", *sizes, "", "--json", str(file))
    rows = report(file)
    assert [(r["method"], r["turn"]) for r in rows] == [
        (m, t) for m in ("plain", "small model") for t in (1, 2)
    ]
    assert [r["prompt_tokens"] for r in rows] == [150, 224] * 2
    # the first turn finds a block of the system prompt in the second conversation only, the second turn two blocks of the first turn's text
    assert [round(r["found"], 3) for r in rows] == [round(64 / 150 / 2, 3), round(128 / 224, 3)] * 2
    assert all(r["low"] <= r["prefill_ratio"] <= r["high"] for r in rows)
    assert "call ratio" in said


@pytest.mark.slow
def test_cpu_floor(tmp_path):
    file = tmp_path / "f.json"
    sizes = ["--batches", "1", "2", "--contexts", "40", "--new-tokens", "4", "--repeats", "1"]
    said = run("recipes/cpu_floor.py", *sizes, "--json", str(file))
    rows = report(file)
    assert [(r["method"], r["batch"]) for r in rows] == [(m, b) for b in (1, 2) for m in ("plain", "vanilla")]
    for r in rows:
        assert r["round_ms"] > r["draft_ms"] + r["target_ms"] > 0
        assert r["floor_ms"] == written(r["products_ms"] + r["reading_ms"], figures=2)
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
        assert r[ratio] == written(r[other] / r["ours_ms"], figures=3)
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
def test_bench_on_prompts_of_ones_own(tmp_path):
    """Rows by category; of a file whose first prompts are of one category, all categories are used."""
    own, file = tmp_path / "own.jsonl", tmp_path / "b.json"
    kinds = ["code"] * 6 + ["prose"] * 2
    lines = [{"prompt": text, "category": kind} for text, kind in zip(prompts(n=8), kinds)]
    own.write_text("\n".join(map(json.dumps, lines)))
    sizes = [
        "--batches",
        "1",
        "2",
        "--context",
        "24",
        "--new-tokens",
        "16",
        "--repeats",
        "1",
        "--temperatures",
        "0",
    ]
    said = run("recipes/bench.py", "--prompts", str(own), *sizes, "--json", str(file))
    rows = report(file)
    whole, parts = ([r for r in rows if ("part" in r) == part] for part in (False, True))
    assert len(parts) == 2 * len(whole) == 2 * 2 * 7
    assert {(r["category"], r["prompts"]) for r in parts} == {("code", 2), ("prose", 2)}
    assert all(1 <= r["tau"] <= 5 for r in parts if r["k"] != "default")
    alone = [r for r in parts if r["batch"] == 1]
    assert all(r["tokens_per_second"] > 0 for r in alone)
    assert "by category" in said


@pytest.mark.slow
def test_train_spire_continues_and_its_draft_is_evaluated(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(prompts(n=9)))
    draft, file = tmp_path / "draft", tmp_path / "t.json"
    words = ["--dataset", str(text), "--length", "64", "--work", str(tmp_path / "work"), "--out", str(draft)]
    words += ["--tokens", "0.002", "--epochs", "1", "--validation", "4", "--no-compile", "--json", str(file)]
    said = run("recipes/train_spire.py", *words)
    rows = report(file)
    assert f"tau {rows[-1]['tau']:.2f} after" in said
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
    assert len({(r["method"], r.pop("prompts_per_minute") > 0) for r in rows}) == 2
    quick("recipes/compare.py", *words)  # from the record
    assert [{**r, "prompts_per_minute": None} for r in report(file)] == [
        {**r, "prompts_per_minute": None} for r in rows
    ]
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


def test_reports_are_merged_without_repetitions(tmp_path, monkeypatch):
    """MagicDec is scored in every part; a part that is given twice, alone and merged, is one."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.delitem(sys.modules, "spire_ablations", raising=False)
    import spire_ablations as recipe

    def part(name, method, seed, tau=3.0):
        sums = {"expected_tokens": [tau, 2 * tau], "expected_rounds": [1.0, 2.0], "accepted": [0.5]}
        row = {"part": "training", **sums, "tokens": 100, "texts": "a", "data": "d"}
        rows = [{**row, "method": method, "seed": seed}, {**row, "method": "magicdec", "seed": None}]
        meta = dict.fromkeys(recipe.ORIGIN, name)
        (tmp_path / name).write_text(json.dumps({"meta": meta, "rows": rows}))

    def merge(into, *names):
        files = tuple(str(tmp_path / name) for name in names)
        recipe.main(recipe.Settings(merge=files, json=str(tmp_path / into)))
        rows = report(tmp_path / into)
        trainings = [(r["method"], r["seed"]) for r in rows if r["part"] == "training"]
        return trainings, [r["command"] for r in rows if r["part"] == "merged"]

    part("a", "spire", 0)
    part("b", "spire", 1)
    part("c", "vanilla", 0)
    assert merge("ab", "a", "b") == ([("spire", 0), ("magicdec", None), ("spire", 1)], ["a", "b"])
    trainings, merged = merge("all", "ab", "b", "c")
    assert trainings == [("spire", 0), ("magicdec", None), ("spire", 1), ("vanilla", 0)]
    assert merged == ["a", "b", "c"]
    part("d", "spire", 1, tau=2.0)
    with pytest.raises(ValueError, match=r"(magicdec, seed None|spire, seed 1), 100 tokens has two scores"):
        merge("wrong", "all", "d")


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
    again = {r["method"]: r for r in merged if r["part"] == "tau"}
    assert again.keys() == whole.keys()
    for method, row in again.items():
        for name, value in row.items():  # computed again, from figures with six digits
            number = isinstance(value, (float, list))
            rel = 1e-4 if name == "seed_sd" else 1e-5  # a difference of figures has fewer digits
            assert value == (pytest.approx(whole[method][name], rel=rel) if number else whole[method][name])
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
def test_selection_on_prompts_of_ones_own(tmp_path):
    own, file = tmp_path / "p.jsonl", tmp_path / "s.json"
    lines = [
        json.dumps({"prompt": text[:400], "category": f"c{i % 2}"}) for i, text in enumerate(prompts(n=8))
    ]
    own.write_text("\n".join(lines))
    run("recipes/spin_selection.py", "--quick", "--prompts", str(own), "--json", str(file))
    assert {r["group"] for r in report(file) if r["part"] == "worth" and r["by"] == "domain"} == {
        "all",
        "c0",
        "c1",
    }
    own.write_text("\n".join(lines[:3]))
    (failed,) = each(["recipes/spin_selection.py", "--quick", "--prompts", str(own)])
    assert failed.returncode == 1
    assert "has too few sources" in failed.stderr


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
        "spin_stream",
    ],
)
def test_spins_recipes_at_toy_size(recipe, tmp_path):
    file = tmp_path / "s.json"
    words = [] if recipe in ("spin_switching", "spin_stream") else ["--plots", str(tmp_path)]
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
        "spin_stream": {"configuration", "admission", "goodput", "throughput", "latency_p95", "arms"},
    }[recipe]
    assert rows
    assert columns <= {name for row in rows for name in row}
    assert not words or list(tmp_path.glob("*.png"))
    if recipe == "spin_selection":
        worth = [r for r in rows if r["part"] == "worth"]
        assert all(1 - 1e-9 <= r["request_oracle"] <= r["round_oracle"] + 1e-9 for r in worth)
        shares = [{k: v for k, v in r.items() if k.startswith("share:")} for r in worth]
        assert all(sum(s.values()) == written(1) and len(s) == 4 for s in shares)
        named = {r["selector"].split(",")[0] for r in rows if r["part"] == "regret"}
        assert named >= set(sd.selectors.__all__) - {"Planner", "ByBatch"}  # which need a table
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
    if recipe == "spin_stream":
        found = {(r["configuration"], r["admission"]): r for r in rows}
        both = ("plain", "best_fixed", "selection", "pooled", "planned")
        assert set(found) >= {(name, order) for name in both for order in ("in order", "by kind")}
        for (name, order), row in found.items():
            assert row["goodput"] > row["throughput"] > 0  # prefills are left out
            if name in both:
                for other in ("plain", "best_fixed"):
                    speed = row["goodput"] / found[other, order]["goodput"]
                    assert row[f"ratio_to_{other}"] == written(speed, figures=3)
        # A draft's texts are the same in any order, and so are its rounds.
        for name in ("plain", "best_fixed"):
            one, other = (found[name, order] for order in ("in order", "by kind"))
            assert one["tau"] == other["tau"]
    if recipe == "spin_end_to_end":
        columns = {"configuration", "batch", "cores", "attention", "goodput", "goodput_low", "goodput_high"}
        assert all(columns <= set(r) and r["goodput"] > 0 for r in rows)
        places = {(r["configuration"], r["attention"], r["cores"]) for r in rows}
        for attention, cores, mine in (
            ("padded", 1, "selection"),
            ("packed", 1, "selection+packed"),
            ("auto", 2, "spin"),
        ):
            wanted = ("plain", "smallest", "best_fixed", "pooled", "planned", mine)
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
                    written(r["goodput"] / same[0]["goodput"], figures=3) if same else None
                )
        assert all(sum(r["arms"].values()) == written(1) for r in rows)


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
def test_stop_rules(tmp_path):
    file = tmp_path / "s.json"
    sizes = ["--count", "6", "--new-tokens", "8", "--context", "48", "--k", "4", "--temperatures", "0", "0.6"]
    what = ["--drafts", "tiny=pocket-tiny", "eagle3=pocket-eagle3", "--least", "0.05", "0.9", "--at", "1.0"]
    what += ["--greedy-least", "0.1", "0.9"]
    said = run("recipes/stop_rules.py", *sizes, *what, "--json", str(file))
    rows = report(file)
    points = [r for r in rows if "least" in r]
    assert len(points) == 2 * 2 * (4 + 4 * 2)
    lengths = [r for r in points if r["rule"] == "length"]
    assert all(r["drafted"] == pytest.approx(r["least"]) for r in lengths)
    assert all(0 <= r["drafted"] <= 4 and 1 <= r["tau"] <= (1 + r["drafted"]) * (1 + 1.1e-5) for r in points)
    found = [r for r in rows if "at" in r]
    assert found
    assert all(r["ratio_low"] <= r["ratio"] <= r["ratio_high"] for r in found)
    assert "PathProb" in said
    with pytest.raises(AssertionError, match="models and heads, and this is a NGram"):
        run("recipes/stop_rules.py", "--drafts", "ngram")


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
