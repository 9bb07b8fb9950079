"""Keep the slots that the last query attends to (TOVA, Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.pruning.pruner import Checked, Needs
from specdec.pruning.slots import per_kv_head, top


@dataclass(frozen=True)
class TOVA(Checked):
    """The slots with the highest weights of the last query, averaged over all heads of the layer: all heads keep the same slots.

    No slot is kept for being recent. Only the last of the Q queries of ``attention [B, Hq, Q, S]`` counts.

    Raises:
        ValueError: when called without attention.
    """

    needs = Needs(attention=True)

    def choose(self, keys: Tensor, length: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        score = per_kv_head(self, attention, keys)[:, :, -1]
        return top(score.mean(1, keepdim=True), length, budget).expand(-1, keys.shape[1], -1)
