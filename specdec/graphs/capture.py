"""Ways to run a function of fixed tensors again and again: a CUDA graph, or simply calling it once more.

A *body* takes no arguments: it reads tensors that stay where they are, and returns tensors (or ``None``). ``capture(body)`` gives a
function that does the work of ``body`` on what is in those tensors when it is called, and returns the tensors with the results:
the same ones every time, so they hold until the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Body = Callable[[], Any]
Capture = Callable[[Body], Body]

CAPTURES = ("cuda", "eager", "recorded")
_capturing = (
    threading.Lock()
)  # while a thread captures, no other may wait for the whole device, which a capture begins with


def capture_for(name: str, device: torch.device) -> Capture:
    """The way of a name in ``CAPTURES``, for one model.

    Raises:
        ValueError: CUDA graphs for a model that is not on a CUDA device.
    """
    if name == "cuda":
        if device.type != "cuda":
            raise ValueError(
                f"graphs asks for CUDA graphs and the model is on {device}: move it to a CUDA device, or give graphs=False "
                "('eager' runs the same steps of fixed shapes without capturing them, on any device)"
            )
        return CudaGraphs(device)
    if name == "eager":
        return eager
    from specdec.graphs.recorded import record

    return record


def eager(body: Body) -> Body:
    """No capture: the body is called."""
    return body


def synchronize(device: torch.device) -> None:
    """Wait for all that a CUDA device has to do, and for captures of other threads."""
    with _capturing:
        torch.cuda.synchronize(device)


class CudaGraphs:
    """Captures bodies as CUDA graphs that share one pool of memory.

    Graphs of a pool may use each other's memory for what they do not return, so they are replayed one at a time, and what one returned
    holds until any of them is replayed.
    """

    def __init__(self, device: torch.device, warm_up: int = 2):
        self.device, self.warm_up = device, warm_up
        self.pool: Any = None

    def __call__(self, body: Body) -> Body:
        """Run ``body`` a few times beside the current stream (kernels are compiled, libraries set up), then capture it.

        Raises:
            RuntimeError: the body waits for the device, or does anything else that cannot be captured.
        """
        with _capturing, torch.cuda.device(self.device):
            current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                for _ in range(self.warm_up):
                    body()
            current.wait_stream(aside)
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, pool=self.pool, stream=aside, capture_error_mode="thread_local"
                ):  # other threads may go on
                    out = body()
            except BaseException:
                # A capture that cannot even be ended leaves the thread on its stream and the pool marked as being recorded.
                torch.cuda.set_stream(current)
                self.pool = None
                raise

        def replay() -> Any:
            graph.replay()
            return out

        return replay
