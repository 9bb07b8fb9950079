"""The recipe that trains the pool, at toy size, and the pool that it made: equal data, sizes as the names say."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from one_process import each

from specdec import zoo
from specdec.lab.streams import Streams
from specdec.training.sources import order

RECIPE = Path(__file__).parents[1] / "recipes" / "train_pool.py"
FORMER = {"pocket-tiny", "pocket-code"}


@pytest.fixture(scope="module")
def recipe():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPE.parent))
        return runpy.run_path(str(RECIPE))


def parameters(name: str) -> int:
    return sum(p.numel() for p in zoo.load(name)[0].parameters())


def test_the_pool_is_in_the_zoo_and_as_large_as_its_names_say(recipe):
    assert set(recipe["FORMER"]) == FORMER
    assert set(recipe["POOL"]) | FORMER == set(recipe["MEMBERS"]) <= set(zoo.names())
    sizes = [parameters(name) for name in recipe["POOL"]]
    assert sizes == sorted(sizes)
    for name, size in zip(recipe["POOL"], sizes):
        assert size == pytest.approx(1000 * int(name.removeprefix("pocket-").removesuffix("k")), rel=0.03)
    assert sizes[0] < 0.15e6
    assert sizes[-1] > 0.85e6


def test_the_members_have_equal_data_and_say_so(recipe):
    assert {member.shares for member in recipe["POOL"].values()} == {recipe["MIXTURE"]}
    said = {}
    for name in recipe["POOL"]:
        card, member = (zoo.FOLDER / name / "README.md").read_text(), recipe["MEMBERS"][name]
        assert f"{parameters(name):,} parameters" in card
        assert "**History.**" in card
        blocks = {1: "0", 2: "0, 3"}[member.layers]
        start = (
            "new weights" if member.hidden else f"pocket-vanilla's embedding and blocks (from 0): {blocks}"
        )
        assert f"Begun from {start}. " in card
        assert ("as many as pocket-vanilla saw" in card) == recipe["has_first_stage"](name)
        assert ("as a part of pocket-vanilla" in card) != recipe["has_first_stage"](name)
        both = re.findall(r"([0-9.]+ M tokens(?: in two stages| \(.*?\)))", card)
        said[name] = *both, re.findall(r"--tokens [0-9]+ --epochs [0-9]+", card)[0]
        assert recipe["EQUAL"] in card
        assert recipe["HISTORY"] in card
    assert len(set(said.values())) == 1, said
    assert said["pocket-140k"][0] == "17.66 M tokens in two stages"
    vanilla = (zoo.FOLDER / "pocket-vanilla" / "README.md").read_text()
    assert f"{recipe['VANILLA_STEPS']:,} steps of {1024 * recipe['VANILLA_BATCH']:,} tokens, 8.7 M" in vanilla
    for name in FORMER:
        card = (zoo.FOLDER / name / "README.md").read_text()
        assert "**History.**" in card
        assert "chosen on the test prompts" in card


def test_the_first_stage_has_the_sequences_of_the_stream_in_its_order(recipe, streams):
    for seed in (0, 1):
        s = recipe["Settings"](work=str(streams), first_steps=3, seed=seed)
        data, training = recipe["first_stage"](s, zoo.load("pocket-140k")[1])
        assert (training.steps, training.batch, len(data)) == (3, 4, 12)
        seen = Streams(work=str(streams)).batches("train")
        for step in range(3):
            assert torch.equal(data[order(12, 4, seed, step)], seen.take(4))
    assert [name for name in recipe["MEMBERS"] if recipe["has_first_stage"](name)] == [
        "pocket-140k",
        "pocket-360k",
    ]


@pytest.mark.slow
def test_a_member_is_trained_exported_and_continued(streams, tmp_path):
    made = tmp_path / "zoo"
    words = f"--work {streams} --zoo {made} --tokens 0.0042 --validation 2 --no-compile --epochs 1 --first-steps 1".split()
    words += ["--drafts", "pocket-140k", "pocket-code", "--json", str(tmp_path / "t.json")]
    first, again, wrong = each(
        [str(RECIPE), *words],
        [str(RECIPE), *words],
        [str(RECIPE), *words[:-4], "pocket-tiny", "pocket-nil"],
    )
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [(row["draft"], row["stage"], row["step"], row["tokens"]) for row in rows] == [
        ("pocket-140k", 1, 1, 4096),
        ("pocket-140k", 2, 1, 2048),
        ("pocket-140k", 2, 2, 4096),
        ("pocket-code", 1, 1, 2048),
        ("pocket-code", 1, 2, 4096),
    ]
    for name in ("pocket-140k", "pocket-code"):
        ours, shipped = zoo.load(name, made)[0], zoo.load(name)[0]
        assert {n: p.shape for n, p in ours.named_parameters()} == {
            n: p.shape for n, p in shipped.named_parameters()
        }
        assert ours.config._attn_implementation == shipped.config._attn_implementation
        assert all(torch.isfinite(p).all() for p in ours.parameters())
        card = (made / name / "README.md").read_text()
        assert f"--drafts {name} --tokens 0.0042 --epochs 1" in card
        assert ("have equal tokens" in card) == (name == "pocket-140k")
    assert wrong.returncode == 1
    assert "--drafts pocket-nil: there are pocket-140k" in wrong.stderr
    shutil.rmtree(streams)
