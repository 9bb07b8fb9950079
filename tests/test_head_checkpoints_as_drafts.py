"""The checkpoint of another project's head, given as a draft by its folder or hub id."""

from __future__ import annotations

import json
import shutil

import pytest
from fixtures.export_speculators import FOLDER, target
from huggingface_hub import constants
from tiny import byte_tokenizer, tiny

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


def cached(root, name, files):
    """The hub's cache of a repository with these files."""
    folder = root / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    shutil.copytree(files, folder / "snapshots" / ("a" * 40))


@pytest.mark.parametrize("ours", [False, True], ids=["speculators", "saved here"])
def test_a_hub_id_is_a_draft(monkeypatch, tmp_path, ours):
    model = sd.HFModel(target())
    files = FOLDER / "eagle3"
    if ours:
        files = tmp_path / "saved"
        heads.load(FOLDER / "eagle3", model).save_pretrained(files)
        assert not (files / "config.json").exists()
    cached(tmp_path / "cache", "me/head", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert isinstance(sd.decoder(model).draft("me/head", 3).build().draft.model, heads.Eagle3)


def test_a_model_in_another_cache_is_a_draft(monkeypatch, tmp_path):
    """The options of loading say where a hub id is looked up."""
    tiny("llama", 1).save_pretrained(tmp_path / "saved")
    cached(tmp_path / "cache", "me/tiny", tmp_path / "saved")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    base = sd.decoder(sd.HFModel(tiny("llama"), byte_tokenizer()))
    built = base.draft("me/tiny", 3, cache_dir=str(tmp_path / "cache"), tokenizer=byte_tokenizer()).build()
    assert isinstance(built.draft, sd.drafts.Model)


def test_what_is_missing_is_named():
    with pytest.raises(TypeError, match=r"draft is the checkpoint of a head.*heads.load.*dtype="):
        sd.decoder(sd.HFModel(target())).draft(FOLDER / "eagle3", dtype="float32")
    with pytest.raises(ValueError, match="the target is a TableModel: give an HFModel"):
        sd.decoder(sd.TableModel.random(4)).draft(FOLDER / "eagle3")
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
