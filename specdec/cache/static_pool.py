"""A pool of pages for captured steps: its memory is lent again when its caches are gone, and one page takes what padding writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec.cache.paged import PagePool
from specdec.cache.slots import KVShape


class StaticPool(PagePool):
    """As ``PagePool``, with a spare page.

    A captured step contains the address of the pool's memory. When the pool grows, its pages are elsewhere, and steps are captured anew. It takes
    a few more pages than asked for, if there is memory for them, so that the next texts, a little longer, need not grow it.

    Args:
        lender: ``lender(page, pages)`` returns a pool of at least ``pages`` such pages that nobody uses, filled with zeros, or ``None``, after it has
            freed all memory that it could lend, as with ``None`` for pages. ``None``: nobody lends.
    """

    def __init__(
        self, shapes: Sequence[KVShape], page: int, lender: Callable[[int, int | None], Any] | None = None
    ):
        super().__init__(shapes, page, spare=1)
        self._lender = lender

    def __getstate__(self) -> dict[str, Any]:
        """As ``Slots.__getstate__``; nobody lends to a copy."""
        return {**super().__getstate__(), "_lender": None}

    def _extend(self, pages: int) -> tuple[torch.device, int, int] | None:
        lent = None if self._lender is None else self._lender(self.page, pages)
        if lent is None:
            step = max(1, (1 << (pages - 1).bit_length()) // 8)
            short = super()._extend(-(-pages // step) * step) and super()._extend(pages)
            if short is None:
                self.lease = None  # what was used before is free
                if self._lender is not None:
                    self._lender(self.page, None)
            return short
        self._move(lent._whole)
        self.lease = lent.lease
        return None
