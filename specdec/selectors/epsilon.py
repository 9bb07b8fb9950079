"""Epsilon-greedy on goodput: mostly the best arm so far, sometimes a random one (Sutton and Barto, "Reinforcement learning", section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import number
from specdec.rng import Rng
from specdec.selectors.matching import assign, checked, draw
from specdec.selectors.statistics import PULLS, Pool, Table, Tabled, goodput, optimistic, poolable, seen
from specdec.types import Context, Feedback


@dataclass(frozen=True)
class EpsilonGreedy(Tabled):
    """Chooses the row's arm by a matching on estimated goodput with probability ``1 - epsilon``, else a random arm.

    Goodput is tokens over seconds, a ratio of sums. Arms never tried come first.

    Attributes:
        epsilon: share of random choices, in [0, 1]; 0 is greedy. pool: which rows share statistics: None (each request has its
            own), "global", or a function from a context to a hashable key per row.
    """

    epsilon: float = 0.1
    pool: Pool = None

    def __post_init__(self) -> None:
        poolable(self.pool)
        number("epsilon", self.epsilon)
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}: give a probability")

    def select(
        self, state: Table, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Table]:
        room = checked(capacities, state.arms, context.batch)
        rows, state = state.seat(self.pool, context)
        sums = state.sums[rows]
        scores = optimistic(goodput(sums), sums[..., PULLS] > 0)
        distribution = np.full((context.batch, state.arms), self.epsilon / state.arms)
        distribution[np.arange(context.batch), assign(scores, room)] += 1 - self.epsilon
        arm, prob = draw(distribution, room, rng, context.length, scores)
        return torch.from_numpy(arm), torch.from_numpy(prob).float(), state

    def update(self, state: Table, feedback: Feedback) -> Table:
        arm, columns = seen(feedback, state.arms, seconds=True)
        return state.add(state.rows(self.pool, feedback), arm, columns)
