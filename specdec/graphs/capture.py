"""Ways to run a function of fixed tensors repeatedly: as a CUDA graph, or by calling it again.

A *body* takes no arguments: it reads tensors at fixed addresses and returns tensors (or ``None``). ``capture(body)`` returns a function
that does the work of ``body`` on the current contents of those tensors and returns the tensors with the results. They are the same
tensors every time, so results hold until the next call.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from specdec.graphs.recorded import Body, record, watch
from specdec.kernels.streams import own_stream

Capture = Callable[[Body], Body]

CAPTURES = ("cuda", "eager", "recorded")
# Captures of a device share one stream, and no thread may wait for the whole device while another one captures.
_capturing = threading.Lock()
_aside: dict[int, Any] = {}  # device -> the stream on which its captures run, and nothing else
_broken: list[Any] = []  # graphs whose capture failed, which are never freed


def capture_for(name: str, device: torch.device) -> Capture:
    """The entry ``name`` of ``CAPTURES``, for one model.

    Raises:
        ValueError: CUDA graphs are asked for and the model is not on a CUDA device.
    """
    if name == "cuda":
        if device.type != "cuda":
            raise ValueError(
                f"graphs asks for CUDA graphs and the model is on {device}: move it to a CUDA device, or give graphs=False "
                "('eager' runs the same steps of fixed shapes without capturing them, on any device)"
            )
        return CudaGraphs(device)
    return eager if name == "eager" else record


def eager(body: Body) -> Body:
    """No capture: the body is called."""
    return body


@contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """Graphs of a device may be dropped in here: its work is done, and no other thread captures."""
    if device.type != "cuda":
        yield
        return
    with _capturing:
        torch.cuda.synchronize(device)
        yield


class _Graph:
    """A captured graph; its pool's memory is in use while it exists."""

    def __init__(self, graph: Any, out: Any):
        self.graph, self.out = graph, out

    def __call__(self) -> Any:
        self.graph.replay()
        return self.out


class CudaGraphs:
    """Captures bodies as CUDA graphs that share one pool of memory.

    Graphs of a pool may share memory for intermediate results, so they are replayed one at a time, and a graph's results hold until
    any of them is replayed.
    """

    def __init__(self, device: torch.device, warm_up: int = 2):
        self.device, self.warm_up = device, warm_up
        self._pool: Any = None
        self._alive: weakref.WeakSet[_Graph] = weakref.WeakSet()  # the graphs in that pool

    def __call__(self, body: Body) -> Body:
        """Run ``body`` a few times on a side stream (which compiles kernels and sets up libraries), then capture it.

        Raises:
            NotCapturable: the body waits for the device, or does anything else that cannot be captured. This is found out in a run that is
                not captured, since a capture that breaks leaves PyTorch's allocator in the middle of it.
            RuntimeError: the capture failed.
        """
        with _capturing, torch.cuda.device(self.device):
            current, aside = torch.cuda.current_stream(), _stream_of(torch.cuda.current_device())
            aside.wait_stream(current)
            try:
                with torch.cuda.stream(aside):
                    for _ in range(self.warm_up):
                        body()
                    watch(body)
            finally:  # also if it is refused: what it reads may be freed then
                current.wait_stream(aside)
            _make_room()
            with torch.cuda.stream(aside), _own_workspaces(), _uncollected():
                made = self._capture(body)
        self._alive.add(made)
        return made

    def _capture(self, body: Body) -> _Graph:
        # The allocator drops a pool with its last graph, and does not take its handle again.
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()
        pool, graph = self._pool, torch.cuda.CUDAGraph()
        try:
            # Not by ``torch.cuda.graph``, which frees all cached memory each time. "thread_local": other threads may go on.
            # The first capture makes tensors for the generator of random numbers, which later captures write outside inference mode, too.
            with torch.inference_mode(False):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                out = body()
            finally:
                graph.capture_end()
        except BaseException:
            self._pool, self._alive = None, weakref.WeakSet()  # it may be marked as recording
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            end_capturing(graph)
            raise
        return _Graph(graph, out)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: what it frees may belong to the device, and nothing of the device may be freed during a capture."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def end_capturing(graph: Any) -> None:
    """After a capture of ``graph`` that failed: PyTorch's generator of random numbers believes that it goes on, until another has ended,
    and its allocator of pinned memory may go on asking the graph.

    To be called on a stream on which captures are possible.
    """
    _broken.append(graph)
    with suppress(Exception), warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")  # the graph is empty
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()


def _stream_of(device: int) -> Any:
    if device not in _aside:
        _aside[device] = own_stream(torch.device("cuda", device))
    return _aside[device]


def _make_room() -> None:
    """Free cached memory if more is cached than free: a capture allocates, and nothing can be freed while it runs."""
    free, _ = torch.cuda.mem_get_info()
    if free < torch.cuda.memory_reserved() - torch.cuda.memory_allocated():
        torch.cuda.empty_cache()


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """The matrix library's workspaces are allocated anew in here and afterwards.

    A graph contains the address of its workspace. One that was there before belongs to nobody who knows of the graph: PyTorch's compiler
    frees all of them when it captures. One that is allocated during the capture belongs to the graph's pool, and must serve nobody else.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
