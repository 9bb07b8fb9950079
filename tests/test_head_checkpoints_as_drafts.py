"""The checkpoint of another project's head, given as a draft by its folder or hub id."""

from __future__ import annotations

import json
import sys

import pytest
from fixtures.export_speculators import FOLDER, target
from tiny import tiny

import specdec as sd
from specdec.drafts import heads
from specdec.drafts.heads.load import is_checkpoint
from specdec.parts import as_draft

PROMPTS = [[1, 2, 3, 4, 5], [7, 8]]


@pytest.mark.parametrize("give", [str, lambda path: path], ids=["text", "path"])
@pytest.mark.parametrize("case", ["eagle3", "dflash"])
def test_a_folder_is_a_draft(case, give):
    model = sd.HFModel(target())
    decoder = sd.decoder(model).greedy().draft(give(FOLDER / case), 3).build()
    assert type(decoder.draft.model) is type(heads.load(FOLDER / case, model))
    assert decoder.generate(PROMPTS, 12).ids == sd.decoder(model).greedy().build().generate(PROMPTS, 12).ids


def test_a_folder_is_an_arm():
    model = sd.HFModel(target())
    arms = {"head": FOLDER / "eagle3", "none": None}
    decoder = sd.decoder(model).greedy().pool(arms, sd.selectors.Fixed(0), length=3).build()
    assert isinstance(decoder.draft.drafts[0], sd.drafts.Head)


def test_a_hub_id_is_a_draft(monkeypatch):
    loading, asked = sys.modules[is_checkpoint.__module__], []
    monkeypatch.setattr(loading, "check_hub_name", lambda name, options: asked.append(name))
    monkeypatch.setattr(loading, "cached_file", lambda name, file, **options: FOLDER / "eagle3" / file)
    monkeypatch.setattr(loading, "folder_of", lambda name: FOLDER / "eagle3")
    decoder = sd.decoder(sd.HFModel(target())).draft("me/head", 3).build()
    assert isinstance(decoder.draft.model, heads.Eagle3)
    assert asked == ["me/head"]


def test_what_is_missing_is_named():
    with pytest.raises(TypeError, match=r"draft is the checkpoint of a head.*heads.load.*dtype="):
        sd.decoder(sd.HFModel(target())).draft(FOLDER / "eagle3", dtype="float32")
    with pytest.raises(TypeError, match="reads a target's activations"):
        as_draft(FOLDER / "eagle3", "draft")


def test_others_are_no_checkpoints_of_heads(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    assert not is_checkpoint(tmp_path)
    for text in ("[1]", "no json", json.dumps({"model_type": "llama"})):
        (tmp_path / "config.json").write_text(text)
        assert not is_checkpoint(str(tmp_path))
    for other in ("pocket-target", "pocket-eagle3", tmp_path / "nothing", tiny("llama"), None):
        assert not is_checkpoint(other)
