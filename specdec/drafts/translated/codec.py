"""Text to ids and back, for parts that work on pieces of a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from tokenizers import Tokenizer

LOST = "\ufffd"  # stands for bytes that are no whole character
BYTE = re.compile("<0x[0-9A-F]{2}>")


class Codec:
    """A tokenizer's encoding and decoding without special tokens; texts that look like one are text. The tokenizer itself is not changed."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.encode: Callable[[str], list[int]]
        self.decode: Callable[[list[int]], str]
        if tokenizer.is_fast:  # the wrapper takes ten times as long
            own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            own.no_truncation()
            own.no_padding()
            own.encode_special_tokens = True
            self.encode = lambda text: own.encode(text, add_special_tokens=False).ids
            self.decode = partial(own.decode, skip_special_tokens=False)
        else:
            self.encode = partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
            self.decode = partial(
                tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        self.letter = self.encode("a")
        self.before = self.decode(self.letter)

    def text(self, ids: list[int], inside: bool) -> str:
        """The text of ``ids``. ``inside``: of a longer text, since some decoders drop a space before the first word."""
        if not inside:
            return self.decode(ids)
        text = self.decode([*self.letter, *ids])
        return text[len(self.before) :] if text.startswith(self.before) else ""

    @cached_property
    def surfaces(self) -> list[str | None]:
        """What each id adds to a text; ``None`` for special ids, and for those that are no whole characters."""
        special = set(self.tokenizer.all_special_ids)
        texts = [self.text([i], True) for i in range(1 + max(self.tokenizer.get_vocab().values()))]
        return [
            text if text and LOST not in text and i not in special else None for i, text in enumerate(texts)
        ]

    @property
    def ids(self) -> dict[str, int]:
        """Text -> id. Of several ids the first, and no single byte where there is another."""
        found: dict[str, int] = {}
        for i, text in enumerate(self.surfaces):
            if text is not None:
                held = found.setdefault(text, i)
                if held != i and BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(held))):
                    found[text] = i
        return found
