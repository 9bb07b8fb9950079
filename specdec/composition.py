"""The parts of a decoder as one value, which executors, serving and workers take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from specdec.arm_policy import ArmAssignment, ArmPolicy
from specdec.capabilities import DraftPart, ModelInfo, VerifierInfo
from specdec.protocols import Draft, KeepsTexts, LanguageModel, NotesActivations, Verifier
from specdec.sampling import Sampling


@dataclass(frozen=True, eq=False)
class Composition:
    """The parts that decode together.

    Attributes:
        target, draft, verifier: the parts. length: longest path drafted a round. sampling: how tokens are drawn.
        selecting: how arms are chosen, where the draft is a pool. learned: a selector's statistics of earlier runs.
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
        """The draft with its capabilities."""
        return DraftPart.of(self.draft)

    @cached_property
    def verifying(self) -> VerifierInfo:
        """The verifier's capabilities."""
        return VerifierInfo.of(self.verifier)

    @cached_property
    def device(self) -> torch.device | None:
        """The device of the target's logits."""
        return ModelInfo.of(self.target).device

    @cached_property
    def keeps(self) -> KeepsTexts | None:
        """The target, if it keeps texts between calls that the draft can use: one that reads activations needs them of every token."""
        if self.drafting.info.taps and self.notes is None:
            return None
        return self.target if isinstance(self.target, KeepsTexts) else None

    @cached_property
    def notes(self) -> NotesActivations | None:
        """The target, if the draft reads activations and the target keeps them."""
        taps, target = self.drafting.info.taps, self.target
        return target if taps and isinstance(target, NotesActivations) else None

    @property
    def nodes(self) -> int:
        """The most nodes of a proposal."""
        return self.drafting.info.nodes(self.length)

    def begin(self, batch: int) -> ArmAssignment | None:
        """The arm assignment of a run, if there are arms: a new one, or the one passed to ``generate``."""
        return self.learned or (None if self.selecting is None else self.selecting.begin(batch))
