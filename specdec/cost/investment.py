"""The cost of training a draft and its savings, in units of one training of the target (SPIRe, arXiv 2504.06419, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.arguments import numbers, positive
from specdec.cost.shapes import Shape


@dataclass(frozen=True)
class Investment:
    """A draft of ``share`` of the target's training cost, and the throughput that it buys.

    Attributes:
        share: units to train the draft. multiplier: throughput with it over plain decoding's.
        serving: units that plain serving costs over the target's life; the paper's 10.
    Raises:
        ValueError: a negative share, or a multiplier or serving that is not positive.
    """

    share: float
    multiplier: float
    serving: float = 10.0

    def __post_init__(self) -> None:
        numbers(self, "share", "multiplier", "serving")
        if self.share < 0:
            raise ValueError(f"share is {self.share}: give units of the target's training, at least 0")
        positive(self, "multiplier", "serving")

    @property
    def saved(self) -> float:
        """Units of serving saved: serving · (1 - 1 / multiplier). Negative for a slowdown."""
        return self.serving * (1 - 1 / self.multiplier)

    @property
    def net(self) -> float:
        """Saved less invested."""
        return self.saved - self.share

    @property
    def break_even(self) -> float:
        """Units of plain serving at which the draft pays off; infinite for a slowdown."""
        return self.share / (1 - 1 / self.multiplier) if self.multiplier > 1 else float("inf")


def training_share(draft: Shape, target: Shape) -> float:
    """Body parameters of the draft over the target's, at equal training tokens: the paper's 0.25 for SPIRe (§5).

    Computing the target's activations, which the draft learns from, is not counted.
    """
    return draft.body / target.body
