"""Keep what the last queries look at, with its neighbours (SnapKV, Li et al., arXiv 2404.14469)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.pruning.slots import check, top
from specdec.pruning.weights import attention_weights


@dataclass(frozen=True)
class SnapKV:
    """The observation window, whose queries vote, and the slots before it with the most votes, per KV head.

    Votes are the attention weights of the last Q queries, summed over them, averaged over the query heads that share a KV
    head (the authors' code keeps a choice for each query head), and smoothed along the text so that what is kept comes in clusters.

    Args:
        kernel: odd width of the smoothing; 5 in the authors' code, 1 for none.
        pool: ``avg_pool1d`` (the authors' default) or ``max_pool1d`` of ``torch.nn.functional``.
        scale: of the attention scores, by default ``D ** -0.5``.
    Raises:
        ValueError: an even kernel; when called, no queries, or a budget that holds nothing besides the observation window.
    """

    kernel: int = 5
    pool: Callable[..., Any] = torch.nn.functional.avg_pool1d
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}: an odd number of slots, so that it has a middle")

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        budget: int,
        queries: Tensor | None = None,
        attention: Tensor | None = None,
    ) -> Tensor:
        check(keys, values, length, budget)
        if queries is None or queries.dim() != 4 or not queries.shape[2]:
            raise ValueError(
                "SnapKV needs queries=: those of an observation window, [B, Hq, Q, D] of the last Q slots of each row"
            )
        B, H, S, _ = keys.shape
        window = queries.shape[2]
        if window >= budget:
            raise ValueError(
                f"budget is {budget} and the observation window alone takes {window}: raise the budget, or pass fewer queries"
            )
        votes = attention_weights(queries, keys, length, self.scale).sum(2).view(B, H, -1, S).mean(2)
        slot = torch.arange(S, device=keys.device)
        observing = (slot >= length.to(keys.device)[:, None] - window)[:, None].expand_as(votes)
        votes = votes.masked_fill(observing, 0)  # the smoothing is of the text before it
        smooth = self.pool(votes, kernel_size=self.kernel, padding=self.kernel // 2, stride=1)
        return top(smooth.masked_fill(observing, float("inf")), length, budget)
