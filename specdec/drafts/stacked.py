"""Drafts of one shape that draft together: each row by its own model, all in one forward a token (``models.stacked``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafts.model import Model, ModelState
from specdec.models.stacked import StackedModel
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


class StackedState(NamedTuple):
    """``inner``: cache and proposal. ``member [B]`` drafts each row, and ``writer [B]`` read what its cache holds (-1: nobody)."""

    inner: ModelState
    member: Tensor
    writer: Tensor

    @property
    def cache(self) -> Any:
        return self.inner.cache


@dataclass(frozen=True)
class Stacked:
    """As ``Model``, with a member of ``model`` for each row (``assign``; member 0 at first).

    One cache serves all members: a row that changes its member is read again by the new one.
    """

    model: StackedModel
    sampling: Sampling | None = None
    vocab_size: int | None = None
    name = "stacked"
    trees = False

    @staticmethod
    def example(model: Any) -> Any:
        """A stack of a model and itself where it can be stacked (for the contract tests); otherwise the model alone."""
        try:
            return Stacked(StackedModel([model, model]))
        except (ValueError, AttributeError):
            return Model(model)

    @property
    def _draft(self) -> Model:
        return Model(self.model, self.sampling, self.vocab_size)

    def bind(self, target: LanguageModel, sampling: Sampling) -> Stacked:
        return replace(self, sampling=self.sampling or sampling, vocab_size=target.vocab_size)

    def init(self, context: Context, target_cache: Any) -> StackedState:
        return self.prepare(self.empty(context), context, None)

    def empty(self, context: Context) -> StackedState:
        """A state that has read nothing."""
        nobody = torch.full((context.batch,), -1)
        return StackedState(self._draft.empty(context), torch.zeros(context.batch, dtype=torch.long), nobody)

    def assign(self, state: StackedState, member: Tensor) -> StackedState:
        """Row b is drafted by ``member[b]`` from now on; rows of -1 keep theirs."""
        return state._replace(member=torch.where(member < 0, state.member, member))

    def prepare(self, state: StackedState, context: Context, rows: Tensor | None) -> StackedState:
        """Read what was not read of ``rows`` (of all), each by its member."""
        state = self._ready(state, torch.arange(context.batch) if rows is None else rows)
        return state._replace(inner=self._draft.prepare(state.inner, context, rows))

    def propose(
        self, state: StackedState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, StackedState]:
        state = self._ready(state, (budget > 0).nonzero()[:, 0])
        proposal, inner = self._draft.propose(state.inner, context, budget, rng)
        return proposal, state._replace(inner=inner)

    def _ready(self, state: StackedState, rows: Tensor) -> StackedState:
        """Forget what another member read of these rows, and tell the model whose they are."""
        stale = rows[state.writer[rows] != state.member[rows]]
        for b in stale.tolist():
            state.inner.cache.forget(b)
        self.model.read_as(state.member)
        return state._replace(writer=state.writer.index_copy(0, stale, state.member[stale]))

    def observe(self, state: StackedState, round: Round) -> StackedState:
        return state._replace(inner=self._draft.observe(state.inner, round))

    def select(self, state: StackedState, rows: Tensor) -> StackedState:
        return StackedState(self._draft.select(state.inner, rows), state.member[rows], state.writer[rows])

    def join(self, state: StackedState, other: StackedState) -> StackedState:
        inner = self._draft.join(state.inner, other.inner)
        return StackedState(
            inner, torch.cat([state.member, other.member]), torch.cat([state.writer, other.writer])
        )
