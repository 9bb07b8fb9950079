"""Text to train on: the documents of a file, a folder or a data set of the hub, and the token sequences that they are cut into."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.lab.assistant import said_and_wrote

LINES = (".jsonl", ".ndjson")
TABLES = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT


def documents(dataset: str, column: str) -> Iterator[Any]:
    """The documents of a data set: texts, or lists of chat messages.

    Args:
        dataset: a file of JSON lines (.jsonl, .ndjson), a table (.json, .csv, .parquet), a file of plain text (any other file: one text), a folder of .txt
            files (one text each), a folder that ``datasets.Dataset.save_to_disk`` wrote, a folder of tables, or a hub id with a split ``train`` (read as a stream).
        column: the name of the column with the texts or messages.
    Raises:
        SystemExit: no such data set, or no such column.
    """
    path = Path(dataset)
    kind = path.suffix.lower()
    if path.is_file() and kind not in (*LINES, *TABLES):
        rows: Iterable[Any] = _plain([path], column)
    elif path.is_file() and kind in LINES:
        rows = _lines(path)
    elif path.is_dir() and {file.suffix.lower() for file in path.rglob("*") if file.is_file()} == {".txt"}:
        rows = _plain(sorted(file for file in path.rglob("*") if file.is_file()), column)
    else:
        rows = _loaded(dataset)
    for row in rows:
        if column not in row:
            raise SystemExit(f"--column {column}: the data set has {', '.join(row)}")
        yield row[column]


def _plain(files: Iterable[Path], column: str) -> Iterator[Any]:
    """One text a file."""
    for file in files:
        try:
            yield {column: file.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise SystemExit(f"--dataset {file}: it is no text in UTF-8 ({error})") from None


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise SystemExit(f"--dataset {path}: line {number} is no JSON ({error})") from None
            if not isinstance(row, dict):
                raise SystemExit(f"--dataset {path}: line {number} is no JSON object: give one row a line")
            yield row


def _loaded(dataset: str) -> Iterator[Any]:
    import datasets

    path = Path(dataset)
    try:
        if path.is_file():
            kind = TABLES[path.suffix.lower()]
            yield from datasets.load_dataset(kind, data_files=dataset, split="train", streaming=True)
        elif (path / "dataset_info.json").exists():
            yield from datasets.load_from_disk(dataset)
        else:
            yield from datasets.load_dataset(dataset, split="train", streaming=True)
    except Exception as error:  # every format and the hub have their own
        raise SystemExit(
            f"--dataset {dataset}: it cannot be read ({error}): give a file of text or rows, a folder, or a hub id with a split named train"
        ) from error


def packed(tokenizer: Any, texts: Iterable[Any], length: int, count: int, skip: int = 0) -> Iterator[Tensor]:
    """At most ``count`` sequences ``[1, length + 1]``, after the first ``skip`` sequences; plain texts end with the end token.

    Args:
        texts: of ``documents``. A list of messages becomes the text that the tokenizer's chat template makes of it, with the template's own ends.
    Raises:
        SystemExit: an entry is neither a text nor a list of messages, or the tokenizer has no chat template.
    """
    for ids, _ in _cut(_encoded(tokenizer, texts, None), length, count, skip):
        yield ids


def answered(
    tokenizer: Any, texts: Iterable[Any], length: int, count: int, seen: Counter[str]
) -> Iterator[tuple[Tensor, Tensor]]:
    """As ``packed``, with which tokens of each sequence to learn, ``[1, length + 1]`` bool: all of a text's, and the assistant's of a chat. Sequences
    without any are left out.

    Args:
        seen: counts the ``chats``, and those of which it cannot be told what the assistant wrote (``whole``), all of whose tokens are learnt.
    Raises:
        SystemExit: as ``packed``.
    """
    return _cut(_encoded(tokenizer, texts, seen), length, count, 0)


def _encoded(
    tokenizer: Any, texts: Iterable[Any], seen: Counter[str] | None
) -> Iterator[tuple[list[int], list[bool]]]:
    """The ids of each text, and which of them to learn: all, unless ``seen`` counts chats."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        wrote = None
        if seen is None or isinstance(text, str):
            said = text if isinstance(text, str) else _chat(tokenizer, text)
            ids = tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"]
            ids = ids + end if isinstance(text, str) else ids
        else:
            ids, wrote = said_and_wrote(tokenizer, messages(text, tokenizer))
            seen.update(chats=1, whole=wrote is None)
            # Nothing predicts the first token, so that no block goes on from one chat to the next.
            wrote = [False, *(wrote or [True] * len(ids))[1:]]
        yield ids, [True] * len(ids) if wrote is None else wrote


def _cut(
    encoded: Iterable[tuple[list[int], list[bool]]], length: int, count: int, skip: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences of what is joined, each with the last token of the one before; those with nothing to learn are left out."""
    ids: list[int] = []
    learnt: list[bool] = []
    for more, which in encoded:
        ids += more
        learnt += which
        for start in range(0, len(ids) - length, length):
            stop = start + length + 1
            if not any(learnt[start + 1 : stop]):
                continue
            if skip:
                skip -= 1
            elif count:
                count -= 1
                yield torch.tensor(ids[start:stop])[None], torch.tensor(learnt[start:stop])[None]
            else:
                return
        done = max(0, len(ids) - 1) // length * length
        ids, learnt = ids[done:], learnt[done:]


def messages(entry: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The messages of a chat with their ``role`` and ``content``, from ``{"role", "content"}`` or ShareGPT's ``{"from", "value"}``.

    Raises:
        SystemExit: the entry is no list of messages, or the tokenizer has no chat template.
    """
    if not isinstance(entry, list) or not all(isinstance(one, dict) for one in entry):
        raise SystemExit(
            f"--column: a row has a {type(entry).__name__}, {str(entry)[:60]!r}: name a column of texts, or of lists of messages"
        )
    if tokenizer.chat_template is None:
        raise SystemExit(
            "--column: the rows are lists of messages, and the target's tokenizer has no chat template: name a column of texts"
        )
    turns = []
    for one in entry:
        role = one.get("role", ROLES.get(one.get("from"), one.get("from")))
        content = one.get("content", one.get("value"))
        if role is None or content is None:
            raise SystemExit(
                f"--column: a message has {', '.join(one)}: messages have role and content, or from and value"
            )
        turns.append({**one, "role": role, "content": content})
    return turns


def _chat(tokenizer: Any, entry: Any) -> str:
    said: str = tokenizer.apply_chat_template(messages(entry, tokenizer), tokenize=False)
    return said
