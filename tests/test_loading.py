"""Models and drafts by the names on a command line: their precision, their device, and hub ids."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from recipe_runs import imported
from tiny import byte_tokenizer, tiny
from tiny_states import stateful

import specdec as sd
from specdec import parts, zoo
from specdec.drafts.heads import MTP, Medusa
from specdec.drafts.spire import SpireModel
from specdec.lab import loading, on_texts
from specdec.lab.loading import draft_part, load, load_draft
from specdec.lab.options import parse
from specdec.lab.recipe import Placed, Replayed
from specdec.models.own_cache import OwnCache

model_files, head_files = (import_module(f"specdec.{part}.load") for part in ("models", "drafts.heads"))
spire_files, spire_model = (import_module(f"specdec.drafts.spire.{part}") for part in ("load", "model"))


def one_dtype(model):
    (found,) = {p.dtype for p in model.parameters()}
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a small model, a head and a SPIRe draft of it, all stored in bfloat16."""
    root = tmp_path_factory.mktemp("models")
    target = tiny("llama", vocab_size=97, dtype=torch.bfloat16)
    target.save_pretrained(root / "target")
    tiny("llama", vocab_size=97, seed=1, dtype=torch.bfloat16).save_pretrained(root / "small")
    for name in ("target", "small"):
        byte_tokenizer().save_pretrained(root / name)
    Medusa.from_target(target).save_pretrained(root / "head")
    SpireModel.from_target(target, layers=1, window=8).save_pretrained(root / "spire")
    return root


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_models_have_the_dtype_that_is_given_or_their_own(folders, dtype):
    expected = dtype or torch.bfloat16
    target = sd.HFModel(*load(str(folders / "target"), dtype))
    assert one_dtype(target.model) == expected
    for name in ("head", "spire"):
        draft = load_draft(str(folders / name), target, dtype)
        assert (one_dtype(draft), draft.device) == (expected, target.device)
    model, tokenizer = load_draft(str(folders / "small"), target, dtype)
    assert one_dtype(model) == expected
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    name, part = draft_part(f"own={folders / 'small'}", target, 8, 1, dtype)
    assert (name, part.info.name, one_dtype(part.model.model)) == ("own", "model", expected)
    texts = {
        name: sd.decoder(target).greedy().draft(draft_part(str(folders / name), target, 8, 1, dtype)[1], 2)
        for name in ("small", "head", "spire")
    }
    assert all(len(one.build().generate(["abc"], 4, eos_token_id=()).ids[0]) == 4 for one in texts.values())


@pytest.mark.parametrize("name", ["pocket-vanilla", "pocket-spire", "pocket-medusa"])
def test_pocket_models_are_in_float32_unless_another_dtype_is_given(name):
    target = sd.HFModel(*load("pocket-target"))
    for dtype in (None, torch.bfloat16):
        found = load_draft(name, target, dtype)
        assert one_dtype(found[0] if isinstance(found, tuple) else found) == (dtype or torch.float32)


@pytest.mark.parametrize(
    ("gpu", "device", "expected"),
    [(False, None, None), (True, None, "cuda"), (True, "cpu", None), (True, "cuda:1", "cuda:1")],
)
def test_models_go_to_the_gpu_if_there_is_one(folders, gpu, device, expected, monkeypatch):
    asked, read = [], loading.read

    def noted(name, dtype, device_map):
        asked.append(device_map)
        return read(name, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(loading, "read", noted)
    load(str(folders / "target"), device=device)
    assert asked == [expected]
    assert load("pocket-vanilla")[0].device.type == "cpu"  # where it is unless told otherwise
    moved = []
    monkeypatch.setattr(type(zoo.load("pocket-vanilla")[0]), "to", lambda model, where: moved.append(where))
    load("pocket-vanilla", device="cuda:1")
    assert moved == ["cuda:1"]


def test_drafts_go_where_the_target_is(folders, monkeypatch):
    asked, target = [], sd.HFModel(*load(str(folders / "target")))
    monkeypatch.setitem(vars(target), "device", torch.device("cuda:1"))
    monkeypatch.setattr(loading, "load", lambda *given: asked.append(given) or (None, None))
    monkeypatch.setattr(SpireModel, "from_pretrained", lambda *given, **how: asked.append(how))
    load_draft(str(folders / "small"), target)
    load_draft(str(folders / "spire"), target)
    assert asked[0][2] == torch.device("cuda:1")
    assert asked[1] == {"dtype": "auto", "device_map": "cuda:1"}


def test_hub_ids_are_read(folders, monkeypatch):
    """As on the hub: no folder has such a name, and the files are found under it."""
    target = sd.HFModel(*load(str(folders / "target")))
    for module in (model_files, head_files):
        monkeypatch.setattr(module, "check_hub_name", lambda name, options: None)
    made, tokens = model_files.AutoModelForCausalLM.from_pretrained, loading.load_tokenizer
    asked = []

    def from_pretrained(name, **options):
        asked.append((name, options["dtype"]))
        return made(folders / str(name).partition("/")[2], **options)

    monkeypatch.setattr(model_files.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(loading, "load_tokenizer", lambda name: tokens(folders / str(name).partition("/")[2]))
    assert one_dtype(load("me/target", torch.float32)[0]) == torch.float32
    name, part = draft_part("hub=me/small", target, 8, 1)
    assert (name, one_dtype(part.model.model)) == ("hub", torch.bfloat16)
    assert asked == [("me/target", torch.float32), ("me/small", "auto")]
    spires = []
    monkeypatch.setattr(spire_files, "from_hub", lambda name, file, options: folders / "spire" / file)
    monkeypatch.setattr(
        SpireModel, "from_pretrained", lambda name, *_, **how: spires.append(name) or "a SPIRe draft"
    )
    assert load_draft("me/spire", target) == "a SPIRe draft"
    monkeypatch.setattr(loading, "is_checkpoint", lambda name: name == "me/head")
    monkeypatch.setattr(loading, "load_head", lambda name, *_, dtype: (name, dtype))
    assert load_draft("me/head", target) == ("me/head", None)
    assert spires == ["me/spire"]


def test_names_of_nothing_are_refused(folders):
    target = sd.HFModel(*load(str(folders / "target")))
    for name in ("nowhere", "me/nowhere"):
        with pytest.raises(ConnectionError, match=f"'{name}' is neither a folder nor a pocket model"):
            load_draft(name, target)
    with pytest.raises(SystemExit, match="no draft 'eagle3', a name of vLLM's: give the draft itself"):
        load_draft("eagle3", target)


def test_a_model_with_its_own_cache_is_a_draft_but_has_no_window(folders, tmp_path):
    target = sd.HFModel(*load(str(folders / "target")))
    name = str(tmp_path / "mamba")
    stateful("lfm2").save_pretrained(name)
    byte_tokenizer().save_pretrained(name)
    assert isinstance(draft_part(name, target, 8, 1)[1].model, OwnCache)
    for prefix in ("windowed:", "fp8:"):
        with pytest.raises(SystemExit, match=f"own cache, .*: leave {prefix} out"):
            draft_part(prefix + name, target, 8, 1)


def test_drafts_are_compared_along_a_target_with_its_own_cache(tmp_path):
    name, file = str(tmp_path / "lfm2"), tmp_path / "prompts.jsonl"
    stateful("lfm2").save_pretrained(name)
    byte_tokenizer().save_pretrained(name)
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in "abcde"))
    with imported("compare") as recipe:
        s = recipe.Settings(
            target=name, drafts=(f"itself={name}",), k=(2,), prompts=str(file), new_tokens=3, trace=str(tmp_path / "t"),
            json=str(tmp_path / "c.json"),
        )  # fmt: skip
        recipe.main(s)
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    tau = {row["method"]: row["tau"] for row in rows}
    assert tau["itself"] == pytest.approx(3)


def test_a_targets_own_layer_is_a_draft(folders, monkeypatch):
    target = sd.HFModel(*load(str(folders / "target")))
    with pytest.raises(SystemExit, match=r"no draft 'mtp'.* found no MTP layer .*: name another draft"):
        draft_part("own=mtp", target, 8, 1)
    monkeypatch.setattr(MTP, "from_checkpoint", MTP.from_target)
    with imported("decide") as decide:
        made = decide.decoders(decide.Settings(drafts=("mtp",), k=(2,), trees=(4,)), target)
    name, part = draft_part("own=mtp", target, 8, 1)
    assert (name, type(part.model)) == ("own", MTP)
    assert list(made) == ["plain", "mtp/2", "mtp, EAGLE-2 tree of 4"]
    assert draft_part("suffix", target, 8, 1) == ("suffix", sd.drafts.Suffix())


EXACT = ["compare", "evaluate_tau", "optimality", "verifier_rounds", "stop_rules", "heads"]


@pytest.mark.parametrize("name", [*EXACT, "decide", "bench", "answers"])
def test_recipes_pass_device_and_dtype_on(name, monkeypatch):
    """Where drafts are replayed, float32 is the default."""

    def stop(*given):
        raise SystemExit(str(given))

    needed = {"answers": {"dataset": "d", "output": "o"}}.get(name, {})
    with imported(name) as recipe:
        on_recorded_texts = issubclass(recipe.Settings, on_texts.OnTexts)
        monkeypatch.setattr(on_texts if on_recorded_texts else recipe, "load", stop)
        default = torch.float32 if name in EXACT else None
        for options, expected in (
            ({}, (default, None)),
            ({"dtype": "bfloat16", "device": "cpu"}, (torch.bfloat16, "cpu")),
        ):
            with pytest.raises(SystemExit) as ended:
                recipe.main(recipe.Settings(target="mine", **needed, **options))
            assert str(ended.value) == str(("mine", *expected))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_target_that_is_trained_for_is_on_its_process_device(gpu, monkeypatch):
    def stop(*given):
        raise SystemExit(str(given))

    with imported("train_spire") as recipe:
        monkeypatch.setattr(recipe, "load", stop)
        monkeypatch.setattr(recipe, "PartialState", lambda: SimpleNamespace(device=torch.device("cuda:1")))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        with pytest.raises(SystemExit) as ended:
            recipe.main(recipe.Settings(target="mine"))
    assert str(ended.value) == str(("mine", torch.float32, torch.device("cuda:1" if gpu else "cpu")))


def test_devices_that_are_not_there_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given, says in (("gpu", "--device gpu: give cpu, cuda"), ("cuda", "PyTorch sees no CUDA device")):
        with pytest.raises(SystemExit, match=says):
            Placed(device=given).begin()
    assert parse(Replayed, "", ["--dtype", "auto"]).precision is None
    with pytest.raises(SystemExit):
        parse(Placed, "", ["--dtype", "int8"])
    assert "auto" in capsys.readouterr().err


def test_answers_may_be_continued_on_another_device(tmp_path):
    with imported("answers") as recipe:
        s = recipe.Settings(target="t", dataset="d", output=str(tmp_path / "o.jsonl"))
        recipe.Answers(s)
        recipe.Answers(recipe.Settings(**{**vars(s), "device": "cuda"}))
        with pytest.raises(SystemExit, match="from another command"):
            recipe.Answers(recipe.Settings(**{**vars(s), "dtype": "float32"}))
        assert "device" not in json.loads((tmp_path / "o.jsonl.settings.json").read_text())


def test_a_spire_draft_on_the_hub_is_no_language_model(folders, monkeypatch):
    """Its files are those of a causal LM, too, with which next to nothing would be accepted."""
    target = sd.HFModel.from_pretrained(str(folders / "target"))
    monkeypatch.setattr(parts, "is_checkpoint", lambda name, options=None: False)
    monkeypatch.setattr(spire_files, "from_hub", lambda name, file, options: folders / "spire" / file)
    monkeypatch.setattr(spire_model, "folder_of", lambda name: folders / "spire")
    made = sd.decoder(target).draft("me/spire", length=2).build()
    assert isinstance(made.draft, sd.drafts.Spire)
    with pytest.raises(TypeError, match=r"draft is a SPIRe draft: give SpireModel\.from_pretrained"):
        sd.decoder(target).draft("me/spire", length=2, dtype="float32")
