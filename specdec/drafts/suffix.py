"""Suffix decoding: the most frequent continuation of the text's end (SuffixDecoding, Oliaro et al., arXiv 2411.04975).

Only the row's own text is searched (the paper's tree of each request), and the proposal is a chain.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from specdec.arguments import numbers, whole
from specdec.capabilities import DraftInfo
from specdec.drafts.stateless import Lookup


@dataclass(frozen=True)
class Suffix(Lookup):
    """Follows what came most often after earlier occurrences of the last tokens, for longer where the match is longer.

    Every length of a match has a path: of the tokens that followed so far, the most frequent one, and of equally frequent ones the latest. Its estimated
    chance is the product of their shares. The path with the largest sum of chances is proposed.

    Args:
        max_match: the longest match, in tokens. factor: a path has at most this many tokens for each token of the match.
        min_chance: a path ends before its estimated chance falls below.
    """

    max_match: int = 24
    factor: float = 1.0
    min_chance: float = 0.1
    info = DraftInfo("suffix", revocable=True)

    def __post_init__(self) -> None:
        whole("max_match", self.max_match)
        numbers(self, "factor", "min_chance")
        if not (self.max_match >= 1 and self.factor > 0 and 0 <= self.min_chance <= 1):
            raise ValueError(
                f"max_match is {self.max_match}, factor {self.factor}, min_chance {self.min_chance}: need max_match >= 1, factor > 0 and a "
                "chance from 0 to 1"
            )

    def lookup(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Up to ``count`` tokens that are likely to follow ``ids [l]``."""
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # where a match could end
        best, most = ids[:0], 0.0
        for n in range(1, self.max_match + 1):
            if not len(ends):
                break
            further = ends[ends >= n]
            further = further[ids[further - n] == ids[-1 - n]] if n < len(ids) else further[:0]
            # Otherwise the longer match has this path, or more of it.
            if len(further) < len(ends) or n == self.max_match:
                longest = min(count, max(1, int(min(count, self.factor * n))))
                path, chances = frequent_path(ids, ends + 1, longest, self.min_chance)
                if chances >= most:
                    best, most = path, chances
            ends = further
        return best


def frequent_path(ids: np.ndarray, at: np.ndarray, count: int, min_chance: float) -> tuple[np.ndarray, float]:
    """Of the continuations that begin at ``at`` (ascending) in ``ids``, the most frequent token and, of those that have it, the most frequent next one, and
    so on; of equally frequent ones the latest.

    Returns:
        up to ``count`` tokens, as long as the product of their shares is at least ``min_chance``, and the sum of these products.
    """
    path: list[int] = []
    chance, chances = 1.0, 0.0
    while len(path) < count and len(at):
        if len(at) == 1:  # the rest is certain
            rest = ids[at[0] : at[0] + count - len(path)].tolist()
            return np.array(path + rest, dtype=ids.dtype), chances + chance * len(rest)
        after = ids[at]
        token, times = _most_frequent(after)
        chance *= times / len(at)
        if chance < min_chance:
            break
        path.append(token)
        chances += chance
        at = at[after == token] + 1
        at = at[at < len(ids)]
    return np.array(path, dtype=ids.dtype), chances


def _most_frequent(tokens: np.ndarray) -> tuple[int, int]:
    """The most frequent token, of several the latest, and how often it occurs."""
    if len(tokens) > 32:
        _, which, times = np.unique(tokens, return_inverse=True, return_counts=True)
        most = int(times.max())
        return int(tokens[np.flatnonzero(times[which] == most)[-1]]), most
    listed = tokens.tolist()  # a short list is counted faster than an array
    counts = Counter(listed)
    most = max(counts.values())
    return next(token for token in reversed(listed) if counts[token] == most), most
