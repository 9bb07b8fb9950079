"""EXP3: exponential weights for rewards that an adversary may choose (Auer, Cesa-Bianchi, Freund, Schapire, SIAM J. Comput. 2002)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import number
from specdec.rng import Rng
from specdec.selectors.matching import checked, draw
from specdec.selectors.statistics import REWARD, Pending, Pool, Pooled, Table, poolable, positive, seen, unit
from specdec.types import Context, Feedback


class Weighted(NamedTuple):
    """Sums of importance-weighted rewards, and the probabilities of the choices that await feedback."""

    table: Table
    pending: Pending


class Weighting(Pooled, ABC):
    """What selectors have in common that draw an arm from a distribution over their ``Weighted`` state."""

    @abstractmethod
    def distribution(self, sums: np.ndarray) -> np.ndarray:
        """``[B, arms]`` by the sums ``[B, arms, 4]`` of each row."""

    def select(
        self, state: Weighted, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Weighted]:
        room = checked(capacities, state.table.arms, context.batch)
        rows, table = state.table.seat(self.pool, context)
        arm, prob = draw(self.distribution(table.sums[rows]), room, rng, context.length)
        pending = state.pending.remember(context.request.tolist(), arm, prob)
        return torch.from_numpy(arm), torch.from_numpy(prob).float(), Weighted(table, pending)

    def init(self, arms: int) -> Weighted:
        return Weighted(Table.empty(arms), Pending({}))

    def leave(self, state: Weighted, requests: Tensor) -> Weighted:
        gone = requests.tolist()
        return Weighted(state.table.leave(self.pool, gone), state.pending.leave(gone))


@dataclass(frozen=True)
class EXP3(Weighting):
    """Chooses arm i with probability ``(1 - gamma) w_i / sum w + gamma / K``, ``w_i = exp(gamma / K * sum of reward / p)`` (figure 1 there).

    The probability of a choice is stored until its feedback comes, however late; feedback without a choice is ignored.

    Attributes:
        gamma: share of uniform exploration and learning rate, in (0, 1]. scale: rewards are divided by it and clipped to [0, 1].
        pool: which rows share statistics: None (each request has its own), "global", or a function from a context to a hashable
            key per row.
    """

    gamma: float = 0.1
    scale: float = 1.0
    pool: Pool = None

    def __post_init__(self) -> None:
        poolable(self.pool)
        positive("scale", self.scale)
        number("gamma", self.gamma)
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}: give a number in (0, 1]")

    def distribution(self, sums: np.ndarray) -> np.ndarray:
        share = self.gamma / sums.shape[1]
        return (1 - self.gamma) * softmax(share * sums[..., REWARD]) + share

    def update(self, state: Weighted, feedback: Feedback) -> Weighted:
        arm, columns = seen(feedback, state.table.arms)
        return weigh(state, self.pool, feedback, arm, columns, unit(columns[:, REWARD], self.scale))


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the arms of ``x [B, arms]``."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def weigh(
    state: Weighted, pool: Pool, feedback: Feedback, arm: np.ndarray, columns: np.ndarray, value: np.ndarray
) -> Weighted:
    """The state after adding ``value [B]`` over the probability of its choice; feedback of unknown choices is ignored."""
    prob, pending = state.pending.recall(feedback.request.tolist(), arm)
    columns[:, REWARD] = value / prob
    rows = np.where(np.isnan(prob), -1, state.table.rows(pool, feedback))
    return Weighted(state.table.add(rows, arm, columns), pending)
