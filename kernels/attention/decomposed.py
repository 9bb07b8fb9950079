"""Runs a verification pass by the blocks of ``decompose``: exact, on views, with partial outputs merged by their log-sum-exps.

A call covers slots beyond the end of its shorter rows, and hidden ones, with weight 0; if these are not finite, it is repeated row
by row (``packed``). Rows are cut only on the CPU, and only if keys and values have one size: elsewhere no kernel returns its
log-sum-exp, and only the grouping of rows into calls is chosen. A window beside first positions is a mask over the whole row.
Prompts (more than ``PROMPT`` queries a row) and slots in arbitrary order run ``packed``.
"""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention import fused, packed
from specdec.kernels.attention.costs import cost_model
from specdec.kernels.attention.decompose import Block, Fragments, decompose
from specdec.kernels.attention.merge import merge_two
from specdec.kernels.attention.packed import careful, careful_with_lse, join, join_with_lse
from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.reach import Reach, binding

__all__ = ["attend", "attend_with_lse", "fragments", "refuses"]

PROMPT = 32


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
    if not plan.ordered or max(plan.counts) > PROMPT:
        return packed.attend(query, keys, values, plan, scale, window)
    window = binding(window, max(plan.length))
    parts = []
    for block, s in _chosen(query, keys, values, plan, window):
        if block.above:
            parts.append(_cut(query, keys, values, plan, block, s, scale, window)[0])
        else:
            parts.append(careful(query, keys, values, plan, s, block.low, scale, window))
    return join(parts)


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
    if not plan.ordered or max(plan.counts) > PROMPT:
        return packed.attend_with_lse(query, keys, values, plan, scale, window)
    window = binding(window, max(plan.length))
    chosen = _chosen(query, keys, values, plan, window)
    return join_with_lse([_cut(query, keys, values, plan, b, s, scale, window) for b, s in chosen])


def fragments(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach) -> Fragments:
    """The cover that ``decompose`` chooses for a layer."""
    model = cost_model(query.shape[1], keys.shape[2], query.shape[3], query.dtype)
    low = None if window is None else [plan.low(s, window) for s in _alone(plan)]
    cut = query.is_cpu and values.shape[-1] == keys.shape[-1]
    return decompose(
        plan.length,
        plan.counts,
        model,
        lows=low,
        rows=plan.rows,
        fragment=plan.fragment if cut else None,
        cut=cut,
    )


def _alone(plan: AttentionPlan) -> list[Segment]:
    return plan.runs(alone=True)


def _chosen(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach
) -> list[tuple[Block, Segment]]:
    """The blocks at the bottom and their segments; layers with the same heads share them."""
    key = ("fragments", window, query.shape[1], keys.shape[2:], values.shape[-1], query.dtype, query.is_cpu)
    if key not in plan.known:
        blocks = fragments(query, keys, values, plan, window).blocks
        each = _alone(plan)
        plan.known[key] = [(b, plan.at(each[b.r0], b.r0, b.r1, b.high)) for b in blocks]
    return plan.known[key]


def _cut(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    block: Block,
    s: Segment,
    scale: float,
    window: Reach,
) -> tuple[Tensor, Tensor]:
    """A block and all above it: output ``[R, Hq, q, D]`` and log-sum-exp ``[R, Hq, q]``."""
    out, lse = careful_with_lse(query, keys, values, plan, s, block.low, scale, window)
    for b in block.above:
        rows = slice(b.r0 - block.r0, b.r1 - block.r0)
        more = _cut(query, keys, values, plan, b, plan.at(s, b.r0, b.r1, b.high), scale, window)
        out[rows], lse[rows] = merge_two(out[rows], lse[rows], *more)
    return out, lse
