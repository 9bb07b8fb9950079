"""Keep the slots with the most attention so far (heavy hitters) and the latest (H2O, Zhang et al., arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.pruning.pruner import Checked, Needs
from specdec.pruning.slots import per_kv_head, top


@dataclass(frozen=True)
class H2O(Checked):
    """The ``recent`` latest slots and, for the rest of the budget, those with the most accumulated attention, per KV head.

    ``attention [B, Hq, Q, S]`` is summed over its Q queries and over the query heads that share a KV head, so the caller decides
    what is accumulated. The paper accumulates over all queries. To do so, pass the weights of all queries, as the authors' code
    does for a prompt, or call the pruner after every token with running sums as one query (``sums[:, :, None]``), which is the
    paper's greedy eviction. ``drafts.MagicDec`` passes the queries of its last ``observation`` tokens only, at every choice anew.

    Args:
        recent: latest slots to keep; by default half the budget (rounded up), as in the paper.
    Raises:
        ValueError: negative recent; when called, no attention, or more recent slots than the budget.
    """

    recent: int | None = None
    needs = Needs(attention=True)

    def __post_init__(self) -> None:
        if self.recent is not None and self.recent < 0:
            raise ValueError(
                f"H2O: recent is {self.recent}: the number of latest slots to keep; 0 keeps heavy hitters only"
            )

    def choose(self, keys: Tensor, length: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        score = per_kv_head(self, attention, keys).sum(2)
        recent = budget - budget // 2 if self.recent is None else self.recent
        if recent > budget:
            raise ValueError(
                f"H2O: budget is {budget} and recent is {recent}: raise the budget, or keep fewer recent slots"
            )
        slot = torch.arange(keys.shape[2], device=keys.device)
        latest = (slot >= length.to(keys.device)[:, None] - recent)[:, None]
        return top(score.masked_fill(latest, float("inf")), length, budget)
