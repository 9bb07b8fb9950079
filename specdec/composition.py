"""What a decoder is made of: the value that executors, serving and workers take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from specdec.arm_policy import ArmAssignment, ArmPolicy
from specdec.capabilities import DraftPart, ModelInfo, VerifierInfo
from specdec.protocols import Draft, LanguageModel, Verifier
from specdec.sampling import Sampling


@dataclass(frozen=True, eq=False)
class Composition:
    """The parts that decode together.

    Attributes:
        target, draft, verifier: the parts. length: longest path drafted a round. sampling: how tokens are drawn.
        selecting: how arms are chosen, where the draft is a pool. learned: what a selector knows from earlier runs.
    """

    target: LanguageModel
    draft: Draft[Any]
    length: int
    sampling: Sampling
    verifier: Verifier
    selecting: ArmPolicy | None = None
    learned: ArmAssignment | None = None

    @cached_property
    def drafting(self) -> DraftPart:
        """The draft with what it can do."""
        return DraftPart.of(self.draft)

    @cached_property
    def verifying(self) -> VerifierInfo:
        """What the verifier can do."""
        return VerifierInfo.of(self.verifier)

    @cached_property
    def device(self) -> torch.device | None:
        """Where the target's logits come out."""
        return ModelInfo.of(self.target).device

    @property
    def nodes(self) -> int:
        """The most nodes of a proposal."""
        return self.drafting.info.nodes(self.length)

    def begin(self, batch: int) -> ArmAssignment | None:
        """A run's choice among arms, if there is one: a new one, or the one that ``generate`` was given."""
        return self.learned or (None if self.selecting is None else self.selecting.begin(batch))
