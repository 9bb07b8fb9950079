"""Models of one shape that draft together: each row with its own model, all rows in one forward a token (``models.stacked``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.cache.paged import PagedCache
from specdec.capabilities import DraftInfo
from specdec.drafts.model import Model
from specdec.drafts.one_model import ModelState, readable
from specdec.models.stacked import StackedModel
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


class Ahead(NamedTuple):
    """What members have read ahead of rows that other members still draft: entry i of ``cache`` is row ``rows[i]``, read by ``member[i]``."""

    cache: Any
    rows: list[int]
    member: list[int]

    def select(self, rows: list[int]) -> Ahead | None:
        """The entries of some rows of the batch, in the given order."""
        at = {b: i for i, b in enumerate(self.rows)}
        found = [(new, at[old]) for new, old in enumerate(rows) if old in at]
        if not found:
            return None
        new, which = zip(*found)
        return Ahead(self.cache.select(torch.tensor(which)), list(new), [self.member[i] for i in which])


class StackedState(NamedTuple):
    """``inner``: cache and proposal. ``member [B]`` drafts each row; ``writer [B]`` has written the row's cache (-1: none has)."""

    inner: ModelState
    member: Tensor
    writer: Tensor
    ahead: Ahead | None = None

    @property
    def cache(self) -> Any:
        return self.inner.cache


@dataclass(frozen=True)
class Stacked:
    """As ``Model``, but each row is drafted by a member of ``model`` (``assign``; member 0 at first).

    One cache serves all members. When a row changes its member, the new member reads it again, at the change or before it (``read_ahead``).
    """

    model: StackedModel
    sampling: Sampling | None = None
    vocab_size: int | None = None

    @property
    def info(self) -> DraftInfo:
        return DraftInfo("stacked", model=self.model, sampling=self.sampling)

    @staticmethod
    def example(model: Any) -> Any:
        """A stack of a model and itself where it can be stacked (for the contract tests); otherwise the model alone."""
        try:
            return Stacked(StackedModel([model, model]))
        except (ValueError, AttributeError):
            return Model(model)

    # Drafts over the stack, whose ``read_as`` sets each row's member.
    draft: Model = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", Model(self.model, self.sampling, self.vocab_size))

    def bind(self, target: LanguageModel, sampling: Sampling) -> Stacked:
        made = replace(self, sampling=sampling.for_draft(self.sampling), vocab_size=target.vocab_size)
        object.__setattr__(made, "draft", made.draft.bind(target, sampling))
        return made

    def init(self, context: Context, target_cache: Any) -> StackedState:
        return self.prepare(self.empty(context), context, None)

    def empty(self, context: Context) -> StackedState:
        """A state that has read nothing."""
        none = torch.full((context.batch,), -1)
        return StackedState(self.draft.empty(context), torch.zeros(context.batch, dtype=torch.long), none)

    def assign(self, state: StackedState, member: Tensor) -> StackedState:
        """Row b is drafted by ``member[b]`` from now on; rows of -1 keep theirs."""
        return state._replace(member=torch.where(member < 0, state.member, member))

    def prepare(self, state: StackedState, context: Context, rows: Tensor | None) -> StackedState:
        """Feed unread tokens of ``rows`` (``None``: all), each to its member."""
        state = self._ready(state, torch.arange(context.batch) if rows is None else rows)
        return state._replace(inner=self.draft.prepare(state.inner, context, rows))

    def read_ahead(self, state: StackedState, context: Context, rows: Tensor, member: Tensor) -> StackedState:
        """Let ``member [R]`` read ``rows [R]`` into a separate cache while other members still draft them.

        The next ``propose`` takes them over. Where there is no memory for the cache, they are read at the change.
        """
        other = state.writer[rows] != member
        rows, member = rows[other], member[other]
        if not len(rows):
            return state._replace(ahead=None)
        held = state.inner.cache
        make = held.beside if isinstance(held, PagedCache) else self.model.cache
        self.model.read_as(member)
        try:
            cache = make(len(rows), held.capacity)
            self.model.prefill(cache, readable(context.select(rows), self.model))
        except MemoryError:
            return state._replace(ahead=None)
        return state._replace(ahead=Ahead(cache, rows.tolist(), member.tolist()))

    def propose(
        self, state: StackedState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, StackedState]:
        state = self._ready(state, (budget > 0).nonzero()[:, 0])
        proposal, inner = self.draft.propose(state.inner, context, budget, rng)
        return proposal, state._replace(inner=inner)

    def _ready(self, state: StackedState, rows: Tensor) -> StackedState:
        """Where another member has read these rows, replace the cache by what was read ahead, or clear it; then set the rows' members."""
        stale = rows[state.writer[rows] != state.member[rows]]
        cache, ahead = state.inner.cache, state.ahead
        known = {} if ahead is None else {key: i for i, key in enumerate(zip(ahead.rows, ahead.member))}
        for b, member in zip(stale.tolist(), state.member[stale].tolist()):
            if ahead is not None and (b, member) in known:
                cache.take(b, ahead.cache, known[b, member])
            else:
                cache.forget(b)
        self.model.read_as(state.member)
        return state._replace(writer=state.writer.index_copy(0, stale, state.member[stale]), ahead=None)

    def observe(self, state: StackedState, round: Round) -> StackedState:
        return state._replace(inner=self.draft.observe(state.inner, round))

    def select(self, state: StackedState, rows: Tensor) -> StackedState:
        ahead = None if state.ahead is None else state.ahead.select(rows.tolist())
        return StackedState(
            self.draft.select(state.inner, rows), state.member[rows], state.writer[rows], ahead
        )

    def join(self, state: StackedState, other: StackedState) -> StackedState:
        inner = self.draft.join(state.inner, other.inner)
        member = torch.cat([state.member, other.member])
        writer = torch.cat([state.writer, other.writer])
        return StackedState(inner, member, writer, state.ahead)  # the new rows have nothing read ahead
