"""Drafts on the hub, with a stub of its interface: what is uploaded, the model cards, and folders that are no language models."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny
from transformers import AutoModelForCausalLM

import specdec as sd
from specdec import zoo
from specdec.drafts import Head, Spire, heads, hub
from specdec.drafts.heads.formats import files
from specdec.drafts.spire.model import SpireModel

CASES = {
    "eagle3": lambda target: heads.Eagle3.from_target(target),
    "dspark": lambda target: heads.DSpark.from_target(target, blocks=1, rank=3),
    "spire": lambda target: SpireModel.from_target(target, 1),
}


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=4))


@pytest.fixture
def uploads(tmp_path, monkeypatch):
    """A stub of the hub, which keeps what is uploaded in folders."""
    seen = []

    class Api:
        def __init__(self, token):
            self.token = token

        def create_repo(self, repo_id, private, exist_ok):
            seen.append(("create", self.token, repo_id, private, exist_ok))
            return SimpleNamespace(repo_id=f"me/{repo_id}" if "/" not in repo_id else repo_id)

        def file_exists(self, repo_id, filename, *, revision):
            return (tmp_path / repo_id / filename).exists()

        def upload_folder(self, repo_id, folder_path, commit_message, revision):
            shutil.copytree(folder_path, tmp_path / repo_id, dirs_exist_ok=True)
            seen.append(("upload", repo_id, commit_message, revision))
            return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(tmp_path / name))
    return seen


@pytest.mark.parametrize("name", CASES)
def test_a_draft_goes_to_the_hub_and_back(target, uploads, tmp_path, name):
    draft = CASES[name](target)
    address = draft.push_to_hub("mine", private=True, token="secret", message="first")
    assert address == "https://hub/me/mine/commit/1"
    assert uploads == [("create", "secret", "mine", True, True), ("upload", "me/mine", "first", None)]
    card = (tmp_path / "me/mine/README.md").read_text()
    assert f"fingerprint `{draft.target}`" in card
    assert "library_name: specdec" in card
    again = Spire("me/mine") if name == "spire" else Head(heads.load("me/mine", target))
    assert all(
        torch.equal(a, b) for a, b in zip(again.model.state_dict().values(), draft.state_dict().values())
    )
    plain = sd.decoder(target).greedy().build().generate([[1, 2, 3]], 8)
    assert (
        sd.decoder(target).greedy().draft(again, length=3).build().generate([[1, 2, 3]], 8).ids == plain.ids
    )
    if name != "spire":
        assert type(draft).from_pretrained("me/mine").settings == draft.settings


@pytest.mark.parametrize("name", CASES)
def test_a_card_on_the_hub_is_not_overwritten(target, uploads, tmp_path, name):
    draft, there = CASES[name](target), tmp_path / "me/mine"
    draft.push_to_hub("mine")
    (there / "README.md").write_text("my own")
    draft.push_to_hub("mine")
    assert (there / "README.md").read_text() == "my own"
    assert len(uploads) == 4


@pytest.mark.parametrize("name", CASES)
def test_a_card_is_not_overwritten(target, tmp_path, name):
    draft = CASES[name](target)
    draft.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text().startswith("---\nlibrary_name: specdec\n")
    (tmp_path / "README.md").write_text("my own")
    draft.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own"


def test_a_spire_draft_is_no_language_model(target, tmp_path):
    draft = SpireModel.from_target(target, 2)
    draft.save_pretrained(tmp_path)
    for folder in (tmp_path, zoo.FOLDER / "pocket-spire"):
        with pytest.raises(ValueError, match=r"model type `specdec\.drafts\.Spire`"):
            AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match=r"is a SPIRe draft.* give drafts\.Spire"):
            sd.HFModel.from_pretrained(folder)
    again = SpireModel.from_pretrained(tmp_path, target)
    assert again.body.config.model_type == "llama"
    assert type(again.body) is type(draft.body)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), draft.state_dict().values()))


def test_older_folders_of_spire_drafts_are_read(target, tmp_path):
    draft = SpireModel.from_target(target, 2)
    draft.save_pretrained(tmp_path)
    draft.body.save_pretrained(tmp_path)  # config.json is the body's own
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    again = SpireModel.from_pretrained(tmp_path, target)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), draft.state_dict().values()))
    with pytest.raises(ValueError, match="is a SPIRe draft"):
        sd.HFModel.from_pretrained(tmp_path)


def test_paths_are_not_asked_for_on_the_hub(monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    for name in ("./a/b", "~/a", "a", "/a/b", "a/b/c", Path("a/b")):
        assert hub.folder_of(name) == Path(name)


@pytest.mark.parametrize("name", [*files.WHOLE, files.INDEX, "config.json"])
def test_every_file_that_is_read_is_downloaded(name):
    assert any(fnmatch(name, pattern) for pattern in hub.PATTERNS)
