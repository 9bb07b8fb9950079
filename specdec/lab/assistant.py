"""Which tokens of a chat the assistant wrote: a draft learns these, as only they are ever drafted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "\ue000"  # for private use, so that no answer has it


def said_and_wrote(tokenizer: Any, turns: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool] | None]:
    """The ids of a chat as the tokenizer's template renders it, and for each whether the assistant wrote it, with the token that ends its turn.

    A template with generation tags says so. With another one, the chat is compared with renderings of its beginnings; ``None``: it does not
    begin with them, or the tokenizer does not know from which characters a token is.

    Args:
        turns: messages with ``role`` and ``content``.
    """
    if tokenizer.is_fast and TAGS.search(tokenizer.get_chat_template()):
        made = tokenizer.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
        )
        return made["input_ids"], list(map(bool, made["assistant_masks"]))
    text = _rendered(tokenizer, turns)
    made = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=tokenizer.is_fast)
    spans = _spans(tokenizer, turns, text) if tokenizer.is_fast else None
    if spans is None:
        return made["input_ids"], None
    return made["input_ids"], _within(made["offset_mapping"], spans)


def _within(tokens: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which of ``tokens`` share characters with one of ``spans``; both ascend."""
    found, at = [], 0
    for first, last in tokens:
        while at < len(spans) and spans[at][1] <= first:
            at += 1
        found.append(at < len(spans) and last > spans[at][0])
    return found


def _spans(tokenizer: Any, turns: Sequence[dict[str, Any]], text: str) -> list[tuple[int, int]] | None:
    """The beginning and the end of each answer in ``text``; ``None``: one is not found."""
    from jinja2 import TemplateError  # needed by chat templates only

    ends = sorted({str(token) for token in tokenizer.added_tokens_decoder.values() if token.special})
    found: list[tuple[int, int]] = []
    for n, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        try:
            start, end = _start(tokenizer, turns, n, text), _end(tokenizer, turns, n, text, ends)
        except TemplateError:  # the template takes no chat that ends there
            return None
        if start is None or end is None or not (found[-1][1] if found else 0) <= start <= end:
            return None
        found.append((start, end))
    return found


def _start(tokenizer: Any, turns: Sequence[dict[str, Any]], n: int, text: str) -> int | None:
    """Where answer ``n`` begins: after the prompt for it, as far as the chat has that, or else with its content."""
    plain = _rendered(tokenizer, turns[:n])
    asked = _rendered(tokenizer, turns[:n], add_generation_prompt=True)
    if asked == plain or not text.startswith(plain):
        return _place(tokenizer, turns, n, text)
    return next((i for i, (a, b) in enumerate(zip(asked, text)) if a != b), min(len(asked), len(text)))


def _end(
    tokenizer: Any, turns: Sequence[dict[str, Any]], n: int, text: str, ends: Sequence[str]
) -> int | None:
    """Where answer ``n`` ends, with one of the special tokens ``ends``."""
    through = _rendered(tokenizer, turns[: n + 1])
    if text.startswith(through):
        return len(through.rstrip())
    end = _place(tokenizer, turns, n, text, last=True)  # templates may drop the reasoning of earlier answers
    return None if end is None else end + max((len(e) for e in ends if text.startswith(e, end)), default=0)


def _place(
    tokenizer: Any, turns: Sequence[dict[str, Any]], n: int, text: str, last: bool = False
) -> int | None:
    """Where the content of turn ``n`` begins, or with ``last`` ends: a mark is put there."""
    content = turns[n]["content"]
    if not isinstance(content, str):
        return None
    one = {**turns[n], "content": content + MARK if last else MARK + content}
    before, *after = _rendered(tokenizer, [*turns[:n], one, *turns[n + 1 :]]).split(MARK, 1)
    return len(before) if after and text.startswith(before) else None


def _rendered(tokenizer: Any, turns: Sequence[dict[str, Any]], **more: Any) -> str:
    """The text of a chat; of no turns, none."""
    said: str = tokenizer.apply_chat_template(list(turns), tokenize=False, **more) if turns else ""
    return said
