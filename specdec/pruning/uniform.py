"""Keep evenly spaced slots: a control, the strided pattern of Child et al. (arXiv 1904.10509) with gaps to fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.pruning.pruner import Checked, Needs


@dataclass(frozen=True)
class Uniform(Checked):
    """Slot ``i * (length - 1) // (k - 1)`` for i below ``k = min(budget, length)``: the first, the last, and evenly spaced ones between.

    A budget of 1 keeps the last.
    """

    needs = Needs()

    def choose(self, keys: Tensor, length: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        n = length.to(keys.device)[:, None]
        k = n.clamp(max=budget)
        i = torch.arange(min(budget, keys.shape[2]), device=keys.device)
        slot = torch.where(k == 1, n - 1, i * (n - 1) // (k - 1).clamp(min=1))
        return torch.where(i < k, slot, -1)[:, None].expand(-1, keys.shape[1], -1)
