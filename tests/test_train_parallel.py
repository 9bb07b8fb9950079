"""The recipe that adapts a small model to draft in parallel: it learns, is saved, drafts in parallel and continues, and bad input ends it early."""

from __future__ import annotations

import pytest
from recipe_runs import imported, report
from tiny import byte_tokenizer, tiny

import specdec as sd

TEXT = "one two three four five six seven eight nine ten. " * 60
WORDS = {
    "length": 32,
    "tokens": 0.002,
    "validation": 4,
    "batch": 4,
    "validations": 1,
    "compile": False,
    "k": 4,
}


@pytest.fixture(scope="module")
def recipe():
    with imported("train_parallel") as module:
        yield module


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("own")
    for name, seed in (("target", 1), ("small", 2)):
        tiny("llama", seed=seed).save_pretrained(place / name)
        byte_tokenizer().save_pretrained(place / name)
    (place / "text.txt").write_text(TEXT)
    return place


def settings(recipe, place, out, **changes):
    words = {name: str(place / name) for name in ("target", "small")}
    words = {
        "target": words["target"],
        "start": words["small"],
        "dataset": str(place / "text.txt"),
        "output": str(out),
    }
    return recipe.Settings(**{**WORDS, **words, **changes})


@pytest.mark.parametrize("changes", [{}, {"mask_token": "~", "loss": "own"}], ids=["default", "given"])
def test_a_small_model_learns_to_draft_in_parallel(changes, recipe, place, tmp_path, capsys):
    out, rows = tmp_path / "draft", tmp_path / "rows.json"
    recipe.main(settings(recipe, place, out, json=str(rows), **changes))
    assert "tau" in capsys.readouterr().out.splitlines()[-1]
    (row,) = report(rows)
    assert "acceptance_4" in row
    base = sd.decoder(str(place / "target"), dtype="float32").greedy()
    decoder = base.draft(str(out), 4, dtype="float32").build()
    assert isinstance(decoder.draft, sd.drafts.Parallel)
    if "mask_token" in changes:
        assert decoder.draft.mask_token == byte_tokenizer().get_vocab()["~"]
    assert decoder.generate("one two", 12).ids == base.build().generate("one two", 12).ids
    card = (out / "README.md").read_text()
    assert f"--start {place / 'small'}" in card
    assert f"id {decoder.draft.mask_token}" in card
    recipe.main(settings(recipe, place, out, json=str(rows), **changes))  # it ends as it did
    assert report(rows) == [row]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": ""}, "--start is missing"),
        ({"k": 0}, "--k 0: give a number above 0"),
        ({"length": 4}, "--length 4: give more than the 4 tokens of a block"),
        ({"loss": "hard"}, "--loss hard: there are mixed and own"),
        ({"mask_token": "200"}, "mask_token is 200: the draft has ids from 0 to 96"),
        ({"mask_token": "[mask]"}, "the tokenizer has no such token: give one that it has, or an id"),
        ({"start": "/nowhere/at/all"}, "there is no folder"),
    ],
)
def test_bad_settings_end_before_the_training(changes, message, recipe, place, tmp_path):
    with pytest.raises(SystemExit, match=message):
        recipe.main(settings(recipe, place, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
