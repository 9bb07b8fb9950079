"""Keep random slots: the control that any other pruner must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.pruning.pruner import Checked, Needs
from specdec.pruning.slots import top
from specdec.rng import Key, Philox, seeds


@dataclass(frozen=True)
class Random(Checked):
    """Random slots for each head, as a function of (seed, head, slot) alone: rows of equal length keep the same slots.

    A row's choice therefore depends neither on its batch nor on the call.
    """

    seed: int = 0
    needs = Needs()

    def choose(self, keys: Tensor, length: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        B, H, S, _ = keys.shape
        key = Key(torch.arange(S).expand(1, H, S), torch.arange(H)[:, None])
        number = Philox(seeds(self.seed, 1)).uniform(key)  # [1, H, S]
        return top(number.to(keys.device).expand(B, H, S), length, budget)
