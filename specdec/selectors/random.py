"""A random arm for every row in every round: the cost of pure exploration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.rng import Rng
from specdec.selectors.fixed import Arms, Unlearning
from specdec.selectors.matching import checked, scatter
from specdec.selectors.statistics import at_least_one
from specdec.types import Context


@dataclass(frozen=True)
class Random(Unlearning):
    """Uniform over the arms with room left."""

    def init(self, arms: int) -> Arms:
        return Arms(at_least_one(arms))

    def select(
        self, state: Arms, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Arms]:
        room = checked(capacities, state.arms, context.batch)
        arm, prob = scatter(room, rng, context.length)
        return torch.from_numpy(arm), torch.from_numpy(prob).float(), state
