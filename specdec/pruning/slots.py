"""The slots that a KV pruner keeps: ragged rows in, ascending slot numbers out.

A pruner is ``(keys, values, length, budget, queries=None, attention=None) -> kept [B, H, K]`` with ``K = min(budget, S)``. Row b
holds something in its first ``length[b]`` slots; what is in the others is never looked at. ``kept[b, h]`` are slots of row b in
ascending order, all that exist where they are fewer than the budget, and then -1.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specdec.arguments import whole


class Pruner(Protocol):
    """Chooses the KV entries that a smaller cache starts from."""

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        budget: int,
        queries: Tensor | None = None,
        attention: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            keys: ``[B, H, S, D]`` and values: ``[B, H, S, Dv]``, as the cache holds them. length: ``[B]`` slots in use.
            budget: the most slots to keep, of each head of each row.
            queries: ``[B, Hq, Q, D]`` of the last Q slots of each row, rotated as the keys are; Hq is a multiple of H.
            attention: ``[B, Hq, S]`` weights that the slots were given; each pruner says by whom.
        Returns:
            ``[B, H, K]`` slots, ascending, -1 at the end.
        Raises:
            ValueError: shapes that do not fit, a budget below 1, or something missing that the pruner needs.
        """
        ...


def check(keys: Tensor, values: Tensor, length: Tensor, budget: int) -> list[int]:
    """The rows' lengths, once the arguments make sense.

    Raises:
        TypeError: a length that is no tensor, or a budget that is no whole number.
        ValueError: the first thing that does not fit.
    """
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"keys are {list(keys.shape)} and values {list(values.shape)}; they must be [B, H, S, D] with equal B, H and S"
        )
    B, _, S, _ = keys.shape
    if not isinstance(length, Tensor):
        raise TypeError(f"length is {length!r}: give a tensor [{B}], the slots in use of each row")
    whole("budget", budget)
    if length.shape != (B,):
        raise ValueError(f"length is {list(length.shape)}; it must be [{B}], the slots in use of each row")
    lengths = length.tolist()
    for b, n in enumerate(lengths):
        if not 0 <= n <= S:
            raise ValueError(f"length[{b}] is {n} and a row has {S} slots")
    if budget < 1:
        raise ValueError(f"budget is {budget}: keep at least 1 slot")
    return lengths


def per_kv_head(attention: Tensor | None, keys: Tensor, name: str, remedy: str) -> Tensor:
    """``attention [B, Hq, S]`` summed over the query heads that share a KV head: ``[B, H, S]``, in float32 at least.

    Raises:
        ValueError: there is none, with the remedy; or its shape does not fit.
    """
    if attention is None:
        raise ValueError(f"{name} needs attention=: {remedy}")
    B, H, S, _ = keys.shape
    if attention.dim() != 3 or attention.shape[0] != B or attention.shape[2] != S or attention.shape[1] % H:
        raise ValueError(
            f"attention is {list(attention.shape)}; {name} wants [{B}, Hq, {S}] with Hq a multiple of {H}: {remedy}"
        )
    wide = attention.to(torch.promote_types(attention.dtype, torch.float32))
    return wide.view(B, H, -1, S).sum(2)


def top(scores: Tensor, length: Tensor, budget: int) -> Tensor:
    """The slots of the highest ``scores [B, H, S]``, ``[B, H, min(budget, S)]``; of equal ones the earlier."""
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
