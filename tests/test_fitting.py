"""What recipes that train share: the training's settings, lines of a curve, and reports with and without a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from specdec.lab.fitting import OnCorpus, Trains, told
from specdec.lab.on_texts import OnDevelopment
from specdec.lab.options import parse
from specdec.lab.recipe import Plotted, Recipe, Reported, WithPlots
from specdec.training.train import Settings


def test_a_training_has_the_recipes_settings():
    s = Trains(epochs=2.0, batch=4, muon_lr=0.1, adam_lr=0.2, warmup=0.3, decay=0.4, compile=False, seed=5)
    assert (s.steps(10), s.steps(1)) == (5, 1)
    expected = Settings(40, 4, 0.1, 0.2, warmup=0.3, decay=0.4, compile=False, seed=5, validate_every=4)
    assert s.training(40) == expected
    assert s.training(3).validate_every == 1


def test_a_row_of_a_curve_is_a_line():
    assert told({"step": 1.0, "tau": 1.23456}) == '{"step": 1.0, "tau": 1.2346}'
    assert told({"tau": 2.0}, "small") == 'small {"tau": 2.0}'


def test_bases_can_be_mixed():
    @dataclass(frozen=True)
    class Both(Trains, OnCorpus):
        pass

    s = parse(Both, None, ["--site", "a,b", "--work", "w", "--tokens", "2"])
    assert (s.streams.sites, s.streams.work, s.tokens) == (["a", "b"], "w", 2.0)


@pytest.mark.parametrize(("base", "seed"), [(Reported, None), (WithPlots, None), (Recipe, 3), (Plotted, 3)])
def test_a_report_has_the_seed_of_its_figures(base, seed, tmp_path):
    file = tmp_path / "r.json"
    s = base(json=str(file), **({} if seed is None else {"seed": seed}))
    s.save([{"a": 1}])
    assert json.loads(file.read_text())["meta"]["seed"] == seed
    s.save([{"a": 1}], 7)
    assert json.loads(file.read_text())["meta"]["seed"] == 7
    replace(s, json=None).save([{"a": 1}])


def test_development_prompts_are_cut_and_counted(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": "word " * 40}) for _ in range(3)))
    s = OnDevelopment(
        target="pocket-target", drafts=("a=ngram",), prompts=str(tmp_path / "p.jsonl"), context=8, count=2
    )
    target = s.loaded()
    assert [len(entry.given) for entry in s.pieces(target)] == [8, 8]
    assert list(s.parts(target)) == ["a"]
    assert list(s.parts(target, ["b=suffix"])) == ["b"]
    shipped = replace(s, prompts=None, context=16).pieces(target)
    assert shipped[0].name.startswith("validation prompt")
