"""A device's peak rates, and the floors that they set."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Bytes (read plus written) a second of a large copy, and FLOP a second of a large bf16 matrix product."""

    copy: float
    matmul: float

    def floor(self, bytes: float, flops: float = 0.0) -> float:
        """A lower bound in seconds: all bytes at the rate of a copy, or all FLOPs at that of a matrix product."""
        return max(bytes / self.copy, flops / self.matmul)
