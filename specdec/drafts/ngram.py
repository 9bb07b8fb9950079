"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023, "Prompt lookup decoding")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec.arguments import whole
from specdec.capabilities import DraftInfo
from specdec.drafts.stateless import Lookup


@dataclass(frozen=True)
class NGram(Lookup):
    """Proposes what followed the longest match of the last ``min_match`` to ``max_match`` tokens; of equally long matches, the latest.

    It needs no model. A row without a match proposes nothing and still gets its token from the target.
    """

    max_match: int = 3
    min_match: int = 1
    info = DraftInfo("ngram", revocable=True)

    def __post_init__(self) -> None:
        whole("min_match", self.min_match)
        whole("max_match", self.max_match)
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"min_match is {self.min_match}, max_match {self.max_match}: need 1 <= min_match <= max_match"
            )

    def lookup(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Up to ``count`` tokens that followed the best earlier match of the end of ``ids [l]``."""
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # where a match could end
        best = None
        for n in range(1, self.max_match + 1):
            if not len(ends):
                break
            if n >= self.min_match:
                best = ends
            ends = ends[ends >= n]
            ends = ends[ids[ends - n] == ids[-1 - n]] if n < len(ids) else ends[:0]
        if best is None or count == 0:
            return ids[:0]
        at = int(best[-1]) + 1
        return ids[at : at + count]
