"""Hedge: exponential weights when every arm is scored in every round (Freund, Schapire, JCSS 1997; HedgeSpec, arXiv 2510.20064).

After verification the accepted text is known, so the reward that every draft *would* have got can be computed: full information.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specdec.rng import Rng
from specdec.selectors.exp3 import softmax
from specdec.selectors.matching import checked, draw
from specdec.selectors.statistics import PULLS, REWARD, Pool, Table, Tabled, poolable, positive, seen, unit
from specdec.types import Context, Feedback


@dataclass(frozen=True)
class Hedge(Tabled):
    """Chooses arm i with probability proportional to ``exp(eta * sum of its rewards)``; needs ``feedback.reward [B, arms]``.

    Attributes:
        rate: eta; None is ``sqrt(8 ln K / t)`` in round t, which needs no horizon (Cesa-Bianchi, Lugosi 2006, theorem 2.3).
        scale: rewards are divided by it and clipped to [0, 1]. pool: which rows share statistics: None (each request has its own),
            "global", or a function from a context to a hashable key per row.
    """

    rate: float | None = None
    scale: float = 1.0
    pool: Pool = None
    full_information: ClassVar[bool] = True

    def __post_init__(self) -> None:
        poolable(self.pool)
        positive("scale", self.scale)
        if self.rate is not None:
            positive("rate", self.rate)

    def select(
        self, state: Table, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Table]:
        room = checked(capacities, state.arms, context.batch)
        rows, state = state.seat(self.pool, context)
        sums = state.sums[rows]
        rate: float | np.ndarray | None = self.rate
        if rate is None:
            rate = np.sqrt(8 * np.log(state.arms) / (sums[..., :1, PULLS] + 1))
        arm, prob = draw(softmax(rate * sums[..., REWARD]), room, rng, context.length)
        return torch.from_numpy(arm), torch.from_numpy(prob).float(), state

    def update(self, state: Table, feedback: Feedback) -> Table:
        _, columns = seen(feedback, state.arms)
        reward = feedback.reward.numpy()
        if reward.shape != (len(columns), state.arms):
            raise ValueError(
                f"feedback.reward has shape {list(reward.shape)}: full information needs a reward of every arm, "
                f"{[len(columns), state.arms]}"
            )
        each = np.repeat(columns[:, None], state.arms, 1)
        each[..., REWARD] = unit(reward, self.scale)
        rows = np.repeat(state.rows(self.pool, feedback), state.arms)
        arm = np.tile(np.arange(state.arms), len(columns))
        return state.add(rows, arm, each.reshape(-1, 4))
