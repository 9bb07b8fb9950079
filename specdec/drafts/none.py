"""No speculation: plain decoding runs through the same engine as a proposal of size 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.rng import Rng
from specdec.types import Context, Proposal, Round


@dataclass(frozen=True)
class NoDraft:
    """Proposes nothing; every round commits the target's own token."""

    name = "plain"
    trees = False
    revocable = True

    def nodes(self, length: int) -> int:
        return 0

    def reach(self, length: int) -> int:
        return 0

    def init(self, context: Context, target_cache: Any) -> None:
        return None

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        return Proposal.none(context.batch), None

    def observe(self, state: None, round: Round) -> None:
        return None

    def select(self, state: None, rows: Tensor) -> None:
        return None

    def join(self, state: None, other: None) -> None:
        return None
