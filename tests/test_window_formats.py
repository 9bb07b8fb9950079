"""Sliding windows in checkpoints of other projects: what is read, refused and written."""

from __future__ import annotations

import json
import shutil

import pytest
from fixtures.export_speculators import FOLDER, target
from test_formats import INNER, asked_to_ignore, written
from transformers import Qwen3Config

import specdec as sd
from specdec.drafts import heads
from specdec.drafts.heads import DFlash, DSpark, Eagle3
from specdec.drafts.heads.windows import sights_of


@pytest.fixture(scope="module")
def model():
    return target().double()


def changed(folder, case, body=(), without=(), **fields):
    """A checkpoint of speculators with other fields of its config and of its body's."""
    shutil.copytree(FOLDER / case, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"] | dict(body)
    config["transformer_layer_config"] = {name: value for name, value in layer.items() if value != "missing"}
    config |= fields
    config = {name: value for name, value in config.items() if name not in without}
    (folder / "config.json").write_text(json.dumps(config))


def sliding(*layers, count=2, size=8):
    kinds = ["sliding_attention" if i in layers else "full_attention" for i in range(count)]
    return {"layer_types": kinds, "use_sliding_window": True, "sliding_window": size}


@pytest.mark.parametrize(
    "case", ["dflash", "dflash-anchor", "dflash2", "dspark-rnn", "eagle3-norms", "peagle"]
)
def test_windows_of_speculators_are_read_and_written(tmp_path, model, case):
    count = len(heads.load(FOLDER / case, model).layers)
    body = sliding(0, count=count) | ({"model_type": "llama"} if case == "peagle" else {})
    changed(tmp_path / "in", case, body)
    head = heads.load(tmp_path / "in", model)
    eagle = isinstance(head, Eagle3)
    both = case == "dflash2"  # whose fixture says so
    origin = "slot" if case == "peagle" else "anchor"
    assert head.sights == sights_of([8] + [None] * (count - 1), count, 4, origin, eagle or not both)
    heads.export(head, tmp_path / "out", model, verifier="x/y")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written["transformer_layer_config"][name] for name in sliding()} == sliding(0, count=count)
    assert written.get("sliding_window_non_causal", False) == both
    again = heads.load(tmp_path / "out", model)
    assert again.sights == head.sights
    assert again.settings == head.settings


def test_the_direction_of_windows_is_read(tmp_path, model):
    for case, missing in (("dflash", True), ("dflash2", False), ("dspark-rnn", True)):
        changed(tmp_path / case, case, sliding(0, 1), without=["sliding_window_non_causal"])
        assert [s.causal for s in heads.load(tmp_path / case, model).sights] == [missing] * 2
        for value in (False, True):
            changed(tmp_path / f"{case}-{value}", case, sliding(0, 1), sliding_window_non_causal=value)
            found = heads.load(tmp_path / f"{case}-{value}", model).sights
            assert [s.causal for s in found] == [not value] * 2


@pytest.mark.parametrize(
    ("body", "windows"),
    [
        (
            {**sliding(0, 1), "sliding_window": "missing"},
            [4096, 4096],
        ),  # the default of Qwen3's config, which saving leaves out
        (
            {"layer_types": "missing", "use_sliding_window": True, "sliding_window": 8},
            None,
        ),  # from layer 28 on
        (
            {
                "layer_types": "missing",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            [None, 8],
        ),
        ({"sliding_window": 8, "use_sliding_window": True}, None),
        (
            {
                "layer_types": "missing",
                "use_sliding_window": True,
                "sliding_window": None,
                "max_window_layers": 0,
            },
            None,
        ),
    ],
)
def test_fields_mean_what_they_mean_in_the_config_of_qwen3(tmp_path, model, body, windows):
    changed(tmp_path, "dflash", body)
    head = heads.load(tmp_path, model)
    assert head.settings["windows"] == windows
    fields = {name: value for name, value in body.items() if value != "missing"}
    there = Qwen3Config(
        **{"layer_types": ["full_attention"] * 2, **fields} if "layer_types" not in body else fields,
        num_hidden_layers=2,
    )
    kinds = there.layer_types[:2]
    assert (windows or [None, None]) == [
        there.sliding_window if k == "sliding_attention" else None for k in kinds
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"layer_types": ["sliding_attention"] * 2},
            r"use_sliding_window is False.*ignore=\('transformer_layer_config\.layer_types',\)",
        ),
        ({**sliding(0), "sliding_window": 0}, "sliding_window is 0"),
        ({**sliding(0), "sliding_window": None}, "sliding_window is None"),
        (
            {**sliding(0), "layer_types": ["sliding_attention", "chunked_attention"]},
            "layer_types is .*'chunked_attention'",
        ),
        ({**sliding(0), "layer_types": ["sliding_attention"]}, "one for each of 2 layers"),
    ],
)
def test_windows_without_a_meaning_are_refused(tmp_path, model, body, message):
    changed(tmp_path, "dflash", body)
    with pytest.raises(ValueError, match=message):
        heads.load(tmp_path, model)


def test_the_remedy_for_a_window_that_the_config_drops_is_one(tmp_path, model):
    changed(tmp_path, "dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8})
    ignore = ("transformer_layer_config.layer_types",)
    assert heads.load(tmp_path, model, ignore=ignore).sights == (None, None)
    head = heads.load(tmp_path, model, ignore=ignore, windows=[8, 8])
    assert head.sights == sights_of([8, 8], 2, head.block_size)


def test_a_head_with_windows_that_the_layout_has_not_is_not_exported(tmp_path, model):
    wrapped = sd.HFModel(model)
    for settings, message in (
        ({"windows": [4, 6]}, r"windows has \[4, 6\]: .* one size"),
        ({"windows": [8, 8], "windows_from": "slot"}, "windows_from is 'slot': .* windows_from='anchor'"),
    ):
        head = DFlash.from_target(wrapped, blocks=2, block_size=4, mask_token=5, **settings)
        with pytest.raises(ValueError, match=message):
            heads.export(head, tmp_path, model, verifier="x/y")


def test_a_missing_norm_before_residual_is_asked_for_where_engines_differ(tmp_path, model):
    changed(tmp_path / "eagle3", "eagle3-norms", without=["norm_before_residual"])
    with pytest.raises(
        ValueError, match="lacks norm_before_residual, for which speculators takes False and vLLM True"
    ):
        heads.load(tmp_path / "eagle3", model)
    for value in (False, True):
        head = heads.load(tmp_path / "eagle3", model, norm_before_residual=value)
        assert head.settings["norm_before_residual"] is value
    changed(tmp_path / "peagle", "peagle", without=["norm_before_residual"])
    assert heads.load(tmp_path / "peagle", model).settings["norm_before_residual"] is False


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    ("field", "causal"), [({}, True), ({"is_causal": False}, False), ({"is_causal": None}, True)]
)
def test_windows_of_z_lab_contain_the_slot_and_are_causal(tmp_path, model, field, causal):
    written(tmp_path / "z", "z-lab", config={"block_size": 4, "dflash_config": INNER, **SLIDING, **field})
    assert heads.load(tmp_path / "z", model).sights == sights_of([8, None], 2, 4, "slot", causal)
    inner = {**INNER, "causal": False}  # vLLM's field, of which is_causal takes precedence
    config = {"block_size": 4, "dflash_config": inner, **SLIDING, **field}
    written(tmp_path / "v", "z-lab", config=config)
    kept = causal and field.get("is_causal") is not None
    assert heads.load(tmp_path / "v", model).sights == sights_of([8, None], 2, 4, "slot", kept)
    written(tmp_path / "s", "SpecForge, DSpark", config={**SLIDING, **field})
    spark = heads.load(tmp_path / "s", model)
    assert type(spark) is DSpark
    assert spark.sights == sights_of([8, None], 2, 3, "slot", causal)


def test_causal_blocks_are_read(tmp_path, model):
    """``is_causal`` of z-lab, ``causal`` of vLLM and ``causal_head`` of JetSpec are of all layers."""
    for top, inner in (({"is_causal": True}, {}), ({}, {"causal": True}), ({}, {"causal_head": True})):
        config = {"block_size": 4, "dflash_config": {**INNER, **inner}} | top
        for more, sizes in (({}, None), (SLIDING, [8, None])):
            written(tmp_path, "z-lab", config=config | more)
            head = heads.load(tmp_path, model)
            assert head.causal
            assert head.sights == sights_of(sizes, 2, 4, "slot")
        written(tmp_path, "z-lab", config=config | SLIDING | {"layer_types": ["sliding_attention"] * 2})
        head = heads.load(tmp_path, model)
        assert head.causal
        assert head.sights == sights_of([8, 8], 2, 4, "slot")
        assert heads.load(tmp_path, model, windows=[None, 8]).causal


def test_fields_that_differ_on_the_direction_are_refused(tmp_path, model):
    both = {"causal": True, "causal_head": True}
    config = {"block_size": 4, "dflash_config": {**INNER, **both}, "is_causal": False}
    written(tmp_path, "z-lab", config=config)
    said = r"is_causal is False and dflash_config\.causal is True and dflash_config\.causal_head is True"
    with pytest.raises(ValueError, match=said):
        heads.load(tmp_path, model)
    assert heads.load(tmp_path, model, ignore=("is_causal",)).causal
    ignore = ["dflash_config.causal", "dflash_config.causal_head"]
    assert not heads.load(tmp_path, model, ignore=ignore).causal
    # NeMo AutoModel writes is_causal=False into every checkpoint.
    for inner, causal in (({"causal": True}, True), ({}, False), (both, True)):
        config["dflash_config"] = {**INNER, **inner, "block_size": 4}
        written(tmp_path, "z-lab", config=config | {"architectures": ["Qwen3DFlashDraftModel"]})
        assert heads.load(tmp_path, model).causal is causal
        assert heads.load(tmp_path, model, ignore=("is_causal",)).causal is causal


@pytest.mark.parametrize("name", ["DeepSpec, DSpark", "SpecForge, P-EAGLE", "SafeAILab"])
def test_windows_without_code_are_refused(tmp_path, model, name):
    kinds = ["sliding_attention"] * (2 if "P-EAGLE" in name else 1)
    written(tmp_path, name, config={**SLIDING, "layer_types": kinds})
    with pytest.raises(ValueError, match=r"some layers have a sliding window .* has no code here"):
        heads.load(tmp_path, model)
    ignore = asked_to_ignore(tmp_path, model)
    assert not any(heads.load(tmp_path, model, ignore=ignore).sights)


def test_windows_of_transformers_are_its_defaults_where_a_config_does_not_say(tmp_path, model):
    """Its config leaves out what is the default, and the default is a window in every layer; a window does not count the slot itself."""
    written(tmp_path, "transformers", config={"layer_types": None, "sliding_window": None})
    assert heads.load(tmp_path, model).sights == sights_of([2049] * 2, 2, 4, "slot", causal=False)
    written(
        tmp_path,
        "transformers",
        config={"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
    )
    assert heads.load(tmp_path, model).sights == sights_of([None, 10], 2, 4, "slot", causal=False)


def test_a_causal_block_with_windows_alone_is_written_for_speculators(tmp_path, model):
    settings = {"block_size": 4, "windows": [9, 9], "windows_causal": False, "causal": True, "mask_token": 9}
    head = DFlash.from_target(sd.HFModel(model), blocks=2, **settings)
    heads.export(head, tmp_path, model, verifier="x/y")
    assert heads.load(tmp_path, model).sights == sights_of([9, 9], 2, 4)
    half = DFlash.from_target(sd.HFModel(model), blocks=2, **settings | {"windows": [9, None]})
    with pytest.raises(ValueError, match=r"causal is True: .* give layout='z-lab'"):
        heads.export(half, tmp_path / "half", model, verifier="x/y")
