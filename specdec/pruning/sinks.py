"""Keep the first slots and the latest (StreamingLLM, Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.pruning.pruner import Checked, Needs
from specdec.pruning.slots import top


@dataclass(frozen=True)
class StreamingLLM(Checked):
    """The first ``sinks`` slots and a window of the latest; the same for all heads, whatever the slots hold.

    Args:
        sinks: 4 in the paper, 1 in SPIRe.
        window: latest slots to keep; by default what the budget leaves.
    Raises:
        ValueError: negative sinks, a window below 1; when called, a budget that is too small for both.
    """

    sinks: int = 4
    window: int | None = None
    needs = Needs()

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(
                f"StreamingLLM: sinks is {self.sinks}: the number of first slots to keep; 0 keeps none"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"StreamingLLM: window is {self.window}: keep at least the latest slot, or leave window out"
            )

    def choose(self, keys: Tensor, length: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        wanted = self.sinks + (1 if self.window is None else self.window)
        if wanted > budget:
            raise ValueError(
                f"StreamingLLM: budget is {budget} and {self.sinks} sinks with a window of {wanted - self.sinks} take {wanted}: "
                "raise the budget, or keep fewer sinks or a smaller window"
            )
        slot = torch.arange(keys.shape[2], device=keys.device)
        score = torch.where(slot < self.sinks, len(slot), slot).expand(keys.shape[:3]).float()
        kept = top(score, length, budget if self.window is None else wanted)
        return torch.nn.functional.pad(kept, (0, min(budget, len(slot)) - kept.shape[-1]), value=-1)
