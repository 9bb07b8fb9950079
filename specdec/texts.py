"""What text generated ids add to their prompt's, at once or piece by piece.

Generated ids are not decoded alone, since many decoders drop the space before a first word, and a character's bytes may lie on both sides of the
prompt's end. The prompt's last ids are decoded with them, and the text that the prompt has without them is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LOST = "\ufffd"  # stands for bytes that are no whole character
LAST = 8  # ids of a prompt


class StreamChunk(NamedTuple):
    """What one round added to one row: new ids, new text (complete characters only), and why the row ended, if it did.

    Attributes:
        row: of ``Decoder.stream`` the number of the prompt, of ``Decoder.serve`` that of the request. text: ``None`` without a tokenizer.
    """

    row: int
    ids: list[int]
    text: str | None
    finish: str | None


def added(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text that ``ids`` add to that of ``prompt``, without special tokens."""
    return PromptEnd.of(tokenizer, prompt).added(ids)


@dataclass(frozen=True)
class PromptEnd:
    """The last ids of a prompt, and their text."""

    tokenizer: Any
    ids: list[int]
    text: str

    @staticmethod
    def of(tokenizer: Any, prompt: Sequence[int]) -> PromptEnd:
        """The last ``LAST`` ids; more of them where their text has no visible character (special tokens, spaces, some bytes of a character)."""
        count = LAST
        while True:
            ids = list(prompt[-count:])
            text = _decoded(tokenizer, ids)
            if len(ids) == len(prompt) or text.replace(LOST, "").strip():
                return PromptEnd(tokenizer, ids, text)
            count *= 2

    def added(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` add."""
        text = _decoded(self.tokenizer, [*self.ids, *ids])
        begin = self.begin(text)
        return _decoded(self.tokenizer, ids) if begin is None else text[begin:]

    def begin(self, text: str) -> int | None:
        """Where, in the text of the prompt's and further ids, that of the further ids begins; ``None``: the prompt's text has become another.

        A character that the prompt left incomplete belongs to the ids that complete it.
        """
        kept = self.text
        while not text.startswith(kept) and kept.endswith(LOST):
            kept = kept[:-1]
        return len(kept) if text.startswith(kept) else None


class GrowingText:
    """A row's text as it grows. Only its end is decoded again, or a long text would take time by the square of its length.

    Args:
        prompt: the ids before the text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), keep: int = 64):
        self.tokenizer, self.keep = tokenizer, keep
        end = PromptEnd.of(tokenizer, prompt)
        self.prompt: PromptEnd | None = end  # until it is known where the text begins
        self.ids = list(end.ids)  # of the end
        self.shown, self.longest = 0, 2 * keep  # characters of the end; tokens before a cut

    def more(self, new: list[int], last: bool) -> str:
        """The text that ``new`` tokens add, of whole characters unless they are the ``last``."""
        self.ids += new
        text = _decoded(self.tokenizer, self.ids)
        end = text if last else text.rstrip(LOST)  # an incomplete character
        if self.prompt is not None:
            if not last and len(end) <= len(self.prompt.text.rstrip(LOST)):
                return ""
            begin, before, self.prompt = self.prompt.begin(end), self.prompt, None
            if begin is None:
                self.ids = self.ids[len(before.ids) :]
                return self.more([], last)
            self.shown = begin
        added, self.shown = end[self.shown :], max(self.shown, len(end))
        if len(self.ids) > self.longest:
            self._cut(text)
        return added

    def _cut(self, text: str) -> None:
        """Forget the tokens before a place from which the rest alone is the end of ``text``, some of which has been shown, if one is found.

        What has been shown stays before what follows: many tokenizers drop the space before a first word.
        """
        hidden = len(text) - self.shown
        for at in range(len(self.ids) - self.keep, len(self.ids) - self.keep // 2):
            rest = _decoded(self.tokenizer, self.ids[at:])
            if len(rest) > hidden >= 0 and text.endswith(rest):
                self.ids, self.shown, self.longest = self.ids[at:], len(rest) - hidden, 2 * self.keep
                return
        self.longest = 2 * len(self.ids)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text
