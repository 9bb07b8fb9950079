"""From the ids of one tokenizer to those of another: which tokens are the same text, and how the other would write a text.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from specdec.drafts.translated.codec import LOST, Codec

LEAST, LONG, MOST = (
    32,
    256,
    1024,
)  # tokens of a block: at least; until it may end inside a word; inside a character
WORD = re.compile(r" \S")


class Read(NamedTuple):
    """A text as far as it was read: its ``ids``, where its finished blocks end in both tokenizers, and their ``other`` ids."""

    ids: np.ndarray
    ends: list[tuple[int, int]]
    other: list[int]


NOTHING = Read(np.zeros(0, dtype=np.int64), [(0, 0)], [])


class Retokenizer:
    """Writes a text that is given in ids of the tokenizer ``ours`` in ids of the tokenizer ``theirs``.

    What is written is a function of the ids alone, and only the end of a text is written anew as it grows: the ids are cut into blocks, each before
    the first word that begins at least 32 tokens after the last cut, and each block is decoded and encoded by itself. Special tokens become those of
    the same name, or line breaks. At the beginning comes what ``theirs`` puts before every text.

    Attributes:
        pairs: our id -> their id, for tokens that are the same text, special tokens of the same name, and the ends of a text. Where several ids
            of a tokenizer are one text, one of them is in a pair. other: ``[V]`` for each of our ids the paired one, or the first of its text.
    """

    def __init__(self, ours: Any, theirs: Any):
        self.codec, other = Codec(ours), Codec(theirs)
        self.encode = other.encode
        texts = self.codec.surfaces
        mine, there = self.codec.ids, other.ids
        names = dict(zip(theirs.all_special_tokens, theirs.all_special_ids))
        special = dict(zip(ours.all_special_ids, ours.all_special_tokens))
        self.special = {i: names.get(name) for i, name in special.items()}
        self.pairs = {i: there[text] for text, i in mine.items() if text in there}
        self.pairs |= {i: other for i, other in self.special.items() if other is not None}
        if ours.eos_token_id is not None and theirs.eos_token_id is not None:
            self.pairs[ours.eos_token_id] = theirs.eos_token_id
        self.start, self.fallback = _start(theirs)
        self.other = np.array(
            [
                self.pairs[i] if i in self.pairs else next(iter(self.encode(text or "")), self.fallback)
                for i, text in enumerate(texts)
            ]
        )
        self.begins = np.array([text is not None and bool(WORD.match(text)) for text in texts])
        self.solid = np.array([text is not None and not text[-1].isspace() for text in texts])
        self.whole = np.array([text is not None for text in texts])
        self.adds, self.doubles = (other.text(self.encode(x), True) == " " + x for x in ("x", " x"))
        self.line = self.encode("\n")

    def __call__(self, ids: np.ndarray, before: Read = NOTHING) -> tuple[list[int], Read]:
        """``ids [n]`` of our tokenizer as those of the other, at least one. ``before``: what an earlier call returned for a text that begins alike."""
        known = min(len(ids), len(before.ids))
        differ = (ids[:known] != before.ids[:known]).nonzero()[0]
        same = int(differ[0]) if len(differ) else known
        # A block has ended where the next one's first token is known.
        ends = [end for end in before.ends if end[0] < max(same, 1)]
        other = before.other[: ends[-1][1]]
        plain = np.minimum(ids, len(self.whole) - 1)  # what pads a vocabulary is no text
        begins, whole = self.begins[plain], self.whole[plain]
        begins[1:] &= self.solid[plain[:-1]]
        while (cut := _cut(begins, whole, ends[-1][0])) is not None:
            other = other + self._written(ids[ends[-1][0] : cut].tolist(), first=len(ends) == 1)
            ends.append((cut, len(other)))
        tail = self._written(ids[ends[-1][0] :].tolist(), first=len(ends) == 1)
        return [*self.start, *other, *tail] or [self.fallback], Read(ids, ends, other)

    def _written(self, ids: list[int], first: bool) -> list[int]:
        """A block in the other's ids. ``first``: it begins the text."""
        out: list[int] = []
        piece: list[int] = []
        for i in [*ids, None]:
            if i is not None and i not in self.special:
                piece += [i] if i < len(self.whole) else []
                continue
            if piece:
                out += self._encoded(piece, first)
                piece, first = [], False
            if i is None:
                break
            other = self.special.get(i)
            if other is not None and not (first and other in self.start):
                out.append(other)
            elif other is None and not first and out[-len(self.line) :] != self.line:
                out += self.line
        return out

    def _encoded(self, ids: list[int], first: bool) -> list[int]:
        decode = partial(self.codec.text, inside=not first)
        for end in range(len(ids), max(len(ids) - 4, 0), -1):  # without the bytes of an unfinished character
            if not (text := decode(ids[:end])).endswith(LOST):
                break
        else:
            text = decode(ids).rstrip(LOST)
        if not text or first or not self.adds:
            return self.encode(text) if text else []
        if text[0] == " ":
            return self.encode(text[1:] if self.doubles else text)
        guarded, n = self.encode("\n" + text), len(self.line)  # no space before what begins no word
        return guarded[n:] if guarded[:n] == self.line else self.encode(text)


def _start(tokenizer: Any) -> tuple[list[int], int]:
    """What a tokenizer puts before every text, and an id for a text without tokens."""
    whole, text = tokenizer("x")["input_ids"], tokenizer.encode("x", add_special_tokens=False)
    at = next((n for n in range(len(whole)) if whole[n : n + len(text)] == text), 0) if text else len(whole)
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
    return whole[:at], next(i for i in others if i is not None)


def _cut(begins: np.ndarray, whole: np.ndarray, start: int) -> int | None:
    """Where the block that begins at ``start`` ends, if its end is known."""
    n, middle = len(begins), start + LONG
    ends = [start + MOST]
    for candidates, offset in (
        (begins[start + LEAST :], start + LEAST),
        (whole[middle:] & whole[middle - 1 : -1] if n > middle else whole[:0], middle),
    ):
        if candidates.any():
            ends.append(offset + int(candidates.argmax()))
    return min(ends) if min(ends) < n else None
