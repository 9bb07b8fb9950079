"""Turns scores of slots into the kept slots, and these into a compact buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def per_kv_head(pruner: Any, attention: Tensor | None, keys: Tensor) -> Tensor:
    """``attention [B, Hq, Q, S]`` summed over the query heads that share a KV head: ``[B, H, Q, S]``, in float32 or wider.

    Raises:
        ValueError: ``attention`` is None, or its shape does not fit; the message names ``pruner``.
    """
    name, remedy = (
        type(pruner).__name__,
        "the weights of the last Q queries of each row (pruning.attention_weights)",
    )
    if attention is None:
        raise ValueError(f"{name} needs attention=: [B, Hq, Q, S], {remedy}")
    B, H, S, _ = keys.shape
    if (
        attention.dim() != 4
        or (attention.shape[0], attention.shape[3]) != (B, S)
        or attention.shape[1] % H
        or not attention.shape[2]
    ):
        raise ValueError(
            f"{name}: attention is {list(attention.shape)}; it must be [{B}, Hq, Q, {S}] with Hq a multiple of {H}: {remedy}"
        )
    wide = attention.to(torch.promote_types(attention.dtype, torch.float32))
    return wide.view(B, H, -1, *wide.shape[2:]).sum(2)


def top(scores: Tensor, length: Tensor, budget: int) -> Tensor:
    """The slots of the highest ``scores [B, H, S]``, ``[B, H, min(budget, S)]``; ties go to the earlier slot."""
    S = scores.shape[-1]
    slot = torch.arange(S, device=scores.device)
    used = (slot < length.to(scores.device)[:, None, None]).expand_as(scores)
    order = scores.masked_fill(~used, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    order = order[..., : min(budget, S)]
    kept = torch.where(used.gather(-1, order), order, S).sort(-1).values
    return torch.where(kept < S, kept, -1)


def gather(entries: Tensor, kept: Tensor) -> Tensor:
    """``entries [B, H, S, D]`` (keys or values) of the kept slots, ``[B, H, K, D]``; zeros where ``kept`` is -1."""
    at = kept.clamp(min=0)[..., None].expand(*kept.shape, entries.shape[-1])
    return entries.gather(2, at).masked_fill((kept < 0)[..., None], 0)
