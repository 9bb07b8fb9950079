"""Keep the keys of the smallest norm, which tend to get the most attention (Devoto et al., arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.pruning.pruner import Checked, Needs
from specdec.pruning.slots import top


@dataclass(frozen=True)
class KeyNorm(Checked):
    """The slots whose keys have the smallest L2 norm, per KV head. A rotary embedding does not change norms.

    The paper does not prune its model's first two layers, where the correlation is weak.
    """

    needs = Needs()

    def choose(self, keys: Tensor, length: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        wide = torch.promote_types(keys.dtype, torch.float32)
        return top(-torch.linalg.vector_norm(keys, dim=-1, dtype=wide), length, budget)
