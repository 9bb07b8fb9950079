"""What every stage of the GPU suite uses: a clock, the machine's two rates, rows of the report, shares of the time, free memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch
from _gpu_bars import COLUMNS, Row
from torch import Tensor

from specdec.cache.contiguous import free_bytes

LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""The largest relative error of a vector of a result (``worst``) in each type that still counts as correct."""

TOO_LARGE = (
    "OutOfMemoryError",
    "OutOfResources",
)  # of the device, of a multiprocessor: no failure, but no figure either


class Rates(NamedTuple):
    """Bytes (read plus written) a second of a large copy, and FLOP a second of a large bf16 matrix product."""

    copy: float
    matmul: float


class Part(NamedTuple):
    """A part of a stage and its share of the stage's time; what one leaves over, the next may use."""

    share: float
    run: Callable[[Lab], None]


class Lab:
    """One stage's run.

    Args:
        stage: its letter. device: ``cuda`` or ``cpu``. toy: small sizes. until: when the stage's time is over, by ``monotonic``.
        put: takes each row as soon as it is known.
    """

    def __init__(
        self, stage: str, device: str, toy: bool, until: float, seed: int, put: Callable[[Row], None]
    ):
        self.stage, self.device, self.toy, self.seed = stage, torch.device(device), toy, seed
        self.put, self.failed = put, False
        self.began, self.deadline = monotonic(), until
        self.seconds = until - self.began
        self.draw = torch.Generator(self.device).manual_seed(seed)
        self._rates: Rates | None = None

    # -- rows -------------------------------------------------------------------------------------------------------------

    def row(
        self,
        case: str,
        seconds: float | None = None,
        floor: float | None = None,
        error: float | None = None,
        *,
        limit: float | None = None,
        **more: Any,
    ) -> None:
        """A row of the report. ``limit``: of the error; above it, or not a number, the row has failed."""
        share = floor / seconds if floor is not None and seconds else None
        row: Row = dict(zip(COLUMNS, (self.stage, case, seconds, floor, share, error)))
        if limit is not None and not (error is not None and error <= limit):
            more |= {"failed": True, "note": f"error {error} is above {limit}"}
        self.failed = self.failed or bool(more.get("failed"))
        self.put(row | more)

    def skip(self, case: str, why: str) -> None:
        """A row without figures."""
        self.row(case, note=why)

    @contextmanager
    def case(self, name: str, bar: str | None = None) -> Iterator[None]:
        """An exception in here is a row (of ``bar``, which is then not met), and the rest goes on."""
        try:
            yield
        except Exception as error:  # whatever it is, it belongs to this case
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            if type(error).__name__ in TOO_LARGE:
                self.empty()
                self.skip(name, f"not run: {said}")
                return
            more = {"bar": bar} if bar else {}
            said += f" ({where.filename.rpartition('/')[2]}:{where.lineno})"
            self.row(name, failed=True, note=said, **more)

    # -- limits -----------------------------------------------------------------------------------------------------------

    def parts(self, parts: dict[str, Part]) -> None:
        """Run the parts one after another, each until its share of the time is used up."""
        used = 0.0
        whole = sum(part.share for part in parts.values())
        for name, part in parts.items():
            used += part.share / whole
            self.deadline = self.began + used * self.seconds
            with self.case(name):
                part.run(self)
            self.empty()

    def late(self, case: str, needs: float = 0.0) -> bool:
        """Whether there is no time left for a case that needs so many seconds; a row says so."""
        if monotonic() + needs < self.deadline:
            return False
        self.skip(case, "not run: its share of the time was used up")
        return True

    def room(self, case: str, need: float) -> bool:
        """Whether ``need`` bytes are free, with a gigabyte to spare; a row says so if not."""
        free = free_bytes(self.device)
        if free is None or need + 2**30 <= free or self.toy:
            return True
        self.skip(case, f"not run: needs {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free")
        return False

    def empty(self) -> None:
        """Give cached memory back, so that the next case finds it."""
        if self.device.type == "cuda":
            with suppress(Exception):  # after an error of the device nothing works, and rows say so
                torch.cuda.empty_cache()

    # -- time -------------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clock(self, runs: Sequence[Callable[[], Any]], seconds: float = 0.3, graph: bool = True) -> Time:
        """Median seconds of a call, over ``runs`` in turn (several sets of inputs, so that none is found in a cache).

        Args:
            seconds: how long to measure. graph: replay the calls from a CUDA graph where they can be captured, so that launches
                by the host are left out; ``Time.eager`` has them in.
        """
        if self.device.type == "cpu":  # a dry run: what it took this once
            start = perf_counter()
            for run in runs:
                run()
            spent = (perf_counter() - start) / len(runs)
            return Time(spent, spent, "host clock")
        for run in (*runs, *runs, *runs):  # compiled, set up, captured
            run()
        self.sync()
        eager = self._events(lambda: [run() for run in runs], seconds / 2) / len(runs)
        replay = _captured(runs) if graph else None
        if replay is None:
            return Time(eager, eager, "events")
        return Time(self._events(replay, seconds) / len(runs), eager, "graph")

    def _events(self, run: Callable[[], Any], seconds: float) -> float:
        """Median seconds of ``run`` by CUDA events, several calls between two of them if it is short."""
        first = self._between(run, 1)
        inner = max(1, min(50, int(0.005 / max(first, 1e-7))))
        repeats = max(5, min(200, int(seconds / max(first * inner, 1e-7))))
        return median(self._between(run, inner) for _ in range(repeats))

    @staticmethod
    def _between(run: Callable[[], Any], inner: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / inner

    @property
    def rates(self) -> Rates:
        """Measured here, once a stage: everything is compared with these."""
        if self._rates is None:
            size, n = (2**20, 256) if self.toy else (2**30, 8192)
            a = self.normal(size, dtype=torch.bfloat16)
            b = torch.empty_like(a)
            copy = self.clock([lambda: b.copy_(a)], graph=False).seconds
            del a, b
            x, y = (self.normal(n, n, dtype=torch.bfloat16) for _ in range(2))
            product = self.clock([lambda: x @ y], graph=False).seconds
            self._rates = Rates(4 * size / copy, 2 * n**3 / product)
            self.row(
                "copy", copy, bytes=4 * size, bytes_per_second=self._rates.copy, note="the ceiling of bytes"
            )
            self.row("matmul bf16", product, flops=2 * n**3, flops_per_second=self._rates.matmul,
                     note="the ceiling of FLOPs")  # fmt: skip
        return self._rates

    def floor(self, bytes: float, flops: float = 0.0) -> float:
        """Seconds that nothing can beat: all bytes at the rate of a copy, or all FLOPs at that of a matrix product."""
        return max(bytes / self.rates.copy, flops / self.rates.matmul)

    def timed(self, case: str, runs: Sequence[Callable[[], Any]], bytes: float, flops: float = 0.0,
              error: float | None = None, limit: float | None = None, graph: bool = True, **more: Any) -> Time:  # fmt: skip
        """``clock`` and a row of it, with the share of the copy's bytes a second."""
        time = self.clock(runs, graph=graph)
        moved = bytes / time.seconds
        self.row(
            case, time.seconds, self.floor(bytes, flops), error, limit=limit, bytes=bytes, flops=flops,
            bytes_per_second=moved, share_of_copy=moved / self.rates.copy,
            share_of_matmul=flops / time.seconds / self.rates.matmul, eager_seconds=time.eager, clock=time.how, **more,
        )  # fmt: skip
        return time

    # -- numbers ----------------------------------------------------------------------------------------------------------

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random normal numbers on the device."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=self.draw)


class Time(NamedTuple):
    """Seconds of a call, those with the host's launches in, and how they were read."""

    seconds: float
    eager: float
    how: str


def _captured(runs: Sequence[Callable[[], Any]]) -> Callable[[], None] | None:
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


def worst(out: Tensor, reference: Tensor) -> float:
    """The largest ``|out - reference| / |reference|`` of the last dimension's vectors: one wrong head of one query is an error of 1.

    Not finite if anything in ``out`` is not.
    """
    exact = reference.double()
    error, size = (out.to(exact.device).double() - exact).norm(dim=-1), exact.norm(dim=-1)
    return float(torch.where(size > 0, error / size, error).max())


def relative(out: Tensor, reference: Tensor) -> float:
    """``|out - reference| / |reference|`` over all numbers; not finite if anything in ``out`` is not."""
    exact = reference.double()
    size = float(exact.norm())
    error = float((out.to(exact.device).double() - exact).norm())
    return error / size if size else error
