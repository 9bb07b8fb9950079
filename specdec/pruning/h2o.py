"""Keep the heavy hitters, which got the most attention so far, and the latest (H2O, Zhang et al., arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.pruning.slots import check, per_kv_head, top


@dataclass(frozen=True)
class H2O:
    """The ``recent`` latest slots and, for the rest of the budget, those with the most accumulated attention, per KV head.

    ``attention [B, Hq, S]`` is the sum, over the queries so far, of the weights that each slot was given. Query heads that
    share a KV head are summed. Called after every token, with sums that the caller carries on, this is the paper's greedy
    eviction; called once after the prefill, it is the choice that the authors' code makes for a prompt.

    Args:
        recent: latest slots to keep; by default half the budget (rounded up), as in the paper.
    Raises:
        ValueError: negative recent; when called, no attention, or more recent slots than the budget.
    """

    recent: int | None = None

    def __post_init__(self) -> None:
        if self.recent is not None and self.recent < 0:
            raise ValueError(
                f"recent is {self.recent}: the number of latest slots to keep; 0 keeps heavy hitters only"
            )

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
        score = per_kv_head(
            attention,
            keys,
            "H2O",
            "[B, Hq, S], the weights of all queries so far, summed over them (pruning.attention_weights(...).sum(2))",
        )
        recent = budget - budget // 2 if self.recent is None else self.recent
        if recent > budget:
            raise ValueError(
                f"budget is {budget} and recent is {recent}: raise the budget, or keep fewer recent slots"
            )
        slot = torch.arange(keys.shape[2], device=keys.device)
        latest = (slot >= length.to(keys.device)[:, None] - recent)[:, None]
        return top(score.masked_fill(latest, float("inf")), length, budget)
