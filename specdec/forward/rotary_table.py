"""A table of the cosines and sines of positions: a step gathers rows of it, where the rotary module launches nine operators.

The rows are the values of the model's own module, bit for bit. A captured step contains the table's address and cannot read positions
on the host: its table is made before, by ``follow``. A step in C looks up its positions with ``at``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from specdec.configs import setting

FIXED = {"default", "linear", "llama3", "yarn"}  # rotary embeddings that depend on the position alone
TABLE = 8192  # positions of the first table of ``at``, and those that are computed at a time
SHORTEST = 256  # positions of the shortest table of ``follow``
BYTES = 2**26  # of the largest table of ``follow``
CHANGED = (
    "rotary_emb was replaced by one of another kind, or the model was moved or cast, and captured steps read its old cosines: make a "
    "new HFModel from the model"
)


class RotaryTable:
    """Cosines and sines of the positions 0 to n - 1 of one model.

    Args:
        body: of the model, with its module ``rotary_emb``. limit: positions that the model supports; ``None`` where that is not known.
    Attributes:
        rows: ``[2, n, D]``, cosines and sines; ``None`` before they are made, and where the values depend on more than the position.
    """

    def __init__(self, body: Any, limit: int | None):
        self.body, self.limit = body, sys.maxsize if limit is None else limit
        self.rows: Tensor | None = None
        self._of: Any = None  # of ``_found``

    def stale(self, like: Tensor) -> bool:
        """Whether the rows were made for other frequencies than the module's, or not for ``like``. The host waits for the module's device."""
        return self.rows is not None and self._of != self._found(like)

    def follow(self, like: Tensor) -> None:
        """Make the rows in the dtype and on the device of ``like``, or bring them up to date with the module, at the same address.

        They are as many as the model has positions, rounded up to a power of two, or as ``BYTES`` hold. There are none where memory is short.

        Raises:
            RuntimeError: captured steps may read the rows, and the module's values now have another size, dtype or device, or depend on
                more than the position.
        """
        rows, found = self.rows, self._found(like)
        if rows is None and found is not None:
            try:
                most = BYTES // self._values(like, 0, 1).nbytes
                self.make(min(1 << (max(min(self.limit, most), SHORTEST) - 1).bit_length(), most), like)
            except torch.OutOfMemoryError:
                return
        elif rows is not None and found != self._of:
            if found is None or found[2:] != self._of[2:]:
                raise RuntimeError(CHANGED)
            self.make(len(rows[0]), like, rows)

    def at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[T, D]`` of ``positions [T]`` on the CPU, in float32. The table grows where it is too short."""
        rows = self.rows
        if rows is not None:
            try:
                cos, sin = rows.index_select(1, positions).unbind(0)
                return cos, sin
            except (IndexError, RuntimeError):
                pass  # beyond the table; PyTorch raises either
        last = self.limit if self._found(like) is None else int(positions.max())
        if last < self.limit and (rows is None or last >= len(rows[0])):
            made = self.make(min(self.limit, max(2 * last + 2, TABLE)), like, dtype=torch.float32)
            cos, sin = made.index_select(1, positions).unbind(0)
        else:
            cos, sin = (t[0].float() for t in self.body.rotary_emb(like, positions[None]))
        return cos, sin

    @torch.inference_mode(False)
    @torch.no_grad()
    def make(self, count: int, like: Tensor, rows: Tensor | None = None, dtype: Any = None) -> Tensor:
        """The rows of the positions below ``count``, as the module gives them for ``like``: put into ``rows``, or new and in ``dtype``."""
        of = self._found(like)
        for first in range(0, count, TABLE):
            values = self._values(like, first, min(first + TABLE, count))
            if rows is None:
                rows = values.new_empty(2, count, values.shape[2], dtype=dtype or values.dtype)
            rows[:, first : first + TABLE] = values
        assert rows is not None
        self.rows, self._of = rows, of  # another thread may replace them
        return rows

    @torch.inference_mode(False)
    @torch.no_grad()
    def _values(self, like: Tensor, first: int, end: int) -> Tensor:
        """``[2, end - first, D]`` by the module."""
        at = torch.arange(first, end, device=like.device)
        return torch.cat(self.body.rotary_emb(like.new_empty(1), at[None]))

    def _found(self, like: Tensor) -> Any:
        """What the values depend on beside the position: first what may change, then what may not. ``None`` for other kinds of modules."""
        module = self.body.rotary_emb
        kind = setting(module, "rope_type")
        if not isinstance(kind, str) or kind not in FIXED:
            return None
        frequencies = module.inv_freq.tolist()
        return frequencies, setting(module, "attention_scaling"), len(frequencies), like.dtype, like.device
