"""Where the drafting halves of micro-batches run while the target verifies: a thread, or a forked process with shared tensors.

Both take requests in order and answer each with a proposal. ``answer`` raises an exception of the worker, and RuntimeError when its
process died.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import pickle
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.composition import Composition
from specdec.executors.round import Drafted, DraftRunner
from specdec.executors.timeline import Span
from specdec.kernels.streams import own_stream
from specdec.rng import Philox, Rng
from specdec.types import Context, Proposal, Round, Scores


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
            self.halves.pop(request.micro_batch, None)
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

    def __init__(self, composition: Composition, micro_batches: int = 1, rows: int = 0):
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


class ProcessWorker:
    """A forked process. It shares the models' memory, computes on one thread, and returns proposals in shared memory: what it writes to the pipe
    is small, so it does not wait for this process, which may be writing a request.

    Forking is safe because the child uses no thread pool (as in PyTorch's data loaders). The child cannot use CUDA.
    """

    shares = False

    def __init__(self, composition: Composition, micro_batches: int, rows: int):
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        size = max(1, rows * composition.nodes * 8 * (3 + composition.target.vocab_size))
        self.buffers = [torch.empty(size, dtype=torch.uint8).share_memory_() for _ in range(micro_batches)]
        self.pipe = ours

        def body() -> None:
            torch.set_num_threads(1)
            ours.close()
            work(
                composition,
                lambda: pickle.loads(theirs.recv_bytes()),
                lambda response: theirs.send_bytes(_dumps(self._lay(response))),
            )

        self.process = fork.Process(target=body, name="specdec-drafting", daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # from Python 3.12 on, of other threads: see above
            self.process.start()
        theirs.close()
        # Also before the interpreter's end, when nothing is left to stop it with.
        self.stop = weakref.finalize(self, _ended, ours, self.process)

    def submit(self, request: DraftRequest) -> None:
        if not isinstance(request.rng, Philox):
            raise ValueError(
                f"rng is a {type(request.rng).__name__}: random decisions that are kept in this process cannot be made in another: use "
                "Pipelined(workers='threads')"
            )
        try:
            self.pipe.send_bytes(_dumps(_slim(request)))
        except OSError:
            while True:  # it has ended; its last response says why
                self.answer()

    def answer(self) -> DraftResponse:
        """The next proposal. Raises what the worker raised, or RuntimeError when it died."""
        wait([self.pipe, self.process.sentinel])
        try:
            if not self.pipe.poll():
                raise EOFError
            response = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError) as broken:
            raise self._dead() from broken
        if isinstance(response, BaseException):
            raise response
        return self._take(response)

    def _dead(self) -> RuntimeError:
        self.process.join(1)
        return RuntimeError(
            f"the drafting worker died (exit code {self.process.exitcode}): rounds that were yielded are not lost; look for a "
            "crash or the out-of-memory killer, or use Pipelined(workers='threads')"
        )

    def _lay(self, response: Any) -> Any:
        """A response with its proposal in shared memory."""
        if isinstance(response, BaseException):
            told = "".join(traceback.format_exception(response))[-20_000:]
            try:
                pickle.loads(pickle.dumps(response))
            except Exception:  # an exception that cannot be pickled
                response = RuntimeError(f"{type(response).__name__} in the drafting worker: {response}")
            response.add_note(f"in the drafting worker:\n{told}")
            return response
        proposal = response.drafted.proposal
        wide = int(proposal.size.max())  # columns beyond are padding
        tokens, parents, probs = proposal.tokens[:, :wide], proposal.parents[:, :wide], proposal.probs
        source = None if proposal.source is None else proposal.source[:, :wide]
        if probs is not None and source is None:
            probs = probs[:, :wide]
        elif probs is not None and probs.shape[1] > wide:  # there is room for one distribution a node
            probs, source = proposal.distributions()[:, :wide], None
        buffer, end = self.buffers[response.micro_batch], 0
        kinds: list[Any] = []
        for value in (tokens, parents, source, probs):
            kinds.append(None if value is None else (value.dtype, tuple(value.shape)))
            if value is not None:
                bytes_ = value.contiguous().view(-1).view(torch.uint8)
                buffer[end : end + len(bytes_)].copy_(bytes_)
                end += len(bytes_)
        laid = Laid(proposal.size, proposal.provenance, tuple(kinds))
        return response._replace(drafted=response.drafted._replace(proposal=laid))

    def _take(self, response: DraftResponse) -> DraftResponse:
        laid, buffer, end = response.drafted.proposal, self.buffers[response.micro_batch], 0
        assert isinstance(laid, Laid)
        values: list[Any] = [None] * len(laid.kinds)
        for i, kind in enumerate(laid.kinds):
            if kind is not None:
                dtype, shape = kind
                count = torch.Size(shape).numel() * dtype.itemsize
                values[i] = buffer[end : end + count].clone().view(dtype).view(shape)
                end += count
        tokens, parents, source, probs = values
        proposal = Proposal(tokens, parents, laid.size, probs, laid.provenance, source)
        return response._replace(drafted=response.drafted._replace(proposal=proposal))


def _ended(pipe: Any, process: Any) -> None:
    """End a drafting process."""
    with suppress(OSError):
        pipe.send_bytes(pickle.dumps(None))
    pipe.close()
    process.join(5)
    if process.is_alive():
        process.terminate()
        process.join()
    process.close()


def _slim(request: DraftRequest) -> DraftRequest:
    """A request without what only the target's process needs."""
    nothing, round = torch.empty(0), request.round
    slim = Round(
        **{
            **vars(round),
            "proposal": Proposal.none(round.context.batch),
            "scores": Scores(nothing),
            "probs": nothing,
            "target_argmax": None,
        }
    )
    joins = None if request.joins is None else _slim(request.joins)
    return request._replace(round=slim, target_cache=None, half=None, joins=joins)


class Laid(NamedTuple):
    """A proposal whose tensors lie in shared memory.

    Attributes:
        kinds: of tokens, parents, source and probs, which follow each other there, the type and the shape; ``None`` for one that it lacks.
    """

    size: Tensor
    provenance: Any
    kinds: tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...]


class _Pickler(pickle.Pickler):
    """Pickles host tensors as NumPy arrays, because PyTorch's pickling through a pipe opens a file for each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor:
            return torch.from_numpy, (value.contiguous().numpy(),)
        return NotImplemented


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
