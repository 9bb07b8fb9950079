"""Ways to run a function of fixed tensors repeatedly: as a CUDA graph, or by calling it again.

A *body* takes no arguments: it reads tensors at fixed addresses and returns tensors (or ``None``). ``capture(body)`` returns a function
that does the work of ``body`` on the current contents of those tensors and returns the tensors with the results. They are the same
tensors every time, so results hold until the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from specdec.graphs.recorded import Body, record

Capture = Callable[[Body], Body]

CAPTURES = ("cuda", "eager", "recorded")
# A capture begins by waiting for the whole device, which no other thread may do while one captures.
_capturing = threading.Lock()


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


def synchronize(device: torch.device) -> None:
    """Wait for all work of a CUDA device, and for captures of other threads."""
    with _capturing:
        torch.cuda.synchronize(device)


class CudaGraphs:
    """Captures bodies as CUDA graphs that share one pool of memory.

    Graphs of a pool may share memory for intermediate results, so they are replayed one at a time, and a graph's results hold until
    any of them is replayed.
    """

    def __init__(self, device: torch.device, warm_up: int = 2):
        self.device, self.warm_up = device, warm_up
        self.pool: Any = None

    def __call__(self, body: Body) -> Body:
        """Run ``body`` a few times on a side stream (which compiles kernels and sets up libraries), then capture it.

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
                # "thread_local": other threads may go on.
                with torch.cuda.graph(graph, pool=self.pool, stream=aside, capture_error_mode="thread_local"):
                    out = body()
            except BaseException:
                # A capture that cannot be ended leaves the thread on its stream and the pool marked as recording.
                torch.cuda.set_stream(current)
                self.pool = None
                raise

        def replay() -> Any:
            graph.replay()
            return out

        return replay
