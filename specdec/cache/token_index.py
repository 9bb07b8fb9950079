"""The host's side of a KV cache: which tokens each row has consumed. Rolling back is changing a length.

Committed tokens are at positions ``0 .. length - 1``; after them come the nodes of the proposal that was scored last, which enter
the index through ``commit`` only, because equal tokens do not mean equal ancestors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.types import Context, Verdict


class Row(NamedTuple):
    """One row of a call: buffer row ``b`` is fed the slots ``first:end``, of which those below ``length`` are committed."""

    b: int
    first: int
    length: int
    end: int


class TokenIndex:
    """The tokens that each of ``batch`` rows of up to ``capacity`` tokens has consumed; none at first.

    Attributes:
        begun: for each row what ``PrefixCache`` noted when it began to be read, else ``None``.
    """

    def __init__(self, batch: int, capacity: int):
        self.capacity = capacity
        self._hold(np.zeros((batch, capacity), dtype=np.int64), [0] * batch, [0] * batch, [None] * batch)

    def _hold(self, tokens: np.ndarray, lengths: list[int], fed: list[int], begun: list[Any]) -> None:
        self._tokens, self._lengths, self._fed, self.begun = tokens, lengths, fed, begun

    @property
    def batch(self) -> int:
        return len(self._lengths)

    @property
    def length(self) -> Tensor:
        """``[B]`` on the host: committed tokens in slots."""
        return torch.tensor(self._lengths, dtype=torch.long)

    @property
    def fed_nodes(self) -> Tensor:
        """``[B]`` on the host: nodes of the current proposal in slots."""
        return torch.tensor(self._fed, dtype=torch.long)

    def empty_rows(self) -> list[int]:
        """The rows that hold no token."""
        return [b for b, n in enumerate(self._lengths) if not n]

    def row(self, b: int) -> list[int]:
        """The committed tokens that row ``b`` holds."""
        return self._tokens[b, : self._lengths[b]].tolist()

    def sync(self, context: Context) -> Tensor:
        """Keep the longest prefix of each row that is still in ``context``: lengths change, and nothing is copied.

        Returns:
            ``[B]`` how many tokens need not be fed again. The last committed one always must, since its logits are wanted.
        Raises:
            ValueError: the context has another number of rows.
        """
        return torch.tensor(self.matched(context), dtype=torch.long)

    def matched(self, context: Context) -> list[int]:
        """``sync``, as a list."""
        if context.batch != self.batch:
            raise ValueError(
                f"the context has {context.batch} rows and the cache {self.batch}: select the same rows of both"
            )
        committed, text = context.length.tolist(), context.tokens.numpy()
        held = [min(a, b) for a, b in zip(self._lengths, committed)]
        top = max(held, default=0)
        differ = self._tokens[:, :top] != text[:, :top]
        if differ.any():  # often only after the end of a shorter row
            differ &= np.arange(top) < np.array(held)[:, None]
            for b in np.flatnonzero(differ.any(1)).tolist():
                held[b] = int(differ[b].argmax())
        for b, (new, old) in enumerate(zip(held, self._lengths)):
            if new < old:
                self._lengths[b], self._fed[b] = new, 0  # the slots after the prefix are free again
        return [min(h, n - 1) for h, n in zip(held, committed)]

    def forget_nodes(self, b: int) -> None:
        """Drop the nodes of row ``b``, which are about to be overwritten."""
        self._fed[b] = 0

    def forget(self, b: int) -> None:
        """Drop all tokens of row ``b``."""
        self._lengths[b] = self._fed[b] = 0

    def remember(self, b: int, text: np.ndarray, first: int, length: int, nodes: int) -> None:
        """Note that row ``b`` was fed ``text[first:length]`` and then ``nodes`` nodes of a proposal."""
        if first < length:
            self._tokens[b, first:length] = text[first:length]
        self._lengths[b], self._fed[b] = length, nodes

    def has_nodes(self, b: int, length: int, nodes: int) -> bool:
        """Whether row ``b`` holds ``length`` committed tokens and, after them, at least ``nodes`` nodes."""
        return self._lengths[b] == length and self._fed[b] >= nodes

    def accepted(self, context: Context, verdict: Verdict) -> list[tuple[int, int, list[int]]]:
        """The accepted nodes, which are held, of the proposal that was scored last, in this ``context``; nothing changes.

        Nodes that were never fed here (a draft's last one) are left out, and so are their descendants; rows in which the
        proposal was not scored do not occur. Node ids must be those of the proposal that was scored.

        Returns:
            for each other row its number, its length, and the accepted nodes.
        """
        out: list[tuple[int, int, list[int]]] = []
        paths, accepted = verdict.path.tolist(), verdict.accepted.tolist()
        for b, start in enumerate(context.length.tolist()):
            if self._lengths[b] == start:
                path, fed = paths[b][: accepted[b]], self._fed[b]
                out.append(
                    (b, start, path[: next((d for d, node in enumerate(path) if node >= fed), len(path))])
                )
        return out

    def accept(self, verdict: Verdict, accepted: list[tuple[int, int, list[int]]]) -> None:
        """Note the nodes that are ``accepted``, whose entries are in the slots after the committed tokens, and drop all others."""
        tokens = verdict.tokens.numpy()
        for b, start, path in accepted:
            self._tokens[b, start : start + len(path)] = tokens[b, : len(path)]
            self._lengths[b] = start + len(path)
        self._fed = [0] * self.batch

    def _become(self, b: int, other: TokenIndex, i: int) -> None:
        """Copy row ``i`` of ``other`` to row ``b``."""
        n = other._lengths[i]
        self._tokens[b, :n] = other._tokens[i, :n]
        self._lengths[b], self._fed[b], self.begun[b] = n, other._fed[i], other.begun[i]

    def _hold_both(self, one: TokenIndex, other: TokenIndex) -> None:
        """Become the index of both indices' rows, in order, for texts as long as the longer ones."""
        mine, theirs = one.batch, other.batch
        self.capacity = max(one.capacity, other.capacity)
        tokens = np.zeros((mine + theirs, self.capacity), dtype=np.int64)
        tokens[:mine, : one.capacity], tokens[mine:, : other.capacity] = one._tokens, other._tokens
        pairs = ((one._lengths, other._lengths), (one._fed, other._fed), (one.begun, other.begun))
        self._hold(tokens, *([*a, *b] for a, b in pairs))

    def _rows(self, order: list[int]) -> tuple[np.ndarray, list[int], list[int], list[Any]]:
        """The arguments of ``_hold`` for some rows, in the given order."""
        lengths, fed, begun = ([some[b] for b in order] for some in (self._lengths, self._fed, self.begun))
        return self._tokens[order], lengths, fed, begun
