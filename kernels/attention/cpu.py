"""The fast path on a CPU: PyTorch's fused attention, one call a segment, on views of the slots.

In the steady state (decoding, verification) all rows have equally many queries and one call serves the batch, cut to its
longest row. Its ``is_causal`` is aligned top-left, so it is used only where a row starts at slot 0; otherwise a mask is added,
made once for all layers. The slots between a shorter row's end and the longest row's are read with weight 0: they must be
*finite* (a cache starts with zeros, and what a model wrote is finite unless its logits were not).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec.kernels.attention.plan import AttentionPlan, Segment


def supports(query: Tensor, softcap: float | None, sinks: Tensor | None) -> str | None:
    """Why this backend cannot serve a call, or ``None``. It runs on every device, but is written for the CPU."""
    if softcap is not None:
        return "fused attention has no soft cap on scores"
    if sinks is not None:
        return "fused attention has no sink logits"
    return None


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``."""
    segments = plan.segments
    if len(segments) == 1:
        return _segment(query, keys, values, plan, segments[0], scale, window)
    out = query.new_empty(1, query.shape[2], query.shape[1], values.shape[-1])
    for s in segments:
        t1 = s.t0 + (s.r1 - s.r0) * s.queries
        out[:, s.t0 : t1] = _segment(query[:, :, s.t0 : t1], keys, values, plan, s, scale, window)
    return out


def _segment(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    s: Segment,
    scale: float,
    window: int | None,
) -> Tensor:
    """``query [1, Hq, R * q, D]`` of one segment -> ``[1, R * q, Hq, Dv]``."""
    R, H, high, low, mask, causal = s.r1 - s.r0, query.shape[1], s.keys, 0, None, False
    alone = R == 1 and plan.tree is None and plan.ordered
    if window is not None and window >= high and plan.ordered:
        window = None
    if window is not None:
        low = plan.low(s, window)
    if alone and window is None and s.queries == high:
        causal = high > 1
    elif not (alone and s.queries == 1):
        mask = plan.mask(s, window, low, query.dtype, query.device)
    if keys.shape[0] != R:
        keys, values = keys[s.b0 : s.b0 + R], values[s.b0 : s.b0 + R]
    k, v = keys[:, low:high].transpose(1, 2), values[:, low:high].transpose(1, 2)
    q = query if R == 1 else query.view(H, R, s.queries, -1).transpose(0, 1)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != H
    ).transpose(1, 2)
    return out if R == 1 else out.reshape(1, R * s.queries, H, -1)
