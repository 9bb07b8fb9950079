"""From the ids of one tokenizer to those of another: which tokens are the same text, and how the other would write a text.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from specdec.drafts.translated.codec import LOST, Codec

LEAST = 32  # tokens of a block
LONG = 256  # tokens after which a block may end inside a word
MOST = 1024  # tokens after which a block ends anywhere
WORD = re.compile(r" \S")


class Read(NamedTuple):
    """A text as far as it was read: its ``ids``, where its finished blocks end in both tokenizers, and their ``other`` ids."""

    ids: np.ndarray
    ends: list[tuple[int, int]]
    other: np.ndarray


NOTHING = Read(np.zeros(0, dtype=np.int64), [(0, 0)], np.zeros(0, dtype=np.int64))


class Retokenizer:
    """Writes a text that is given in ids of the tokenizer ``ours`` in ids of the tokenizer ``theirs``.

    What is written is a function of the ids alone, and only the end of a text is written anew as it grows: the ids are cut into blocks, each before
    the first word that begins at least 32 tokens after the last cut, and each block is decoded and encoded by itself. Special tokens become those of
    the same name, or line breaks. At the beginning comes what ``theirs`` puts before every text.

    Attributes:
        pairs: our id -> their id, one to one, for tokens that are the same text, special tokens of the same name, and the ends of a text. Where
            several ids of a tokenizer are one text, one of them is in a pair.
        other: ``[V + 1]`` for each of our ids the paired one, or the first of its text. The last entry stands for all ids that are no tokens of ours.
    """

    def __init__(self, ours: Any, theirs: Any):
        self.codec, self.there = Codec(ours), Codec(theirs)
        there = self.there.ids
        self.pairs = {i: there[text] for text, i in self.codec.ids.items() if text in there}
        names = {name: i for i, name in self.there.special.items()}
        self.special = {i: names.get(name) for i, name in self.codec.special.items()}
        self.pairs |= {i: other for i, other in self.special.items() if other is not None}
        end, its = ours.eos_token_id, theirs.eos_token_id
        if end is not None and its is not None and end not in self.pairs:
            self.pairs = {i: other for i, other in self.pairs.items() if other != its} | {end: its}
        self.start, self.fallback = _start(theirs)
        texts = [*self.codec.surfaces, None]
        first = [self.there.encode(text)[:1] if isinstance(text, str) else [] for text in texts]
        self.other = np.array([self.pairs.get(i, *(ids or [self.fallback])) for i, ids in enumerate(first)])
        whole = [text if isinstance(text, str) else "" for text in texts]
        self.whole = np.array([bool(text) for text in whole])
        self.begins = np.array([bool(WORD.match(text)) for text in whole])
        self.solid = np.array([bool(text) and not text[-1].isspace() for text in whole])

    def __call__(self, ids: np.ndarray, before: Read = NOTHING) -> tuple[np.ndarray, Read]:
        """``ids [n]`` of our tokenizer as those of the other, at least one. ``before``: what an earlier call returned for a text that begins alike."""
        known = min(len(ids), len(before.ids))
        differ = (ids[:known] != before.ids[:known]).nonzero()[0]
        same = int(differ[0]) if len(differ) else known
        # A block's end is final once the token after it is known.
        ends = [end for end in before.ends if end[0] < max(same, 1)]
        parts = [before.other[: ends[-1][1]]]
        while (cut := self._cut(ids, ends[-1][0])) is not None:
            parts.append(self._written(ids[ends[-1][0] : cut], first=len(ends) == 1))
            ends.append((cut, ends[-1][1] + len(parts[-1])))
        other = np.concatenate(parts) if len(parts) > 1 else parts[0]
        tail = self._written(ids[ends[-1][0] :], first=len(ends) == 1)
        whole = np.concatenate([np.array(self.start, dtype=np.int64), other, tail])
        return whole if len(whole) else np.array([self.fallback]), Read(ids, ends, other)

    def _cut(self, ids: np.ndarray, start: int) -> int | None:
        """Where the block that begins at ``start`` ends: before a word, or after ``LONG`` tokens between two whole tokens, or after ``MOST``, whichever
        comes first; ``None`` if no such place is known yet."""
        plain = np.minimum(ids[start : start + MOST + 1], len(self.other) - 1)
        inner = plain[LEAST - 1 :]  # a block may end after each of these but the last
        if len(inner) < 2:
            return None
        fits = self.begins[inner[1:]] & self.solid[inner[:-1]]
        far = LONG - LEAST
        fits[far:] |= self.whole[inner[far + 1 :]] & self.whole[inner[far:-1]]
        if len(plain) > MOST:
            fits[MOST - LEAST :] = True
        return start + LEAST + int(fits.argmax()) if fits.any() else None

    def _written(self, ids: np.ndarray, first: bool) -> np.ndarray:
        """A block in the other's ids. ``first``: it begins the text."""
        out: list[int] = []
        piece: list[int] = []
        for i in [*ids.tolist(), None]:
            if i is not None and i not in self.special:
                piece += [i] if i < len(self.other) - 1 else []
                continue
            if piece:
                out += self._encoded(piece, first)
                piece, first = [], False
            if i is None:
                break
            other = self.special[i]
            if other is not None and not (first and other in self.start):
                out.append(other)
            elif other is None and not first and out[-len(self.there.line) :] != self.there.line:
                out += self.there.line
        return np.array(out, dtype=np.int64)

    def _encoded(self, ids: list[int], first: bool) -> list[int]:
        for end in range(len(ids), max(len(ids) - 4, -1), -1):
            text = self.codec.text(ids[:end], inside=not first)
            if not text.endswith(LOST):
                # The bytes of an unfinished character are paired one by one, or left out.
                rest = [self.pairs.get(i) for i in ids[end:]]
                return self.there.ids_of(text, inside=not first) + [
                    i for i in rest if i is not None and None not in rest
                ]
        return self.there.ids_of(self.codec.text(ids, inside=not first).rstrip(LOST), inside=not first)


def _start(tokenizer: Any) -> tuple[list[int], int]:
    """What a tokenizer puts before every text, and an id for a text without tokens."""
    whole, text = tokenizer("x")["input_ids"], tokenizer.encode("x", add_special_tokens=False)
    at = next((n for n in range(len(whole)) if whole[n : n + len(text)] == text), 0) if text else len(whole)
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
    return whole[:at], next(i for i in others if i is not None)
