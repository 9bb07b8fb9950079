"""What drafts over one model share: its cache is their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from specdec.models.hf import HFModel
from specdec.protocols import KeepsTexts, LanguageModel
from specdec.types import Context, Proposal, Round


class ModelState(NamedTuple):
    cache: Any
    proposal: Proposal | None  # its nodes are in the cache


class Unused(NamedTuple):
    """The state of ``batch`` rows, with ``width`` tokens at most, of a draft that none of them has used: nothing has been made for it."""

    batch: int
    width: int


class OneModel:
    """The methods of a draft, except ``propose``, whose ``model`` has the nodes that were proposed last in its cache."""

    model: LanguageModel

    def init(self, context: Context, target_cache: Any) -> ModelState:
        return self.prepare(self.empty(context), context, None)

    def empty(self, context: Context) -> ModelState:
        """A state that has read nothing."""
        return self.made(Unused(context.batch, context.tokens.shape[1]))

    def made(self, unused: Unused) -> ModelState:
        """A state for its rows that has read nothing."""
        return ModelState(self.model.cache(*unused), None)

    def check_room(self, unused: Unused, beside: Sequence[Any] = ()) -> list[Any]:
        """As ``HFModel.check_room``, for a draft that is ``late``."""
        assert isinstance(self.model, HFModel)
        return self.model.check_room(*unused, beside)

    def prepare(self, state: ModelState, context: Context, rows: Tensor | None) -> ModelState:
        """Feed unread tokens of ``rows`` (``None``: all), so that the next ``propose`` need not."""
        self.model.prefill(state.cache, readable(context, self.model), rows)
        return state

    def observe(self, state: ModelState, round: Round) -> ModelState:
        if state.proposal is round.proposal:  # otherwise the cache holds another tree, which sync notices
            state.cache.commit(round.context, round.verdict)
        if bool(round.finished.any()) and isinstance(self.model, KeepsTexts):
            ended = round.finished.nonzero()[:, 0]
            text = readable(round.context.append(round.verdict.tokens, round.committed), self.model)
            self.model.keep_texts(state.cache, text.select(ended), ended.tolist())
        return ModelState(state.cache, None)

    def select(self, state: ModelState, rows: Tensor) -> ModelState:
        return ModelState(state.cache.select(rows), None)

    def join(self, state: ModelState, other: ModelState) -> ModelState:
        return ModelState(state.cache.join(other.cache), None)


def late(draft: Any) -> OneModel | None:
    """The draft, if a state that is made when a row first uses it serves as well as an earlier one: it has a ``OneModel``'s methods, and no others in their
    place, over an ``HFModel``, which can say before whether there is room. With captured steps caches share memory and cost nothing."""
    if not (isinstance(draft, OneModel) and isinstance(draft.model, HFModel) and draft.model.steps is None):
        return None
    if type(draft.model).cache is not HFModel.cache:
        return None
    classes = type(draft).mro()
    own = {name for each in classes[: classes.index(OneModel)] for name in vars(each)}
    return None if own & {name for name in vars(OneModel) if not name.startswith("__")} else draft


def readable(context: Context, model: LanguageModel) -> Context:
    """The context for a draft with a smaller (less padded) vocabulary: ids that it lacks become its last id."""
    if model.vocab_size > int(context.tokens.max()):
        return context
    return replace(context, tokens=context.tokens.clamp(max=model.vocab_size - 1))
