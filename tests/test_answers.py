"""The recipe in which a target answers prompts: its texts are the decoder's, turns follow one another, and runs continue."""

from __future__ import annotations

import json

import pytest
from recipe_runs import imported, report
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec.lab.documents import documents

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "old"},
    {"from": "human", "value": "b"},
    {"role": "assistant", "content": "old"},
    {"role": "system", "content": "end"},
]


@pytest.fixture(scope="module")
def recipe():
    with imported("answers") as module:
        yield module


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a target of 256 positions."""
    place = tmp_path_factory.mktemp("answers")
    tiny("llama").save_pretrained(place)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(place)
    return place


def settings(recipe, place, tmp_path, entries, **changes):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"it": entry}) + "\n" for entry in entries))
    words = {
        "target": str(place),
        "dataset": str(data),
        "column": "it",
        "output": str(tmp_path / "out.jsonl"),
    }
    return recipe.Settings(**{"new_tokens": 6, "batch": 2, **words, **changes})


def lines(s):
    with open(s.output, encoding="utf-8") as file:
        return {row["index"]: row for row in map(json.loads, file)}


def test_texts_are_continued_and_a_run_goes_on(recipe, place, tmp_path, capsys):
    entries = ["one", "", "two three", "x" * 300, "four"]
    s = settings(recipe, place, tmp_path, entries, temperature=0.0, json=str(tmp_path / "rows.json"))
    recipe.main(s)
    assert "prompts answered: 3, left out: 2; tokens: 18" in capsys.readouterr().out
    assert report(tmp_path / "rows.json") == [{"prompts": 3, "tokens": 18, "left_out": 2, "tau": 1.0}]
    target = sd.HFModel.from_pretrained(place)
    plain = sd.decoder(target).greedy().build()
    made = lines(s)
    for n in (0, 2, 4):
        assert made[n]["text"] == entries[n] + plain.generate(entries[n], 6).texts[0]
    assert (made[0]["finish"], made[0]["tokens"]) == ("length", 6)
    whole = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(whole[: whole.index("\n") + 20])  # ended while it wrote
    recipe.main(settings(recipe, place, tmp_path, entries, temperature=0.0, draft="ngram", batch=1))
    assert "prompts answered: 2, answered before: 1" in capsys.readouterr().out
    assert {n: row["text"] for n, row in lines(s).items()} == {n: row["text"] for n, row in made.items()}
    with pytest.raises(SystemExit, match="from another command: give a new file"):
        recipe.main(settings(recipe, place, tmp_path, entries, temperature=0.5))
    assert len(lines(s)) == 3


def test_every_assistants_turn_is_answered_after_the_earlier_ones(recipe, place, tmp_path):
    alone = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "old"}]
    talks = [TALK, [{"role": "system", "content": "s"}], alone]
    s = settings(recipe, place, tmp_path, talks, seed=3)
    recipe.main(s)
    cut = lines(s)[0]
    assert (cut["finish"], [m["role"] for m in cut["messages"]]) == (
        "length",
        ["system", "user", "assistant"],
    )
    model = tiny("llama")
    model.generation_config.eos_token_id = list(range(0, 96, 2))  # so that answers end
    model.save_pretrained(tmp_path / "target")
    sd.HFModel.from_pretrained(place).tokenizer.save_pretrained(tmp_path / "target")
    place = tmp_path / "target"
    s = settings(recipe, place, tmp_path, talks, seed=3, new_tokens=60, output=str(tmp_path / "more.jsonl"))
    recipe.main(s)
    made = lines(s)
    assert sorted(made) == [0, 2]
    said = made[0]["messages"]
    assert [m["role"] for m in said] == ["system", "user", "assistant", "user", "assistant"]
    assert [said[n]["content"] for n in (0, 1, 3)] == ["s", "a", "b"]
    plain = sd.decoder(sd.HFModel.from_pretrained(place)).build()
    for n in (2, 4):
        seed = 3 * 1_000_003 * 1_009 + n // 2 - 1
        (one,) = plain.serve([sd.Request(said[:n], 60, seed=seed)])
        assert (said[n]["content"], one.finish) == (one.text, "eos")
    assert said in list(documents(s.output, "messages"))  # as recipes that train read it


def test_greetings_stay_and_tools_are_left_out(recipe, place, tmp_path):
    greeted = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "a"}]
    tools = [{"role": "user", "content": "a"}, {"role": "tool", "content": "42"}]
    s = settings(recipe, place, tmp_path, [tools, greeted])
    recipe.main(s)
    assert sorted(lines(s)) == [1]
    assert lines(s)[1]["messages"][:2] == greeted
    assert len(lines(s)[1]["messages"]) == 3


def test_the_first_tokens_are_the_prompt(recipe, place, tmp_path):
    s = settings(recipe, place, tmp_path, ["one two three", "four"], prompt_tokens=4, count=1)
    recipe.main(s)
    assert lines(s).keys() == {0}
    assert lines(s)[0]["text"].startswith("one ")
    assert not lines(s)[0]["text"].startswith("one two")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": ""}, "--dataset is missing"),
        ({"new_tokens": 0}, "--new-tokens 0: give at least 1"),
        ({"column": "text"}, "--column text: the data set has it"),
        ({"draft": "nowhere"}, "'nowhere' is neither a folder nor a pocket model"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_bad_settings_end_it(changes, message, recipe, place, tmp_path):
    with pytest.raises(SystemExit, match=message):
        recipe.main(settings(recipe, place, tmp_path, ["one"], **changes))
