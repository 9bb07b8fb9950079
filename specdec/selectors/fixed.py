"""Always the same arm: the baseline that every selector must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.rng import Rng
from specdec.selectors.matching import checked, within
from specdec.selectors.statistics import at_least_one, seen
from specdec.types import Context, Feedback

HELD = 32  # rounds


class Arms(NamedTuple):
    """The state of a selector that learns nothing: how many arms there are."""

    arms: int


class Unlearning:
    """What selectors have in common that learn nothing."""

    def update(self, state: Arms, feedback: Feedback) -> Arms:
        seen(feedback, state.arms)  # only its checks
        return state

    def leave(self, state: Arms, requests: Tensor) -> Arms:
        return state


class Steady(Unlearning):
    """What selectors have in common that learn nothing, and choose the same while the rows stay."""

    def hold(self, state: Arms) -> int:
        """How many more rounds the last choice stands; none in classes that derive from one of these selectors and may choose otherwise."""
        return HELD - 1 if Steady in type(self).__bases__ else 0


@dataclass(frozen=True)
class Fixed(Steady):
    """Arm ``arm`` for every row; rows beyond its capacity get the first arms with room.

    Raises:
        TypeError: ``arm`` is not a whole number.
        ValueError: (``init``) ``arm`` is not one of the arms.
    """

    arm: int = 0

    def __post_init__(self) -> None:
        whole("arm", self.arm, ": arms are counted from 0 in the order of the pool's")

    def init(self, arms: int) -> Arms:
        if not 0 <= self.arm < at_least_one(arms):
            raise ValueError(f"arm is {self.arm}: there are arms 0..{arms - 1}")
        return Arms(arms)

    def select(
        self, state: Arms, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Arms]:
        room = checked(capacities, state.arms, context.batch)
        scores = np.zeros((context.batch, state.arms))
        arm = within(np.full(context.batch, self.arm), scores, room)
        return torch.from_numpy(arm), torch.ones(context.batch), state
