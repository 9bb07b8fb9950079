"""Heads written as checkpoints of other projects (``heads.export``), and what a layout cannot express."""

from __future__ import annotations

import json

import pytest
import torch
from fixtures.export_speculators import target
from safetensors.torch import load_file
from test_formats import IDS, LAYOUTS

import specdec as sd
from specdec.drafts import heads
from specdec.drafts.heads import (
    MTP,
    DFlash,
    DFlash2,
    Domino,
    DSpark,
    Eagle3,
    LiLiCorr,
    Medusa,
    XPress,
)
from specdec.masks import streaming
from specdec.training.anchored import steps


@pytest.fixture(scope="module")
def model():
    return target().double()


EXPORTS = {
    "a mask": (DFlash, {"mask": streaming(4), "mask_token": 5}, "has no masks"),
    "the final norm": (Eagle3, {"taps": (1, 2, "final")}, "no output of the final norm"),
    "a vector for a mask": (DFlash, {}, "make the head with mask_token=id"),
    "an embedding": (DFlash, {"mask_token": 5, "own_embedding": True}, "without own_embedding"),
    "a whole head": (DSpark, {"mask_token": 5, "own_head": True}, "without own_head"),
    "a vocabulary": (DFlash2, {"mask_token": 5, "vocabulary": range(9)}, "without vocabulary"),
    "norms of MTP": (MTP, {"norm_output": False, "head_norms": True}, "has norm_output=False"),
    "the layer of MTP": (MTP, {"taps": (8,), "head_norms": True}, "this one reads 8"),
    "two norms": (Eagle3, {"fc_norm": True, "norm_before_fc": True}, "has one of them"),
}


@pytest.mark.parametrize("what", EXPORTS)
def test_what_cannot_be_exported_is_refused(tmp_path, model, what):
    kind, settings, message = EXPORTS[what]
    head = kind.from_target(sd.HFModel(model), **settings)
    with pytest.raises(ValueError, match=message):
        heads.export(head, tmp_path, model, verifier="x/y")


@pytest.mark.parametrize("vocabulary", [None, IDS])
@torch.no_grad()
def test_an_eagle3_head_is_written_as_specforge_does(tmp_path, model, vocabulary):
    head = Eagle3.from_target(sd.HFModel(model), own_head=vocabulary is not None, vocabulary=vocabulary)
    for p in head.parameters():
        p.copy_(torch.randn(p.shape))
    heads.export(head, tmp_path, model, layout="specforge")
    # The tensors and the fields of the checkpoints that SpecForge writes, as read above.
    fields, shapes, *_ = LAYOUTS["SpecForge, EAGLE-3.1"]
    there, config = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_text()),
    )
    assert there.keys() == {f"{name}.weight" for name in shapes if "fc_norm" not in name} | {"d2t", "t2d"}
    assert config.keys() >= fields.keys() - {"fc_norm", "norm_output"}
    assert config["architectures"] == fields["architectures"]
    assert config["target_hidden_size"] == config["hidden_size"] == 16, "SGLang computes with it"
    ids = list(range(64)) if vocabulary is None else vocabulary
    assert (there["d2t"] + torch.arange(len(ids))).tolist() == ids
    assert there["t2d"].nonzero()[:, 0].tolist() == ids
    assert there["d2t"].dtype == torch.long
    again = heads.load(tmp_path, model)
    assert again.settings == head.settings | {"own_head": vocabulary is not None}
    assert (again.taps, again.ids.tolist()) == (head.taps, ids)
    tokens = torch.randint(0, 64, (2, 12))
    layers = {tap: torch.randn(2, 11, 16, dtype=torch.float64) for tap in head.taps}
    for one, other in zip(*(steps(each, tokens, layers, 3) for each in (head, again))):
        assert torch.equal(one.logits, other.logits)


ZLAB = {
    "dflash": (DFlash, {"blocks": 2, "block_size": 4}),
    "dflash, windows": (DFlash, {"blocks": 2, "block_size": 4, "windows": [None, 9], "windows_from": "slot"}),
    "dflash, windows, both directions": (
        DFlash,
        {"blocks": 1, "block_size": 4, "windows": [9], "windows_from": "slot", "windows_causal": False},
    ),
    "dflash2": (DFlash2, {"blocks": 1, "block_size": 5, "conv_group": 4, "rank": 6, "top_k": 7}),
    "domino": (Domino, {"blocks": 1, "block_size": 3, "rank": 6, "state": 7, "prefix": 0}),
    "domino, slots of their own": (Domino, {"blocks": 1, "block_size": 4, "anchor_first": False, "rank": 6}),
    "lilicorr": (
        LiLiCorr,
        {"blocks": 2, "block_size": 4, "top_k": 4, "heads": 2, "factors": 3, "layers": 1, "inner": 8},
    ),
    "xpress": (XPress, {"blocks": 1, "block_size": 4, "rank": 6, "mlp_ratio": 3}),
    "lilicorr, convolutions": (
        LiLiCorr,
        {
            "blocks": 1,
            "block_size": 4,
            "heads": 2,
            "conv_size": 2,
            "conv_group": 4,
            "scale": 3.5,
            "mlp_ratio": 1.5,
        },
    ),
    "jetspec": (DFlash, {"blocks": 2, "block_size": 4, "causal": True}),
    "xpress, causal, windows": (
        XPress,
        {
            "blocks": 2,
            "block_size": 4,
            "rank": 6,
            "causal": True,
            "windows": [None, 9],
            "windows_from": "slot",
        },
    ),
}


@pytest.mark.parametrize("name", ZLAB)
@torch.no_grad()
def test_heads_are_written_as_z_lab_does(tmp_path, model, name):
    kind, settings = ZLAB[name]
    head = kind.from_target(sd.HFModel(model), (0, 3, 7), mask_token=9, **settings)
    for p in head.parameters():
        p.copy_(torch.randn(p.shape) * 0.3)
    heads.export(head, tmp_path, model, layout="z-lab")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [-1, 2, 6]
    again = heads.load(tmp_path, model)
    assert type(again) is kind
    free = [] if head.settings["windows"] else ["windows_from", "windows_causal"]
    free += ["inner"] if kind is LiLiCorr else []  # the head's width by its name
    assert again.settings == head.settings | {name: again.settings[name] for name in free}
    assert again.taps == head.taps
    tokens = torch.randint(0, 64, (2, 12))
    layers = {tap: torch.randn(2, 11, 16, dtype=torch.float64) for tap in head.taps}
    for one, other in zip(*(steps(each, tokens, layers, 3) for each in (head, again))):
        assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize(
    ("kind", "settings", "error", "message"),
    [
        (
            DSpark,
            {},
            TypeError,
            "head is a DSpark: the layout of z-lab has DFlash, DFlash2, Domino, LiLiCorr, XPress",
        ),
        (DFlash, {"mask": streaming(4)}, ValueError, "has no masks"),
        (DFlash, {"own_head": True}, ValueError, "without own_head"),
        (DFlash2, {"vocabulary": range(9)}, ValueError, "without vocabulary"),
        (DFlash, {"mask_token": None}, ValueError, "make the head with mask_token=id"),
        (DFlash, {"taps": (2, "final")}, ValueError, "make the head with layers below 8"),
        (DFlash, {"taps": (2, 8)}, ValueError, "make the head with layers below 8"),
        (LiLiCorr, {"anchor_first": True}, ValueError, "make the head with anchor_first=False"),
        (DFlash, {"blocks": 1, "windows": [20]}, ValueError, "make the head with windows_from='slot'"),
        (
            DFlash,
            {"blocks": 2, "block_size": 4, "windows": [20, 30], "windows_from": "slot"},
            ValueError,
            "one size for all layers",
        ),
    ],
)
def test_what_z_lab_has_not_is_refused(tmp_path, model, kind, settings, error, message):
    head = kind.from_target(sd.HFModel(model), **{"mask_token": 9, **settings})
    with pytest.raises(error, match=message):
        heads.export(head, tmp_path / "out", model, layout="z-lab")
    assert not (tmp_path / "out").exists()


SPECFORGE = {
    "another head": (MTP, {}, TypeError, "only an Eagle3 is written"),
    "a norm": (Eagle3, {"norm_output": True}, ValueError, "norm_output is True.*in that of speculators"),
    "two blocks": (Eagle3, {"blocks": 2}, ValueError, "blocks is 2"),
    "other layers": (Eagle3, {"taps": (1, 2, 3)}, ValueError, r"are written with \[2, 4, 5\]"),
    "a window": (Eagle3, {"windows": [4]}, ValueError, "no masks and no windows"),
}


@pytest.mark.parametrize("what", SPECFORGE)
def test_what_specforge_has_not_is_refused(tmp_path, model, what):
    kind, settings, error, message = SPECFORGE[what]
    head = kind.from_target(sd.HFModel(model), **settings)
    with pytest.raises(error, match=message):
        heads.export(head, tmp_path / "out", model, layout="specforge")
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        ValueError, match="layout is 'sglang': give one of 'speculators', 'specforge', 'z-lab'"
    ):
        heads.export(head, tmp_path / "out", model, layout="sglang")


def test_a_saved_head_is_not_overwritten_by_an_export(tmp_path, model):
    """Its folder would have the weights of one layout and the settings of another."""
    head = Eagle3.from_target(sd.HFModel(model))
    head.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has a head\.json.* give an empty folder"):
        heads.export(head, tmp_path, model, verifier="x/y")
    assert heads.load(tmp_path, model).settings == head.settings


def test_another_model_is_not_overwritten_by_an_export(tmp_path, model):
    """The folder of the target itself, for example; an earlier export is written anew."""
    head = Eagle3.from_target(sd.HFModel(model))
    model.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes(), (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"has the config\.json of another model: give an empty folder"):
        heads.export(head, tmp_path, model, verifier="x/y")
    assert before == ((tmp_path / "config.json").read_bytes(), (tmp_path / "model.safetensors").read_bytes())
    for _ in range(2):
        heads.export(head, tmp_path / "out", model, verifier="x/y")


def test_an_export_names_its_target(tmp_path, model):
    head = Eagle3.from_target(sd.HFModel(model))
    with pytest.raises(ValueError, match="verifier: the target was not loaded by a name"):
        heads.export(head, tmp_path, model)
    with pytest.raises(TypeError, match="head is a Medusa"):
        heads.export(Medusa.from_target(sd.HFModel(model)), tmp_path, model, verifier="x/y")
    with pytest.raises(ValueError, match="made for target"):
        heads.export(head, tmp_path, target(num_hidden_layers=7), verifier="x/y")
    heads.export(head, tmp_path, model, verifier="x/y", length=5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] is None, "the default layers"
    about = config["speculators_config"]
    assert about["verifier"] == {"name_or_path": "x/y", "architectures": ["LlamaForCausalLM"]}
    assert about["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
