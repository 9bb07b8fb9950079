"""A decoder around a verifier: the adversary's proposals, which depend on the whole past, for a small table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.arguments import name_of
from specdec.audit.adversaries import MENU, Adversary
from specdec.audit.level_adversary import LevelAdversary
from specdec.builder import Builder, decoder
from specdec.capabilities import VerifierInfo
from specdec.decoder import Decoder
from specdec.drafts import Tree
from specdec.models import TableModel
from specdec.protocols import Verifier
from specdec.rng import Rng
from specdec.types import Context, Proposal, Verdict

PROMPTS, TOKENS, NODES = ((0,), (1,), (2, 0)), 4, 3


class Refused(ValueError):
    """The verifier's ``check`` does not take a proposal."""


@dataclass(frozen=True)
class _Function:
    """A function ``(proposal, probs, context, rng) -> Verdict`` as a verifier that takes all but declared probabilities."""

    function: Callable[..., Verdict]

    @property
    def info(self) -> VerifierInfo:
        return VerifierInfo(name_of(self.function), lossless=True)  # to be found out

    def check(self, proposal: Proposal) -> None:
        if proposal.provenance == "declared":
            raise ValueError(
                f"{name_of(self.function)} is a function, which is given no declared probabilities: draw with rng.categorical and "
                "provenance='sampled', leave probs out, or give an object whose check takes them"
            )

    def for_draft(self, rng: Rng) -> Rng:
        return rng

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        return self.function(proposal, probs, context, rng)


class _Strict:
    """A verifier whose refusals can be told from other errors."""

    def __init__(self, inner: Verifier):
        self.inner, self.info = inner, VerifierInfo.of(inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        return self.inner(proposal, probs, context, rng)

    def for_draft(self, rng: Rng) -> Rng:
        return self.inner.for_draft(rng)

    def check(self, proposal: Proposal) -> None:
        try:
            self.inner.check(proposal)
        except ValueError as refusal:
            raise Refused(str(refusal)) from refusal


def verifier_of(part: Any) -> Verifier:
    """``part`` if it has a verifier's methods; a function is given those that it lacks.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(part, (type, Builder, Decoder)) or not callable(part):
        what = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
        raise TypeError(
            f"decoder is {what}: give a built decoder, sd.decoder(...).build(), a verifier, or a function (proposal, probs, context, rng) -> Verdict"
        )
    return part if isinstance(part, Verifier) else _Function(part)


def decoders(verifier: Verifier) -> Iterator[Decoder]:
    """Decoders to certify a verifier with, the most general proposals that it declares to take first: trees, chains, one node."""
    base = decoder(TableModel.random(3, 1, seed=0)).verifier(_Strict(verifier))
    siblings = VerifierInfo.of(verifier).siblings
    if "in turn" in siblings:
        yield base.draft(Adversary(MENU, NODES), length=NODES).build()
    if "independent" in siblings:
        yield base.draft(LevelAdversary(MENU, NODES), length=NODES).build()
        yield base.draft(Tree(TableModel.random(3, 1, seed=1), (2, 1)), length=2).build()
    if "distinct" in siblings:
        yield base.draft(LevelAdversary(MENU, NODES, replacement=False), length=NODES).build()
    yield base.draft(Adversary(MENU, NODES, trees=False), length=NODES).build()
    yield base.draft(Adversary(MENU, NODES, trees=False), length=1).build()
