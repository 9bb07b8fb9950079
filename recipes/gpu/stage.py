"""Shared by all stages of the GPU suite: rows of the report, shares of the time, free memory, the device's rates and clock."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.gpu.bars import COLUMNS, Row
from recipes.gpu.rates import Rates
from specdec.cache.contiguous import free_bytes
from specdec.lab.device import Time, clock

TOO_LARGE = ("OutOfMemoryError", "OutOfResources")
"""Errors of the device, which give a row without a figure instead of a failure."""


class Part(NamedTuple):
    """A part of a stage and its share of the stage's time; later parts may use what earlier ones leave over."""

    share: float
    run: Callable[[Stage], None]


class Stage:
    """One stage's run.

    Args:
        letter: of the stage. device: ``cuda`` or ``cpu``. toy: small sizes. until: the stage's deadline, by ``monotonic``.
        put: called with each row as soon as it is known. share: which of how many shares of its cases is run here, for stages whose
            cases several processes share. folder: for files beside the report.
    """

    def __init__(
        self,
        letter: str,
        device: str,
        toy: bool,
        until: float,
        seed: int,
        put: Callable[[Row], None],
        share: tuple[int, int] = (0, 1),
        folder: Path | None = None,
    ):
        self.letter, self.device, self.toy, self.seed = letter, torch.device(device), toy, seed
        self.put, self.failed = put, False
        self.share, self.folder, self._cases = share, folder, 0
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
        """Add a row to the report. It has failed if its error is NaN or above ``limit``."""
        share = floor / seconds if floor is not None and seconds else None
        row: Row = dict(zip(COLUMNS, (self.letter, case, seconds, floor, share, error)))
        if limit is not None and not (error is not None and error <= limit):
            more |= {"failed": True, "note": f"error {error} is above {limit}"}
        self.failed = self.failed or bool(more.get("failed"))
        self.put(row | more)

    def mine(self) -> bool:
        """Whether the next case is in this process's share; every process asks for every case, in the same order."""
        self._cases += 1
        return (self._cases - 1) % self.share[1] == self.share[0]

    def skip(self, case: str, why: str) -> None:
        """Add a row without figures."""
        self.row(case, note=why)

    @contextmanager
    def case(self, name: str, bar: str | None = None) -> Iterator[None]:
        """Turn an exception in the body, or a recipe's refusal, into a row (of ``bar``, which is then not met), and continue."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not isinstance(error.code, str):
                raise  # the process is to end
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            said = said.replace(f"{tempfile.gettempdir()}/", "")
            if type(error).__name__ in TOO_LARGE:
                self.empty()
                self.skip(name, f"not run: {said}")
                return
            more = {"bar": bar} if bar else {}
            said += f" ({where.filename.rpartition('/')[2]}:{where.lineno})"
            self.row(name, failed=True, note=said, **more)
            if self.lost():
                raise SystemExit(3) from error

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
        """Whether too little time is left for a case that needs ``needs`` seconds; if so, a row says it."""
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

    def lost(self) -> bool:
        """Whether nothing works in this process any more, after an error of the device."""
        try:
            self.sync()
        except Exception:
            return True
        return False

    def empty(self) -> None:
        """Free cached memory for the next case."""
        if self.device.type == "cuda":
            with suppress(Exception):  # after an error of the device this fails, too
                torch.cuda.empty_cache()

    # -- time -------------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clock(self, runs: Sequence[Callable[[], Any]], seconds: float = 0.3, graph: bool = True) -> Time:
        """``lab.device.clock`` on the stage's device."""
        return clock(self.device, runs, seconds, graph)

    @property
    def rates(self) -> Rates:
        """The device's rates, measured once per stage."""
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
        """``Rates.floor`` with the measured rates."""
        return self.rates.floor(bytes, flops)

    def timed(self, case: str, runs: Sequence[Callable[[], Any]], bytes: float, flops: float = 0.0,
              error: float | None = None, limit: float | None = None, graph: bool = True, **more: Any) -> Time:  # fmt: skip
        """``clock`` and its row, with the shares of the floor, of the copy's bandwidth and of the matrix product's FLOP/s."""
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
