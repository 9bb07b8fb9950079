"""A clock for calls on a device: by CUDA events, replayed from a CUDA graph where they can be, and the device's two rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch


class Rates(NamedTuple):
    """Bytes (read plus written) a second of a large copy, and FLOP a second of a large bf16 matrix product."""

    copy: float
    matmul: float

    def floor(self, bytes: float, flops: float = 0.0) -> float:
        """Seconds that nothing can beat: all bytes at the rate of a copy, or all FLOPs at that of a matrix product."""
        return max(bytes / self.copy, flops / self.matmul)


class Time(NamedTuple):
    """Seconds of a call, those with the host's launches in, and how they were read: ``graph``, ``events`` or ``host clock``."""

    seconds: float
    eager: float
    how: str


def clock(
    device: torch.device, runs: Sequence[Callable[[], Any]], seconds: float = 0.3, graph: bool = True
) -> Time:
    """Median seconds of a call, over ``runs`` in turn (several sets of inputs, so that none is found in a cache).

    Args:
        seconds: how long to measure. graph: replay the calls from a CUDA graph where they can be captured, so that launches
            by the host are left out; ``Time.eager`` has them in.
    """
    if device.type == "cpu":  # a dry run: what it took this once
        start = perf_counter()
        for run in runs:
            run()
        spent = (perf_counter() - start) / len(runs)
        return Time(spent, spent, "host clock")
    for run in (*runs, *runs, *runs):  # compiled, set up, captured
        run()
    torch.cuda.synchronize()
    eager = _events(lambda: [run() for run in runs], seconds / 2) / len(runs)
    replay = capture(runs) if graph else None
    if replay is None:
        return Time(eager, eager, "events")
    return Time(_events(replay, seconds) / len(runs), eager, "graph")


def _events(run: Callable[[], Any], seconds: float) -> float:
    """Median seconds of ``run`` by CUDA events, several calls between two of them if it is short."""
    first = _between(run, 1)
    inner = max(1, min(50, int(0.005 / max(first, 1e-7))))
    repeats = max(5, min(200, int(seconds / max(first * inner, 1e-7))))
    return median(_between(run, inner) for _ in range(repeats))


def _between(run: Callable[[], Any], inner: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(inner):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / inner


def capture(runs: Sequence[Callable[[], Any]]) -> Callable[[], None] | None:
    """All ``runs`` as one CUDA graph, or ``None`` for something that cannot be captured."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        torch.cuda.set_sync_debug_mode("error")  # a failed capture leaves a mess: find out before
        try:
            side = torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for run in runs:
                    run()
            current.wait_stream(side)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for run in runs:
                run()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:  # something in it waits for the device
        torch.cuda.set_stream(current)
        with suppress(Exception):
            torch.cuda.synchronize()
        return None
    return graph.replay
