"""No speculation: plain decoding is a proposal of size 0 in every round."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.capabilities import DraftInfo
from specdec.drafts.stateless import Stateless
from specdec.rng import Rng
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class NoDraft(Stateless):
    """Proposes nothing; every round commits one token of the target."""

    info = DraftInfo("plain", nodes=lambda length: 0, longest=0, revocable=True)

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        return Proposal.none(context.batch), None
