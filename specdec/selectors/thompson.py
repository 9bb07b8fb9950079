"""Thompson sampling: each arm with the probability that it is the best one (Thompson 1933; Agrawal, Goyal, AISTATS 2013)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from specdec.rng import Rng
from specdec.selectors.matching import checked, draw
from specdec.selectors.statistics import PULLS, REWARD, Pool, Table, Tabled, poolable, positive
from specdec.types import Context

_Z = np.linspace(-6, 6, 13)  # quadrature points of each arm's posterior, in its standard deviations
# A look-up is several times as fast as ndtr, and off by less than 0.001.
_CDF = ndtr(np.linspace(-8, 8, 4097))


@dataclass(frozen=True)
class Thompson(Tabled):
    """The Gaussian form for rewards in [0, 1]: arm i's posterior is ``N(sum reward / (n + 1), spread^2 / (n + 1))``.

    Thompson sampling draws from each arm's posterior and takes the argmax. Here the probabilities of being the argmax are
    computed (``best_of``, by quadrature) and the arm is drawn from them with one key, so that ``arm_prob`` is exact.

    Attributes:
        scale: rewards are divided by it and clipped to [0, 1]. spread: standard deviation of the prior, 1 in the paper; rewards that
            vary less allow less. pool: which rows share statistics: None (each request has its own), "global", or a function from a
            context to a hashable key per row.
    """

    scale: float = 1.0
    spread: float = 1.0
    pool: Pool = None

    def __post_init__(self) -> None:
        poolable(self.pool)
        positive("scale", self.scale)
        positive("spread", self.spread)

    def select(
        self, state: Table, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Table]:
        room = checked(capacities, state.arms, context.batch)
        rows, state = state.seat(self.pool, context)
        some, of = (rows[:1], np.zeros_like(rows)) if self.pool == "global" else (rows, slice(None))
        n = state.sums[some][..., PULLS] + 1
        distribution = best_of(state.sums[some][..., REWARD] / n, self.spread / np.sqrt(n))[of]
        arm, prob = draw(distribution, room, rng, context.length)
        return torch.from_numpy(arm), torch.from_numpy(prob).float(), state


def best_of(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """``[B, arms]`` the probability that each of independent normal variables is the largest.

    ``P(i) = integral of dF_i prod_{j != i} F_j`` on the arms' own grid points (13 per arm, to 6 deviations: within 0.01), F_j within
    an interval being the mean of its ends; then normalised.
    """
    x = (mean[..., None] + deviation[..., None] * _Z).reshape(len(mean), 1, mean.shape[1] * len(_Z))
    x.sort(-1)
    steps = 256 / deviation[..., None]  # of _CDF
    cdf = _CDF.take((x * steps + (2048.5 - mean[..., None] * steps)).astype(np.int64), mode="clip")
    low, high = cdf[..., :-1], cdf[..., 1:]  # [B, arms, intervals], never 0
    twice = low + high
    probs = ((high - low) / twice * twice.prod(1, keepdims=True)).sum(-1)
    return probs / probs.sum(1, keepdims=True)
