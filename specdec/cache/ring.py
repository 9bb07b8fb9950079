"""Keys and values in constant memory a row: the first positions, and a ring of the latest (StreamingLLM, arXiv 2309.17453).

A query at position q sees at most the positions ``p <= q`` with ``p > q - window`` or ``p < sinks`` (a window counts the query itself);
a mask, whose reach is ``sinks`` and ``window``, says which of them. Position p is in slot p for ``p < sinks`` and in slot
``sinks + (p - sinks) mod W`` of the ring otherwise, so slot numbers are positions until the ring is full. The device stores no positions of
slots: seen from a query at q, a ring slot holds the latest position up to q that belongs there, which is within the last W.

How large must W be? Entries are written ahead of the text: a draft's provisional positions up to h, most of which are rolled back.
Rolling back is free (the next query is at some q <= h and does not see positions above q) unless a write has overwritten an entry that q
still sees. Writing position h overwrites h - W, and q sees down to ``q - window + 1``, so the entries are complete iff

    h - W < q - window + 1        that is    W >= window + (h - q),

where h is the highest position written so far, and a forward writes its entries before its queries read. With ``block`` positions in
flight, from the first that may be queried again to the highest written (both counted), ``h - q <= block - 1``:

    W = window + block - 1.

``tests/test_windowed.py`` finds by brute force that a smaller W fails.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec import masks
from specdec.arguments import at_least
from specdec.cache.contiguous import check_memory
from specdec.cache.slots import KVShape, Slots
from specdec.kernels.device import to_device

BLOCK = "give how many positions are written before any is rolled back, 1 or more"


class Ring(Slots):
    """Slots for ``sinks`` first positions and the latest ``window``, with ``block`` positions in flight.

    Args:
        shapes: one for each layer. sinks: may be 0. window: at least 1, the query included; a ring that holds everything has the
            text's capacity as its window.
        block: how many positions may be written from the earliest that may be queried again on, that one included.
        extra: slots after the ring for the user of this class; ``visible`` leaves them out.
        mask: what a query sees within that reach (default: all of it).
    Raises:
        ValueError: a window or a block is below 1, or sinks are negative; the mask has no reach, or a longer one.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        batch: int,
        sinks: int,
        window: int,
        block: int,
        extra: int = 0,
        mask: masks.Mask | None = None,
    ):
        at_least(1, "block", block, BLOCK)
        all_of_it = masks.streaming(window, sinks)
        self.mask = all_of_it if mask is None else mask
        self.narrower = self.mask != all_of_it
        self.sinks, self.window, self.block, self.extra = sinks, window, block, extra
        self.size = window + block - 1  # W
        super().__init__(shapes, batch, sinks + self.size + extra)

    def slot(self, positions: np.ndarray) -> np.ndarray:
        """The slot of each position, for any shape of non-negative positions."""
        ring = self.sinks + (positions - self.sinks) % self.size
        return np.where(positions < self.sinks, positions, ring)

    def at(self, rows: Tensor, positions: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """``[T]`` flat slots of ``positions [T]`` in batch ``rows [T]`` (both on the host), for ``put`` or ``append``.

        The slots must differ: of more than W positions of a row, pass the latest.
        """
        flat = rows.numpy() * self.slots + self.slot(positions.numpy())
        return to_device(torch.from_numpy(flat), device)

    def held(self, queries: np.ndarray) -> np.ndarray:
        """``[..., sinks + W]``: the position that each slot holds, seen from queries at positions ``[...]``; not above the query.

        Negative, or above the query among the sinks, where no such position exists.
        """
        s = np.arange(self.sinks + self.size)
        q = queries[..., None]
        return np.where(s < self.sinks, s, q - (q - s) % self.size)

    def visible(self, queries: np.ndarray) -> np.ndarray:
        """``[..., sinks + W]`` bool: which slots queries at positions ``[...]`` see."""
        p, q = self.held(queries), queries[..., None]
        s = np.arange(self.sinks + self.size)
        exists = np.where(s < self.sinks, p <= q, (p >= self.sinks) & (p > q - self.window))
        return exists & self.sees(q, p) if self.narrower else exists

    def sees(self, queries: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which ``positions`` the mask shows to queries, in the broadcast shape; positions below 0 count as 0."""
        at = torch.from_numpy(positions.clip(min=0))
        return masks.sees(self.mask, torch.from_numpy(queries), at).numpy()

    def safe(self, highest: int, query: int) -> bool:
        """Whether all that ``query`` sees is still held after position ``highest`` was written to its row."""
        return highest - self.size <= max(query - self.window, self.sinks - 1)

    def select(self, rows: Tensor) -> Ring:
        """The ring of some rows, in the given order; the old object must not be used again."""
        blocks = self._gathered(rows, [self.slots] * self._blocks[0].shape[1])
        new = copy.copy(self)
        new._blocks = blocks
        new._view()
        return new

    def followed_by(self, other: Ring) -> Ring:
        """A ring of both rings' rows, these first, with the larger window of the two; neither may be used again.

        Only a ring that holds the whole text may join one of another window: its slots are positions in both. Where rows have left
        this ring, the new rows take their place and nothing else is copied.

        Raises:
            MemoryError: they do not fit.
        """
        mine, theirs = self._blocks[0].shape[1], other._blocks[0].shape[1]
        window, extra = max(self.window, other.window), max(self.extra, other.extra)
        both = copy.copy(self)
        if (window, extra) == (self.window, self.extra) and self._whole[0].shape[1] >= mine + theirs:
            both._blocks = [block[:, : mine + theirs] for block in self._whole]
        else:
            check_memory(self.shapes, mine + theirs, self.sinks + window + self.block - 1, extra)
            vars(both).update(vars(self.resized(window, extra, theirs)))
        both._view()
        other._copy_to(both, mine)
        return both

    def resized(self, window: int, extra: int, more: int = 0) -> Ring:
        """A copy with another window, other ``extra`` slots and ``more`` rows at the end."""
        mask = self.mask if self.narrower else None
        batch = self._blocks[0].shape[1] + more
        grown = Ring(self.shapes, batch, self.sinks, window, self.block, extra, mask)
        self._copy_to(grown, 0)
        return grown

    def _copy_to(self, ring: Ring, first: int) -> None:
        """Copy all rows to rows ``first`` on of a ring whose slots for positions are at least as many, with their extra slots, as far as it has them."""
        held = self.sinks + self.size
        with torch.inference_mode(False), torch.no_grad():
            for there, here in zip(self._blocks, ring._blocks):
                rows = slice(first, first + there.shape[1])
                here[:, rows, :held] = there[:, :, :held]
                extra, end = min(self.extra, ring.extra), ring.slots - ring.extra
                here[:, rows, end : end + extra] = there[:, :, held : held + extra]
