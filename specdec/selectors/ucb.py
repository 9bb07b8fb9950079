"""UCB1: the arm with the highest upper confidence bound (Auer, Cesa-Bianchi, Fischer, Machine Learning 47, 2002)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.rng import Rng
from specdec.selectors.matching import assign, checked
from specdec.selectors.statistics import PULLS, Pool, Table, Tabled, mean, optimistic, poolable, positive
from specdec.types import Context


@dataclass(frozen=True)
class UCB1(Tabled):
    """``mean reward + sqrt(2 ln t / n)`` (figure 1 of the paper); every arm is tried once first. Deterministic.

    Attributes:
        scale: rewards are divided by it and clipped to [0, 1], where the bound holds: give the largest possible reward.
        pool: which rows share statistics: None (each request has its own), "global", or a function from a context to a hashable key
            per row.
    """

    scale: float = 1.0
    pool: Pool = None

    def __post_init__(self) -> None:
        poolable(self.pool)
        positive("scale", self.scale)

    def select(
        self, state: Table, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Table]:
        room = checked(capacities, state.arms, context.batch)
        rows, state = state.seat(self.pool, context)
        arm = assign(bounds(state.sums[rows]), room)
        return torch.from_numpy(arm), torch.ones(context.batch), state


def bounds(sums: np.ndarray) -> np.ndarray:
    """UCB1's indices ``[B, arms]`` from sums ``[B, arms, 4]`` of rewards in [0, 1]."""
    n = sums[..., PULLS]
    t = n.sum(-1, keepdims=True)
    wide = np.sqrt(2 * np.log(np.maximum(t, 1)) / np.maximum(n, 1))
    return optimistic(mean(sums) + wide, n > 0)
