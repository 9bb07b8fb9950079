"""All rows padded to the longest, masked, in one call per layer: the baseline of request decomposition (SPIN).

One call serves neighbouring rows with equally many queries, as in a verification pass. Slots between a shorter row's end and the
longest row's, and hidden ones, are read with weight 0; if they are not finite, rows are computed one by one (``packed``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specdec.kernels.attention import fused
from specdec.kernels.attention.packed import careful, careful_with_lse, join, join_with_lse
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, binding

__all__ = ["attend", "attend_with_lse", "refuses"]


def refuses(
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
    if plan.table is not None:
        return "it reads slots, not pages"
    return fused.refuses(query, keys, values, plan, window, softcap, sink_logits, lse)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
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
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores; for calls that ``refuses`` allows."""
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
    widest = max(plan.length)
    if plan.ordered:
        window = binding(window, widest)
    return [
        one(query, keys, values, plan, plan.at(s, s.r0, s.r1, widest), 0, scale, window) for s in plan.runs()
    ]
