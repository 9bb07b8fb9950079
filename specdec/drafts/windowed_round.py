"""The chain of a model with constant-size KV in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.cache.ring_cache import RingCache
from specdec.cache.static import StaticStore
from specdec.drafts.model import Model
from specdec.drafts.stops import why_stop
from specdec.drafts.whole_round import ModelDrafting
from specdec.graphs.drafting import Drafting, Given
from specdec.graphs.ring_plan import RingPlans
from specdec.masks.text import known
from specdec.models.masked import Masked
from specdec.types import Context


class WindowedDrafting(Drafting):
    """``Drafting`` of a ``Windowed`` or ``Masked`` model with graphs, over its ring. Rows of the memory that the batch does not use are
    padding, which writes to their own slots.

    As in ``ModelDrafting``, the last two committed tokens of every row are fed, in one forward: with ``length`` committed tokens, a round feeds the
    positions ``length - 2`` to ``length - 2 + steps``.

    - Rejected tokens lie at or after the next round's ``length - 1``. That round overwrites each position before a query can see it.
    - No overwritten slot is still seen. In a ring of ``W = window + block - 1`` slots, the last position overwrites ``length - 1 - window +
      (steps - block)``. The next round queries at ``length - 1`` or later, which sees positions from ``length - window`` on. A round that runs again on
      the same text (captures do that, and rows that have ended) queries at ``length - 2``, which sees those from ``length - 1 - window`` on: the block
      must be longer than the chain, as it is with graphs (``Masked.in_flight``).
    - Of the two tokens that are fed at once, the later one overwrites what the earlier one does not see, for the same reason.
    """

    fed = 2  # committed tokens

    def __init__(self, draft: Model, memory: RingCache):
        self.model: Any = draft.model
        self.store = StaticStore(memory)
        self.plans = RingPlans(memory, self.store)
        self.rows = memory._whole[0].shape[1]

    @staticmethod
    def why_not(draft: Model, target: Any, length: int) -> str | None:
        model: Any = draft.model
        if model.reach is None:
            return f"runs masked models in constant memory, but the draft's has storage for the whole text ({model.mask!r})"
        if model.steps is None:
            return "runs models with graphs=True, but the draft's model has no graphs"
        if model.block < length:
            return f"draws chains of {length} tokens with block={length} or more, but the draft's model has block={model.block}"
        return unknown(model) or why_stop(draft.stop)

    modules, memory = staticmethod(ModelDrafting.modules), staticmethod(ModelDrafting.memory)
    programs = staticmethod(ModelDrafting.programs)

    @staticmethod
    def select(memory: RingCache, rows: Tensor, context: Context) -> RingCache:
        remember(memory, rows, context, 2)
        return memory.select(rows)

    def chain(self, given: Given, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        length, n = state[:, 0], self.fed
        count = torch.arange(max(n, given.steps), device=length.device)
        first = length[:, None] - n + count[:n]  # [R, n]
        later = length[:, None] + count[: given.steps - 1]  # [R, steps - 1]
        plans = [*self.plans.of(first.flatten()[None], n), *self.plans.of(later.t())]
        positions = [given.within(first).flatten(), *given.within(later).unbind(1)]
        last = torch.arange(len(length), device=length.device) * n + (n - 1)

        def forward(i: int, tokens: Tensor) -> Tensor:
            ids = tokens if i else state[:, 3 - n :].flatten()
            # Ids beyond a smaller vocabulary are fed as its last one.
            ids, keep = ids.clamp(max=self.model.vocab_size - 1), None if i else last
            self.store.begin()
            logits: Tensor = self.model.steps.forward(self.store, plans[i], ids, positions[i], keep)
            return logits

        return forward


def unknown(model: Masked) -> str | None:
    """Why a captured step cannot compute what a model's mask shows, or ``None``."""
    return None if known(model.mask) else f"runs the library's masks, but the draft's is {model.mask!r}"


def remember(memory: RingCache, rows: Tensor, context: Context, fed: int) -> None:
    """Note that ``rows [B']`` of a ring hold the texts ``context``, except the last ``fed`` tokens, which every round feeds."""
    words = context.tokens.numpy()
    for i, (b, n) in enumerate(zip(rows.tolist(), context.length.tolist())):
        memory.remember(b, words[i], 0, n - fed, 0)
        memory.wrote(b, n + memory.block - 3)  # at most
