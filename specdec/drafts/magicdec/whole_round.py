"""MagicDec's chain in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafts.magicdec.draft import MagicDec
from specdec.drafts.magicdec.rotation import turned
from specdec.drafts.magicdec.view import View, ViewCache
from specdec.drafts.stops import why_stop
from specdec.drafts.windowed_round import WindowedDrafting, remember, unknown
from specdec.graphs.drafting import Given, Passed
from specdec.graphs.programs import Programs
from specdec.types import Context


class ViewDrafting(WindowedDrafting):
    """``Drafting`` of MagicDec: the target's weights over a view, which lacks one committed token of every row.

    With positions in the cache, the sinks' keys are the target's, rotated before each forward to where its queries see them.
    """

    fed = 1

    def __init__(self, draft: MagicDec, memory: ViewCache):
        assert draft.draft is not None
        super().__init__(draft.draft, memory)
        rotation, self.near = memory.view.rotation, memory.sinks + memory.window
        self.table = None if rotation is None else rotation.table(memory.capacity, memory.layers[0][0])

    @staticmethod
    def why_not(draft: Any, target: Any, length: int) -> str | None:
        view: View = draft.view
        draft.check_length(length)
        if view.extra:
            return f"runs MagicDec without a pruner, but the draft's is {draft.pruner!r}"
        if view.steps is None:
            return f"runs MagicDec with masks that have a reach, but the draft's is {view.mask!r}"
        return unknown(view) or why_stop(draft.stop)

    @staticmethod
    def modules(draft: Any) -> tuple[Iterable[nn.Module], object]:
        return draft.view.clone.modules(), draft.view

    @staticmethod
    def programs(draft: Any) -> Programs:
        return draft.view.steps

    @staticmethod
    def select(memory: Any, rows: Tensor, context: Context) -> ViewCache:
        """As ``Drafting.select``; the view's ``source`` still has all rows."""
        remember(memory, rows, context, 1)
        for b in rows.tolist():
            memory.exact[b] = memory._lengths[b]
        chosen: ViewCache = memory.select(rows)
        return chosen

    @staticmethod
    def join(memory: Any, other: Any, target_cache: Any) -> ViewCache:
        """As ``Drafting.join``; the view reads from ``target_cache`` from now on."""
        joined: ViewCache = memory.join(other)
        joined.source = target_cache
        return joined

    def chain(self, given: Given, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        forward = super().chain(given, state)
        if self.table is None or not self.plans.sinks:
            return forward

        def rotated(i: int, tokens: Tensor) -> Tensor:
            self._turn(given, state[:, 0] - 1 + i)
            return forward(i, tokens)

        return rotated

    def _turn(self, given: Given, query: Tensor) -> None:
        """As ``ViewCache._turn``, for queries at ``query [R]``."""
        assert self.table is not None
        rows, sinks, last = given.on["rows"].long(), self.plans.sinks, len(self.table[0]) - 1
        gone = (query + 1 - self.near).clamp(0, last)  # at most where the model's positions end
        for (mine, _), (theirs, _) in zip(self.store.layers, given.target.layers):
            mine[: len(rows), :sinks] = turned(theirs[:, :sinks].index_select(0, rows), self.table, gone)

    def observe(self, given: Given, passed: Passed) -> None:
        """As ``Drafting.observe``: copy the target's entries of all fed positions to the view.

        The last position is ``length - 1 + steps``, and the next round queries at ``length`` or later, or at ``length - 1`` on the same text. So this
        is right for the reasons of ``WindowedDrafting``, one position further.
        """
        position = passed.length - 1 + torch.arange(given.steps + 1, device=passed.length.device)[:, None]
        there = given.on["rows"].long() * given.target.slots + position
        self.store.copy(there.flatten(), given.target, self.plans.slots(position).flatten())
