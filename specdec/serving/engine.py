"""A thread that serves requests of other threads with one decoder, as a server needs it."""

from __future__ import annotations

import queue
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from specdec.likelihood import LogProbs, log_probs
from specdec.prompts import prepared, rows_of
from specdec.rng import seeds
from specdec.sampling import Sampling
from specdec.serving.logprobs import TokenNames
from specdec.serving.penalties import Penalties
from specdec.serving.requests import Finished, Request
from specdec.texts import StreamChunk


class Stopped(RuntimeError):
    """No more requests are taken."""


class Said(NamedTuple):
    """``what`` of a choice: a ``StreamChunk``, or its ``Finished``, with its log-probabilities if they were asked for."""

    choice: int
    what: Any
    log_probs: LogProbs | None = None


@dataclass(eq=False)
class Job:
    """A request of a client: what the engine has to say of it (chunks, then what is finished, of each choice, or an error), and whether the client is gone.

    Attributes:
        choices: texts that are wanted in all, in the order of the prompts. each: of one prompt. left: those that are not finished. top: also the
            log-probabilities of so many tokens in each place, and of the generated ones; ``None``: none. echo: whether the prompt's tokens have theirs, too.
    """

    stops: tuple[str, ...]
    choices: int = 1
    each: int = 1
    top: int | None = None
    echo: bool = False
    said: queue.Queue[Any] = field(default_factory=queue.Queue)
    gone: threading.Event = field(default_factory=threading.Event)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.choices

    def next(self, connection: socket.socket) -> Said | BaseException:
        """What is said next; raises ConnectionResetError if the client goes before."""
        while True:
            said: Any = None
            with suppress(queue.Empty):
                said = self.said.get(timeout=0.2)
            if isinstance(said, BaseException) or (said and isinstance(said.what, Finished)):
                return said
            try:
                if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise ConnectionResetError("the client is gone")
            except BlockingIOError:  # it waits
                pass
            if said is not None:
                return said

    def shown(self, text: str, last: bool) -> str:
        """What of a text may be shown: what is before a stop, and, while there may be more, not the beginning of one."""
        cut = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if cut is not None:
            return text[:cut]
        held = 0
        if not last:
            held = max((n for s in self.stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        return text[: len(text) - held]


class Engine:
    """A thread that serves requests from a queue with one decoder.

    Raises:
        TypeError, ValueError: the decoder cannot serve, or a number is wrong.
    """

    def __init__(self, decoder: Any, limit: int, capacity: int | None = None):
        self.decoder = decoder
        self.target: Any = decoder.target
        self.names = TokenNames(self.target.tokenizer)
        self.inbox: queue.Queue[Request | None] = queue.Queue()
        self.open, self.lock = set[Job](), threading.Lock()
        self.broken: BaseException | None = None
        rows_of(self.target, "a")  # a tokenizer may change itself when it is first used
        self.stream = decoder.serve(
            self._arrivals(), limit, capacity=capacity, errors="yield", own_sampling=True
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(
        self,
        prompt: Any,
        stops: tuple[str, ...],
        *,
        n: int = 1,
        top: int | None = None,
        echo: bool = False,
        seed: int | None = None,
        penalties: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Job:
        """Queue a request for each of ``n`` choices of every prompt. The first of a prompt has its ``seed``, and the others have seeds that are made of it.
        ``penalties`` are arguments of ``Penalties``, a processor after those of its sampling.

        Raises:
            Stopped: no more are taken. TypeError, ValueError: it is no request, or what its tokenizer's chat template raises.
        """
        rows = rows_of(self.target, prompt)
        if len(rows) > 1:  # what is wrong with one of them is said before any is queued
            prepared(self.decoder, rows, settings["max_new_tokens"], settings.get("eos_token_id"), stops, ())
        job = Job(stops, n * len(rows), n, top, echo)
        own: list[Any] = [seed, *([None] * (n - 1) if seed is None else seeds(seed, n)[1:].tolist())]
        requests, sampling = [], settings.get("sampling")
        for choice, (row, one) in enumerate(product(rows, own)):
            if penalties:
                own_sampling = sampling or Sampling()
                processors = (*own_sampling.processors, Penalties(len(row), **penalties))
                settings["sampling"] = replace(own_sampling, processors=processors)
            requests.append(
                Request(
                    row, key=(job, choice), arrival=None, cancelled=job.gone.is_set, seed=one,
                    on_chunk=partial(_say, job, choice), stop_strings=stops, **settings,
                )
            )  # fmt: skip
        with self.lock:
            if self.broken is not None:
                raise Stopped(str(self.broken))
            self.open.add(job)
            for request in requests:
                self.inbox.put(request)
        return job

    def close(self) -> None:
        """Stop; requests end with what they have."""
        with self.lock:
            self.broken = self.broken or Stopped("the server is ending")
            for job in self.open:
                job.gone.set()
            self.inbox.put(None)
        self.thread.join()

    def _arrivals(self) -> Iterator[Request | None]:
        while True:
            try:
                request = self.inbox.get_nowait()
            except queue.Empty:
                yield None
                continue
            if request is None:
                return
            yield request

    def _run(self) -> None:
        error: BaseException = Stopped("the server is ending")
        try:
            for one in self.stream:
                job, choice = one.request.key
                said = self._said(job, choice, one)
                with self.lock:
                    job.left -= 1
                    if not job.left:
                        self.open.discard(job)
                job.said.put(said)
        except BaseException as raised:
            error = raised
            traceback.print_exc()
        finally:
            with self.lock:
                self.broken = self.broken or error
                for job in self.open:
                    job.said.put(error)
                self.open.clear()

    def _said(self, job: Job, choice: int, one: Finished) -> Said | Exception:
        """What is said of a finished choice.

        Its log-probabilities are computed here, on the engine's thread, where the stream waits between two rounds. So no round of the target is under way, which a model with
        captured steps needs, and the other requests wait for about as long as for a prompt of this length.
        """
        if job.top is None or one.error is not None or one.finish == "cancelled":
            return Said(choice, one)
        text = one.prompt_ids + one.ids
        try:
            read: Any = ([text[:1]], [text[1:]]) if job.echo else [one]
            return Said(choice, one, log_probs(self.decoder, read, top=job.top or None))
        except Exception as error:
            return error


def _say(job: Job, choice: int, chunk: StreamChunk) -> None:
    job.said.put(Said(choice, chunk))
