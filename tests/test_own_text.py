"""Text of one's own for a training: documents, chats, the sequences they are cut into, and those that are held out."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import byte_tokenizer

from specdec.lab.documents import documents, packed
from specdec.lab.own_text import OnOwnText, frequent, split
from specdec.training.sources import Masked

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
ENDING = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
TEXT = "one two three four five six seven eight nine ten. " * 9


def settings(tmp_path, text=TEXT, **more):
    (tmp_path / "text.txt").write_text(text)
    words = {"dataset": str(tmp_path / "text.txt"), "length": 8, "tokens": 24e-6, "validation": 2}
    return OnOwnText(**(words | more))


def chats(tmp_path, count=9):
    turns = [{"role": "user", "content": "UVW"}, {"role": "assistant", "content": "one two"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"text": turns})] * count))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ENDING
    return tokenizer, str(tmp_path / "chats.jsonl")


def test_chats_become_texts(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    mine = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    theirs = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"talk": talk}) + "\n\n" for talk in (mine, theirs)))
    found = list(packed(tokenizer, documents(str(file), "talk"), 24, 9))
    said = "<user>a b<assistant>c" * 2  # the template's own ends, and no end token
    assert tokenizer.decode(torch.cat(found)[0]) == said[:25]
    with pytest.raises(SystemExit, match="a message has role: messages have role and content"):
        list(packed(tokenizer, [[{"role": "user"}]], 4, 1))


def test_tables_are_read(tmp_path):
    pytest.importorskip("datasets")
    file = tmp_path / "rows.csv"
    file.write_text("body,n\nsome text,1\nother text,2\n")
    assert list(documents(str(file), "body")) == ["some text", "other text"]


def test_files_and_folders_are_read(tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo\n", encoding="utf-8")
    (folder / "more" / "b.TXT").write_text("ünter", encoding="utf-8")
    assert list(documents(str(folder), "text")) == ["one\ntwo\n", "ünter"]
    for name in ("rows.JSONL", "rows.ndjson"):
        (tmp_path / name).write_text('{"text": "a"}\n', encoding="utf-8")
        assert list(documents(str(tmp_path / name), "text")) == ["a"]
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    for name in ("bad.json", "bad.txt"):
        with pytest.raises(SystemExit, match=f"--dataset .*{name}: it "):
            list(documents(str(tmp_path / name), "text"))


def test_the_first_sequences_are_held_out(tmp_path):
    tokenizer = byte_tokenizer()
    data, held = settings(tmp_path).texts(tokenizer)
    assert (list(data.shape), list(held.shape)) == ([3, 9], [2, 9])
    assert tokenizer.decode(held[0]) == TEXT[:9]
    assert tokenizer.decode(data[0]) == TEXT[16:25]


def test_sequences_are_held_out_of_text_of_their_own(tmp_path, capsys):
    tokenizer, other = byte_tokenizer(), tmp_path / "other.txt"
    other.write_text("zyxwv " * 2)
    data, held = settings(tmp_path, tokens=1e-3, validation_dataset=str(other)).texts(tokenizer)
    assert tokenizer.decode(data[0]) == TEXT[:9], "nothing of it is held out"
    assert [tokenizer.decode(one) for one in held] == ["zyxwv zyx"]
    said = capsys.readouterr().out
    assert "--validation-dataset has 1 sequences, fewer than --validation 2" in said
    assert "training tokens, fewer than --tokens 0.001" in said


def test_of_chats_the_assistants_tokens_are_learnt(tmp_path, capsys):
    tokenizer, file = chats(tmp_path)
    s = settings(tmp_path, dataset=file)
    for part in s.texts(tokenizer):
        assert isinstance(part, Masked)
        ids, learnt = split(part)
        assert ids.shape == learnt.shape
        assert not set("UVW") & set(tokenizer.decode(ids[learnt]))
    whole = settings(tmp_path, dataset=file, all_tokens=True).texts(tokenizer)[0]
    assert isinstance(whole, torch.Tensor)
    assert split(whole) == (whole, None)
    assert not capsys.readouterr().out
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages | length < 2 %}{{ raise_exception('two') }}{% endif %}"
    assert isinstance(s.texts(tokenizer)[0], torch.Tensor)
    assert "chats all tokens are learnt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("short", {}, "--dataset .* has 0 sequences of 8 tokens, and --validation 2 .* or --validation"),
        ("short", {"validation_dataset": "text"}, "--validation-dataset .* has no sequence of 8 tokens"),
        (
            TEXT,
            {"validation_dataset": "/nowhere.jsonl"},
            "--validation-dataset /nowhere.jsonl: it cannot be read",
        ),
        (TEXT, {"validation": 99}, "sequences of 8 tokens, and --validation 99 of them are held out"),
    ],
)
def test_text_that_is_too_short_or_not_there_is_refused(tmp_path, text, more, message):
    s = settings(tmp_path, text, **more)
    if s.validation_dataset == "text":
        s = settings(tmp_path, text, validation_dataset=s.dataset)
    with pytest.raises(SystemExit, match=message):
        s.texts(byte_tokenizer())


def test_chats_without_an_answer_are_refused(tmp_path):
    tokenizer, _ = chats(tmp_path)
    (tmp_path / "asks.jsonl").write_text(json.dumps({"text": [{"role": "user", "content": "UVW" * 9}]}))
    with pytest.raises(SystemExit, match=r"--dataset .*its 1 chats have no sequence of 8 tokens"):
        settings(tmp_path, dataset=str(tmp_path / "asks.jsonl")).texts(tokenizer)


def test_the_most_frequent_tokens_are_of_what_is_learnt(tmp_path, capsys):
    tokenizer, file = chats(tmp_path)
    data, _ = settings(tmp_path, dataset=file, tokens=1e-3).texts(tokenizer)
    ids = frequent(data, tokenizer, 97, 12)
    assert len(ids) == 12
    assert tokenizer.eos_token_id in ids
    assert set("one tw") <= set(tokenizer.decode(ids))
    assert not set("UVW") & set(tokenizer.decode(ids))
    assert "--vocabulary 12: these tokens are 100.0% of the training text" in capsys.readouterr().out
