"""No work on padding to speak of: rows of about one length in one fused call on views of the slots, or else row by row.

In the steady state (decoding, verification) all rows have equally many queries and one call serves the batch, cut to its
longest row; where more than half of that would be masked, each row has a call of its own. The slots between a shorter row's end
and the longest row's, and those that a window, a tree or a mask hides, are read with weight 0; on the CPU, if the result shows
that something there may not have been finite, the rows are computed again one by one, on copies in which it is 0.

Pages are copied together first, those of a segment's rows at a time, from the first that a window reaches: a pass over memory more
for each layer, which a prompt does not notice. Only the CPU, where what is not finite is noticed, takes several rows of pages at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.attention.fused import fused, fused_supports, fused_with_lse, refuses
from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.reach import Reach, binding
from specdec.kernels.device import to_device

__all__ = ["attend", "attend_with_lse", "careful", "careful_with_lse", "refuses", "supports"]


def supports(
    query: Tensor, softcap: float | None, sinks: Tensor | None, plan: AttentionPlan | None = None
) -> str | None:
    """Why this backend cannot serve a call, or ``None``. Slots or pages are the same to it."""
    return fused_supports(query, softcap, sinks)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``."""
    return join(_parts(careful, query, keys, values, plan, scale, window))


def attend_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores; where ``refuses`` has nothing against it."""
    return join_with_lse(_parts(careful_with_lse, query, keys, values, plan, scale, window))


def _parts(
    one: Callable[..., Any],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach,
) -> list[Any]:
    """What ``one`` (``careful``, ``careful_with_lse``) makes of each segment."""
    if plan.ordered:
        window = binding(window, max(plan.length))
    if plan.table is not None:
        segments = plan.segments if query.is_cpu else plan.runs(alone=True)
        return [_paged(one, query, keys, values, plan, s, scale, window) for s in segments]
    return [
        one(query, keys, values, plan, s, 0 if window is None else plan.low(s, window), scale, window)
        for s in plan.segments
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
    begin: int = 0,
) -> Tensor:
    """``fused``, and row by row if a slot that nothing sees was not finite: ``[R, Hq, q, Dv]``."""
    out = fused(query, keys, values, plan, s, low, scale, window, begin)
    if out.is_cpu and plan.hides(s, window, low) and not finite(out):
        for r in range(s.r0, s.r1):
            k, v, one = _cleaned(keys, values, plan, s, r, low, window, begin)
            out[r - s.r0] = fused(query, k, v, plan, one, low, scale, window, low)[0]
    return out


def careful_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    s: Segment,
    low: int,
    scale: float,
    window: Reach,
    begin: int = 0,
) -> tuple[Tensor, Tensor]:
    """``careful`` by ``fused_with_lse``: ``[R, Hq, q, Dv]`` and ``[R, Hq, q]``."""
    out, lse = fused_with_lse(query, keys, values, plan, s, low, scale, window, begin)
    if plan.hides(s, window, low) and not finite(out):
        for r in range(s.r0, s.r1):
            k, v, one = _cleaned(keys, values, plan, s, r, low, window, begin)
            part = fused_with_lse(query, k, v, plan, one, low, scale, window, low)
            out[r - s.r0], lse[r - s.r0] = part[0][0], part[1][0]
    return out, lse


def _cleaned(
    keys: Tensor, values: Tensor, plan: AttentionPlan, s: Segment, r: int, low: int, window: Reach, begin: int
) -> tuple[Tensor, Tensor, Segment]:
    """Copies of one row's slots from ``low`` on, ``[1, n, H, D]``, 0 where none of its queries sees them, and its segment of these."""
    one = plan.at(s, r, r + 1, min(s.keys, plan.length[r]))
    visible = torch.as_tensor(plan.visible(one, window, low))  # [1, q, n], or [1, Hq, q, n]
    seen = visible.flatten(0, -2).any(0)
    k, v = (
        torch.where(seen[:, None, None], buffer[one.b0, low - begin : one.keys - begin], 0)[None]
        for buffer in (keys, values)
    )
    return k, v, one._replace(b0=0)


def _paged(
    one: Callable[..., Any],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    s: Segment,
    scale: float,
    window: Reach,
) -> Any:
    """``one`` on copies of the pages of a segment's rows."""
    low = 0 if window is None else plan.low(s, window)
    first = low // plan.page
    key = ("pages", s, first, query.device)
    if key not in plan.known:
        plan.known[key] = to_device(_pages(plan, s, first), query.device)
    at, rows = plan.known[key], s.r1 - s.r0
    keys, values = _gathered(keys, at, rows), _gathered(values, at, rows)
    return one(query, keys, values, plan, s._replace(b0=0), low, scale, window, first * plan.page)


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
    """``[pages, page, H, D]`` -> ``[rows, P * page, H, D]``, in memory heads before slots."""
    heads, size = buffer.shape[2:]
    copied = buffer.permute(2, 0, 1, 3).index_select(1, pages)  # [H, R * P, page, D]
    return copied.view(heads, rows, -1, size).permute(1, 2, 0, 3)


def finite(out: Tensor) -> bool:
    """Whether a sum over all of it is: NaN and infinities do not cancel, and 0 times either is NaN."""
    total = float(out.detach().sum())
    return total - total == 0


def join(parts: list[Tensor]) -> Tensor:
    """``[R, Hq, q, Dv]`` of neighbouring segments -> ``[1, T, Hq, Dv]``."""
    if len(parts) == 1:
        return _flat(parts[0])
    return torch.cat([_flat(part) for part in parts], 1)


def join_with_lse(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """``join``, and ``[R, Hq, q]`` of neighbouring segments -> ``[1, T, Hq]``."""
    each = [lse.transpose(1, 2).reshape(1, -1, lse.shape[1]) for _, lse in parts]
    return join([out for out, _ in parts]), each[0] if len(each) == 1 else torch.cat(each, 1)


def _flat(part: Tensor) -> Tensor:
    part = part.transpose(1, 2)
    return part if part.shape[0] == 1 else part.reshape(1, -1, part.shape[2], part.shape[3])
