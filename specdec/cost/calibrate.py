"""Fits a machine's constants to measured step times, and the host's work around steps to round times.

The model is that of SPIRe (arXiv 2504.06419, section 2) with the overheads of ``Hardware``, so that a few measurements predict steps
of other sizes. Constants are fitted to *relative* errors, since the largest steps would dominate otherwise, and none is negative.
Every fit is convex or searched exhaustively, so the result does not depend on a starting point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp

import numpy as np
from scipy.optimize import nnls

from specdec.arguments import number
from specdec.cost.hardware import Hardware
from specdec.cost.terms import Step

CACHED = ("kv_reads", "kv_writes")
"""Terms that move cached keys and values."""


@dataclass(frozen=True)
class Fitted(Hardware):
    """``Hardware`` that was fitted to measurements.

    Attributes:
        cached_bytes_per_second: rate at which cached keys and values move; ``None``: as fast as everything else. Weights that fit
            a processor's cache are read faster than the keys and values of a long context, which do not.
        cache_bytes: size of the processor's cache. If a loop touches more bytes, a share of its accesses misses (``missed``), and what is missed, weights
            or keys and values, moves at ``cached_bytes_per_second``; the rest moves as fast as everything else. ``None``: weights always
            fit, and keys and values never do.
        residuals: modelled over measured seconds, minus 1, of each sample in the order given.
    """

    cached_bytes_per_second: float | None = None
    residuals: tuple[float, ...] = ()
    cache_bytes: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cached_bytes_per_second", "cache_bytes"):
            if vars(self)[name] is not None:
                number(name, vars(self)[name], ", or None")
        if self.cache_bytes is not None and not (self.cache_bytes > 0 and self.cached_bytes_per_second):
            raise ValueError(
                f"cache_bytes is {self.cache_bytes}: give a positive number, and cached_bytes_per_second with it"
            )

    @property
    def error(self) -> float:
        """Median absolute relative error on the samples."""
        return float(np.median(np.abs(self.residuals))) if self.residuals else float("nan")

    def time(self, step: Step, loop: float | None = None) -> float:
        """Seconds for a step.

        Args:
            loop: bytes touched between two runs of this step; ``None``: only the step's own.
        """
        compute, moved = step.flops / self.flops, step.bytes / self.bytes_per_second
        if self.cached_bytes_per_second is not None:
            slow = _slow(step, self.cache_bytes, step.bytes if loop is None else loop)
            moved += slow / self.cached_bytes_per_second - slow / self.bytes_per_second
        roof = max(compute, moved) if self.overlapped else compute + moved
        return roof + self.overhead + self.overhead_per_layer * step.layers


@lru_cache
def missed(loop: float, cache: float) -> float:
    """Miss rate of a cache with random replacement if ``loop`` bytes are touched over and over.

    Between two touches of a line, misses replace ``m * loop`` bytes, and the line outlives that with probability
    ``exp(-m * loop / cache)``: so ``m = 1 - exp(-m * loop / cache)``, which is 0 if the loop fits, and 0.8 if it is twice as large.
    """
    if loop <= cache:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        m = (low + high) / 2
        low, high = (m, high) if 1 - exp(-m * loop / cache) > m else (low, m)
    return high


@dataclass(frozen=True)
class Host:
    """The host's seconds around a round's steps: sampling, verification, bookkeeping, and cache misses after them.

    ``fixed + per_row * rows + tokens * (per_token + per_row_token * rows)``: some work is done once, some for each row, some for each
    step of a draft, and some (distributions over the vocabulary) for each token of each row.

    Raises:
        ValueError: a negative part.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    per_token: float = 0.0
    per_row_token: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            number(name, seconds)
            if seconds < 0:
                raise ValueError(f"{name} is {seconds}: give seconds, at least 0")

    def seconds(self, rows: int, tokens: int = 1) -> float:
        """Seconds for ``tokens`` tokens of each of ``rows`` rows."""
        return self.fixed + self.per_row * rows + tokens * (self.per_token + self.per_row_token * rows)

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, int, float, float]]) -> Host:
        """Fits ``(rows, tokens, measured, explained)``: measured seconds, and those of them that steps explain.

        Errors are relative to ``measured``. If steps explain more than was measured, the host's share is 0.

        Raises:
            ValueError: no samples, or seconds that are not positive.
        """
        some = list(samples)
        _check([measured for _, _, measured, _ in some])
        measured = np.array([m for _, _, m, _ in some])
        left = np.array([m - e for _, _, m, e in some])
        columns = np.array([[1.0, rows, tokens, rows * tokens] for rows, tokens, _, _ in some])
        return cls(*_positive(columns / measured[:, None], left / measured).tolist())


def calibrate(
    samples: Iterable[tuple[Step, float]],
    name: str = "measured",
    *,
    overlapped: bool | None = None,
    cached_apart: bool = False,
    cache: bool = False,
    rank: Callable[[Fitted], float] | None = None,
) -> Fitted:
    """The constants that best explain measured steps.

    Args:
        samples: steps and their seconds. They must differ in FLOPs, bytes and layers: several batches, contexts and models.
        overlapped: whether memory moves while the machine computes; ``None`` takes the better fit.
        cached_apart: fit a separate rate for cached keys and values.
        cache: fit the size of a cache that a step may not fit (``Fitted.cache_bytes``); needs ``cached_apart``. Each sample is
            assumed to repeat the same step. The sizes tried are the samples' own; if none fits better, or memory would be faster
            than the cache, ``cache_bytes`` is ``None``.
        rank: chooses among the best fits with and without overlap, and of each size of the cache: the smallest value wins. Default: the
            sum of their squared residuals. Use it to choose by what the machine is to predict.
    Raises:
        ValueError: fewer samples than constants, seconds that are not positive, or ``cache`` without ``cached_apart``.
    """
    some = list(samples)
    _check([seconds for _, seconds in some])
    if cache and not cached_apart:
        raise ValueError("cache needs cached_apart=True: what a cache misses moves at a rate of its own")
    needed = 4 + cached_apart + cache
    if len(some) < needed:
        raise ValueError(
            f"{len(some)} samples for {needed} constants: measure at least {needed} steps of different batches, contexts and models"
        )
    kinds = (True, False) if overlapped is None else (overlapped,)
    sizes = [None, *sorted({step.bytes for step, _ in some})] if cache else [None]

    def squares(made: Fitted) -> float:
        return sum(r * r for r in made.residuals)

    each = [list(_machines(some, name, kind, cached_apart, size)) for size in sizes for kind in kinds]
    return min((min(found, key=squares) for found in each if found), key=rank or squares)


def _machines(
    samples: Sequence[tuple[Step, float]], name: str, overlapped: bool, apart: bool, size: float | None
) -> Iterable[Fitted]:
    """Candidates with a cache of ``size``: one without overlap; with it, one for each split by intensity into memory-bound and compute-bound steps.

    With one rate for all bytes the right split is among those tried. With two it need not be, so each candidate determines which
    of its steps are memory-bound and is fitted again until that does not change.
    """
    seconds = np.array([s for _, s in samples])
    flops = np.array([step.flops for step, _ in samples])
    cached = np.array([_slow(step, size, step.bytes) if apart else 0.0 for step, _ in samples])
    others = np.array([step.bytes for step, _ in samples]) - cached
    layers = np.array([float(step.layers) for step, _ in samples])
    every = np.ones(len(samples), dtype=bool)
    parts = [(every, every)]
    if overlapped:
        intensity = flops / (others + cached)
        parts = [(intensity > border, intensity <= border) for border in [0.0, *np.unique(intensity)]]
    for computing, moving in parts:
        for _ in range(8):
            columns = [flops * computing, others * moving, cached * moving, np.ones_like(flops), layers]
            x = _positive(np.stack(columns, 1) / seconds[:, None], np.ones_like(seconds))
            made = _machine(name, x.tolist(), overlapped, apart, size)
            if size is None or x[1] <= x[2]:  # the cache must not be slower than memory
                yield replace(made, residuals=tuple(made.time(step) / s - 1 for step, s in samples))
            now = flops * x[0] > others * x[1] + cached * x[2]
            if not overlapped or (now == computing).all():
                break
            computing, moving = now, ~now


def _machine(name: str, x: list[float], overlapped: bool, apart: bool, size: float | None) -> Fitted:
    """From seconds per FLOP, byte, cached byte, step and layer. A rate of 0 seconds is unlimited."""
    flops, other, cached = (1 / v if v > 0 else float("inf") for v in x[:3])
    return Fitted(name, flops, other, x[3], x[4], overlapped, cached if apart else None, cache_bytes=size)


def _positive(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The least-squares solution of ``columns @ x = values`` with ``x >= 0``; a part that is rounding alone is 0."""
    scale = np.abs(columns).max(0)
    scale[scale == 0] = 1
    x, _ = nnls(columns / scale, values)
    return np.where(x > 1e-9 * x.max(), x, 0) / scale


def _slow(step: Step, size: float | None, loop: float) -> float:
    """Bytes that move at the slower rate: those that a cache of ``size`` misses, or, without one, cached keys and values."""
    if size is not None:
        return missed(loop, size) * step.bytes
    return sum(w.bytes for w in step.work if w.name in CACHED)


def _check(seconds: Sequence[float]) -> None:
    if not seconds:
        raise ValueError("samples is empty: give measured steps and their seconds")
    if not all(0 < s < float("inf") for s in seconds):
        raise ValueError("a sample has seconds that are not positive and finite: it was not measured")
