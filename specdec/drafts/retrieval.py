"""Retrieval: what followed the text's last tokens in a corpus (REST, He, Zhong, Cai, Lee, He, arXiv 2311.08252)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import index as whole_number
from typing import Any

import numpy as np

from specdec.arguments import at_least, number, whole
from specdec.capabilities import DraftInfo
from specdec.drafts.stateless import Lookup
from specdec.drafts.suffix import frequent_path
from specdec.protocols import LanguageModel
from specdec.sampling import Sampling

REACH = 32  # tokens by which places are sorted: the longest match
SAMPLED = 256  # places of a match that are looked at, at most


@dataclass(frozen=True)
class Corpus:
    """Texts to search in. The index is made when a decoder is built: about a second and 100 MB for every million tokens.

    Args:
        ids: the tokens of each text.
    Raises:
        TypeError: texts, or anything else, where ids are expected. ValueError: there are no tokens, or an id is negative.
    """

    ids: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        texts = tuple(self.ids) if isinstance(self.ids, Iterable) else ()
        if isinstance(self.ids, str) or any(isinstance(text, str) for text in texts):
            raise TypeError("ids are texts: give Corpus.of(texts, target.tokenizer)")
        if not isinstance(self.ids, Iterable) or not all(isinstance(text, Iterable) for text in texts):
            raise TypeError("ids are no texts of tokens: give a list of ids for each text, [[5, 6], [7]]")
        try:
            ids = tuple(tuple(map(whole_number, text)) for text in texts)
        except TypeError as error:
            raise TypeError(f"ids has a token that is no whole number ({error})") from None
        if not any(ids):
            raise ValueError("ids is empty: give at least one text with a token")
        if min(min(text) for text in ids if text) < 0:
            raise ValueError("ids has a negative token: give ids of the target's vocabulary")
        object.__setattr__(self, "ids", ids)

    @staticmethod
    def of(texts: Iterable[str], tokenizer: Any) -> Corpus:
        """The corpus of some texts, without special tokens.

        Raises:
            TypeError: a single text instead of a list of them, something that is no text, or no tokenizer.
        """
        several = [texts] if isinstance(texts, str) else list(texts)
        if isinstance(texts, str) or not all(isinstance(text, str) for text in several):
            raise TypeError(f"texts is {type(texts).__name__}: give a list of texts")
        if not callable(tokenizer):
            raise TypeError(f"tokenizer is {tokenizer!r}: give the target's, target.tokenizer")
        return Corpus(
            tuple(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in several)
        )

    def __repr__(self) -> str:
        return f"Corpus({len(self.ids)} texts, {sum(map(len, self.ids))} tokens)"

    @cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, with -1 after each text."""
        return np.array([token for text in self.ids for token in (*text, -1)], dtype=np.int64)

    @cached_property
    def _backwards(self) -> bytes:
        """The tokens from the last to the first, four bytes each, so that bytes compare as tokens do; -1 is above all."""
        return self.tokens[::-1].astype(">u4").tobytes()

    @cached_property
    def _order(self) -> np.ndarray:
        """Places of the reversed corpus, sorted by the ``REACH`` tokens from there on: prefix doubling (Manber and Myers, 1993)."""
        _, rank = np.unique(self.tokens[::-1].astype(np.uint32), return_inverse=True)
        n, reach = len(rank), 1
        while reach < min(REACH, n):
            later = np.zeros(n, dtype=np.int64)
            later[: n - reach] = rank[reach:] + 1
            _, rank = np.unique(rank * (n + 1) + later, return_inverse=True)
            reach *= 2
        return np.argsort(rank, kind="stable")

    def index(self) -> None:
        """Make the index, if there is none yet."""
        _ = self._backwards, self._order

    def after(self, ids: np.ndarray, max_match: int, min_match: int) -> np.ndarray:
        """Where in ``tokens`` the continuations of the longest match begin, ascending: of the last ``min_match`` to ``max_match`` tokens of ``ids [l]``."""
        pattern = ids[::-1][:max_match].astype(">u4").tobytes()
        low, high, longest = 0, len(self._order), 0
        shortest, most = min_match, len(pattern) // 4
        while shortest <= most:  # a longer match has no more places
            length = (shortest + most) // 2
            first, last = self._range(pattern[: 4 * length])
            if first < last:
                low, high, longest, shortest = first, last, length, length + 1
            else:
                most = length - 1
        if not longest:
            return self._order[:0]
        places = self._order[low:high]
        if len(places) > SAMPLED:
            places = places[np.linspace(0, len(places) - 1, SAMPLED).astype(int)]
        return np.sort(len(self.tokens) - places)

    def _range(self, pattern: bytes) -> tuple[int, int]:
        """The places that begin with ``pattern``: from, and before which."""
        data, size = self._backwards, len(pattern)

        def key(place: int) -> bytes:
            return data[4 * int(place) : 4 * int(place) + size]

        first = bisect_left(self._order, pattern, key=key)  # type: ignore[arg-type]
        return first, bisect_right(self._order, pattern, first, key=key)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Retrieval(Lookup):
    """Proposes the most frequent continuation, in a corpus, of the longest match of the row's last tokens.

    It needs no model. The paper proposes a tree of several continuations; this is its most frequent path.

    Args:
        corpus: texts like those to come: documents that are quoted, code of the same project, earlier answers.
        max_match, min_match: tokens that are matched. min_chance: a path ends before its share of the continuations falls below.
    Raises:
        TypeError: ``corpus`` is no ``Corpus``. ValueError: matches out of range, or, in ``bind``, ids that the target lacks.
    """

    corpus: Corpus
    max_match: int = 16
    min_match: int = 2
    min_chance: float = 0.1
    info = DraftInfo("retrieval", revocable=True)

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, Corpus):
            raise TypeError(
                f"corpus is a {type(self.corpus).__name__}: give drafts.Corpus.of(texts, target.tokenizer), or drafts.Corpus(ids)"
            )
        whole("max_match", self.max_match)
        at_least(1, "min_match", self.min_match, "give at least 1")
        number("min_chance", self.min_chance)
        if not self.min_match <= self.max_match <= REACH or not 0 <= self.min_chance <= 1:
            raise ValueError(
                f"min_match is {self.min_match}, max_match {self.max_match}, min_chance {self.min_chance}: need min_match <= max_match <= {REACH} "
                "and a chance from 0 to 1"
            )

    @staticmethod
    def example(model: LanguageModel) -> Retrieval:
        """A corpus of two texts (for the contract tests)."""
        return Retrieval(Corpus(((0, 1, 2, 0, 1, 1, 2), (2, 2, 1))), min_match=1)

    def bind(self, target: LanguageModel, sampling: Sampling) -> Retrieval:
        largest = int(self.corpus.tokens.max())
        if largest >= target.vocab_size:
            raise ValueError(
                f"corpus has the id {largest} and the target's vocabulary {target.vocab_size}: make it with the target's tokenizer"
            )
        self.corpus.index()  # now, so that neither the first request waits for it nor every new process makes its own
        return super().bind(target, sampling)

    def lookup(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Up to ``count`` tokens that are likely to follow ``ids [l]``."""
        at = self.corpus.after(ids, self.max_match, self.min_match)
        path, _ = frequent_path(self.corpus.tokens, at, count, self.min_chance)
        ends = np.flatnonzero(path < 0)  # of a text
        return path[: ends[0]] if len(ends) else path
