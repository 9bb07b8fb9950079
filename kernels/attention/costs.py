"""The cost of a batched attention call: constants fitted to timings of this machine, or defaults.

seconds = call + rows * row + rows * slots * (bytes of a slot / bandwidth + queries * FLOPs of a slot and query / rate), and
for a merge of two fragments: merge + rows * queries * merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from specdec.kernels.attention.fused import fused
from specdec.kernels.attention.merge import merge_two
from specdec.kernels.attention.plan import AttentionPlan, Segment


@dataclass(frozen=True)
class CostModel:
    """Seconds of the parts of a call, for one shape of heads.

    Attributes:
        call: per call. row: per row. slot: per slot of each row, for moving keys and values. query: per slot of each row and query,
        for arithmetic. merge: per merge of two fragments. merged: per row and query of a merge.
    Raises:
        ValueError: a negative part.
    """

    call: float
    row: float
    slot: float
    query: float
    merge: float
    merged: float

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not seconds >= 0:
                raise ValueError(f"{name} is {seconds}: give seconds, at least 0")

    def block(self, rows: Any, slots: Any, queries: int) -> Any:
        """Seconds of one call: ``rows`` rows of ``slots`` slots each; arrays broadcast."""
        return self.call + rows * (self.row + slots * (self.slot + queries * self.query))

    def merging(self, rows: int, queries: int) -> float:
        """Seconds to merge two fragments of ``rows`` rows."""
        return self.merge + rows * queries * self.merged

    @classmethod
    def of(
        cls,
        heads: int,
        kv_heads: int,
        size: int,
        itemsize: int = 4,
        *,
        bandwidth: float = 1.5e10,
        rate: float = 6e10,
        call: float = 1.5e-5,
        row: float = 1e-6,
    ) -> CostModel:
        """From bytes and FLOPs a second; the defaults are those of one core of a server's CPU in float32."""
        slot, query = 2 * kv_heads * size * itemsize / bandwidth, 4 * heads * size / rate
        return cls(call, row, slot, query, 1.5e-5, 3 * heads * size * itemsize / bandwidth)


_FITTED: dict[tuple[Any, ...], CostModel] = {}


def cost_model(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> CostModel:
    """The result of ``fit`` in this process for this shape and number of threads; the defaults if it was not called."""
    fitted = _FITTED.get((heads, kv_heads, size, dtype, torch.get_num_threads()))
    return _default(heads, kv_heads, size, dtype.itemsize) if fitted is None else fitted


_default = lru_cache(maxsize=256)(CostModel.of)


def fit(
    heads: int,
    kv_heads: int | None = None,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    *,
    repeats: int = 7,
) -> CostModel:
    """Time a few calls on this machine (under 2 s), and plan with the fitted constants from now on in this process.

    Args:
        heads: query heads. kv_heads: by default ``heads``. size: of a head.
        repeats: of each call; the fastest counts.
    Raises:
        ValueError: a number below 1, or ``kv_heads`` does not divide ``heads``.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    for name, n in (("heads", heads), ("kv_heads", kv_heads), ("size", size), ("repeats", repeats)):
        if n < 1:
            raise ValueError(f"{name} is {n}: give at least 1")
    if heads % kv_heads:
        raise ValueError(f"kv_heads is {kv_heads}: give a divisor of the {heads} heads")
    samples = list(_calls(heads, kv_heads, size, dtype, repeats))
    columns = np.array([[1.0, n, n * slots, n * slots * q] for n, slots, q, _ in samples])
    seconds = np.array([s for *_, s in samples])
    columns /= seconds[:, None]  # relative errors
    scale = columns.max(0)
    call, row, slot, query = (nnls(columns / scale, np.ones_like(seconds))[0] / scale).tolist()
    small, large = (_merges(n, 5, heads, size, dtype, repeats) for n in (1, 16))
    merged = max(large - small, 0.0) / (15 * 5)
    model = CostModel(call, row, slot, query, max(small - 5 * merged, 0.0), merged)
    _FITTED[heads, kv_heads, size, dtype, torch.get_num_threads()] = model
    return model


def _calls(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, repeats: int
) -> Iterator[tuple[int, int, int, float]]:
    """(rows, slots, queries, seconds) of calls on buffers that are not in the processor's cache, as in a model's layers."""
    rows, capacity, layers = 8, 1040, 6
    made = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        buffer = torch.randn(layers, 2, rows, kv_heads, capacity, size, generator=made, dtype=dtype)
        for n, slots, q in [(n, s, q) for n in (1, 4, 8) for s in (16, 128, 512, 1024) for q in (1, 5, 9)]:
            query = torch.randn(1, heads, n * q, size, generator=made, dtype=dtype)
            plan = AttentionPlan(range(n), [slots - q if slots > q else 0] * n, [q] * n, capacity)
            s = Segment(0, n, 0, 0, q, max(plan.length))
            best = float("inf")
            for turn in range(repeats):
                key, value = (b.transpose(1, 2) for b in buffer[turn % layers])
                start = perf_counter()
                fused(query, key, value, plan, s, 0, size**-0.5, None)
                took = perf_counter() - start
                best = best if not turn else min(best, took)  # the first call builds the mask
            yield n, s.keys, q, best


def _merges(n: int, q: int, heads: int, size: int, dtype: torch.dtype, repeats: int) -> float:
    """Seconds of one merge into a part of a larger output, as decomposition does it."""
    with torch.inference_mode():
        a, b = torch.zeros(2, n, heads, q, size, dtype=dtype)
        lse_a, lse_b = torch.zeros(2, n, heads, q, dtype=dtype)
        best = float("inf")
        for _ in range(4 * repeats):
            start = perf_counter()
            out, lse = merge_two(a, lse_a, b, lse_b)
            a[:n], lse_a[:n] = out, lse
            best = min(best, perf_counter() - start)
    return best
