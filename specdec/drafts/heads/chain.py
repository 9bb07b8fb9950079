"""A chain drawn left to right from a head's steps: each token from the logits after the tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import number
from specdec.drafts.draw import ChainDraw
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import SlotAnchors
from specdec.drafts.stops import Stops, as_stops
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class Chain:
    """Proposes a chain. If the head's logits depend on the tokens drafted before, each token has a conditional law, otherwise a marginal one.

    Args:
        stop: a chain ends before the first token whose confidence is below this probability; 0: never. The head must estimate confidences,
            as DSpark does. The token has not been drawn by then, so the output stays exact.
        rules: of ``drafts.stops``, which look at the head's distributions.
    Raises:
        ValueError: a probability outside 0 .. 1.
    """

    stop: float = 0.0
    rules: Stops = ()
    trees = False
    longest = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", as_stops(self.rules))
        number("stop", self.stop, " (rules of drafts.stops are given as rules=)")
        if not 0 <= self.stop <= 1:
            raise ValueError(f"stop is {self.stop}: give a probability")

    def check(self, head: HeadModel) -> None:
        """As ``Grower.check``."""
        if self.stop and not head.confident:
            raise ValueError(
                f"stop is {self.stop}, and this {type(head).__name__} estimates no confidence: leave it at 0, or use a head that does"
            )

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
        draw, known = ChainDraw(context, budget, sampling, stop=self.rules), given.shape[1]
        if head.marginal and not self.stop and not self.rules:
            each = list[Tensor]()
            for n in range(known - 1 + draw.length):
                logits, memo = head.step(n, memo, given[:, min(n, known - 1)], at)
                each.append(logits)
            draw.draw_all(head.widened(torch.stack(each[known - 1 :], 1)), rng)
            return draw.proposal()
        token = given[:, 0]
        for n in range(known - 1 + draw.length):
            token = given[:, n] if n < known else token
            logits, memo = head.step(n, memo, token, at)
            if n < known - 1:
                continue
            if self.stop:
                draw.end(head.confidence(n, memo, token).sigmoid() < self.stop)
                if draw.done:
                    break
            token = draw.draw(head.widened(logits), rng)
            if draw.done:
                break
        return draw.proposal()
