"""A table of the cosines and sines of positions: a step gathers rows of it, where the rotary module launches nine operators.

The rows are the values of the model's own module, bit for bit. A captured step contains the table's address and cannot read positions
on the host: its table is made before, by ``hold``. For a step in C, ``at`` looks up the rows. A table serves one of the two.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from specdec.configs import setting

FIXED = {"default", "linear", "llama3", "yarn"}  # rotary embeddings that depend on the position alone
TABLE = 8192  # the fewest positions of a table that ``at`` makes, and the most that are computed at a time
SHORTEST = 256  # the fewest positions of a table that ``hold`` makes
BYTES = 2**26  # the most bytes of a table that ``hold`` makes


class RotaryTable:
    """Cosines and sines of the positions 0 to n - 1 of one model, whose module does not change (``HFModel`` has a copy of its own).

    Args:
        body: the model's, with the module ``rotary_emb``. limit: positions that the model supports; ``None`` where that is not known.
    Attributes:
        rows: ``[2, n, D]``, cosines and sines; ``None`` before they are made, and where the values depend on more than the position.
    """

    def __init__(self, body: Any, limit: int | None):
        self.body, self.limit = body, sys.maxsize if limit is None else limit
        kind = setting(body.rotary_emb, "rope_type")
        # The frequencies of other kinds vary with the kind of layer, or with the length.
        self.fixed = isinstance(kind, str) and kind in FIXED
        self.rows: Tensor | None = None

    def hold(self, like: Tensor) -> None:
        """Make the rows in the dtype and on the device of ``like``, unless they are made: they stay where they are from then on.

        There is one for each of the model's positions, at least ``SHORTEST``, rounded up to a power of two, as far as ``BYTES`` allow. Where the
        device's memory does not suffice, there are none.
        """
        if self.rows is None and self.fixed:
            most = BYTES // self._values(like, 0, 1).nbytes
            count = min(1 << (max(min(self.limit, most), SHORTEST) - 1).bit_length(), most)
            try:
                self.make(count, like, like.dtype)
            except torch.OutOfMemoryError:
                return

    def at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[T, D]`` in float32 of ``positions [T]`` on the CPU, as for ``like``; the table grows up to ``limit`` where it is too short."""
        rows = self.rows
        if rows is not None:
            try:
                cos, sin = rows.index_select(1, positions).unbind(0)
                return cos, sin
            except (IndexError, RuntimeError):
                pass  # beyond the table; PyTorch raises either
        last = int(positions.max()) if self.fixed else self.limit
        if last < self.limit and (rows is None or last >= rows.shape[1]):
            made = self.make(min(self.limit, max(2 * last + 2, TABLE)), like, torch.float32)
            cos, sin = made.index_select(1, positions).unbind(0)
        else:
            cos, sin = (t[0].float() for t in self.body.rotary_emb(like, positions[None]))
        return cos, sin

    @torch.inference_mode(False)
    @torch.no_grad()
    def make(self, count: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """New rows ``[2, count, D]`` in ``dtype``, as the module gives them for the dtype and device of ``like``."""
        parts = [self._values(like, i, min(i + TABLE, count)).to(dtype) for i in range(0, count, TABLE)]
        self.rows = rows = torch.cat(parts, 1)  # another thread may replace the attribute
        return rows

    @torch.inference_mode(False)
    @torch.no_grad()
    def _values(self, like: Tensor, first: int, end: int) -> Tensor:
        """``[2, end - first, D]`` by the module."""
        at = torch.arange(first, end, device=like.device)
        return torch.cat(self.body.rotary_emb(like.new_empty(1), at[None]))
