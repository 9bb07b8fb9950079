"""Runs a verification pass by the blocks of ``decompose``: exact, on views, with partial outputs merged by their log-sum-exps.

A call covers slots beyond the end of its shorter rows, and hidden ones, with weight 0; if these are not finite, it is repeated row
by row (``packed``). Rows are cut only on the CPU, and only if keys and values have one size: elsewhere no kernel returns its
log-sum-exp, and only the grouping of rows into calls is chosen. A window beside first positions is a mask over the whole row.
Prompts (more than ``PROMPT`` queries a row) and slots in arbitrary order run ``packed``.
"""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention import packed
from specdec.kernels.attention.costs import cost_model
from specdec.kernels.attention.decompose import Block, Fragments, decompose
from specdec.kernels.attention.merge import merge_two
from specdec.kernels.attention.packed import Part, Segmented, careful
from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.reach import Reach, binding

PROMPT = 32


def parts(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float, window: Reach, lse: bool
) -> list[Part]:
    """One call for each block, merged with those above it."""
    if not plan.ordered or max(plan.counts) > PROMPT:
        return packed.parts(query, keys, values, plan, scale, window, lse)
    window = binding(window, max(plan.length))
    chosen = _chosen(query, keys, values, plan, window)
    return [_cut(query, keys, values, plan, block, s, scale, window, lse) for block, s in chosen]


def fragments(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach) -> Fragments:
    """The cover that ``decompose`` chooses for a layer."""
    model = cost_model(query.shape[1], keys.shape[2], query.shape[3], query.dtype)
    low = None if window is None else [plan.low(s, window) for s in plan.runs(alone=True)]
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


def _chosen(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach
) -> list[tuple[Block, Segment]]:
    """The blocks at the bottom and their segments; layers with the same heads share them."""
    key = ("fragments", window, query.shape[1], keys.shape[2:], values.shape[-1], query.dtype, query.is_cpu)
    if key not in plan.known:
        blocks = fragments(query, keys, values, plan, window).blocks
        each = plan.runs(alone=True)
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
    lse: bool,
) -> Part:
    """A block and all above it, which are merged by their log-sum-exps."""
    out, total = careful(query, keys, values, plan, s, block.low, scale, window, lse or bool(block.above))
    for b in block.above:
        rows = slice(b.r0 - block.r0, b.r1 - block.r0)
        more, above = _cut(query, keys, values, plan, b, plan.at(s, b.r0, b.r1, b.high), scale, window, True)
        assert total is not None
        assert above is not None
        out[rows], total[rows] = merge_two(out[rows], total[rows], more, above)
    return out, total


_backend = Segmented(parts)
refuses, attend, attend_with_lse = _backend.refuses, _backend.attend, _backend.attend_with_lse
