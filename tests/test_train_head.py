"""The recipe that trains a head for a target of one's own: it learns, is saved, decodes and continues, and bad input ends it early."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from recipe_runs import imported, quick, report
from tiny import byte_tokenizer, tiny
from tiny_states import stateful

import specdec as sd
from specdec.drafts.heads import PEagle
from specdec.lab.head_kinds import KINDS, LOGITS, anchors, mask_token_of
from specdec.lab.loading import load
from specdec.lab.states import sequence_states
from specdec.training.anchored import blocks, layers_of
from specdec.training.losses import ByDepth, CombinedLoss
from specdec.training.states import target_states
from specdec.training.train import train

TEXT = "one two three four five six seven eight nine ten. " * 60
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
# So that a training takes a second.
WORDS = {"length": 32, "tokens": 0.001, "validation": 4, "batch": 4, "validations": 1, "compile": False}


@pytest.fixture(scope="module")
def recipe():
    with imported("train_head") as module:
        yield module


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a target and a text."""
    place = tmp_path_factory.mktemp("own")
    tiny("qwen3", num_hidden_layers=4).save_pretrained(place / "target")
    byte_tokenizer().save_pretrained(place / "target")
    (place / "text.txt").write_text(TEXT)
    return place


def settings(recipe, place, out, **changes):
    words = {"target": str(place / "target"), "dataset": str(place / "text.txt"), "output": str(out)}
    return recipe.Settings(**{**WORDS, **words, **changes})


def check_trained(place, out, kind):
    """The head in a folder is of its kind, and decoding with it gives the target's own text."""
    target = sd.decoder(str(place / "target"), dtype="float32").build().target
    head = sd.drafts.heads.load(out, target, dtype=torch.float32)
    assert type(head) is KINDS[kind].head
    greedy = sd.decoder(target).greedy()
    made = greedy.draft(sd.drafts.Head(head), 3).build().generate("one two", 12)
    assert made.ids == greedy.build().generate("one two", 12).ids
    assert greedy.draft(str(out), 3).build().generate("one two", 12).ids == made.ids


def test_a_head_of_ones_own_is_trained_saved_and_continued(recipe, place, tmp_path, monkeypatch, capsys):
    whole, part = tmp_path / "whole", tmp_path / "deeper" / "part"
    rows = tmp_path / "rows.json"
    recipe.main(settings(recipe, place, whole, tokens=0.0022, json=str(rows)))
    assert "tau" in capsys.readouterr().out.splitlines()[-1]
    said = report(rows)
    assert [row["step"] for row in said] == [0, 17]
    assert said[-1]["validation_loss"] < said[0]["validation_loss"]
    assert said[-1]["tau"] > said[0]["tau"]
    assert said[0]["parameters"] == sum(
        p.numel() for p in sd.drafts.heads.Eagle3.from_pretrained(whole).parameters()
    )
    check_trained(place, whole, "eagle3")
    card = (whole / "README.md").read_text()
    assert "--tokens 0.0022 --batch 4 " in card
    assert "--no-compile --validation 4 " in card
    assert "--length 32 " in card
    assert f"| {said[-1]['validation_loss']:.3f} |" in card

    def stops(row):
        if row["step"] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recipe, "train", partial(train, on_step=stops))
        with pytest.raises(KeyboardInterrupt):
            recipe.main(settings(recipe, place, part, tokens=0.0022))
    assert not part.exists()  # a folder with a head is a trained one
    recipe.main(settings(recipe, place, part, tokens=0.0022))
    one, two = (sd.drafts.heads.Eagle3.from_pretrained(folder) for folder in (whole, part))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "eagle3"])
def test_every_kind_of_head_learns(kind, recipe, place, tmp_path):
    out, rows = tmp_path / "head", tmp_path / "rows.json"
    more = {"record": True, "work": str(tmp_path / "work")} if kind == "mtp" else {}
    recipe.main(
        settings(recipe, place, out, head=kind, epochs=6, muon_lr=0.03, adam_lr=0.01, json=str(rows), **more)
    )
    first, last = (json.loads(rows.read_text())["rows"][n] for n in (0, -1))
    assert last["acceptance"] > first["acceptance"]
    if kind in ("dflash2", "lilicorr"):  # q is 0 outside of its candidates
        assert first["validation_loss"] is None
    else:
        assert last["validation_loss"] < first["validation_loss"]
    assert (tmp_path / "work").exists() == (kind == "mtp")
    check_trained(place, out, kind)


def test_a_head_begins_with_a_small_model(recipe, place, tmp_path):
    tiny("llama", seed=5, hidden_size=24, num_key_value_heads=4).save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    changes = {
        "head": "pard2",
        "start": str(tmp_path / "small"),
        "loss": "own",
        "k": 4,
        "layers": ("2", "final"),
    }
    recipe.main(settings(recipe, place, tmp_path / "head", **changes))
    check_trained(place, tmp_path / "head", "pard2")
    head = sd.drafts.heads.Pard2.from_pretrained(tmp_path / "head")
    assert (head.depth, head.taps, head.config.hidden_size) == (4, (2, "final"), 24)
    card = (tmp_path / "head" / "README.md").read_text()
    assert "CATLoss" in card
    assert "the target's embedding" not in card


@pytest.mark.slow
def test_the_command_line(place, tmp_path):
    """A chat data set, other layers, and a recording that a second run finds."""
    data = tmp_path / "chat.jsonl"
    turns = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": TEXT[:200]}]
    data.write_text("\n".join(json.dumps({"talk": turns}) for _ in range(20)))
    chatty = byte_tokenizer()
    chatty.chat_template = CHAT
    tiny("llama", num_hidden_layers=3).save_pretrained(tmp_path / "target")
    chatty.save_pretrained(tmp_path / "target")
    words = ["--target", str(tmp_path / "target"), "--dataset", str(data), "--column", "talk"]
    words += ["--length", "32", "--tokens", "0.001", "--validation", "2", "--no-compile", "--blocks", "2"]
    words += ["--layers", "1", "3", "final", "--k", "3", "--record", "--work", str(tmp_path / "work")]
    out = tmp_path / "head"
    said = quick("recipes/train_head.py", *words, "--output", str(out))
    assert "tau" in said.splitlines()[-1]
    head = sd.drafts.heads.Eagle3.from_pretrained(out)
    assert (head.taps, head.kv_layers) == ((1, 3, "final"), 2)
    assert "--layers 1 3 final --k 3 --blocks 2 " in (out / "README.md").read_text()
    assert (
        quick("recipes/train_head.py", *words, "--output", str(out)).count("step") == 1
    )  # the untrained one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": ""}, "--target is missing"),
        ({"target": "/nowhere/at/all"}, "there is no folder"),
        ({"layers": ("9",)}, r"--layers 9: the target has 0 \(the embedding\) to 4"),
        ({"layers": ("last",)}, "--layers last: give numbers from 0, or final"),
        ({"head": "mtp", "layers": ("1", "2")}, "MTP reads one layer"),
        ({"head": "mtp", "blocks": 2}, "MTP has one block"),
        ({"head": "dflash2", "vocabulary": 8}, "--vocabulary: dflash2 is trained without one"),
        ({"head": "xpress", "start": "small"}, "xpress has no weights of a language model"),
        ({"length": 4096}, "--length 4096: the target takes at most 256 tokens"),
        ({"length": 5}, "--length 5: give more than the 5 tokens of a block"),
        ({"length": 200, "validation": 40}, r"has 15 sequences of 200 tokens, and --validation 40"),
        ({"tokens": 0.0}, "--tokens 0.0: give a number above 0"),
        ({"k": -1}, "--k -1: give at least 1, or 0"),
        (
            {"mask_token": "5"},
            "--mask-token: eagle3 is trained without one: leave it out, or train peagle, dflash, dflash2, dspark",
        ),
        ({"head": "dflash", "mask_token": "97"}, "--mask-token 97: the target has no such token"),
        (
            {"head": "dflash", "mask_token": "[mask]"},
            "the target has no such token: give one that it has, or its id",
        ),
        (
            {"head": "mtp", "vocabulary": 9},
            "--vocabulary: mtp is trained without one: leave it out, or train eagle3",
        ),
        ({"vocabulary": 97}, "--vocabulary 97: give fewer than the target's 97 tokens"),
        ({"vocabulary": -1}, "--vocabulary -1: give at least 1"),
        (
            {"head": "medusa", "export": "there"},
            "--export: head is a Medusa: the layout of speculators has Eagle3",
        ),
        ({"layers": ("1", "final"), "export": "there"}, "--export: taps are .*make the head with layers"),
        ({"head": "dspark", "mask_token": "none", "export": "there"}, "--export: mask_token is None"),
        ({"validation_dataset": "/nowhere.jsonl"}, "--validation-dataset /nowhere.jsonl: it cannot be read"),
        (
            {"head": "eagle3", "layout": "z-lab"},
            "it has no eagle3: leave it out, or train dflash or jetspec or dflash2 or domino or lilicorr or xpress",
        ),
        ({"start": "small"}, "--start small: eagle3 has no weights of a language model"),
        (
            {"head": "pard2", "start": "small", "blocks": 2},
            "--start small: its blocks and its mask token are the model's",
        ),
        (
            {"head": "pard2", "start": "pocket-tiny"},
            "model has a vocabulary of 4096 and the target one of 97",
        ),
    ],
)
def test_bad_settings_end_before_the_training(changes, message, recipe, place, tmp_path):
    with pytest.raises(SystemExit, match=message):
        recipe.main(settings(recipe, place, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_bad_targets_texts_and_folders(recipe, place, tmp_path):
    def refused(message, **changes):
        with pytest.raises(SystemExit, match=message):
            recipe.main(settings(recipe, place, changes.pop("out", tmp_path / "out"), **changes))

    tiny("llama").save_pretrained(tmp_path / "mute")
    refused("it has no tokenizer: save one", target=str(tmp_path / "mute"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": TEXT, "n": 1, "talk": [{"role": "user"}]}))
    rows = str(tmp_path / "rows.jsonl")
    refused("--column body: the data set has text, n, talk", dataset=rows, column="body")
    refused("a row has a int, '1': name a column of texts", dataset=rows, column="n")
    refused("has no chat template", dataset=rows, column="talk")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"')
    refused("line 2 is no JSON", dataset=str(tmp_path / "bad.jsonl"))
    (tmp_path / "list.jsonl").write_text("[1]")
    refused("line 1 is no JSON object", dataset=str(tmp_path / "list.jsonl"))
    refused("it has other files than a head's", out=place / "target")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "head.json").write_text("{}")
    refused("and there is no .*head.pt to continue from", out=tmp_path / "head")
    with pytest.raises(SystemExit):
        recipe.parse(recipe.Settings, None, ["--head", "eagle4"])


def test_a_target_that_heads_do_not_read_is_refused(recipe, place, tmp_path):
    stateful("gemma3n_text").save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit, match=r"Gemma3n.* does more to its logits"):
        recipe.main(settings(recipe, place, tmp_path / "out", target=str(tmp_path / "other")))


@pytest.mark.slow
def test_a_hybrid_target_trains_a_head(recipe, place, tmp_path):
    stateful("lfm2").save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    recipe.main(settings(recipe, place, tmp_path / "out", target=str(tmp_path / "target"), head="mtp"))
    check_trained(tmp_path, tmp_path / "out", "mtp")


def test_the_disk_is_asked_before_it_is_filled(recipe, place, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe.shutil, "disk_usage", lambda folder: type("", (), {"free": 1000}))
    s = settings(recipe, place, tmp_path / "out", record=True, work=str(tmp_path / "work"))
    full = recipe.shutil.disk_usage
    with pytest.raises(SystemExit, match="GB free: give another --work"):
        recipe.main(s)
    monkeypatch.undo()
    recipe.main(s)
    monkeypatch.setattr(recipe.shutil, "disk_usage", full)
    again = settings(recipe, place, tmp_path / "again", record=True, work=str(tmp_path / "work"))
    recipe.main(again)  # everything is stored already


def test_a_run_does_not_continue_with_another_text(recipe, place, tmp_path):
    recipe.main(settings(recipe, place, tmp_path / "head"))
    (tmp_path / "head" / "head.json").unlink()
    for file in (tmp_path / "head").iterdir():
        if file.name != "README.md":  # as if the export had been ended
            file.unlink()
    recipe.main(settings(recipe, place, tmp_path / "head"))
    assert (tmp_path / "head" / "head.json").exists()
    (tmp_path / "other.txt").write_text(TEXT.replace("one", "eno"))
    with pytest.raises(SystemExit, match="is of another run: its data is"):
        recipe.main(settings(recipe, place, tmp_path / "head", dataset=str(tmp_path / "other.txt")))


def test_recorded_sequences_are_found_by_their_ids(tmp_path):
    target = tiny("llama")
    ids = torch.arange(36).view(4, 9)
    first = sequence_states(target, ids, str(tmp_path), (0,))
    assert len(first) == 4
    assert sequence_states(target, ids, str(tmp_path), (0,)).folder == first.folder
    assert sequence_states(target, ids + 1, str(tmp_path), (0,)).folder != first.folder


def logits(head, target):
    tokens = torch.arange(60)[None] % 97
    with torch.no_grad():
        batch = target_states(target, tokens, [tap for tap in head.taps if tap != "final"])
        return blocks(head, tokens, layers_of(head, batch), 3)


WITHOUT = ("medusa", "domino", "lilicorr", "jetspec", "pard2")  # which the layout of speculators has not


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT])
def test_every_kind_is_trained_and_exported(kind, recipe, place, tmp_path, capsys):
    takes = KINDS[kind].takes
    more = {"mask_token": "~"} if "mask_token" in takes else {}
    more |= {"vocabulary": 20} if "vocabulary" in takes and kind != "peagle" else {}
    out, there = tmp_path / "head", tmp_path / "there"
    recipe.main(settings(recipe, place, out, head=kind, tokens=0.00025, k=3, export=str(there), **more))
    said = capsys.readouterr().out
    assert "the head can be exported for vLLM" in said.splitlines()[0]
    target, _ = load(str(place / "target"), torch.float32)
    mine, read = (sd.drafts.heads.load(folder, target, dtype=torch.float32) for folder in (out, there))
    assert torch.equal(logits(mine, target), logits(read, target))
    if "mask_token" in more:
        assert mine.settings["mask_token"] == byte_tokenizer().get_vocab()["~"]
    config = json.loads((there / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(place / "target")
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    if "vocabulary" in more:
        text = byte_tokenizer()(TEXT)["input_ids"]
        assert len(mine.ids) == 20
        assert set(text) <= set(mine.ids.tolist())
        assert byte_tokenizer().eos_token_id in mine.ids
        assert "--vocabulary 20: these tokens are 100.0% of the training text" in said
        assert "--vocabulary 20" in (out / "README.md").read_text()
    check_trained(place, out, kind)
    # The same command again ends as it did, and another one does not write there.
    recipe.main(settings(recipe, place, out, head=kind, tokens=0.00025, k=3, export=str(there), **more))
    with pytest.raises(SystemExit, match=r"--export .*something else than this head"):
        recipe.main(settings(recipe, place, tmp_path / "new", head=kind, export=str(there)))


def test_a_head_for_sglang(recipe, tmp_path):
    tiny("llama", num_hidden_layers=8).save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "text.txt").write_text(TEXT)
    out, there = tmp_path / "head", tmp_path / "there"
    recipe.main(
        settings(recipe, tmp_path, out, tokens=0.00025, layout="specforge", export=str(there), vocabulary=20)
    )
    assert json.loads((there / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    target, _ = load(str(tmp_path / "target"), torch.float32)
    mine, read = (sd.drafts.heads.load(folder, target, dtype=torch.float32) for folder in (out, there))
    assert torch.equal(logits(mine, target), logits(read, target))
    assert "--layout specforge" in (out / "README.md").read_text()


def test_a_causal_block_for_vllm(recipe, place, tmp_path):
    out, there = tmp_path / "head", tmp_path / "there"
    words = {"head": "jetspec", "loss": "own", "mask_token": "~", "layers": ("1",), "tokens": 0.00025, "k": 3}
    recipe.main(settings(recipe, place, out, layout="z-lab", export=str(there), **words))
    config = json.loads((there / "config.json").read_text())
    assert config["is_causal"] is config["dflash_config"]["causal"] is True
    target, _ = load(str(place / "target"), torch.float32)
    mine, read = (sd.drafts.heads.load(folder, target, dtype=torch.float32) for folder in (out, there))
    assert torch.equal(logits(mine, target), logits(read, target))
    check_trained(place, out, "jetspec")


def test_a_head_that_cannot_be_exported_is_trained_all_the_same(recipe, place, tmp_path, capsys):
    recipe.main(settings(recipe, place, tmp_path / "head", head="medusa", tokens=0.00025, vocabulary=20))
    assert (
        "cannot be exported for vLLM, which reads the layout of speculators: head is a Medusa"
        in capsys.readouterr().out
    )
    check_trained(place, tmp_path / "head", "medusa")
    recipe.main(settings(recipe, place, tmp_path / "other", head="dflash", tokens=0.00025))
    assert "no token to spare: give one that texts do not have, --mask-token" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    for there, reason in (
        (tmp_path / "new", "it is --output, too"),
        (tmp_path / "head", "something else"),
        (tmp_path / "file", "something else"),
        (place / "target", "something else"),
    ):
        with pytest.raises(SystemExit, match=f"--export .*{reason}.*give a"):
            recipe.main(settings(recipe, place, tmp_path / "new", export=str(there)))


def test_the_token_of_slots_without_one():
    tokenizer, target = byte_tokenizer(), tiny("llama", vocab_size=101)
    table = target.get_input_embeddings().weight
    assert mask_token_of(tokenizer, target) == 97, "the first that the tokenizer does not use"
    tokenizer.add_tokens(["<|reserved_7|>", "<unk>", "<pad>"])
    assert mask_token_of(tokenizer, target) == 100
    with torch.no_grad():
        table[100] = 0  # its slots would read nothing
    assert mask_token_of(tokenizer, target) == 97, "reserved"
    with torch.no_grad():
        table[97] = 0
    assert mask_token_of(tokenizer, target) is None
    tokenizer.pad_token = tokenizer.eos_token
    assert mask_token_of(tokenizer, target) is None, "texts have it"
    tokenizer.pad_token = "<pad>"
    assert mask_token_of(tokenizer, target) == 99
    tokenizer.unk_token = "<unk>"
    assert mask_token_of(tokenizer, target) == 98
    tokenizer.mask_token = "~"
    assert mask_token_of(tokenizer, target) == 94


@pytest.fixture
def chats(place, tmp_path):
    """A folder with a target that has a chat template, and chats."""
    tiny("qwen3", num_hidden_layers=4).save_pretrained(tmp_path / "target")
    chatty = byte_tokenizer()
    chatty.chat_template = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    chatty.save_pretrained(tmp_path / "target")
    turns = [{"role": "user", "content": "UVW" * 12}, {"role": "assistant", "content": "one two three"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"text": turns})] * 30))
    return tmp_path


def test_chats_train_on_what_the_assistant_wrote(recipe, chats, monkeypatch, capsys):
    found = {}

    def watched(head, target, data, **more):
        found[more["settings"].seed] = data, more["validation"]
        return train(head, target, data, **more)

    monkeypatch.setattr(recipe, "train", watched)
    words = {
        "dataset": str(chats / "chats.jsonl"),
        "tokens": 0.00025,
        "length": 64,
        "work": str(chats / "work"),
    }
    recipe.main(settings(recipe, chats, chats / "one", seed=1, **words))
    recipe.main(settings(recipe, chats, chats / "two", seed=2, record=True, vocabulary=12, **words))
    recipe.main(settings(recipe, chats, chats / "all", seed=3, record=True, all_tokens=True, **words))
    tokenizer = byte_tokenizer()
    for part in found[1]:
        learnt = tokenizer.decode(part.data[:, 1:][part.mask[:, 1:]])
        assert set(learnt.split("</s>")[1:-1]) == {"one two three"}
    for live, stored, whole in zip(found[1], found[2], found[3]):
        assert torch.equal(live.mask, stored.mask)
        assert torch.equal(stored.data.take([0]).tokens, live.data[:1])
        assert whole.folder == stored.data.folder, "states serve any mask"
    head = sd.drafts.heads.load(chats / "two", load(str(chats / "target"))[0])
    assert set(tokenizer.decode(head.ids)) >= set("one two three</s>") - set("</s>")
    assert not set("UVW") & set(tokenizer.decode(head.ids))
    assert "all tokens are learnt" not in capsys.readouterr().out
    (chats / "asks.jsonl").write_text(json.dumps({"text": [{"role": "user", "content": "UVW" * 60}]}))
    for option in ("dataset", "validation_dataset"):
        with pytest.raises(
            SystemExit, match=rf"--{option.replace('_', '-')} .*its 1 chats have no sequence of 64 tokens"
        ):
            recipe.main(
                settings(recipe, chats, chats / "new", **{**words, option: str(chats / "asks.jsonl")})
            )
    broken = byte_tokenizer()
    broken.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages | length < 2 %}{{ raise_exception('two') }}{% endif %}"
    broken.save_pretrained(chats / "target")
    recipe.main(settings(recipe, chats, chats / "none", seed=4, **words))
    assert isinstance(found[4][0], torch.Tensor)
    assert "of 12 of 12 chats all tokens are learnt" in capsys.readouterr().out


def test_held_out_text_of_its_own(recipe, place, tmp_path, capsys, monkeypatch):
    found = {}

    def watched(head, target, data, **more):
        found.update(data=data, held=more["validation"])
        return train(head, target, data, **more)

    monkeypatch.setattr(recipe, "train", watched)
    other = tmp_path / "other.txt"
    other.write_text("zyxwv " * 20)
    recipe.main(settings(recipe, place, tmp_path / "head", tokens=0.00025, validation_dataset=str(other)))
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(found["data"][0]) == TEXT[:33], "nothing of it is held out"
    assert [tokenizer.decode(one) for one in found["held"]] == [
        other.read_text()[n : n + 33] for n in (0, 32, 64)
    ]
    assert "--validation-dataset has 3 sequences, fewer than --validation 4" in capsys.readouterr().out
    assert "at most 4 sequences of" in (tmp_path / "head" / "README.md").read_text()
    other.write_text("short")
    with pytest.raises(SystemExit, match=r"--validation-dataset .*its text has no sequence of 32 tokens"):
        recipe.main(settings(recipe, place, tmp_path / "new", validation_dataset=str(other)))


def test_a_head_fits_the_depth_of_its_target():
    shallow, deep = tiny("llama"), tiny("llama", num_hidden_layers=24)
    assert KINDS["dflash"].new(shallow).settings["blocks"] == 1
    assert KINDS["dflash"].new(deep).settings["blocks"] == 5
    assert KINDS["eagle3"].new(deep).taps == (2, 12, 21)
    head = KINDS["jetspec"].new(deep)
    assert (head.causal, KINDS["dflash"].new(deep).causal) == (True, False)
    assert KINDS["jetspec"].loss("own", head) == ByDepth(CombinedLoss(soft=1.0), 1.0)
    assert KINDS["jetspec"].loss("mixed", head) == KINDS["dflash"].loss("mixed", head)
    head = KINDS["peagle"].new(deep, k=3, blocks=2)
    assert isinstance(head, PEagle)
    assert (head.longest, head.kv_layers) == (3, 2)
    for name, kind in KINDS.items():
        made = kind.new(shallow, k=3)
        assert (made.longest or 3) == 3, name
    with pytest.raises(ValueError, match="there are mixed and own"):
        KINDS["mtp"].loss("hard", made)


def test_a_large_vocabulary_has_fewer_anchors():
    assert anchors(4096, 5, 2) == 256
    assert 8 < anchors(151936, 5, 2) < 100
    assert anchors(151936, 5, 2) * 2 * 5 * 151936 <= LOGITS
    assert anchors(10**9, 5, 2) == 8
    assert math.isclose(KINDS["dflash"].factor, math.exp(-1 / 4))
