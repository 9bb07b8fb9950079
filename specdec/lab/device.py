"""A clock for calls on a device: CUDA events, around a replay of a CUDA graph if possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import torch

from specdec.graphs.capture import end_capturing
from specdec.lab.clock import seconds as wall_clock


class Time(NamedTuple):
    """Seconds of a call, seconds with the host's launches, and the source: ``graph``, ``events`` or ``host clock``."""

    seconds: float
    eager: float
    how: str


def clock(
    device: torch.device, runs: Sequence[Callable[[], Any]], seconds: float = 0.3, graph: bool = True
) -> Time:
    """Median seconds of a call, over alternating ``runs`` (several sets of inputs, so that none stays in a cache).

    Args:
        seconds: how long to measure. graph: replay the calls from a CUDA graph if possible, without the host's launches.
    """
    if device.type == "cpu":  # a dry run: the seconds of one call
        spent = wall_clock(lambda: [run() for run in runs]) / len(runs)
        return Time(spent, spent, "host clock")
    for run in (*runs, *runs, *runs):  # compiled, set up, captured
        run()
    torch.cuda.synchronize()
    eager = _events(lambda: [run() for run in runs], seconds / 2) / len(runs)
    replay = capture(runs) if graph else None
    # In a row, the host prepares the next call meanwhile, as under ``Ahead``; ``eager`` has its time.
    if replay is None:
        return Time(_events(lambda: [run() for run in runs], seconds, 5) / len(runs), eager, "events")
    return Time(_events(replay, seconds) / len(runs), eager, "graph")


def _events(run: Callable[[], Any], seconds: float, least: int = 1) -> float:
    """Median seconds of ``run`` by CUDA events, with ``least`` calls between two events, and several if it is short."""
    first = _between(run, 1)
    inner = max(least, min(50, int(0.005 / max(first, 1e-7))))
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
    """All ``runs`` as one CUDA graph, or ``None`` if they cannot be captured."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        torch.cuda.set_sync_debug_mode("error")  # a failed capture corrupts CUDA's state: detect it before
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
        with torch.cuda.stream(torch.cuda.Stream()):
            end_capturing(graph)
        return None
    return graph.replay
