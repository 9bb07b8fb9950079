"""Log-probabilities of a choice in OpenAI's two forms: that of completions, and that of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from specdec.drafts.translated.codec import Codec
from specdec.serving.requests import Finished
from specdec.texts import GrowingText

LEAST = -9999.0
"""What stands for the logarithm of 0, which JSON does not have, as in OpenAI's answers."""


class TokenNames:
    """What tokens are called in answers: by the text that they add.

    Bytes that are no whole characters are written as OpenAI does, ``bytes:\\xe2\\x80``. A special token has its own name, and another one that adds nothing is ``token_id:5``.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.made = tokenizer, dict[int, tuple[str, list[int] | None]]()

    @cached_property
    def _codec(self) -> Codec:
        return Codec(self.tokenizer)

    def __getitem__(self, i: int) -> tuple[str, list[int] | None]:
        """The name of a token, and the bytes of its text, if it has some."""
        if i not in self.made:
            self.made[i] = self._named(i)
        return self.made[i]

    def _named(self, i: int) -> tuple[str, list[int] | None]:
        name = self.tokenizer.convert_ids_to_tokens(i)
        found = None if name is None else self._codec.surface(i, name)
        if isinstance(found, bytes):
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), list(found)
        if found is None:
            return self._codec.special.get(i, f"token_id:{i}"), None
        return found, list(found.encode())


class Entry(NamedTuple):
    """A token, where its text begins, its log-probability (``None`` of the first one of a prompt), and the most probable tokens in its place with theirs."""

    id: int
    offset: int
    logprob: float | None
    top: list[tuple[int, float]]


def entries(
    tokenizer: Any, one: Finished, found: Any, shown: int | None = None, echo: str | None = None
) -> list[Entry]:
    """The tokens of a choice.

    Args:
        found: their log-probabilities, a ``LogProbs`` of one row. shown: tokens whose text begins after so many characters are left out; ``None``: none are.
        echo: the text of the prompt, where its tokens come first. Then ``found`` is of all tokens but the first.
    """
    begin = len(echo or "")
    places = _placed(tokenizer, one.prompt_ids, one.ids, begin)
    places = [place for place in places if shown is None or place[1] < begin + shown]
    values = [max(value, LEAST) for value in found[0].tolist()]
    tops: list[list[tuple[int, float]]] = [[] for _ in values]
    if found.top_ids is not None:
        pairs = zip(found.top_ids[0].tolist(), found.top_values[0].tolist())
        tops = [[(i, max(value, LEAST)) for i, value in zip(*pair)] for pair in pairs]
    if echo is not None:
        first = [(i, min(offset, begin)) for i, offset in _placed(tokenizer, [], one.prompt_ids, 0)]
        places, values, tops = first + places, [None, *values], [[], *tops]
    return [Entry(*place, value, top) for place, value, top in zip(places, values, tops)]


def _placed(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], offset: int) -> list[tuple[int, int]]:
    """Each of ``ids``, and where its text begins."""
    growing, made = GrowingText(tokenizer, prompt), list[tuple[int, int]]()
    for n, i in enumerate(ids):
        made.append((i, offset))
        offset += len(growing.more([i], last=n + 1 == len(ids)))
    return made


def of_completion(found: Sequence[Entry], names: TokenNames) -> dict[str, Any]:
    """``logprobs`` of a choice of a completion. ``top_logprobs`` has the token of the text, too."""
    return {
        "tokens": [names[one.id][0] for one in found],
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [_top(one, names) for one in found],
        "text_offset": [one.offset for one in found],
    }


def _top(one: Entry, names: TokenNames) -> dict[str, float] | None:
    if one.logprob is None or not one.top:
        return None
    made: dict[str, float] = {}
    for i, value in one.top:
        made.setdefault(names[i][0], value)  # of several tokens with one name, the most probable
    return made | {names[one.id][0]: one.logprob}


def of_chat(found: Sequence[Entry], names: TokenNames) -> dict[str, Any]:
    """``logprobs`` of a choice of a chat completion."""
    return {
        "content": [
            {**_token(one.id, one.logprob, names), "top_logprobs": [_token(*top, names) for top in one.top]}
            for one in found
        ]
    }


def _token(i: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    name, data = names[i]
    return {"token": name, "bytes": data, "logprob": logprob}
