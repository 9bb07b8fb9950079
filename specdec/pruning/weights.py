"""Attention weights of the last queries of each row: the input of SnapKV, H2O and TOVA."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.attention.reach import Reach, near


def attention_weights(
    queries: Tensor,
    keys: Tensor,
    length: Tensor,
    scale: float | None = None,
    *,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Causal attention weights of the last Q queries of each row on all slots.

    Args:
        queries: ``[B, Hq, Q, D]``; query j of row b belongs to slot ``length[b] - Q + j``. If that is negative, the query may hold
            anything. keys: ``[B, H, S, D]``, rotated as the queries are; H divides Hq. length: ``[B]`` slots in use.
        scale: of the scores, by default ``D ** -0.5``.
        window: a query at slot p sees slots above ``p - window`` only. softcap: scores become ``softcap * tanh(scores / softcap)``.
        sink_logits: ``[Hq]`` an extra logit for each head, which takes weight and belongs to no slot.
    Returns:
        ``[B, Hq, Q, S]`` in float32 or wider. Rows of existing queries sum to 1 (less with sink logits); the others are 0.
    Raises:
        ValueError: shapes that do not fit.
    """
    B, H, S, D = keys.shape
    if (
        queries.dim() != 4
        or queries.shape[0] != B
        or queries.shape[3] != D
        or queries.shape[1] % H
        or not queries.shape[1]
    ):
        raise ValueError(
            f"queries are {list(queries.shape)}; they must be [{B}, Hq, Q, {D}] with Hq a multiple of the {H} heads of the keys"
        )
    wide = torch.promote_types(keys.dtype, torch.float32)
    Q = queries.shape[2]
    q = queries.to(wide).view(B, H, -1, Q, D)  # query heads that share a KV head are neighbours
    scores = torch.einsum("bhgqd,bhsd->bhgqs", q, keys.to(wide)) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    slot = torch.arange(S, device=keys.device)
    own = length.to(keys.device)[:, None] - Q + torch.arange(Q, device=keys.device)  # [B, Q]
    seen = slot <= own[:, :, None]  # a query that does not exist sees nothing
    if window is not None:
        seen &= near(own[:, :, None], slot, window)
    seen = seen[:, None, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink_logits is not None:
        extra = sink_logits.to(scores).view(1, H, -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, extra], -1)
    return scores.softmax(-1)[..., :S].masked_fill(~seen, 0).reshape(B, -1, Q, S)
