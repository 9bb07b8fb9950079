"""MagicDec's chain in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafts.magicdec.draft import MagicDec
from specdec.drafts.magicdec.view import View, ViewCache
from specdec.drafts.windowed_round import WindowedDrafting, remember, unknown
from specdec.graphs.drafting import Given, Passed
from specdec.types import Context


class ViewDrafting(WindowedDrafting):
    """``Drafting`` of MagicDec: the target's weights over a view, which lacks one committed token of every row."""

    fed = 1

    def __init__(self, draft: MagicDec, memory: ViewCache):
        assert draft.draft is not None
        super().__init__(draft.draft, memory)

    @staticmethod
    def why_not(draft: Any, target: Any, length: int) -> str | None:
        """As ``Drafting.why_not``."""
        view: View = draft.view
        draft.check_length(length)
        if view.rotation is not None:
            return "runs MagicDec with positions='original', but the draft's are 'in_cache'"
        if view.extra:
            return f"runs MagicDec without a pruner, but the draft's is {draft.pruner!r}"
        if view.steps is None:
            return f"runs MagicDec with masks that have a reach, but the draft's is {view.mask!r}"
        return unknown(view)

    @staticmethod
    def modules(draft: Any) -> tuple[Iterable[nn.Module], object]:
        """As ``Drafting.modules``."""
        return draft.view.clone.modules(), draft.view

    @staticmethod
    def select(memory: Any, rows: Tensor, context: Context) -> ViewCache:
        """As ``Drafting.select``; the view's ``source`` still has all rows."""
        remember(memory, rows, context, 1)
        for b in rows.tolist():
            memory.exact[b] = memory._lengths[b]
        chosen: ViewCache = memory.select(rows)
        return chosen

    def observe(self, given: Given, passed: Passed) -> None:
        """As ``Drafting.observe``: copy the target's entries of all fed positions to the view.

        The last position is ``length - 1 + steps``, and the next round queries at ``length`` or later, or at ``length - 1`` on the same text. So this
        is right for the reasons of ``WindowedDrafting``, one position further.
        """
        position = passed.length - 1 + torch.arange(given.steps + 1, device=passed.length.device)[:, None]
        there = given.on["rows"].long() * given.target.slots + position
        self.store.copy(there.flatten(), given.target, self.plans.slots(position).flatten())
