"""Keep what the last query looks at (TOVA, Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.pruning.pruner import Needs, check
from specdec.pruning.slots import per_kv_head, top


@dataclass(frozen=True)
class TOVA:
    """The slots with the highest weights of the last query, averaged over all heads of the layer: one choice for all of them.

    Nothing is kept for being recent. Of ``attention [B, Hq, Q, S]`` the last of the Q queries counts.

    Raises:
        ValueError: when called without attention.
    """

    needs = Needs(attention=True)

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        budget: int,
        attention: Tensor | None = None,
    ) -> Tensor:
        check(self, keys, values, length, budget)
        score = per_kv_head(self, attention, keys)[:, :, -1]
        return top(score.mean(1, keepdim=True), length, budget).expand(-1, keys.shape[1], -1)
