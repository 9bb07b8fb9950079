"""A chain drawn left to right from a head's steps: each token from the logits after the tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.drafts.draw import ChainDraw
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import SlotAnchors
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class Chain:
    """One candidate continuation. A head whose logits depend on the tokens before gives conditional laws, any other marginal ones."""

    trees = False
    longest: int | None = None

    def nodes(self, length: int) -> int:
        return length

    def grow(
        self,
        head: HeadModel,
        at: SlotAnchors,
        memo: Any,
        given: Tensor,
        context: Context,
        budget: Tensor,
        sampling: Sampling,
        rng: Rng,
    ) -> Proposal:
        """As ``Grower.grow``."""
        draw, known = ChainDraw(context, budget, sampling), given.shape[1]
        token = given[:, 0]
        for n in range(known - 1 + draw.length):
            logits, memo = head.step(n, memo, given[:, n] if n < known else token, at)
            if n >= known - 1:
                token = draw.draw(head.widened(logits), rng)
        return draw.proposal()
