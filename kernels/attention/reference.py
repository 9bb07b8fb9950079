"""Attention written out: one row after the other, dense, in the precision of its input (float32 at least), on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.attention.plan import AttentionPlan, Segment


def supports(query: Tensor, softcap: float | None, sinks: Tensor | None) -> str | None:
    """Why this backend cannot serve a call; ``None``: it can serve every call."""
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
    """Arguments and result as for ``api.attention``. Slots that no query of a row sees are never read."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(query.shape[2], query.shape[1], values.shape[-1])
    group = query.shape[1] // keys.shape[2]
    t = 0
    for r, (row, count, length) in enumerate(zip(plan.rows, plan.counts, plan.length)):
        one = Segment(r, r + 1, row, t, count, length)
        visible = torch.as_tensor(plan.visible(one, window)[0]).to(query.device)  # [q, n], or [Hq, q, n]
        used = visible.flatten(0, -2).any(0)  # slots that this call's queries do not see may hold anything
        q = query[0, :, t : t + count].to(wide)  # [Hq, q, D]
        k = keys[row, :length][used].to(wide).repeat_interleave(group, 1)  # [n, Hq, D]
        v = values[row, :length][used].to(wide).repeat_interleave(group, 1)
        scores = torch.einsum("hqd,nhd->hqn", q, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible[..., used], float("-inf"))
        if sinks is not None:  # a logit of its own for each head that takes weight and gives nothing
            scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        out[t : t + count] = torch.einsum("hqn,nhd->qhd", weights, v).to(query.dtype)
        t += count
    return out[None]
