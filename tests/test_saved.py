"""A decoder that was saved and loaded decodes alike; what its folder cannot hold is refused by name, before anything is written."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from tiny import byte_tokenizer, tiny
from transformers import TopKLogitsWarper

import specdec as sd
from specdec import zoo
from specdec.drafts import heads
from specdec.drafts.siblings import Distinct
from specdec.drafts.spire import SpireModel
from specdec.drafts.stops import Entropy
from specdec.executors import Optimistic, Pipelined
from specdec.lab.traces import identity
from specdec.masks import Causal, Sinks, Strided, Window
from specdec.models import Masked, Windowed
from specdec.pruning import SnapKV

MASK = Causal() & (Sinks(1) | Window(4) | Strided(5))
TEXTS = ["hello there", "one two three"]


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama"), byte_tokenizer())


def other(seed=1, **options):
    return sd.HFModel(tiny("llama", seed=seed), byte_tokenizer(), **options)


COMPOSED = {
    "plain": lambda t: sd.decoder(t).greedy(),
    "chain": lambda t: (
        sd.decoder(t)
        .draft(sd.drafts.Model(other(), sd.Sampling(0.5)), length=3)
        .sampling(temperature=0.8, top_p=0.9)
    ),
    "rules": lambda t: sd.decoder(t).draft(
        sd.drafts.Paced(sd.drafts.Model(other(), stop=(0.3, Entropy(0.2)))), length=3
    ),
    "tree": lambda t: (
        sd.decoder(t)
        .draft(sd.drafts.Tree(other(), (3, 2), siblings=Distinct()))
        .verifier(sd.Traversal(trust_declared=True))
    ),
    "n-gram": lambda t: (
        sd.decoder(t).draft(sd.drafts.NGram(max_match=5)).executor(Pipelined(2, barrier=True))
    ),
    "suffix": lambda t: sd.decoder(t).draft(sd.drafts.Suffix(factor=2.0)),
    "window": lambda t: (
        sd.decoder(t).draft(Windowed(other(), 6, 2, block=8)).executor(Optimistic(threads=False))
    ),
    "mask": lambda t: sd.decoder(t).draft(Masked(other(), MASK)).verifier(sd.Coupled()),
    "own weights": lambda t: sd.decoder(t).draft(Windowed(t, 6)),
    "spire": lambda t: sd.decoder(t).draft(
        sd.drafts.Spire(SpireModel.from_target(t, layers=1, window=4), block=5)
    ),
    "head": lambda t: sd.decoder(t).draft(
        sd.drafts.Head(heads.Eagle3.from_target(t), heads.DynamicTree(2, 3, 5)), length=3
    ),
    "magicdec": lambda t: sd.decoder(t).draft(
        sd.drafts.MagicDec(window=5, pruner=SnapKV(), budget=4, observation=2), length=3
    ),
    "pool": lambda t: sd.decoder(t).pool(
        {"a": sd.Arm(other(1), 2), "b": other(2), "none": None},
        sd.selectors.UCB1(),
        length=3,
        capacities={"a": 1},
    ),
    "pool by batch": lambda t: sd.decoder(t).pool(
        {"a": other(1), "none": None}, sd.selectors.ByBatch({1: 0, 2: 1})
    ),
    "settings under a mask": lambda t: (
        sd.decoder(other(7, graphs="eager"))
        .draft(Windowed(other(1, graphs="eager", prefill_chunk=7, bf16_weights=False), 6))
        .executor(sd.executors.Ahead())
    ),
    "settings": lambda t: sd.decoder(other(7, graphs="eager", prefill_chunk=64)).draft(t),
    "eight bits": lambda t: sd.decoder(t).draft(sd.HFModel(t.model, kv_dtype=torch.float8_e5m2)),
    "eight bits of both": lambda t: sd.decoder(other(7, kv_dtype=torch.float8_e4m3fn)).draft(
        Windowed(other(1, kv_dtype=torch.float8_e4m3fn), 6)
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_a_loaded_decoder_decodes_alike(name, target, tmp_path):
    torch.manual_seed(0)
    decoder = COMPOSED[name](target).build()
    decoder.save(tmp_path / "saved")
    loaded = sd.load(tmp_path / "saved").build()
    assert repr(loaded) == repr(decoder)
    assert loaded.sampling_is_set == decoder.sampling_is_set
    for texts in (TEXTS, TEXTS[::-1]):
        assert loaded.generate(texts, 24, seed=5).ids == decoder.generate(texts, 24, seed=5).ids
    loaded.save(tmp_path / "again")
    first, again = ((tmp_path / folder / "decoder.json").read_text() for folder in ("saved", "again"))
    assert first == again


def test_a_pickled_decoder_decodes_alike(target):
    decoder = COMPOSED["tree"](target).build()
    assert (
        pickle.loads(pickle.dumps(decoder)).generate(TEXTS, 24, seed=5).ids
        == decoder.generate(TEXTS, 24, seed=5).ids
    )


def test_models_that_parts_share_are_saved_and_loaded_once(target, tmp_path):
    COMPOSED["own weights"](target).build().save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoder.json", "target"]
    loaded = sd.load(tmp_path).build()
    assert loaded.draft.model.model is loaded.target.model


def test_a_loaded_decoder_can_be_changed(target, tmp_path):
    COMPOSED["chain"](target).build().save(tmp_path)
    loaded = sd.load(tmp_path)
    assert loaded.greedy().generate(TEXTS, 16).ids == sd.decoder(target).greedy().generate(TEXTS, 16).ids


def test_pocket_models_keep_their_numbers(tmp_path):
    decoder = sd.decoder("pocket-target").draft("pocket-tiny", length=3).build()
    decoder.save(tmp_path)
    loaded = sd.load(tmp_path).build()
    assert loaded.target.dtype == torch.float32
    assert loaded.generate("import os\n", 16, seed=1).ids == decoder.generate("import os\n", 16, seed=1).ids


def every_8th(b, h, q_position, kv_position):
    return kv_position % 8 == 0


class OwnHead(heads.Eagle3):
    pass


class OwnModel(sd.HFModel):
    pass


@pytest.mark.parametrize(
    ("composed", "says"),
    [
        (lambda t: sd.decoder(sd.TableModel.random(5)), r"target is .*TableModel.*: give an HFModel with a tokenizer"),
        (lambda t: sd.decoder(OwnModel(t.model)), r"target is "),
        (lambda t: sd.decoder(sd.HFModel(t.model, ord)), r"target.tokenizer is <built-in function ord>"),
        (lambda t: sd.decoder(t).draft(OwnModel(t.model)), r"draft.model is .*again, sd.load\(folder\)\.draft\(\.\.\.\)"),
        (lambda t: sd.decoder(t).draft(sd.chain_draft(lambda ids: torch.zeros(97))), r"draft.logits is <function"),
        (lambda t: sd.decoder(t).draft(Masked(other(), Causal() & (Window(3) | every_8th))), "draft.model.mask is "),
        (lambda t: sd.decoder(t).draft(OwnHead.from_target(t)), "draft.model is OwnHead"),
        (
            lambda t: sd.decoder(t).draft(SpireModel.from_target(t, layers=1, mask=Causal() & Window(4) & (every_8th | Window(1)))),
            "draft.model.mask is ",
        ),
        (
            lambda t: sd.decoder(t).pool({"a": other(1), "b": other(2)}, sd.selectors.Random(), stacked=True),
            r"is of a stacked pool.*sd.load\(folder\).pool\(\.\.\., stacked=True\)",
        ),
        (
            lambda t: sd.decoder(t).sampling(processors=(TopKLogitsWarper(5),)),
            r"sampling.processors\[0\] is .*TopKLogitsWarper.*: save the decoder without it",
        ),
        (
            lambda t: sd.decoder(t).pool({"a": None}, sd.selectors.Random(), reward=lambda round: torch.zeros(1)),
            r"pool.reward is <function .*sd.load\(folder\)\.pool\(",
        ),
    ],
)  # fmt: skip
def test_what_a_folder_cannot_hold_is_named(composed, says, target, tmp_path):
    decoder = composed(target).build()
    with pytest.raises(TypeError, match=says):
        decoder.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_the_settings_of_a_model_under_a_mask_are_kept(tmp_path):
    COMPOSED["settings under a mask"](None).build().save(tmp_path)
    model = sd.load(tmp_path).build().draft.model
    assert (model.graphs, model.prefill_chunk, model.bf16_weights) == ("eager", 7, False)


def test_saving_changes_no_config_and_traces_stay_those_of_the_target(target, tmp_path):
    small = other()
    models = [target.model, small.model]
    before = [(m.config.to_dict(), m.generation_config.to_dict()) for m in models]
    name = identity(target)
    sd.decoder(target).draft(small).build().save(tmp_path / "d")
    assert [(m.config.to_dict(), m.generation_config.to_dict()) for m in models] == before
    model = tiny("llama", 4)
    first = identity(sd.HFModel(model))
    model.save_pretrained(tmp_path / "m")  # transformers' own changes the config
    assert identity(sd.HFModel(model)) == first
    assert identity(target) == name


@pytest.mark.parametrize("call", [sd.load, lambda folder: sd.decoder(other()).save(folder)])
def test_a_folder_is_a_path(call):
    with pytest.raises(TypeError, match="folder is None: give a path"):
        call(None)


@pytest.fixture
def folder(target, tmp_path):
    sd.decoder(target).draft(sd.drafts.NGram()).build().save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("error", "says", "change"),
    [
        (ValueError, "has version 2, and this library reads version 1", {"version": 2}),
        (ValueError, r"the part 'os.system', which this version", {"draft": {"part": "os.system"}}),
        (ValueError, r"decoder.json' is damaged .*unexpected keyword", {"draft": {"part": "drafts.NGram", "n": 1}}),
        (ValueError, "'../target', which is outside its folder", {"draft": {"part": "drafts.Model", "model": {"model": "../target"}}}),
        (ValueError, "'/target', which is outside", {"target": {"model": "/target"}}),
        (FileNotFoundError, "gone", {"target": {"model": "gone"}}),
        (ValueError, r"is damaged \(KeyError", {"target": {"modell": "target"}}),
        (ValueError, "'os' is no mask", {"draft": {"mask": "os"}}),
    ],
)  # fmt: skip
def test_a_recipe_names_parts_of_the_library_and_folders_beside_it(error, says, change, folder):
    file = folder / "decoder.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=says):
        sd.load(folder)


def test_code_in_a_models_folder_is_not_run(folder):
    file = folder / "target" / "config.json"
    config = json.loads(file.read_text()) | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    file.write_text(json.dumps(config))
    ran = folder / "ran"
    (folder / "target" / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        sd.load(folder)
    with pytest.raises(ValueError, match="trust_remote_code"):
        sd.decoder(folder / "target")
    assert not ran.exists()


def test_folders_that_are_no_saved_decoder(folder, target):
    with pytest.raises(FileExistsError, match="is not an empty folder: give a new one"):
        sd.decoder(target).build().save(folder)
    with pytest.raises(ValueError, match=r"is a saved decoder: give it to sd.load\("):
        sd.decoder(folder)
    with pytest.raises(FileNotFoundError, match=r"has no decoder.json: .* goes to sd.decoder\(folder\)"):
        sd.load(zoo.FOLDER / "pocket-tiny")
    (folder / "decoder.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        sd.load(folder)


def test_a_save_that_fails_leaves_nothing(tmp_path):
    target = sd.HFModel(tiny("llama", 0))
    target.model.generation_config.temperature = 0.3  # without do_sample, which transformers refuses to save
    decoder = sd.decoder(target).greedy().build()
    for _ in range(2):
        with pytest.raises(ValueError, match="GenerationConfig"):
            decoder.save(tmp_path / "folder" / "saved")
        assert not list((tmp_path / "folder").iterdir())
    target.model.generation_config.temperature = None
    (tmp_path / "folder" / "saved").mkdir()
    decoder.save(tmp_path / "folder" / "saved")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["saved"]
    assert (
        sd.load(tmp_path / "folder" / "saved").generate([[1, 2]], 4).ids == decoder.generate([[1, 2]], 4).ids
    )
