"""Where the drafting halves of micro-batches run while the target verifies: a thread, or a forked process (``executors.forked``).

Both take requests in order and answer each with a proposal. ``answer`` raises an exception of the worker, and RuntimeError when its
process died.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.composition import Composition
from specdec.executors.round import Drafted, DraftRunner
from specdec.executors.timeline import Span
from specdec.kernels.streams import own_stream
from specdec.rng import Rng
from specdec.types import Context, Round


class DraftRequest(NamedTuple):
    """What the drafting half of a micro-batch needs: the last round, and what to draft next (no rows: the micro-batch is finished).

    Attributes:
        round, stay: the last round, and its rows that go on (``None``: all).
        context, budget, rng, arm: of the rows to be drafted. wanted: arms of the round after.
        target_cache: the target's, where the worker shares its memory. half: a drafting half that had to begin in the target's thread and
            has observed the round.
        joins: the request of new rows, which come after the others; its last round is their prefill.
    """

    micro_batch: int
    round: Round
    stay: Tensor | None
    context: Context
    budget: Tensor
    rng: Rng
    arm: Tensor | None = None
    wanted: Tensor | None = None
    target_cache: Any = None
    half: DraftRunner | None = None
    joins: DraftRequest | None = None


class DraftResponse(NamedTuple):
    """A proposal for a micro-batch, and what the worker did since its last response."""

    micro_batch: int
    drafted: Drafted
    spans: tuple[Span, ...]


class DraftWorker:
    """The drafting halves of all micro-batches, by number, and what was done for them since the last response.

    Args:
        settle: as for ``DraftRunner.propose``.
    """

    def __init__(self, composition: Composition, settle: bool = True):
        self.composition, self.settle = composition, settle
        self.halves: dict[int, DraftRunner] = {}
        self.before: Any = None  # states that were joined: until the device has copied them, their memory belongs to nobody else
        self.spans: list[Span] = []

    def draft(self, request: DraftRequest) -> DraftResponse | None:
        """Observe the last round and draft for the next; ``None`` for a micro-batch that is finished."""
        self.before = None
        if not request.context.batch:
            half = self.halves.pop(request.micro_batch, None)
            if half is not None:
                half.observe(request.round)  # a model may keep what it has read of texts that end
            return None
        half = self.halves[request.micro_batch] = self._told(request, self.halves.get(request.micro_batch))
        if not request.round.number:
            self._read(half, request, request.arm)
        began = perf_counter()
        drafted = half.propose(request.context, request.budget, request.rng, request.arm, self.settle)
        self._note("draft", request.micro_batch, began)
        spans, self.spans = tuple(self.spans), []
        return DraftResponse(request.micro_batch, drafted, spans)

    def prepare(self, request: DraftRequest) -> None:
        """After the response: let the arms of the next round read their rows."""
        if request.wanted is not None:
            began = perf_counter()
            self.halves[request.micro_batch].prepare(request.context, request.wanted)
            self._note("prepare", request.micro_batch, began)

    def _told(self, request: DraftRequest, half: DraftRunner | None) -> DraftRunner:
        """The drafting half (``None``: a new one) after the request's round, with the rows that join."""
        begins = request.half is not None
        if request.half is not None:
            half = request.half
        else:
            if half is None:
                began, half = perf_counter(), DraftRunner(self.composition)
                half.start(request.round.context, request.target_cache)
                self._note("prefill", request.micro_batch, began)
            half.observe(request.round)
            if request.stay is not None:
                half.state = half.draft.select(half.state, request.stay)
        if request.joins is not None:
            new = self._told(request.joins, None)
            self._read(
                new,
                request.joins,
                None if request.arm is None else request.arm[-request.joins.context.batch :],
            )
            assert half.part.joins is not None  # ``serving.check``
            self.before = half.state, new.state
            half.state = half.part.joins.join(half.state, new.state)
        if begins or request.joins is not None or request.stay is not None:
            half.state = half.part.follow(half.state, request.target_cache)
        return half

    def _read(self, half: DraftRunner, request: DraftRequest, arm: Tensor | None) -> None:
        """Let the arms read new rows; this counts as prefill."""
        if arm is not None:
            began = perf_counter()
            half.prepare(request.context, arm)
            self._note("prefill", request.micro_batch, began)

    def _note(self, stage: str, micro_batch: int, began: float) -> None:
        self.spans.append(Span("drafts", stage, micro_batch, began, perf_counter()))


def work(
    composition: Composition,
    receive: Callable[[], Any],
    send: Callable[[Any], None],
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Serve requests until ``None`` comes. An exception is sent and ends the loop.

    Args:
        wait: returns when the device has done the worker's work. It is called before a response or an exception is sent and before the loop
            ends, since the memory that the worker uses may be used again then.
    """
    try:
        drafts = DraftWorker(composition)
        with torch.inference_mode():
            while (request := receive()) is not None:
                response = drafts.draft(request)
                if response is not None:
                    wait()
                    send(response)
                    drafts.prepare(request)
            wait()
    except BaseException as error:  # raised where the response is awaited
        with suppress(Exception):
            wait()
        with suppress(OSError):  # the other end may be closed
            send(error)


class InlineWorker:
    """No worker: drafts at once, in the caller's thread, for one micro-batch, as the serial executor does."""

    shares = True

    def __init__(self, composition: Composition):
        self.drafts = DraftWorker(composition, settle=False)
        self.response: DraftResponse | None = None

    def submit(self, request: DraftRequest) -> None:
        self.response = self.drafts.draft(request)

    def answer(self) -> DraftResponse:
        """The proposal."""
        assert self.response is not None
        return self.response

    def stop(self) -> None:
        """There is nothing to stop."""


class ThreadWorker:
    """A thread of this process. On a GPU it has a stream of its own, so that its kernels run beside the target's."""

    shares = True

    def __init__(self, composition: Composition, micro_batches: int, rows: int):
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.outbox: SimpleQueue[Any] = SimpleQueue()
        device = composition.device
        stream = own_stream(device) if device is not None and device.type == "cuda" else None
        self.stream = stream

        def receive() -> Any:
            request, ready = self.inbox.get()
            if stream is not None:
                stream.wait_event(ready)
            return request

        def body() -> None:
            with torch.cuda.stream(stream):  # None: nothing changes
                work(
                    composition, receive, self.outbox.put, *(() if stream is None else (stream.synchronize,))
                )

        self.thread = threading.Thread(target=body, name="specdec-drafting", daemon=True)
        self.thread.start()
        # Python ends a daemon thread inside PyTorch's C++ code, which aborts the process: end it before.
        atexit.register(self.stop)

    def submit(self, request: DraftRequest | None) -> None:
        # On a GPU the request waits for the target's stream, which may still write activations and move cache rows.
        ready = None if self.stream is None else torch.cuda.current_stream(self.stream.device).record_event()
        self.inbox.put((request, ready))

    def answer(self) -> DraftResponse:
        """The next proposal. Raises what the worker raised."""
        response = self.outbox.get()
        if isinstance(response, BaseException):
            raise response
        return response

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self.submit(None)
        self.thread.join()
        # Python's join returns before the system's thread has ended, which frees what MKL holds, under a lock. A process that is forked
        # meanwhile would wait for that lock forever.
        running = Path(f"/proc/self/task/{self.thread.native_id}")
        while running.exists():
            sleep(0)
