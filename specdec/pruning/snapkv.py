"""Keep the slots that the last queries attend to, and their neighbours (SnapKV, Li et al., arXiv 2404.14469)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.pruning.pruner import Checked, Needs
from specdec.pruning.slots import per_kv_head, top


@dataclass(frozen=True)
class SnapKV(Checked):
    """The last Q slots (those of the Q observing queries) and the slots before them with the most votes, per KV head.

    Votes are the attention weights of the last Q queries, summed over these and over the query heads that share a KV head (the
    authors' code chooses per query head), and smoothed along the text so that the kept slots form clusters.

    Args:
        kernel: odd width of the smoothing; 5 in the authors' code, 1 for none.
        pool: ``avg_pool1d`` (the authors' default) or ``max_pool1d`` of ``torch.nn.functional``.
    Raises:
        ValueError: an even kernel; when called, no attention, or a budget not above the observation window.
    """

    kernel: int = 5
    pool: Callable[..., Any] = torch.nn.functional.avg_pool1d
    needs = Needs(attention=True)

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"SnapKV: kernel is {self.kernel}: an odd number of slots, so that it has a middle"
            )

    def choose(self, keys: Tensor, length: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        weights = per_kv_head(self, attention, keys)
        window = weights.shape[2]
        if window >= budget:
            raise ValueError(
                f"SnapKV: budget is {budget} and the observation window alone takes {window}: raise the budget, or observe fewer queries"
            )
        votes = weights.sum(2)
        slot = torch.arange(keys.shape[2], device=keys.device)
        observing = (slot >= length.to(keys.device)[:, None] - window)[:, None].expand_as(votes)
        # Smoothing covers the text before the observation window only.
        votes = votes.masked_fill(observing, 0)
        smooth = self.pool(votes, kernel_size=self.kernel, padding=self.kernel // 2, stride=1)
        return top(smooth.masked_fill(observing, float("inf")), length, budget)
