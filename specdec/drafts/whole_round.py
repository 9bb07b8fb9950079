"""The chain of ``drafts.Model`` in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdec.cache.contiguous import SlotCache
from specdec.cache.slots import Slots
from specdec.cache.static import StaticStore
from specdec.drafts.model import Model
from specdec.drafts.one_model import ModelState
from specdec.drafts.stops import why_stop
from specdec.graphs.drafting import Drafting, Given, Side
from specdec.graphs.programs import Programs
from specdec.models.hf import HFModel
from specdec.types import Context


class ModelDrafting(Drafting):
    """``Drafting`` of an ``HFModel`` with graphs.

    The draft is fed the last two committed tokens of every row, since it may lack one of them.
    """

    def __init__(self, draft: Model, memory: SlotCache):
        model: Any = draft.model
        self.side = Side(model.steps.forward, StaticStore(memory), model.vocab_size)

    @staticmethod
    def why_not(draft: Model, target: Any, length: int) -> str | None:
        return without_slots(draft.model) or why_stop(draft.stop)

    @staticmethod
    def modules(draft: Model) -> tuple[Iterable[nn.Module], object]:
        model: Any = draft.model
        return model.clone.modules(), model

    @staticmethod
    def programs(draft: Model) -> Programs:
        return cast(Any, draft.model).steps

    @staticmethod
    def memory(state: ModelState) -> Slots:
        return cast(Slots, state.cache)

    @staticmethod
    def select(memory: SlotCache, rows: Tensor, context: Context) -> SlotCache:
        words = context.tokens.numpy()
        for i, (b, n) in enumerate(zip(rows.tolist(), context.length.tolist())):
            memory.remember(b, words[i], 0, n - 2, 0)  # the last two are fed once more
        return memory.select(rows)

    def chain(self, given: Given, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        length, ends = state[:, 0], state[:, 1:]

        def forward(n: int, tokens: Tensor) -> Tensor:
            if n == 0:
                keep = torch.arange(len(ends), device=ends.device) * 2 + 1
                return self.side.feed(given, ends, length - 2, keep)
            return self.side.feed(given, tokens[:, None], length + (n - 1))

        return forward


def class_of(model: Any) -> type:
    """The class of a model, or, where it only makes other caches, of the one that it was made from (``HFModel.plain``)."""
    return type(model.plain if isinstance(model, HFModel) else model)


def without_steps(model: Any) -> str | None:
    """Why a model is not exactly an ``HFModel`` with graphs (by ``class_of``), as a predicate ("has no graphs"); ``None`` if it is one."""
    if class_of(model) is HFModel:
        return None if model.steps is not None else "has no graphs"
    return f"is a {class_of(model).__name__}"


def without_slots(model: Any) -> str | None:
    """Why a captured round cannot run a draft's model over slots, or ``None``."""
    why = without_steps(model)
    if why is not None:
        return f"runs an HFModel with graphs=True, but the draft's model {why}"
    if model.page is not None:
        return f"needs a draft's keys and values in slots, and its model has pages of {model.page} tokens"
    return None
