"""One call of PyTorch's fused attention: neighbouring rows with equally many queries over a range of slots, on views.

Only small tensors are copied: if several query heads share keys and values (GQA) and queries are few, the heads are *folded* into
the queries, so that one pass over the keys serves them all (up to twice as fast as the kernel's own grouping).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.reach import Reach

# Queries a row up to which folding pays; its mask is as many times larger as there are heads to fold.
FOLD = 16
ALIGNED = 8  # numbers of 16 bits in 16 bytes

WITHOUT_CUDNN = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # it alone returns its log-sum-exp


def fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    s: Segment,
    low: int,
    scale: float,
    window: Reach,
    lse: bool = False,
    begin: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one segment over the slots ``low:s.keys`` of its rows.

    Arguments as for ``api.attention``; ``query [1, Hq, T, D]`` are all packed queries. Slots beyond a row's end, up to ``s.keys``,
    are read with weight 0. ``begin``: the first slot of the rows of ``keys`` and ``values``, at most ``low``.

    Returns:
        output ``[R, Hq, q, Dv]`` and, with ``lse``, the log-sum-exp ``[R, Hq, q]`` of the scores, else ``None``; 0 and -inf for a
        query that sees none of the slots.
    """
    group = 1 if s.queries > FOLD else query.shape[1] // keys.shape[2]
    # One look-up, because small models are bound by Python.
    asked = s, window, low, query.dtype, query.device
    key = ("call", *asked, group)
    known = plan.known.get(key)
    if known is None:
        causal = plan.causal(s, window, low)
        mask = None
        if not causal:
            mask = plan.mask(*asked) if group == 1 else plan.folded_mask(*asked, group)
            if mask is not None and not mask.is_cpu:
                mask = aligned(mask)
        known = mask, causal, 1 if causal else group
        if plan.ordered:  # otherwise visibility may differ between layers
            plan.known[key] = known
    mask, causal, group = known
    q, k, v = _views(query, keys, values, s, low, group, begin)
    total = None
    if lse:
        out, total = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        total = total.reshape(q.shape[0], -1, s.queries)
        blind = None if mask is None else plan.blind(s, window, low, query.device)
        if blind is not None:  # for these the kernel returns 0 for both
            total = total.masked_fill(blind, float("-inf"))
    else:
        grouped = k.shape[1] != q.shape[1]
        # With a mask and these shapes, cuDNN has ended a process on an H200; what remains wants as many heads of keys as of queries.
        safe = mask is None or mask.is_cpu
        if grouped and not safe:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            grouped = False
        with nullcontext() if safe else sdpa_kernel(WITHOUT_CUDNN):
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )
    return out if group == 1 else out.reshape(q.shape[0], -1, s.queries, out.shape[-1]), total


def aligned(mask: Tensor) -> Tensor:
    """The mask, copied if not all of its rows begin at multiples of 16 bytes: kernels of cuDNN seem to need that."""
    width, n = mask.element_size(), mask.shape[-1]
    if not any(place % 16 for place in (mask.data_ptr(), *(width * step for step in mask.stride()[:-1]))):
        return mask
    return pad(mask, (0, ALIGNED - n % ALIGNED))[..., :n]


def _views(
    query: Tensor, keys: Tensor, values: Tensor, s: Segment, low: int, group: int, begin: int
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
