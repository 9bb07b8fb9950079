"""What the lab refuses, and how it says so: prompts of a wrong form, damaged traces, a winner of one repeat, no numbers at all."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec import lab
from specdec.arguments import counts
from specdec.lab.prompt_file import Entry, read

TABLE = sd.TableModel.random(vocab_size=6, order=1, seed=0)
DRAFT = sd.TableModel.random(vocab_size=6, order=1, seed=1)
HOW = {"new_tokens": 4, "k": 2, "eos_token_id": (), "progress": False}
PROMPTS = [[0], [1, 2], [3], [4, 5, 1], [5]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return lab.record(TABLE, PROMPTS, tmp_path_factory.mktemp("trace") / "t", **HOW)


@pytest.fixture
def folder(recorded, tmp_path):
    """A copy of a trace, to damage."""
    shutil.copytree(recorded.folder, tmp_path / "t")
    return tmp_path / "t"


# -- prompts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        (None, TypeError, "prompts is a NoneType: give"),
        ([{"prompt": "x"}], TypeError, r"prompt 0 is a dict with keys \['prompt'\]: .*Entry"),
        ([[1], {"turns": ["x"]}], TypeError, "prompt 1 is a dict with keys"),
        ([[1], [0.5]], TypeError, "prompt 1 holds float"),
        ([Entry((), given=(1,)), None], TypeError, "prompt 1 holds NoneType"),
        ([[1], [6]], ValueError, "prompt 1 has an id outside the target's vocabulary of 6"),
        ([[1], []], ValueError, "prompt 1 is empty"),
        (["x"], ValueError, "prompt 0 is text but the target has no tokenizer"),
        ([], ValueError, "prompts is empty"),
    ],
)
def test_wrong_prompts_are_named(given, kind, says, tmp_path):
    with pytest.raises(kind, match=says):
        lab.record(TABLE, given, tmp_path / "t", **HOW)
    assert not (tmp_path / "t").exists()


def test_prompts_of_every_form_are_recorded(tmp_path):
    def first(given, model=TABLE):
        trace = lab.record(model, given, tmp_path / str(len(list(tmp_path.iterdir()))), **HOW)
        return [text.ids[: text.prompt] for text in trace.texts]

    assert first([1, 2, 3]) == first(torch.tensor([[1, 2, 3]])) == [[1, 2, 3]]
    assert first({"input_ids": [[1, 2], [0, 3]], "attention_mask": [[1, 1], [0, 1]]}) == [[1, 2], [3]]
    assert first([[1], Entry((), given=(4, 5)), (2,)]) == [[1], [4, 5], [2]]
    assert (
        first(["ab", Entry(("ab",))], sd.HFModel(tiny("llama"), byte_tokenizer()))
        == [byte_tokenizer()("ab")["input_ids"]] * 2
    )


def test_an_unknown_field_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "x", "catgory": "code"}\n')
    with pytest.raises(
        ValueError,
        match=r"line 2 of p\.jsonl has an unknown field 'catgory' \(did you mean 'category'\?\): give prompt, turns or messages",
    ):
        read(path)


# -- damaged traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own", "probs"])
def test_a_cut_array_is_named(folder, name):
    path = folder / "part-000" / f"{name}.bin"
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(ValueError, match=rf"part-000/{name}\.bin is damaged: .*: record again"):
        lab.Trace(folder)
    path.unlink()
    with pytest.raises(ValueError, match=rf"part-000/{name}\.bin is damaged: it has 0 bytes"):
        lab.Trace(folder)


@pytest.mark.parametrize("text", ["", '{"format": 1,', "[]", '{"format": 1}'])
def test_cut_settings_are_named(folder, text):
    (folder / "trace.json").write_text(text)
    for ask in (lab.Trace, lambda folder: lab.record(TABLE, PROMPTS, folder, **HOW)):
        with pytest.raises(ValueError, match=r"trace\.json is damaged .*: record again, into a new folder"):
            ask(folder)


def test_texts_that_are_gone_are_missed_and_recorded_again(recorded, folder):
    path = folder / "part-000" / "texts.jsonl"
    for left, count in ((path.read_text()[:-7], 4), ("", 0), (None, 0)):
        if left is None:
            path.unlink()
        else:
            path.write_text(left)
        with pytest.raises(
            ValueError, match=rf"texts\.jsonl is damaged: it has {count} of 5 texts: record again"
        ):
            lab.Trace(folder)
    again = lab.record(TABLE, PROMPTS, folder, **HOW)
    assert [text.ids for text in again.texts] == [text.ids for text in recorded.texts]
    assert lab.Trace(folder).id == recorded.id


def test_a_line_that_is_no_text_is_named(folder):
    path = folder / "part-000" / "texts.jsonl"
    lines = path.read_text().splitlines()
    for wrong in (lines[1][:20], "[]", "{}"):
        path.write_text("\n".join([lines[0], wrong, *lines[2:], ""]))
        with pytest.raises(ValueError, match=r"line 2 of .*texts\.jsonl is damaged"):
            lab.Trace(folder)


def test_traces_without_the_number_of_texts_are_read(recorded, folder):
    """Those of earlier versions, and those whose recording was interrupted."""
    (folder / "part-000" / "texts.count").unlink()
    assert lab.Trace(folder).id == recorded.id


# -- comparisons --------------------------------------------------------------------------------------------------------------


def test_one_repeat_shows_no_winner():
    base = sd.decoder(TABLE)
    some = {"plain": base, "drafted": base.draft(DRAFT, 2)}
    found = sd.compare(some, PROMPTS, batches=(1, 2), repeats=1, new_tokens=4)
    assert found.best == {}
    assert {(row["ratio_low"], row["ratio_high"]) for row in found.rows} == {(None, None)}
    assert all(row["ratio"] > 0 and not row["close"] for row in found.rows)
    assert "one repeat gives no interval and shows no winner: raise repeats" in repr(found)
    assert "best at" not in repr(found)
    (axes,) = found.plot().axes
    assert len(axes.get_legend().get_texts()) == 2
    again = sd.compare(some, PROMPTS, batches=1, repeats=2, new_tokens=4)
    assert list(again.best) == [1]
    assert "one repeat" not in repr(again)


def test_rows_of_auto_tell_which_are_lossy():
    base = sd.decoder(TABLE).verifier(sd.verifiers.TypicalAcceptance())
    found = sd.auto(base, {"a": DRAFT}, PROMPTS, 1, batches=1, new_tokens=6, repeats=1)
    assert {row["method"]: row["lossless"] for row in found.rows} == {
        "plain": True,
        "none": True,
        "a/1": False,
    }
    assert "is lossy" in repr(found)
    exact = sd.auto(sd.decoder(TABLE), {"a": DRAFT}, PROMPTS, 1, batches=1, new_tokens=6, repeats=1)
    assert all(row["lossless"] for row in exact.rows)
    assert "lossy" not in repr(exact)


def test_a_simulation_has_its_tau(recorded):
    found = lab.simulate(recorded, DRAFT, TABLE, 2, repeats=1)
    assert found.tau == found.counted.tau
    assert f"tau {found.tau:.3f}" in repr(found)


@pytest.mark.parametrize("empty", [(), [], torch.tensor([], dtype=torch.long)])
def test_no_numbers_at_all(empty):
    with pytest.raises(ValueError, match="batches is empty: give a whole number, or several"):
        counts("batches", empty)
    base = sd.decoder(TABLE)
    with pytest.raises(ValueError, match="batches is empty"):
        sd.compare({"plain": base}, PROMPTS, batches=empty)
    with pytest.raises(ValueError, match="batches is empty"):
        sd.auto(base, {"a": DRAFT}, PROMPTS, batches=empty)
    for lengths in (empty, {"a": empty}):
        with pytest.raises(ValueError, match="lengths is empty"):
            sd.auto(base, {"a": DRAFT}, PROMPTS, lengths)
