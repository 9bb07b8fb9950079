"""No speculation: plain decoding is a proposal of size 0 in every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.capabilities import DraftInfo
from specdec.rng import Rng
from specdec.types import Context, Proposal, Round


@dataclass(frozen=True)
class NoDraft:
    """Proposes nothing; every round commits one token of the target."""

    info = DraftInfo("plain", nodes=lambda length: 0, longest=0, revocable=True)

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
