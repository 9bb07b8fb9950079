"""Long outputs take time in proportion to their length: streamed text, and the progress bar's figures."""

from __future__ import annotations

import random

import pytest
from tiny import tiny

import specdec as sd
from specdec import zoo
from specdec.stats import Stats
from specdec.texts import GrowingText

SPECIAL = 100


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens = tokenizer, 0

    def decode(self, ids, skip_special_tokens):
        self.tokens += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class Words:
    """Decodes as SentencePiece does: a text loses the space that its first word begins with. Every third token has no space."""

    def decode(self, ids, skip_special_tokens):
        words = (f"{'' if i % 3 == 0 else ' '}w{i}" for i in ids if i != SPECIAL)
        return "".join(words).removeprefix(" ")


class Spaced(Words):
    """All tokens begin with a space, so that every cut would lose one."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(f"w{i}" for i in ids if i != SPECIAL)


def said(tokenizer, ids, step):
    text = GrowingText(tokenizer)
    pieces = [text.more(ids[at : at + step], last=at + step >= len(ids)) for at in range(0, len(ids), step)]
    return pieces, text


@pytest.mark.parametrize("step", [1, 3, 500])
@pytest.mark.parametrize("text", ["naïve 日本語 🙂🙃 café\n", "def f(x):\n    return x\n\n"])
def test_pieces_make_up_the_text(text, step):
    tokenizer = zoo.load("pocket-tiny")[1]
    ids = tokenizer(text * 60).input_ids[:1000]
    pieces, _ = said(tokenizer, ids, step)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces[:-1])


@pytest.mark.parametrize("tokenizer", [Words(), Spaced()])
def test_a_tokenizer_that_drops_the_first_space(tokenizer):
    ids = random.Random(0).choices(range(100), k=1000)
    pieces, text = said(tokenizer, ids, 4)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(text.ids) < 200


@pytest.mark.parametrize("tokenizer", [Words(), Spaced()])
def test_a_run_of_special_tokens_hides_no_space(tokenizer):
    for run in range(40, 240, 7):
        ids = [*range(1, 70), *[SPECIAL] * run, *range(1, 70)]
        pieces, _ = said(tokenizer, ids, 1)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_last_piece_has_an_incomplete_character():
    tokenizer = zoo.load("pocket-tiny")[1]
    ids = tokenizer("word 🙂").input_ids[:-1]
    pieces, _ = said(tokenizer, ids, 1)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert pieces[-1].endswith("\ufffd")


def test_a_long_run_of_incomplete_characters_is_not_lost():
    tokenizer = zoo.load("pocket-tiny")[1]
    emoji = tokenizer("🙂").input_ids
    ids = emoji[:1] * 300 + tokenizer(" and words" * 100).input_ids  # 300 first bytes without their others
    pieces, _ = said(tokenizer, ids, 1)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", [Words(), Spaced()])
def test_the_work_of_a_stream_grows_with_its_length(tokenizer):
    def work(n):
        counting = Counting(tokenizer)
        said(counting, list(range(n)), 1)
        return counting.tokens / n

    assert work(4000) < 1.2 * work(1000) < 240


def test_the_bar_counts_every_round_once(monkeypatch):
    counted, whole = [], []
    count, of = Stats.count, Stats.of
    monkeypatch.setattr(Stats, "count", lambda self, record: (counted.append(self), count(self, record)))
    monkeypatch.setattr(Stats, "of", staticmethod(lambda records: whole.append(len(records)) or of(records)))
    decoder = sd.decoder(tiny("llama", 0)).greedy().draft(sd.drafts.NGram(), length=2).build()
    out = decoder.generate([[1, 2, 1, 2]] * 2, 80, progress=True)
    assert len(whole) == 1
    assert len(counted) == whole[0] > 33
    bar, stats = counted[-1], out.stats
    assert (bar.tau, bar.rounds, bar.tokens) == (stats.tau, stats.rounds, stats.tokens)
