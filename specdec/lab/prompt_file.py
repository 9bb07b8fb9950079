"""Prompts of one's own from a JSON-lines file: ``{"prompt": ...}``, ``{"turns": [...]}`` or ``{"messages": [...]}``, with an optional ``category`` and
``source``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from specdec.data.prompts import entries

NONE = "uncategorised"


@dataclass(frozen=True)
class Entry:
    """A prompt for a measurement.

    Attributes:
        turns: what the user says, turn by turn; a plain prompt is one turn. chat: whether the turns are messages of a chat, for the
            tokenizer's chat template. category: results are given by it. source: prompts with one source are one cluster of a bootstrap; by default
            a prompt is its own source.
        name: for messages, such as a line of a file. given: ids of a plain prompt, in place of its text.
        before: role and content of the chat's messages before the first turn, such as a system message.
    """

    turns: tuple[str, ...]
    category: str = NONE
    source: str = ""
    chat: bool = False
    name: str = ""
    given: tuple[int, ...] = ()
    before: tuple[tuple[str, str], ...] = ()

    def ids(self, tokenizer: Any, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of the conversation up to turn ``len(answers)``, after the ``answers`` to the turns before.

        Raises:
            ValueError: a chat, and the tokenizer has no chat template, or its template refuses the messages.
        """
        if not self.turns or self.given:
            return list(self.given)
        if tokenizer is None:
            raise ValueError(
                f"{self.name} is a text, and the target has no tokenizer: give ids, or HFModel(model, tokenizer)"
            )
        said = self.turns[: len(answers) + 1]
        if not self.chat:
            text = "".join(turn + answer for turn, answer in zip(said, [*answers, ""]))
            return list(tokenizer(text, verbose=False)["input_ids"])
        if tokenizer.chat_template is None:
            raise ValueError(
                f"{self.name}: turns and messages need a chat template, and the tokenizer has none: give prompt instead, or set tokenizer.chat_template"
            )
        messages = [{"role": role, "content": content} for role, content in self.before]
        messages += [{"role": "user", "content": said[0]}]
        for answer, turn in zip(answers, said[1:]):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as refused:  # templates raise what they like
            raise ValueError(
                f"{self.name}: the tokenizer's chat template refuses its messages ({refused}): change the messages, or give prompt instead"
            ) from refused
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def read(path: str | Path) -> list[Entry]:
    """The prompts of a file, one JSON object a line; empty lines are skipped.

    Raises:
        FileNotFoundError: no such file. ValueError: a line is not such an object, it has another field, its prompt or a turn is empty or no text,
            or the file has no prompt; the message names the line.
    """
    file, made = Path(path), []
    if not file.is_file():
        raise FileNotFoundError(f"no file of prompts {path}: give a JSON-lines file")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file.name} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            made.append(_entry(f"line {number} of {file.name}", line))
    if not made:
        raise ValueError(f"{file.name} has no prompts: give one JSON object a line, such as {_FORM}")
    return made


_FORM = '{"prompt": "Once upon a time", "category": "tales"}'
_KINDS = ("prompt", "turns", "messages")
_FIELDS = (*_KINDS, "category", "source")
_ROLES = ("system", "user", "assistant")


def _entry(name: str, line: str) -> Entry:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error.msg}): give an object such as {_FORM}") from None
    if not isinstance(found, dict) or sum(kind in found for kind in _KINDS) != 1:
        raise ValueError(
            f"{name} is not an object with either prompt, turns or messages: give an object such as {_FORM}"
        )
    other = [field for field in found if field not in _FIELDS]
    if other:
        near = "".join(f" (did you mean {one!r}?)" for one in get_close_matches(other[0], _FIELDS, 1))
        raise ValueError(
            f"{name} has an unknown field {other[0]!r}{near}: give prompt, turns or messages, category and source only"
        )
    chat, before = "prompt" not in found, tuple[tuple[str, str], ...]()
    what = next(kind for kind in _KINDS if kind in found)
    turns = found[what] if chat else [found[what]]
    if what == "messages":
        before, turns = _conversation(name, turns)
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{name}: {what} is {turns!r:.60}: give {'a list of texts' if chat else 'a text'}")
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError(f"{name}: {what} is empty: give at least one token")
    category = NONE if found.get("category") is None else str(found["category"])
    if category == "all":
        raise ValueError(f'{name}: category is "all", which names the rows of all prompts: use another')
    source = "" if found.get("source") is None else str(found["source"])
    return Entry(tuple(turns), category, source, chat, name, before=before)


def _conversation(name: str, messages: Any) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """The messages before the last one of the user's, and that one; what follows it is left out."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError(
            f'{name}: messages is {messages!r:.60}: give a list of {{"role": ..., "content": ...}}'
        )
    said = []
    for number, one in enumerate(messages, 1):
        if set(one) != {"role", "content"}:
            raise ValueError(
                f"{name}: message {number} has {', '.join(map(str, one)) or 'nothing'}: give role and content, and nothing else"
            )
        if one["role"] not in _ROLES:
            raise ValueError(
                f"{name}: message {number} has the role {one['role']!r}: give {', '.join(_ROLES)}"
            )
        if not isinstance(one["content"], str):
            raise ValueError(f"{name}: message {number} has the content {one['content']!r:.60}: give a text")
        said.append((one["role"], one["content"]))
    users = [number for number, (role, _) in enumerate(said) if role == "user"]
    if not users:
        raise ValueError(f"{name}: messages has none of the user's: give at least one, which is answered")
    return tuple(said[: users[-1]]), [said[users[-1]][1]]


def shipped(count: int | None = None, split: str = "test") -> list[Entry]:
    """The first ``count`` held-out prompts of the pocket corpus (default: all), domains in turn: a category each; a source is a file.

    Args:
        split: as for ``data.prompts``: ``"validation"`` for choices, ``"test"`` for results.
    """
    return [
        Entry((e["text"],), e["domain"], f"{e['package']}/{e['path']}", name=f"{split} prompt {i}")
        for i, e in enumerate(entries(split)[:count])
    ]


def entries_from(path: str | Path | None) -> list[Entry]:
    """The prompts of a file, or the shipped ones."""
    return shipped() if path is None else read(path)


def by_turns(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with categories in turn, so that a few of them are of all categories; in order within each."""
    seen = Counter[str]()
    places = []
    for number, entry in enumerate(entries):
        places.append((seen[entry.category], number))
        seen[entry.category] += 1
    return [entries[number] for _, number in sorted(places)]


def prompt_entries(path: str | Path | None, tokenizer: Any, longest: int) -> list[Entry]:
    """The prompts of a file, or the shipped ones, as ``cut`` leaves them."""
    return cut(entries_from(path), tokenizer, longest)


def cut(entries: Sequence[Entry], tokenizer: Any, longest: int) -> list[Entry]:
    """The entries; plain prompts of more than ``longest`` tokens lose their beginning (0: they never do). Chats stay whole: their beginning is the
    system message and a part of the template."""
    made = []
    for entry in entries:
        ids = [] if entry.chat or not longest else entry.ids(tokenizer)
        made.append(replace(entry, given=tuple(ids[-longest:])) if len(ids) > longest else entry)
    return made


def pieces(entries: list[Entry], tokenizer: Any, length: int, most: int) -> list[Entry]:
    """At most ``most`` pieces of exactly ``length`` tokens of each prompt, of a chat's first turn; shorter ones have none.

    Raises:
        ValueError: no prompt has that many tokens, or an entry is a chat, and the tokenizer has no chat template.
    """
    made, longest = [], 0
    for entry in entries:
        ids = entry.ids(tokenizer)
        longest = max(longest, len(ids))
        starts = range(0, len(ids) - length + 1, length)[:most]
        made += [replace(entry, turns=entry.turns[:1], given=tuple(ids[a : a + length])) for a in starts]
    if not made:
        raise ValueError(
            f"no prompt has {length} tokens, and the longest has {longest}: choose smaller contexts"
        )
    return made
