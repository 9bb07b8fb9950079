"""Attention with little padding: rows of similar length in one fused call on views of the slots, else row by row.

In the steady state (decoding, verification) all rows have equally many queries and one call serves the batch, up to its longest
row; if more than half of that would be masked, each row has its own call. Slots between a shorter row's end and the longest row's,
and those hidden by a window, a tree or a mask, are read with weight 0. On the CPU, if the result shows that such slots may not be
finite, the rows are recomputed one by one on copies in which they are 0.

Pages are copied together first, for the rows of one segment at a time, from the first page that a window reaches. This is another
pass over memory per layer, which is negligible for prompts. Only the CPU, where non-finite values are detected, takes several rows
of pages at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.attention.fused import fused
from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.reach import Reach, binding
from specdec.kernels.device import to_device

Part = tuple[Tensor, Tensor | None]
"""The output ``[R, Hq, q, Dv]`` of a segment, and its log-sum-exp ``[R, Hq, q]`` where that is wanted."""


@dataclass(frozen=True)
class Segmented:
    """``contract.Backend`` by calls of fused attention.

    Args:
        parts: ``(query, keys, values, plan, scale, window, lse)`` -> the results of neighbouring segments, in order.
        pages: whether it reads pages.
    """

    parts: Callable[[Tensor, Tensor, Tensor, AttentionPlan, float, Reach, bool], list[Part]]
    pages: bool = False

    def refuses(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        window: Reach = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        lse: bool = False,
    ) -> str | None:
        """As ``contract.Backend.refuses``."""
        if plan.table is not None and not self.pages:
            return "it reads slots, not pages"
        if softcap is not None:
            return "fused attention has no soft cap on scores"
        if sink_logits is not None:
            return "fused attention has no sink logits"
        if not lse:
            return None
        if not query.is_cpu:
            return "PyTorch's fused attention returns its log-sum-exp on the CPU only"
        if keys.shape[-1] != values.shape[-1]:
            return (
                "PyTorch's fused attention returns its log-sum-exp for keys and values of one size, "
                f"not {keys.shape[-1]} and {values.shape[-1]}"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, keys, values)):
            return (
                "the log-sum-exp of PyTorch's fused attention has no gradient: call it under torch.no_grad()"
            )
        return None

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: Reach = None,
        *_: Any,
    ) -> Tensor:
        """Arguments and result as for ``api.attention``, without soft cap and sink logits."""
        return join([out for out, _ in self.parts(query, keys, values, plan, scale, window, False)])

    def attend_with_lse(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: Reach = None,
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores; for calls that ``refuses`` allows."""
        outs, totals = zip(*self.parts(query, keys, values, plan, scale, window, True))
        return join(outs), join([total[..., None] for total in totals])[..., 0]


def parts(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float, window: Reach, lse: bool
) -> list[Part]:
    """One call for each segment of the plan; over pages on a GPU, for each row."""
    if plan.ordered:
        window = binding(window, max(plan.length))
    segments, one = plan.segments, careful if plan.table is None else _paged
    if plan.table is not None and not query.is_cpu:
        segments = plan.runs(alone=True)
    return [
        one(query, keys, values, plan, s, 0 if window is None else plan.low(s, window), scale, window, lse)
        for s in segments
    ]


def careful(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    s: Segment,
    low: int,
    scale: float,
    window: Reach,
    lse: bool,
    begin: int = 0,
) -> Part:
    """``fused``, repeated row by row if a slot that no query sees was not finite."""
    out, total = fused(query, keys, values, plan, s, low, scale, window, lse, begin)
    if out.is_cpu and plan.hides(s, window, low) and not finite(out):
        for r in range(s.r0, s.r1):
            k, v, one = _cleaned(keys, values, plan, s, r, low, window, begin)
            own, mine = fused(query, k, v, plan, one, low, scale, window, lse, low)
            out[r - s.r0] = own[0]
            if total is not None and mine is not None:
                total[r - s.r0] = mine[0]
    return out, total


def _cleaned(
    keys: Tensor, values: Tensor, plan: AttentionPlan, s: Segment, r: int, low: int, window: Reach, begin: int
) -> tuple[Tensor, Tensor, Segment]:
    """Copies of one row's slots from ``low`` on, ``[1, n, H, D]``, with 0 in slots that none of its queries sees, and their segment."""
    one = plan.at(s, r, r + 1, min(s.keys, plan.length[r]))
    visible = torch.as_tensor(plan.visible(one, window, low))  # [1, q, n], or [1, Hq, q, n]
    seen = visible.flatten(0, -2).any(0)
    k, v = (
        torch.where(seen[:, None, None], buffer[one.b0, low - begin : one.keys - begin], 0)[None]
        for buffer in (keys, values)
    )
    return k, v, one._replace(b0=0)


def _paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    s: Segment,
    low: int,
    scale: float,
    window: Reach,
    lse: bool,
) -> Part:
    """``careful`` on copies of the pages of a segment's rows."""
    first = low // plan.page
    key = ("pages", s, first, query.device)
    if key not in plan.known:
        plan.known[key] = to_device(_pages(plan, s, first), query.device)
    at, rows = plan.known[key], s.r1 - s.r0
    keys, values = _gathered(keys, at, rows), _gathered(values, at, rows)
    return careful(query, keys, values, plan, s._replace(b0=0), low, scale, window, lse, first * plan.page)


def _pages(plan: AttentionPlan, s: Segment, first: int) -> Tensor:
    """``[R * P]`` pages of a segment's rows from their ``first`` on; a shorter row's last one is repeated."""
    assert plan.table is not None
    end = -(-s.keys // plan.page)
    rows = []
    for pages, length in zip(plan.table[s.r0 : s.r1], plan.length[s.r0 : s.r1]):
        last = -(-length // plan.page) - 1
        rows.append([pages[min(p, last)] for p in range(first, end)])
    return torch.tensor(rows).flatten()


def _gathered(buffer: Tensor, pages: Tensor, rows: int) -> Tensor:
    """``[pages, page, H, D]`` -> ``[rows, P * page, H, D]``, stored with heads before slots."""
    page, heads, size = buffer.shape[1:]
    copied = buffer.transpose(1, 2).index_select(0, pages).view(rows, -1, heads, page, size)
    return copied.transpose(1, 2).reshape(rows, heads, -1, size).transpose(1, 2)


def finite(out: Tensor) -> bool:
    """Whether the sum over ``out`` is finite: NaN and infinities do not cancel, and 0 times either is NaN."""
    total = float(out.detach().sum())
    return total - total == 0


def join(parts: Sequence[Tensor]) -> Tensor:
    """``[R, Hq, q, Dv]`` of neighbouring segments -> ``[1, T, Hq, Dv]``."""
    if len(parts) == 1:
        return _flat(parts[0])
    return torch.cat([_flat(part) for part in parts], 1)


def _flat(part: Tensor) -> Tensor:
    part = part.transpose(1, 2)
    return part if part.shape[0] == 1 else part.reshape(1, -1, part.shape[2], part.shape[3])


_backend = Segmented(parts, pages=True)
refuses, attend, attend_with_lse = _backend.refuses, _backend.attend, _backend.attend_with_lse
