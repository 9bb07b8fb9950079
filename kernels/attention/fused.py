"""One call of PyTorch's fused attention: neighbouring rows with equally many queries over a range of slots, on views.

Only small tensors are copied: if several query heads share keys and values (GQA) and queries are few, the heads are *folded* into
the queries, so that one pass over the keys serves them all (up to twice as fast as the kernel's own grouping).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.reach import Reach

FOLD = (
    16  # queries a row up to which folding pays; its mask is as many times larger as there are heads to fold
)

_flash = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
)  # the only one that returns its log-sum-exp


def fused_supports(query: Tensor, softcap: float | None, sink_logits: Tensor | None) -> str | None:
    """Why fused attention cannot serve a call, or ``None``. It runs on every device, but is written for the CPU."""
    if softcap is not None:
        return "fused attention has no soft cap on scores"
    if sink_logits is not None:
        return "fused attention has no sink logits"
    return None


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
    """As ``contract.Backend.refuses``, for slots and pages alike."""
    why = fused_supports(query, softcap, sink_logits)
    if why or not lse:
        return why
    if not query.is_cpu:
        return "PyTorch's fused attention returns its log-sum-exp on the CPU only"
    if keys.shape[-1] != values.shape[-1]:
        return (
            "PyTorch's fused attention returns its log-sum-exp for keys and values of one size, "
            f"not {keys.shape[-1]} and {values.shape[-1]}"
        )
    if torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad):
        return "the log-sum-exp of PyTorch's fused attention has no gradient: call it under torch.no_grad()"
    return None


def fused(
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
    """Attention of one segment over the slots ``low:s.keys`` of its rows: ``[R, Hq, q, Dv]``.

    Arguments as for ``api.attention``; ``query [1, Hq, T, D]`` are all packed queries. Slots beyond a row's end, up to ``s.keys``,
    are read with weight 0. ``begin``: the first slot of the rows of ``keys`` and ``values``, at most ``low``.
    """
    group = query.shape[1] // keys.shape[2]
    if s.queries > FOLD:
        group = 1
    key = (
        "call",
        s,
        low,
        window,
        query.dtype,
        query.device,
        group,
    )  # one look-up, because small models are bound by Python
    known = plan.known.get(key)
    if known is None:
        causal = plan.causal(s, window, low)
        mask = None if causal else _mask(query, plan, s, window, low, group)
        known = mask, causal, 1 if causal else group
        if plan.ordered:  # otherwise visibility may differ between layers
            plan.known[key] = known
    mask, causal, group = known
    q, k, v = _views(query, keys, values, s, low, group, begin)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out if group == 1 else out.reshape(q.shape[0], -1, s.queries, out.shape[-1])


def fused_with_lse(
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
    """As ``fused``, with the log-sum-exp ``[R, Hq, q]`` of the scores; for calls that ``refuses`` allows.

    A query that sees none of the slots gets 0 and -inf.
    """
    causal = plan.causal(s, window, low)
    group = 1 if causal or s.queries > FOLD else query.shape[1] // keys.shape[2]
    mask = None if causal else _mask(query, plan, s, window, low, group)
    q, k, v = _views(query, keys, values, s, low, group, begin)
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    out, lse = (t.reshape(q.shape[0], -1, s.queries, *t.shape[3:]) for t in (out, lse))
    if mask is not None:
        blind = plan.blind(s, window, low, query.device)
        if blind is not None:  # for these the kernel returns 0 for both
            lse = lse.masked_fill(blind, float("-inf"))
    return out, lse


def _mask(
    query: Tensor, plan: AttentionPlan, s: Segment, window: Reach, low: int, group: int
) -> Tensor | None:
    if group == 1:
        return plan.mask(s, window, low, query.dtype, query.device)
    return plan.folded_mask(s, window, low, query.dtype, query.device, group)


def _views(
    query: Tensor, keys: Tensor, values: Tensor, s: Segment, low: int, group: int, begin: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """``[R, Hq / group, group * q, D]`` queries, ``[R, Hkv, high - low, D]`` keys and values."""
    r0, r1, b0, t0, n, high = s
    rows, slots = r1 - r0, high - low
    _, heads, _, size = query.shape
    _, by_head, by_query, by_size = query.stride()
    at = query.storage_offset() + t0 * by_query
    if group > 1:
        q = query.as_strided(
            (rows, keys.shape[2], group, n, size),
            (n * by_query, group * by_head, by_head, by_query, by_size),
            at,
        ).reshape(rows, keys.shape[2], group * n, size)
    else:
        q = query.as_strided((rows, heads, n, size), (n * by_query, by_head, by_query, by_size), at)
    return q, _slots(keys, b0, rows, low - begin, slots), _slots(values, b0, rows, low - begin, slots)


def _slots(buffer: Tensor, b0: int, rows: int, low: int, slots: int) -> Tensor:
    """``[B, S, H, D]`` -> ``[rows, H, slots, D]`` in one operation instead of three, since it runs for each call and layer."""
    by_row, by_slot, by_head, by_size = buffer.stride()
    _, _, heads, size = buffer.shape
    at = buffer.storage_offset() + b0 * by_row + low * by_slot
    return buffer.as_strided((rows, heads, slots, size), (by_row, by_head, by_slot, by_size), at)
