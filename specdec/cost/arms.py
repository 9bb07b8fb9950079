"""What an arm's round costs: modelled by weights read, or given.

One row's round is charged ``length * draft + verify``: what it would cost if all rows of the batch were on its arm, divided by the
batch. Only ratios matter to a selector; the model's unit is one verification pass. A tree is charged by its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ArmCosts:
    """``draft``: of one drafted token of one row, by arm. ``verify``: of one row's share of a verification."""

    draft: tuple[float, ...]
    verify: float = 1.0

    def __post_init__(self) -> None:
        if self.verify <= 0 or min(self.draft, default=0) < 0:
            raise ValueError(
                f"costs are draft {self.draft}, verify {self.verify}: need draft >= 0 and verify > 0"
            )

    def seconds(self, arm: Tensor, drafted: Tensor) -> Tensor:
        """``[B]`` charged to rows of these arms that drafted so many tokens."""
        return drafted * self._draft[arm] + self.verify

    @cached_property
    def _draft(self) -> Tensor:
        return torch.tensor(self.draft, dtype=torch.float64)

    @staticmethod
    def of(target: Any, drafts: Sequence[Any]) -> ArmCosts:
        """Modelled: a pass costs what its weights are, in units of the target's; a draft without a model costs nothing, and one that
        looks at the target's cache with the target's own weights (``drafts.MagicDec``) what the target does.

        A decoder that reads few tokens at a time waits for its weights, and for a small model's calls, whose number grows with its
        weights too.
        """
        whole = weights(target)
        used = [getattr(d, "model", target if hasattr(d, "view") else None) for d in drafts]
        return ArmCosts(tuple(0.0 if whole == 0 else weights(model) / whole for model in used))


def weights(model: Any) -> int:
    """Numbers in a model's parameters; 0 for what has none."""
    inner = model if isinstance(model, torch.nn.Module) else getattr(model, "model", None)
    return sum(p.numel() for p in inner.parameters()) if isinstance(inner, torch.nn.Module) else 0
