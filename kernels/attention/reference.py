"""The reference: dense attention row by row, in the precision of its input (float32 or wider), on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.attention.contract import without_lse
from specdec.kernels.attention.plan import AttentionPlan, Segment
from specdec.kernels.attention.reach import Reach


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
    """As ``contract.Backend.refuses``: it serves every call."""
    return None


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
    """Arguments as for ``api.attention``. Slots that no query of a row sees are never read.

    Returns:
        output ``[1, T, Hq, Dv]`` and lse ``[1, T, Hq]`` (float32, or float64 for a float64 query), natural logarithms, a
        sink logit included. A query that sees nothing gets 0 and -inf (with a sink: 0 and the sink's logit).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    heads, total = query.shape[1:3]
    out = query.new_empty(total, heads, values.shape[-1])
    lse = query.new_empty(total, heads, dtype=wide)
    group = heads // keys.shape[2]
    t = 0
    for r, (row, count, length) in enumerate(zip(plan.rows, plan.counts, plan.length)):
        one = Segment(r, r + 1, row, t, count, length)
        visible = torch.as_tensor(plan.visible(one, window)[0]).to(query.device)  # [q, n], or [Hq, q, n]
        used = visible.flatten(0, -2).any(0)  # slots that no query of this call sees may hold anything
        q = query[0, :, t : t + count].to(wide)  # [Hq, q, D]
        k = _slots(keys, plan, r, used).to(wide).repeat_interleave(group, 1)  # [n, Hq, D]
        v = _slots(values, plan, r, used).to(wide).repeat_interleave(group, 1)
        scores = torch.einsum("hqd,nhd->hqn", q, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible[..., used], float("-inf"))
        # An extra logit per head takes weight and contributes nothing; -inf takes none.
        extra = query.new_full((heads,), float("-inf")) if sink_logits is None else sink_logits
        scores = torch.cat([scores, extra.to(wide)[:, None, None].expand(-1, count, 1)], -1)
        top = scores.logsumexp(-1)
        blind = top == float("-inf")
        weights = scores.softmax(-1).masked_fill(blind[..., None], 0.0)[..., : k.shape[0]]
        out[t : t + count] = torch.einsum("hqn,nhd->qhd", weights, v).to(query.dtype)
        lse[t : t + count] = top.transpose(0, 1)
        t += count
    return out[None], lse[None]


attend = without_lse(attend_with_lse)


def _slots(buffer: Tensor, plan: AttentionPlan, r: int, used: Tensor) -> Tensor:
    """``[n, H, D]``: the slots of row ``r`` that ``used [length]`` marks, from a buffer of slots or of pages."""
    if plan.table is None:
        return buffer[plan.rows[r], : len(used)][used]
    slot = used.nonzero()[:, 0]
    page = torch.tensor(list(plan.table[r]), device=buffer.device)[slot // plan.page]
    return buffer[page, slot % plan.page]
