"""Where the drafting halves of micro-batches run while the target verifies: a thread, or a forked process with shared tensors.

Both take jobs in order and answer each with a proposal. An exception in the worker is raised where its answer is awaited; a process
that dies is an exception too.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import threading
import traceback
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
from specdec.rng import Philox, Rng
from specdec.types import Context, Proposal, Round, Scores


class DraftRequest(NamedTuple):
    """What the drafting half of a micro-batch is told: of the last round, and what to draft next (no rows: nothing, the micro-batch is through).

    Attributes:
        round, stay: the last round, and the rows of it that go on (``None``: all do).
        context, budget, rng, arm: of the rows to be drafted. wanted: arms of the round after.
        target_cache: where the worker shares memory with the target. half: the drafting half, where it had to begin in the target's
            thread: it knows the round already.
        joins: new rows, which come after the others: told as a micro-batch of their own, whose last round is their prefill.
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
    """A proposal for a micro-batch, and what the worker did since its last answer."""

    micro_batch: int
    drafted: Drafted
    spans: tuple[Span, ...]


class DraftWorker:
    """The drafting halves of all micro-batches, by number, and what was done for them since the last answer.

    Args:
        settle: as for ``DraftRunner.propose``.
    """

    def __init__(self, composition: Composition, settle: bool = True):
        self.composition, self.settle = composition, settle
        self.halves: dict[int, DraftRunner] = {}
        self.spans: list[Span] = []

    def draft(self, job: DraftRequest) -> DraftResponse | None:
        """Hear of the last round and draft for the next; ``None`` for a micro-batch that is through."""
        if not job.context.batch:
            self.halves.pop(job.micro_batch, None)
            return None
        half = self.halves[job.micro_batch] = self._told(job, self.halves.get(job.micro_batch))
        if not job.round.number:
            self._read(half, job, job.arm)
        began = perf_counter()
        drafted = half.propose(job.context, job.budget, job.rng, job.arm, self.settle)
        self._note("draft", job.micro_batch, began)
        spans, self.spans = tuple(self.spans), []
        return DraftResponse(job.micro_batch, drafted, spans)

    def prepare(self, job: DraftRequest) -> None:
        """After the answer: let the arms that are wanted next read their rows."""
        if job.wanted is not None:
            began = perf_counter()
            self.halves[job.micro_batch].prepare(job.context, job.wanted)
            self._note("prepare", job.micro_batch, began)

    def _told(self, job: DraftRequest, half: DraftRunner | None) -> DraftRunner:
        """A half (``None``: of rows that begin) after the round of ``job``, with the rows that join."""
        begins = job.half is not None
        if job.half is not None:
            half = job.half
        else:
            if half is None:
                began, half = perf_counter(), DraftRunner(self.composition)
                half.start(job.round.context, job.target_cache)
                self._note("prefill", job.micro_batch, began)
            half.observe(job.round)
            if job.stay is not None:
                half.state = half.draft.select(half.state, job.stay)
        if job.joins is not None:
            new = self._told(job.joins, None)
            self._read(new, job.joins, None if job.arm is None else job.arm[-job.joins.context.batch :])
            assert half.part.joins is not None  # ``serving.check``
            half.state = half.part.joins.join(half.state, new.state)
        if begins or job.joins is not None or job.stay is not None:
            half.state = half.part.follow(half.state, job.target_cache)
        return half

    def _read(self, half: DraftRunner, job: DraftRequest, arm: Tensor | None) -> None:
        """Reading the prompt is prefill, whichever draft does it."""
        if arm is not None:
            began = perf_counter()
            half.prepare(job.context, arm)
            self._note("prefill", job.micro_batch, began)

    def _note(self, stage: str, micro_batch: int, began: float) -> None:
        self.spans.append(Span("drafts", stage, micro_batch, began, perf_counter()))


def work(composition: Composition, receive: Callable[[], Any], send: Callable[[Any], None]) -> None:
    """Serve jobs until ``None`` comes; an exception is sent and ends the work."""
    try:
        desk = DraftWorker(composition)
        with torch.inference_mode():
            while (job := receive()) is not None:
                answer = desk.draft(job)
                if answer is not None:
                    _finish(answer.drafted.proposal)
                    send(answer)
                    desk.prepare(job)
    except BaseException as error:  # whatever it is, it belongs to whoever waits for the answer
        with suppress(OSError):  # nobody may wait any more
            send(error)


def _finish(proposal: Proposal) -> None:
    """A proposal that is sent must be there: on a GPU, wait for this worker's stream."""
    if proposal.tokens.is_cuda:
        torch.cuda.current_stream(proposal.tokens.device).synchronize()


class InlineWorker:
    """No worker: drafts in the caller's thread, as soon as it is told to; for one micro-batch, as the serial executor has it."""

    shares = True

    def __init__(self, composition: Composition, micro_batches: int = 1, rows: int = 0):
        self.desk = DraftWorker(composition, settle=False)
        self.said: DraftResponse | None = None

    def submit(self, job: DraftRequest) -> None:
        self.said = self.desk.draft(job)

    def answer(self) -> DraftResponse:
        """The proposal."""
        assert self.said is not None
        return self.said

    def stop(self) -> None:
        """There is nothing to stop."""


class ThreadWorker:
    """A thread of this process; on a GPU it has a stream of its own, so that its kernels run beside the target's."""

    shares = True

    def __init__(self, composition: Composition, micro_batches: int, rows: int):
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.outbox: SimpleQueue[Any] = SimpleQueue()
        device = composition.device
        stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self.stream = stream

        def receive() -> Any:
            job, ready = self.inbox.get()
            if stream is not None:
                stream.wait_event(ready)
            return job

        def body() -> None:
            with torch.cuda.stream(stream):  # None: nothing changes
                work(composition, receive, self.outbox.put)

        self.thread = threading.Thread(target=body, name="specdec-drafting", daemon=True)
        self.thread.start()

    def submit(self, job: DraftRequest | None) -> None:
        # On a GPU the job waits for what the target's stream was given: activations, and cache rows that move.
        ready = None if self.stream is None else torch.cuda.current_stream(self.stream.device).record_event()
        self.inbox.put((job, ready))

    def answer(self) -> DraftResponse:
        """The next proposal. Raises what the worker raised."""
        said = self.outbox.get()
        if isinstance(said, BaseException):
            raise said
        return said

    def stop(self) -> None:
        self.submit(None)
        self.thread.join()


class ProcessWorker:
    """A forked process: it has the models at no cost, computes on one thread, and hands probabilities over in shared memory.

    Forking is safe here because the child uses no thread pool (as PyTorch's own data loaders do); it cannot use CUDA.
    """

    shares = False

    def __init__(self, composition: Composition, micro_batches: int, rows: int):
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        size = max(1, rows * composition.nodes * composition.target.vocab_size * 8)
        self.buffers = [torch.empty(size, dtype=torch.uint8).share_memory_() for _ in range(micro_batches)]
        self.pipe = ours

        def body() -> None:
            torch.set_num_threads(1)
            ours.close()
            work(
                composition,
                lambda: pickle.loads(theirs.recv_bytes()),
                lambda said: theirs.send_bytes(_dumps(self._lay(said))),
            )

        self.process = fork.Process(target=body, name="specdec-drafting", daemon=True)
        self.process.start()
        theirs.close()

    def submit(self, job: DraftRequest) -> None:
        if not isinstance(job.rng, Philox):
            raise ValueError(
                f"rng is a {type(job.rng).__name__}: random decisions that are kept in this process cannot be made in another; use "
                "Pipelined(workers='threads')"
            )
        try:
            self.pipe.send_bytes(_dumps(_slim(job)))
        except OSError:
            while True:  # it has ended: what it said last tells why
                self.answer()

    def answer(self) -> DraftResponse:
        """The next proposal. Raises what the worker raised, or RuntimeError when it died."""
        wait([self.pipe, self.process.sentinel])
        try:
            if not self.pipe.poll():
                raise EOFError
            said = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError) as broken:
            raise self._dead() from broken
        if isinstance(said, BaseException):
            raise said
        return self._take(said)

    def _dead(self) -> RuntimeError:
        self.process.join(1)
        return RuntimeError(
            f"the drafting worker died (exit code {self.process.exitcode}): nothing of the batch is lost that was yielded; look for a "
            "crash or the out-of-memory killer, or use Pipelined(workers='threads')"
        )

    def _lay(self, said: Any) -> Any:
        """An answer with its probabilities laid into shared memory."""
        if isinstance(said, BaseException):
            told = "".join(traceback.format_exception(said))
            try:
                pickle.loads(pickle.dumps(said))
            except Exception:  # what cannot travel is told in words
                said = RuntimeError(f"{type(said).__name__} in the drafting worker: {said}")
            said.add_note(f"in the drafting worker:\n{told}")
            return said
        proposal = said.drafted.proposal
        if proposal.probs is None:
            return said
        probs, source = proposal.probs, proposal.source
        if probs.shape[1] > proposal.nodes:  # there is room for one distribution a node
            probs, source = proposal.distributions(), None
        probs = probs.contiguous()
        bytes_ = probs.view(-1).view(torch.uint8)
        if len(bytes_) > len(self.buffers[said.micro_batch]):
            return RuntimeError(
                f"the draft proposed {proposal.nodes} nodes a row, more than it declares: a draft of trees has "
                "info = DraftInfo(..., nodes=lambda length: ...), the most nodes of a proposal"
            )
        self.buffers[said.micro_batch][: len(bytes_)].copy_(bytes_)
        laid = Laid(
            proposal.tokens,
            proposal.parents,
            proposal.size,
            proposal.provenance,
            probs.dtype,
            tuple(probs.shape),
            source,
        )
        return said._replace(drafted=said.drafted._replace(proposal=laid))

    def _take(self, said: DraftResponse) -> DraftResponse:
        laid = said.drafted.proposal
        if not isinstance(laid, Laid):
            return said
        count = torch.Size(laid.shape).numel() * laid.dtype.itemsize
        probs = self.buffers[said.micro_batch][:count].clone().view(laid.dtype).view(laid.shape)
        proposal = Proposal(laid.tokens, laid.parents, laid.size, probs, laid.provenance, laid.source)
        return said._replace(drafted=said.drafted._replace(proposal=proposal))

    def stop(self) -> None:
        with suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(None))
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()
        self.process.close()


def _slim(job: DraftRequest) -> DraftRequest:
    """A job without what only the target's process needs."""
    nothing, round = torch.empty(0), job.round
    slim = Round(
        **{
            **vars(round),
            "proposal": Proposal.none(round.context.batch),
            "scores": Scores(nothing),
            "probs": nothing,
            "target_argmax": None,
        }
    )
    joins = None if job.joins is None else _slim(job.joins)
    return job._replace(round=slim, target_cache=None, half=None, joins=joins)


class Laid(NamedTuple):
    """A proposal whose probabilities lie in shared memory."""

    tokens: Tensor
    parents: Tensor
    size: Tensor
    provenance: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: Tensor | None


class _Pickler(pickle.Pickler):
    """Host tensors as plain arrays: PyTorch's own way through a pipe opens a file for each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor:
            return torch.from_numpy, (value.contiguous().numpy(),)
        return NotImplemented


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
