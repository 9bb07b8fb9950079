"""What a request of a stream is at each stage (due, ready to join, open), and the places where micro-batches run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from traceback import format_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.executors.round import MicroBatch
from specdec.per_request import Failure
from specdec.serving.requests import Request
from specdec.stats import Stats
from specdec.texts import GrowingText, StreamChunk
from specdec.types import Context


def outside(function: Callable[[], Any]) -> Any:
    """What the user's code returns; it runs outside inference mode."""
    with torch.inference_mode(False):
        return function()


class Due(NamedTuple):
    """A request of the stream, its number, and when it arrived."""

    number: int
    request: Request
    arrived: float


class Ready(NamedTuple):
    """A request that will join: its ``context`` of one row, and its ``seed [1]``."""

    due: Due
    context: Context
    seed: Tensor


@dataclass(eq=False)
class Open:
    """A request in flight.

    Attributes:
        growing: the text that its chunks have shown, where there are chunks and a tokenizer. lenient: an error of its ``on_chunk`` or ``cancelled``
            ends this request alone, and is its ``error``. failed: so does the first failure of its sampling in the committed text. cached: tokens of its
            prompt that the target's prefix cache had.
    """

    due: Due
    started: float
    prompt: list[int]
    growing: GrowingText | None
    lenient: bool
    ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    first_token: float = 0.0
    cached: int = 0
    error: Exception | None = None
    failed: Failure | None = None

    @staticmethod
    def of(ready: Ready, started: float, tokenizer: Any, lenient: bool) -> Open:
        prompt = ready.context.row(0)
        shown = tokenizer is not None and ready.due.request.on_chunk is not None
        return Open(ready.due, started, prompt, GrowingText(tokenizer, prompt) if shown else None, lenient)

    def add(self, new: list[int], failures: Sequence[Failure], ended: bool) -> list[int]:
        """Note the tokens of a round; returns those that stay, which are the ones before a failure of its sampling. ``ended``: nothing follows them."""
        if failures and self.failed is None:
            text = self.prompt + self.ids + new
            real = [one for one in failures if text[: len(one.text)] == one.text]
            real = [one for one in real if not (ended and one.kept == len(text))]
            self.failed = min(real, key=lambda one: one.kept, default=None)
        if self.failed is not None:
            new = new[: max(self.failed.kept - len(self.prompt) - len(self.ids), 0)]
        self.ids += new
        return new

    def show(self, new: list[int], finish: str | None) -> None:
        """Call the request's ``on_chunk``, if it has one."""
        see = self.due.request.on_chunk
        if finish is not None and self.failed is not None:
            finish = "error"
        if see is not None and self.error is None and (new or finish is not None):
            text = None if self.growing is None else self.growing.more(new, last=finish is not None)
            self._call(lambda: see(StreamChunk(self.due.number, new, text, finish)))

    def ends(self) -> bool:
        """Whether the request is to end now: it was cancelled, or its own code or sampling failed."""
        asked = self.due.request.cancelled
        if self.error is None and asked is not None and self._call(asked):
            return True
        return self.error is not None or self.failed is not None

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call the request's own code."""
        try:
            return outside(function)
        except Exception as error:
            if not self.lenient:
                raise
            let_go(error)
            self.error = error


def let_go(error: BaseException) -> None:
    """Drop the tracebacks of an error and of what caused it: their frames and callers hold logits and caches, and the error may be kept for long. A note says where
    it was raised, of an error without a cause."""
    chain, seen = list[BaseException | None]([error]), set[int]()
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if one.__traceback__ is not None and one.__cause__ is None:
            one.add_note("".join(format_tb(one.__traceback__)).rstrip())
        one.__traceback__ = None
        chain += [one.__cause__, one.__context__]


@dataclass(eq=False)
class Place:
    """A place for one micro-batch at a time.

    Attributes:
        micro_batch: the one that runs, if any. spare: the target's cache for all rows of a micro-batch, while no row uses it.
        waiting: requests that will join when the micro-batch has been verified, or at once where none runs.
    """

    number: int
    micro_batch: MicroBatch | None = None
    spare: Any = None
    waiting: list[Ready] = field(default_factory=list)

    @property
    def load(self) -> int:
        """Rows that run and requests that wait."""
        return len(self.waiting) + (self.micro_batch.context.batch if self.micro_batch else 0)
