"""Has a target answer the prompts of a data set: text to train a draft on, of the kind that it will draft.

    python recipes/answers.py --target FOLDER_OR_HUB_ID --dataset PROMPTS --output answers.jsonl
    python recipes/train_head.py --target FOLDER_OR_HUB_ID --dataset answers.jsonl --output my-head

PROMPTS is a file (.txt, .jsonl, .json, .csv, .parquet), a folder or a data set of the hub. --column names the column of the prompts, texts or lists of
chat messages. The target continues a text, or the first --prompt-tokens of it. In a chat, the target writes every answer to the user again, each after
its own earlier ones, until --new-tokens cuts one. OUTPUT gets a line for each answered prompt: `text`, or `messages` (train with --column messages), with `index`, its number in the
data set, `finish`, why the last answer ended (`eos` or `length`), and `tokens`, those generated. The same command continues an interrupted run.

--draft, a draft as in compare.py, makes it faster; the answers have the target's distribution, whatever it is. Prompts without anything to answer, chats with
tools, and prompts that do not fit into the target's positions are left out, and counted.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401

import specdec as sd
from specdec.lab.console import progress, short_errors
from specdec.lab.documents import documents, messages
from specdec.lab.loading import draft_part, load
from specdec.lab.options import option, parse
from specdec.lab.recipe import Placed

ROLES = {"system", "developer", "user", "assistant"}
"""Of chats that can be answered again: a tool's result would answer a call that another model made."""


@dataclass(frozen=True)
class Settings(Placed):
    target: str = option("", "a pocket model, a folder or a hub id")
    dataset: str = option("", "a file, a folder, or a data set of the hub")
    column: str = option("text", "the data set's column of texts, or of lists of chat messages")
    output: str = option("", "the file of the answers, JSON lines")
    count: int = option(0, "answer the first prompts only (0: all)")
    prompt_tokens: int = option(0, "tokens of a text that are the prompt (0: all)")
    new_tokens: int = option(512, "the most tokens of an answer")
    temperature: float = option(1.0, "of the target (0: greedy)")
    draft: str = option(
        "", "a pocket model, a folder, a hub id, ngram, suffix, magicdec or mtp (default: plain decoding)"
    )
    k: int = option(4, "tokens that the draft proposes in a round")
    batch: int = option(16, "answers at a time")


@dataclass
class Open:
    """A prompt that is being answered: what of it is there, and the turns that are still to come."""

    index: int
    chat: bool
    said: Any  # a text, or messages
    rest: deque[dict[str, Any]]
    finish: str = ""
    tokens: int = 0

    @staticmethod
    def of(index: int, entry: Any, tokenizer: Any, most: int) -> Open | None:
        """``None``: there is nothing to answer."""
        if isinstance(entry, str):
            if most:
                entry = tokenizer.decode(
                    tokenizer(entry, verbose=False)["input_ids"][:most], skip_special_tokens=True
                )
            return Open(index, False, entry, deque()) if entry else None
        turns = messages(entry, tokenizer)
        if {turn["role"] for turn in turns} - ROLES:
            return None
        one = Open(index, True, [], deque(turns))
        return one if one.ask() else None

    def ask(self) -> bool:
        """Go on to the next message of the assistant's that answers the user, which is dropped, or to the end; whether there is a user's to answer."""
        while self.rest:
            turn = self.rest.popleft()
            if turn["role"] == "assistant" and self.said and self.said[-1]["role"] == "user":
                return True
            self.said.append(turn)
        return bool(self.said) and self.said[-1]["role"] == "user"

    def answered(self, text: str, finish: str, tokens: int) -> bool:
        """Take in an answer; whether another one is to come."""
        self.finish, self.tokens = finish, self.tokens + tokens
        if not self.chat:
            self.said += text
            return False
        self.said.append({"role": "assistant", "content": text})
        before = len(self.said)
        if finish == "eos" and self.ask():  # nobody goes on after half an answer
            return True
        del self.said[before:]  # what nobody answers
        return False

    def row(self) -> dict[str, Any]:
        """The line of the output."""
        name = "messages" if self.chat else "text"
        return {"index": self.index, name: self.said, "finish": self.finish, "tokens": self.tokens}


class Answers:
    """The output file: one line for each answered prompt, continued where a run ended."""

    def __init__(self, s: Settings):
        self.path = Path(s.output)
        about = Path(f"{s.output}.settings.json")
        free = ("output", "count", "batch", "draft", "k", "threads", "json", "device")
        mine = {name: value for name, value in dataclasses.asdict(s).items() if name not in free}
        if self.path.exists() and (not about.exists() or json.loads(about.read_text()) != mine):
            raise SystemExit(f"--output {self.path}: it is there, and from another command: give a new file")
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):  # the run was ended while it wrote
            lines.pop()
        self.done: set[int] = {json.loads(line)["index"] for line in lines}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        about.write_text(json.dumps(mine, indent=1))
        self.path.write_bytes(b"".join(lines))

    def write(self, row: dict[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def check(s: Settings) -> None:
    """Refuse settings that need no model to be wrong."""
    for name in ("target", "dataset", "output"):
        if not getattr(s, name):
            raise SystemExit(f"--{name} is missing: give --target, --dataset and --output")
    for name, least in (("new_tokens", 1), ("batch", 1), ("k", 1), ("count", 0), ("prompt_tokens", 0)):
        if getattr(s, name) < least:
            raise SystemExit(f"--{name.replace('_', '-')} {getattr(s, name)}: give at least {least}")


def built(s: Settings) -> sd.Decoder:
    """The target's decoder."""
    model, tokenizer = load(s.target, s.precision, s.place)
    if tokenizer is None:
        raise SystemExit(f"--target {s.target}: it has no tokenizer: save one into its folder")
    builder = sd.decoder((model, tokenizer)).sampling(temperature=s.temperature)
    plain = builder.build()
    return (
        builder.draft(draft_part(s.draft, plain.target, 64, 1, s.precision)[1], s.k).build()
        if s.draft
        else plain
    )


class Conversations:
    """Prompts of a data set as a stream's requests: of every one, the next turn when the last one is answered."""

    def __init__(self, s: Settings, tokenizer: Any, done: set[int]):
        self.s, self.tokenizer, self.done = s, tokenizer, done
        self.ready: deque[Open] = deque()
        self.running = self.left_out = 0

    def __iter__(self) -> Iterator[sd.Request | None]:
        for index, entry in enumerate(documents(self.s.dataset, self.s.column)):
            if self.s.count and index == self.s.count:
                break
            while self.ready:  # what has begun goes first
                yield self._request(self.ready.popleft())
            if index in self.done:
                continue
            one = Open.of(index, entry, self.tokenizer, self.s.prompt_tokens)
            if one is None:
                self.left_out += 1
                continue
            self.running += 1
            yield self._request(one)
        while self.running:
            yield self._request(self.ready.popleft()) if self.ready else None

    def _request(self, one: Open) -> sd.Request:
        turn = sum(message["role"] == "assistant" for message in one.said) if one.chat else 0
        seed = (self.s.seed * 1_000_003 + one.index) * 1_009 + turn
        return sd.Request(one.said, self.s.new_tokens, arrival=None, seed=seed, key=one)


def main(s: Settings) -> None:
    check(s)
    s.begin()
    with short_errors():
        decoder = built(s)
    out = Answers(s)
    work = Conversations(s, decoder.target.tokenizer, out.done)
    answers = tokens = 0
    stats = sd.Stats()
    for one in decoder.serve(work, s.batch, errors="yield"):
        prompt: Any = one.request.key
        if one.error is not None and not isinstance(one.error, ValueError):
            raise one.error
        if one.error is None:
            stats += one.stats
            tokens += len(one.ids)
            if prompt.answered(one.text or "", one.finish, len(one.ids)):
                work.ready.append(prompt)
                continue
            out.write(prompt.row())
            answers += 1
        else:
            work.left_out += 1
            progress(f"prompt {prompt.index}: {one.error}", stays=True)
        work.running -= 1
        progress(f"{answers} prompts answered, {tokens} tokens")
    progress()
    there = f", answered before: {len(out.done)}" if out.done else ""
    print(
        f"{s.output}: prompts answered: {answers}{there}, left out: {work.left_out}; tokens: {tokens}, tau {stats.tau:.2f}"
    )
    s.save([{"prompts": answers, "tokens": tokens, "left_out": work.left_out, "tau": stats.tau}])


if __name__ == "__main__":
    main(parse(Settings, __doc__))
