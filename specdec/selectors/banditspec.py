"""UCBSpec and EXP3Spec: bandits that count tokens a round (Hou et al., "BanditSpec", arXiv 2505.15141, algorithms 2 and 3).

Their regret is counted in rounds until the end of the text, not in seconds: arms should cost about the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import number
from specdec.rng import Rng
from specdec.selectors.exp3 import Weighted, Weighting, softmax, weigh
from specdec.selectors.matching import assign, checked
from specdec.selectors.statistics import (
    PULLS,
    REWARD,
    TOKENS,
    Pool,
    Table,
    Tabled,
    mean,
    optimistic,
    poolable,
    positive,
    seen,
)
from specdec.types import Context, Feedback


@dataclass(frozen=True)
class UCBSpec(Tabled):
    """``argmax mu_i + cr_i``: mean tokens a round plus a confidence radius, valid at all times with probability ``1 - delta``.

    ``cr_i = L/2 sqrt((1 + n) / n^2 (1 + 2 log(K t^2 sqrt(1 + n) / delta)))``, n pulls of arm i, t rounds, K arms. Every arm is tried once
    first. Deterministic.

    Attributes:
        length: L, drafted tokens a round (a round commits 1 to L + 1). delta: in (0, 1).
        pool: which rows share statistics: None (each request has its own), "global", or a function from a context to a hashable
            key per row.
    """

    length: int = 5
    delta: float = 0.1
    pool: Pool = None

    def __post_init__(self) -> None:
        poolable(self.pool)
        positive("length", self.length)
        number("delta", self.delta)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta is {self.delta}: give a probability between 0 and 1")

    def select(
        self, state: Table, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Table]:
        room = checked(capacities, state.arms, context.batch)
        rows, state = state.seat(self.pool, context)
        sums = state.sums[rows]
        n = sums[..., PULLS]
        index = optimistic(mean(sums, TOKENS) + radius(n, self.length, self.delta), n > 0)
        return torch.from_numpy(assign(index, room)), torch.ones(context.batch), state


def radius(pulls: np.ndarray, length: int, delta: float) -> np.ndarray:
    """UCBSpec's ``cr_i [B, arms]`` from pulls ``[B, arms]``, t being their sum; an arm without pulls counts as one with 1."""
    K, n = pulls.shape[-1], np.maximum(pulls, 1)
    t = np.maximum(pulls.sum(-1, keepdims=True), 1)
    return length / 2 * np.sqrt((1 + n) / n**2 * (1 + 2 * np.log(K * t**2 * np.sqrt(1 + n) / delta)))


@dataclass(frozen=True)
class EXP3Spec(Weighting):
    """Chooses arm i with probability proportional to ``exp(-eta_t sum Z_i)``, ``Z_i = (L + 1 - Y) / (L p_i)`` if i was chosen, else 0.

    Y is the number of tokens of the round, ``eta_t = sqrt(log K / (t K))`` in round t. There is no uniform exploration.

    Attributes:
        length: L, drafted tokens a round. pool: as for ``UCBSpec``.
    """

    length: int = 5
    pool: Pool = None

    def __post_init__(self) -> None:
        poolable(self.pool)
        positive("length", self.length)

    def distribution(self, sums: np.ndarray) -> np.ndarray:
        arms, t = sums.shape[1], sums[..., PULLS].sum(-1, keepdims=True) + 1
        return softmax(-np.sqrt(np.log(arms) / (t * arms)) * sums[..., REWARD])

    def update(self, state: Weighted, feedback: Feedback) -> Weighted:
        arm, columns = seen(feedback, state.table.arms)
        lost = np.clip((self.length + 1 - columns[:, TOKENS]) / self.length, 0, 1)
        return weigh(state, self.pool, feedback, arm, columns, lost)
