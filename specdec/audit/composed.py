"""What the catalogue is made of: a composition with its claim, and the small models, drafts and distributions that it composes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from specdec import drafts
from specdec.audit.adversaries import Remembers
from specdec.audit.certify import Certificate, certify
from specdec.builder import Builder, decoder
from specdec.grammars import Table
from specdec.models import TableModel


@dataclass(frozen=True)
class Composition:
    """Something to certify.

    Attributes:
        tokens: number of new tokens, one number or one for each of ``prompts``. settings: further arguments of ``certifier``.
        lossless: the claim; ``False`` is a planted bias, or a verifier that is declared lossy.
        distance: the total variation of a verifier that is declared lossy.
    """

    name: str
    builder: Builder
    tokens: int | Sequence[int] = 3
    prompts: Sequence[Sequence[int]] = ((0,),)
    settings: Mapping[str, Any] = field(default_factory=dict)
    lossless: bool = True
    certifier: Callable[..., Certificate] = certify
    distance: float | None = None

    def run(self) -> Certificate:
        return self.certifier(self.builder.build(), self.prompts, self.tokens, **self.settings)

    def stands(self, found: Certificate) -> bool:
        """Whether the certificate agrees with the claim: lossless, as lossy as it should be, or a visible bias (at least 1e-3)."""
        if self.distance is not None:
            return not found.claimed and abs(found.total_variation - self.distance) <= 1e-9
        return found.lossless if self.lossless else found.total_variation >= 1e-3


def distribution(*probs: float) -> Tensor:
    """Probabilities in float64."""
    return torch.tensor(probs, dtype=torch.float64)


def _prefix_penalty(ids: Tensor, scores: Tensor) -> Tensor:
    """A penalty that depends on every token of the prefix, in order."""
    weighted = (ids * torch.arange(1, ids.shape[1] + 1)).sum(1, keepdim=True)
    return scores - 0.3 * (weighted + torch.arange(scores.shape[1])).remainder(3)


MODEL, OTHER = TableModel.random(3, 1, seed=0), TableModel.random(3, 1, seed=1)
PAIRS = (
    ("zeros", TableModel.random(3, 1, 5, zeros=0.4), TableModel.random(3, 1, 6, zeros=0.4)),
    ("ties", TableModel([1 / 3, 1 / 3, 1 / 3]), TableModel([0.5, 0.5, 0.0])),
    ("disjoint supports", TableModel([0.4, 0.6, 0.0]), TableModel([0.0, 0.0, 1.0])),
    ("a certain target", TableModel([0.0, 1.0, 0.0]), OTHER),
    ("a certain draft", MODEL, TableModel([0.0, 1.0, 0.0])),
)
BASE, CHAIN, TREE = decoder(MODEL), drafts.Model(OTHER), drafts.Tree(OTHER, (2, 1))
RAGGED: dict[str, Any] = {"prompts": ((0, 1), (2,), (1, 1, 0)), "tokens": (3, 2, 4)}
GRAMMAR = Table(((1, 0, -1), (-1, 1, 0)))
PENALTIES = (RepetitionPenaltyLogitsProcessor(1.7), _prefix_penalty)
REMEMBERING = decoder(TableModel([0.5, 0.3, 0.2])).draft(
    Remembers(distribution(0.2, 0.3, 0.5), (2,)), length=2
)
