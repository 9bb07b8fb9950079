"""A drafting worker in a forked process: it shares the models' memory, and answers with proposals in shared memory."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import traceback
import warnings
import weakref
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.composition import Composition
from specdec.executors.worker import DraftRequest, DraftResponse, work
from specdec.rng import Philox
from specdec.types import Proposal, Round, Scores


class ProcessWorker:
    """A forked process. It shares the models' memory, computes on one thread, and returns proposals in shared memory: what it writes to the pipe
    is small, so it does not wait for this process, which may be writing a request.

    The child uses no thread pool (as in PyTorch's data loaders) and cannot use CUDA. No other thread of this process may compute at the time
    of the fork: a lock that it holds, such as MKL's, stays locked in the child, which would wait for it forever.
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
            # From Python 3.12 on, of other threads: see above.
            warnings.simplefilter("ignore", DeprecationWarning)
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
