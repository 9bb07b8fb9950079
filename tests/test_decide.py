"""The recipe that says which decoder to use: what it tries, on which prompts, and what it concludes."""

from __future__ import annotations

import json

import pytest
from recipe_runs import imported, report
from tiny import tiny

import specdec as sd
from specdec import zoo

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def recipe():
    with imported("decide") as module:
        yield module


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(*zoo.load("pocket-target"))


def test_every_draft_is_tried_with_every_length_and_heads_with_trees(recipe, target):
    s = recipe.Settings(drafts=("pocket-medusa", "look=ngram"), k=(2, 4, 16), trees=(6, 0))
    made = recipe.decoders(s, target)
    names = ["plain", "pocket-medusa/2", "pocket-medusa/4", "pocket-medusa/5"]
    names.append("pocket-medusa, DDTree of 6")
    assert list(made) == [*names, "look/2", "look/4", "look/16"]  # this head has five outputs
    assert {one.sampling.temperature for one in made.values()} == {1.0}
    assert made["pocket-medusa/2"].length == 2


def test_a_length_that_a_draft_refuses_is_left_out(recipe, target, capsys):
    s = recipe.Settings(drafts=("spire=pocket-spire", "ngram"), k=(2, 16), trees=(0,))
    assert list(recipe.decoders(s, target)) == ["plain", "spire/2", "ngram/2", "ngram/16"]
    assert "spire/16 is left out: " in capsys.readouterr().err


def test_drafts_with_windows_and_with_other_tokenizers_are_tried(recipe, target):
    drafts = (
        "narrow=windowed:pocket-tiny",
        "words=pocket-words",
        "text=text:windowed:pocket-words",
        "magicdec",
    )
    s = recipe.Settings(drafts=drafts, k=(2,), trees=(0,), window=9, sinks=2, temperature=0.0)
    made = recipe.decoders(s, target)
    assert list(made) == ["plain", "narrow/2", "words/2", "text/2", "magicdec/2"]
    narrow, words, text, magicdec = (one.draft for one in list(made.values())[1:])
    for windowed in (narrow.model, text.model, magicdec):
        assert (windowed.window, windowed.sinks) == (9, 2)
    assert (type(words.model), type(text)) == (sd.drafts.Translated, sd.drafts.TextMatch)
    assert len({one.generate("def area(r):", 8).texts[0] for one in made.values()}) == 1


def test_answers_follow_a_schema(recipe, target, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}')
    drafts = ("ngram", "jump", "both=jump:pocket-vanilla")
    s = recipe.Settings(drafts=drafts, k=(4,), trees=(0,), temperature=0.0, schema=str(file))
    recipe.check(s)
    made = recipe.decoders(s, target)
    assert list(made) == ["plain", "ngram/4", "jump/4", "both/4"]
    outs = {name: one.generate("x = ", 24) for name, one in made.items()}
    assert {json.loads(out.texts[0])["size"] for out in outs.values()} <= {1, 2}
    assert len({out.texts[0] for out in outs.values()}) == 1
    assert outs["jump/4"].stats.rounds < outs["plain"].stats.rounds
    file.write_text('{"type": 3}')
    with pytest.raises(SystemExit, match=r"--schema .*schema\.json: "):
        recipe.decoders(s, target)


def test_prompts_of_one_source_are_in_one_half(recipe, target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"text {n}", "source": source} for n, source in enumerate("abac")]
    file.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "alone"}])))
    s = recipe.Settings(prompts=str(file), context=0)
    texts = [[target.tokenizer.decode(row) for row in half] for half in recipe.halves(s, target)]
    assert texts == [["text 0", "text 2", "text 3"], ["text 1", "alone"]]
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(SystemExit, match="give prompts of at least two"):
        recipe.halves(s, target)
    short = recipe.Settings(context=7)
    assert {len(row) for half in recipe.halves(short, target) for row in half} == {7}


@pytest.fixture
def chatty(target, monkeypatch):
    monkeypatch.setattr(target.tokenizer, "chat_template", CHAT)
    return target


def test_chats_stay_whole_and_what_is_too_long_is_refused(recipe, chatty, tmp_path):
    file = tmp_path / "prompts.jsonl"
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two " * 40}]
    lines = [{"messages": talk}, {"turns": ["one two " * 40]}, {"prompt": "one two " * 40}]
    file.write_text("\n".join(map(json.dumps, lines)))
    s = recipe.Settings(prompts=str(file), context=16)
    (chat, plain), (turns,) = recipe.halves(s, chatty)
    text = chatty.tokenizer.decode(chat)
    assert text.startswith("<system>Be brief.<user>one two")
    assert text.endswith("<assistant>")
    assert len(plain) == 16 < len(turns) < len(chat)
    long = recipe.Settings(prompts=str(file), context=16, new_tokens=2048 - len(chat) + 1)
    with pytest.raises(
        SystemExit, match=r"line 1 of prompts.jsonl has \d+ tokens.*2048 positions: shorten it"
    ):
        recipe.halves(long, chatty)


@pytest.mark.parametrize(
    ("low", "said"),
    [
        (1.1, "use a/2, 1.30 [1.10, 1.50]"),
        (0.9, "a/2 may not be faster"),
        (None, "a/2 is not confirmed: all repeats"),
    ],
)
def test_a_lead_that_may_be_noise_is_no_recommendation(low, said, recipe):
    row = {"method": "a/2", "ratio": 1.3, "ratio_low": low, "ratio_high": 1.5}
    assert recipe.verdict(row).startswith(said)


def test_a_prompt_that_a_draft_has_no_room_for_is_refused_before_anything_runs(recipe, tmp_path, monkeypatch):
    """Also one of the second half."""
    tiny("llama", vocab_size=4096, max_position_embeddings=64).save_pretrained(tmp_path / "small")
    monkeypatch.setattr(recipe.sd, "compare", lambda *_: pytest.fail("it ran"))
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "one two " * 40)))
    s = recipe.Settings(drafts=(f"small={tmp_path / 'small'}",), prompts=str(file), new_tokens=8, k=(2,))
    with pytest.raises(SystemExit, match=r"prompt 1 has \d+ tokens .* the draft has 64: shorten the prompt"):
        recipe.main(s)


@pytest.mark.slow
def test_the_fastest_is_measured_again_on_other_prompts(recipe, tmp_path, capsys, monkeypatch):
    """Whatever the machine says: the rows of one comparison, and a second one for each batch at which a draft was the fastest."""
    asked, compare = [], sd.compare

    def noted(decoders, prompts, *settings):
        asked.append((list(decoders), prompts))
        assert settings[-1] is None  # the target's end tokens
        return compare(decoders, prompts, *settings)

    monkeypatch.setattr(recipe.sd, "compare", noted)
    file, texts = tmp_path / "d.json", tmp_path / "p.jsonl"
    texts.write_text("\n".join(json.dumps({"prompt": f"import {name}\n"}) for name in ("os", "sys", "re")))
    s = recipe.Settings(
        drafts=("ngram",),
        k=(2,),
        context=64,
        new_tokens=8,
        batches=(1, 2),
        repeats=2,
        prompts=str(texts),
        eos=True,
        json=str(file),
    )
    found = recipe.main(s)
    said = capsys.readouterr().out
    rows = report(file)
    assert [row["method"] for row in rows if row["part"] == "search"] == ["plain", "ngram/2"] * 2
    speculated = [batch for batch, best in found.best.items() if best != "plain"]
    assert [row["batch"] for row in rows if row["part"] == "again"] == [b for b in speculated for _ in "pd"]
    assert len(asked) == 1 + len(speculated)
    assert all(prompts != asked[0][1] and names[0] == "plain" for names, prompts in asked[1:])
    assert said.count("do not speculate") == 2 - len(speculated)
    assert all(f"batch {batch}: " in said for batch in (1, 2))
    assert said.startswith("half of the prompts are 1: larger batches have some of them more than once")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": ("nowhere",)}, "nowhere"),
        ({"temperature": -1.0}, "temperature"),
        ({"repeats": 0}, "repeats"),
        ({"repeats": 1}, "--repeats 1: one run of each"),
        ({"k": (0,)}, "--k 0: give lengths"),
        ({"drafts": ("a=ngram", "a=suffix")}, "the name 'a' is"),
        ({"drafts": ("=ngram",)}, "the name '' is"),
        ({"drafts": ("a=jump:pocket-tiny",)}, "a=jump:pocket-tiny: nothing is forced without a schema"),
        (
            {"drafts": ("s=windowed:pocket-spire",)},
            "--drafts s=windowed:.*a SPIRe draft has a mask of its own: leave wi",
        ),
        (
            {"drafts": ("s=windowed:pocket-tiny",), "window": 0},
            "--drafts s=windowed:pocket-tiny: window is 0",
        ),
        ({"drafts": ("h=text:pocket-medusa",)}, "--drafts h=text:.*: leave text: out"),
        ({"drafts": ("h=windowed:",)}, "--drafts h=windowed:: .*name a draft after windowed:"),
        ({"schema": "nowhere.json"}, "--schema nowhere.json: there is no such file"),
    ],
)
def test_bad_settings_end_it(changes, message, recipe):
    with pytest.raises(SystemExit, match=message):
        recipe.main(recipe.Settings(**{"drafts": ("ngram",), "context": 16, "new_tokens": 2, **changes}))


def test_a_name_of_another_engine_is_refused_in_one_line(recipe, target):
    with pytest.raises(SystemExit, match="no draft 'eagle3', a name of vLLM's: give the draft itself"):
        recipe.decoders(recipe.Settings(drafts=("small=eagle3",)), target)
