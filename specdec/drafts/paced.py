"""Chains whose length follows what was accepted: the schedule "heuristic" of transformers' assisted generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.capabilities import DraftInfo, DraftPart
from specdec.drafts.model import Model, as_draft
from specdec.protocols import Draft, LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


class PacedState(NamedTuple):
    """The ``inner`` draft's state, and ``length [B]``, the most tokens of each row's next chain."""

    inner: Any
    length: Tensor


@dataclass(frozen=True)
class Paced:
    """Chains of ``draft`` (or of a model), of at most ``first`` tokens in a row's first round.

    After a round in which all of a row's tokens were accepted it is ``up`` more, otherwise ``down`` fewer, from 1 to the decoder's ``length``. Rounds without a
    drafted token change nothing.

    Raises:
        TypeError, ValueError: a number is not whole, or too small. ValueError: ``draft`` proposes trees, or is a pool.
    """

    draft: Draft[Any]
    first: int = 4
    up: int = 2
    down: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", as_draft(self.draft, "draft"))
        at_least(1, "first", self.first, "give at least 1")
        at_least(0, "up", self.up, "give at least 0")
        at_least(0, "down", self.down, "give at least 0")
        if self.part.info.trees or self.part.info.drafts:
            raise ValueError(
                f"draft is {self.part.info.name!r}, a pool or of trees: give a draft of chains (a pool may have paced ones)"
            )

    @staticmethod
    def example(model: LanguageModel) -> Paced:
        """A paced model (for the contract tests)."""
        return Paced(Model(model), 1)

    @cached_property
    def part(self) -> DraftPart:
        """The draft with its capabilities."""
        return DraftPart.of(self.draft)

    @property
    def info(self) -> DraftInfo:
        return replace(self.part.info, name=f"paced {self.part.info.name}")

    def bind(self, target: LanguageModel, sampling: Sampling) -> Paced:
        return replace(self, draft=self.part.bound(target, sampling))

    def init(self, context: Context, target_cache: Any) -> PacedState:
        return self._begun(self.draft.init(context, target_cache), context)

    def propose(
        self, state: PacedState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, PacedState]:
        proposal, inner = self.part.propose(state.inner, context, budget.minimum(state.length), rng)
        return proposal, state._replace(inner=inner)

    def observe(self, state: PacedState, round: Round) -> PacedState:
        size, length, most = round.proposal.size, state.length, round.budget
        more = (length + self.up).minimum(most).maximum(length)
        fewer = (length.minimum(most) - self.down).clamp(min=1)
        length = torch.where(round.verdict.accepted == size, more, fewer).where(size > 0, length)
        return PacedState(self.draft.observe(state.inner, round), length)

    def select(self, state: PacedState, rows: Tensor) -> PacedState:
        return PacedState(self.draft.select(state.inner, rows), state.length[rows])

    def __getattr__(self, name: str) -> Any:
        """The optional methods that ``draft`` has."""
        if name not in ("empty", "prepare", "follow", "join", "forget", "check_length"):
            raise AttributeError(name)
        method = getattr(self.draft, name)
        if name == "check_length":
            return method
        if name == "empty":
            return lambda text: self._begun(method(text), text)
        if name == "join":
            return lambda a, b: PacedState(method(a.inner, b.inner), torch.cat([a.length, b.length]))
        return lambda state, *others: state._replace(inner=method(state.inner, *others))

    def _begun(self, inner: Any, context: Context) -> PacedState:
        return PacedState(inner, torch.full((context.batch,), self.first))
