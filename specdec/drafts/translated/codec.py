"""Text to ids and back, for parts that work on pieces of a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

from specdec.configs import setting
from specdec.stop_rules import special_tokens

LOST = "\ufffd"  # stands for bytes that are no whole character
BYTE = re.compile("<0x([0-9A-F]{2})>")


class Codec:
    """A tokenizer's encoding and decoding without special tokens; texts that look like one are text. The tokenizer itself is not changed.

    Attributes:
        special: id -> name of special tokens.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.encode: Callable[[str], list[int]]
        self.decode: Callable[[list[int]], str]
        self.byte_level = False
        if setting(tokenizer, "encode") is None:
            raise TypeError(
                f"tokenizer is a {type(tokenizer).__name__}: give the tokenizer itself, such as target.tokenizer"
            )
        if tokenizer.is_fast:  # the wrapper takes ten times as long
            own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            own.no_truncation()
            own.no_padding()
            own.encode_special_tokens = True
            self.byte_level = isinstance(own.decoder, decoders.ByteLevel)
            self.encode = lambda text: own.encode(text, add_special_tokens=False).ids
            self.decode = partial(own.decode, skip_special_tokens=False)
        else:
            self.encode = partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
            self.decode = partial(
                tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        self.special = special_tokens(tokenizer)
        self.letter, self.line = self.encode("a"), self.encode("\n")
        self.before = self.decode(self.letter)
        self.adds, self.doubles = (self.text(self.encode(x), True) == " " + x for x in ("x", " x"))

    def text(self, ids: list[int], inside: bool) -> str:
        """The text of ``ids``. ``inside``: of a longer text, since some decoders drop a space before the first word."""
        if not inside:
            return self.decode(ids)
        text = self.decode([*self.letter, *ids])
        return text[len(self.before) :] if text.startswith(self.before) else ""

    def ids_of(self, text: str, inside: bool) -> list[int]:
        """The ids of ``text``. ``inside``: of a longer text, since some tokenizers put a space before the first word."""
        if not text or not inside or not self.adds:
            return self.encode(text) if text else []
        if text[0] == " ":
            return self.encode(text[1:] if self.doubles else text)
        guarded, n = self.encode("\n" + text), len(self.line)  # no space before what begins no word
        return guarded[n:] if guarded[:n] == self.line else self.encode(text)

    @cached_property
    def surfaces(self) -> list[str | bytes | None]:
        """What each id adds to a text, in bytes where it is not made of whole characters; ``None`` for special ids, and for those that add nothing."""
        vocabulary = self.tokenizer.get_vocab()
        found: list[str | bytes | None] = [None] * (1 + max(vocabulary.values()))
        for name, i in vocabulary.items():
            found[i] = self.surface(i, name)
        return found

    def surface(self, i: int, name: str) -> str | bytes | None:
        """What the id ``i``, a token of this ``name``, adds to a text, as in ``surfaces``."""
        if i in self.special:
            return None
        text = self.text([i], inside=True)
        return self._bytes(name) if LOST in text else text or None

    def _bytes(self, name: str) -> bytes | None:
        """The bytes of a token that is not made of whole characters, if they are known."""
        if match := BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        return (
            bytes(_VALUE[letter] for letter in name)
            if self.byte_level and set(name) <= _VALUE.keys()
            else None
        )

    @property
    def ids(self) -> dict[str | bytes, int]:
        """Text -> id. If several ids have the same text, the first; a byte only if there is no other."""
        found: dict[str | bytes, int] = {}
        for i, text in enumerate(self.surfaces):
            if text is not None:
                held = found.setdefault(text, i)
                if held != i and BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(held))):
                    found[text] = i
        return found


def _values() -> dict[str, int]:
    """The byte that each letter of byte-level tokens stands for: printable ones for themselves, the others for the letters from 256 on, in order."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip(sorted(letters - own.keys()), others, strict=True))


_VALUE = _values()
