"""A thread that serves requests of other threads with one decoder, as a server needs it."""

from __future__ import annotations

import queue
import socket
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specdec.prompts import rows_of
from specdec.serving.requests import Request
from specdec.texts import StreamChunk


class Stopped(RuntimeError):
    """No more requests are taken."""


@dataclass(eq=False)
class Job:
    """A request of a client: what the engine has to say of it (chunks, then what is finished, or an error), and whether the client is gone."""

    prompt_tokens: int
    stops: tuple[str, ...]
    said: queue.Queue[Any] = field(default_factory=queue.Queue)
    gone: threading.Event = field(default_factory=threading.Event)

    def next(self, connection: socket.socket) -> Any:
        """What is said next; raises ConnectionResetError if the client goes before."""
        while True:
            try:
                said = self.said.get(timeout=0.2)
            except queue.Empty:
                said = None
            if said is not None and not isinstance(said, StreamChunk):
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
        self.inbox: queue.Queue[Request | None] = queue.Queue()
        self.open, self.lock = set[Job](), threading.Lock()
        self.broken: BaseException | None = None
        rows_of(self.target, "a")  # a tokenizer may change itself when it is first used
        self.stream = decoder.serve(
            self._arrivals(), limit, capacity=capacity, errors="yield", own_sampling=True
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(self, prompt: Any, stops: tuple[str, ...], **settings: Any) -> Job:
        """Queue a request.

        Raises:
            Stopped: no more are taken. TypeError, ValueError: it is no request, or what its tokenizer's chat template raises.
        """
        rows = rows_of(self.target, prompt)
        if len(rows) > 1:
            raise ValueError(f"prompt holds {len(rows)} prompts: send a request for each")
        job = Job(len(rows[0]), stops)
        request = Request(
            rows[0], key=job, arrival=None, cancelled=job.gone.is_set, on_chunk=job.said.put, stop_strings=stops, **settings
        )  # fmt: skip
        with self.lock:
            if self.broken is not None:
                raise Stopped(str(self.broken))
            self.open.add(job)
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
                job: Any = one.request.key
                with self.lock:
                    self.open.discard(job)
                job.said.put(one)
        except BaseException as raised:
            error = raised
            traceback.print_exc()
        finally:
            with self.lock:
                self.broken = self.broken or error
                for job in self.open:
                    job.said.put(error)
                self.open.clear()
