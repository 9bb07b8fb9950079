"""Which tokens a call has to feed, and where: committed tokens that the cache lacks, then the nodes of a proposal.

Slots below the row's committed length hold committed tokens, and slot ``length + n`` holds node ``n``. The code uses plain lists
because between two forwards the processor's caches are cold, and a loop over a few rows costs less than twenty array operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec import tree
from specdec.cache.token_index import Row, TokenIndex
from specdec.kernels.attention import AttentionPlan, Tree
from specdec.kernels.device import to_device
from specdec.types import Context, Proposal


@lru_cache(maxsize=64)
def _shape_of(parents: bytes, size: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """Ancestors ``[B, N, N]`` and depths ``[B, N]`` for the bytes of parents and sizes (the key of the memoization); ``None`` for chains."""
    counts = torch.from_numpy(np.frombuffer(size, dtype=np.int64).copy())
    table = torch.from_numpy(np.frombuffer(parents, dtype=np.int64).reshape(len(counts), -1).copy())
    if bool(tree.is_chain(table, counts).all()):
        return None
    return tree.ancestors(table).numpy(), tree.depths(table).numpy()


class PrefillChunk(NamedTuple):
    """The tokens of one forward: ``ids [T]``, ``positions [T]``, and ``keep``, the tokens whose logits are wanted."""

    plan: AttentionPlan
    ids: Tensor
    positions: Tensor
    keep: Tensor | bool | None  # indices, None for all, False for none


@dataclass
class PackedBatch:
    """All tokens of a call, packed row after row."""

    rows: list[Row]
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    drafted: Tensor | None = None  # proposed tokens on a device; ``ids`` has zeros in their place
    shape: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def owners(self) -> tuple[Tensor, Tensor, Tensor]:
        """``[T]`` row, position and node of every token; committed tokens have node -1."""
        row = torch.tensor([r.b for r in self.rows for _ in range(r.first, r.end)])
        node = torch.tensor([max(s - r.length, -1) for r in self.rows for s in range(r.first, r.end)])
        return row, torch.tensor(self.positions), node

    def pieces(
        self,
        slots: int,
        limit: int,
        wanted: bool,
        device: torch.device,
        table: Mapping[int, list[int]] | None = None,
        page: int = 0,
    ) -> Iterator[PrefillChunk]:
        """The forwards to run, in order, over a cache of ``slots`` slots a row, each of at most ``limit`` tokens.

        Args:
            wanted: whether logits are wanted, of the last committed token and of nodes.
            table: row -> its pages of ``page`` slots, over a cache in pages; ``slots`` is then the most that a row can have.
        """
        ids, positions, at = self.tensors(device, self.flat(slots, table, page))
        if self.tokens <= limit:
            yield PrefillChunk(
                self._plan(self.rows, slots, at, table, page),
                ids,
                positions,
                self.keep(self.rows, wanted, device),
            )
            return
        for low in range(0, self.tokens, limit):
            part, rows = slice(low, low + limit), self.cut(low, low + limit)
            plan = self._plan(rows, slots, at[part], table, page)
            yield PrefillChunk(plan, ids[part], positions[part], self.keep(rows, wanted, device))

    def flat(self, slots: int, table: Mapping[int, list[int]] | None = None, page: int = 0) -> list[int]:
        """The flat number of every token's slot; arguments as for ``pieces``."""
        if table is None:
            return [r.b * slots + s for r, s in self._slots()]
        return [table[r.b][s // page] * page + s % page for r, s in self._slots()]

    def plan(self, slots: int, table: Mapping[int, list[int]] | None = None, page: int = 0) -> AttentionPlan:
        """The plan of all tokens in one forward, on the host; arguments as for ``pieces``."""
        return self._plan(self.rows, slots, torch.tensor(self.flat(slots, table, page)), table, page)

    def tensors(self, device: torch.device, *more: Sequence[int]) -> tuple[Tensor, ...]:
        """Ids ``[T]``, positions ``[T]``, and ``more`` lists of T numbers, all in one copy to ``device``."""
        ids, *others = to_device(torch.tensor([self.ids, self.positions, *more]), device).unbind(0)
        if self.drafted is not None:
            here = [(i, r.b, s - r.length) for i, (r, s) in enumerate(self._slots()) if s >= r.length]
            where, b, n = to_device(torch.tensor(here), device).unbind(1)
            ids.index_copy_(0, where, self.drafted[b, n])
        return ids, *others

    def _slots(self) -> Iterator[tuple[Row, int]]:
        return ((r, s) for r in self.rows for s in range(r.first, r.end))

    def _plan(
        self, rows: list[Row], slots: int, at: Tensor, table: Mapping[int, list[int]] | None, page: int
    ) -> AttentionPlan:
        shape = None
        if self.shape is not None:
            which = [r.b for r in rows]
            shape = Tree(np.array([r.length for r in rows]), *(table[which] for table in self.shape))
        return AttentionPlan(
            [r.b for r in rows],
            [r.first for r in rows],
            [r.end - r.first for r in rows],
            slots,
            shape,
            at,
            table=None if table is None else [table[r.b] for r in rows],
            page=page,
        )

    def places(self, width: int, begin: int) -> list[int]:
        """Where the logits of the nodes from ``begin`` on go in ``[B * width]``; node -1 is the last committed token."""
        return [
            r.b * width + node - begin
            for r in self.rows
            for node in range(max(r.first - r.length, -1), r.end - r.length)
        ]

    def spread(self, made: Tensor, batch: int, width: int, begin: int, copy: bool) -> Tensor:
        """The logits ``made [K, V]`` of all pieces as ``[B, width, V]``, 0 where there are none. Without ``copy`` the result may share memory with ``made``."""
        V = made.shape[1]
        if made.shape[0] == batch * width:
            logits = made.view(batch, width, V)
            return logits.clone() if copy else logits
        logits = torch.zeros(batch * width, V, dtype=made.dtype, device=made.device)
        if len(made):
            at = to_device(torch.tensor(self.places(width, begin)), made.device)
            logits.index_copy_(0, at, made)
        return logits.view(batch, width, V)

    def remember(self, cache: TokenIndex, context: Context) -> None:
        """Note in the cache what was fed; called after the forward, so that one that fails does not change the token index."""
        text = context.tokens.numpy()
        for b, first, length, end in self.rows:
            cache.remember(b, text[b], first, min(length, end), max(end - length, 0))

    def limit(self, chunk: int, wanted: bool) -> int:
        """The most tokens of a forward: prompts are fed in pieces of ``chunk``; nodes and the tokens before them are verified in one pass."""
        if not wanted or self.tokens <= chunk:
            return chunk
        return max(chunk, 2 * sum(r.end - max(r.first, r.length - 1) for r in self.rows))

    def cut(self, low: int, high: int) -> list[Row]:
        """The part of each row among packed tokens ``low:high``."""
        rows, t = [], 0
        for r in self.rows:
            first, end = r.first + max(low - t, 0), min(r.end, r.first + high - t)
            if first < end:
                rows.append(Row(r.b, first, r.length, end))
            t += r.end - r.first
        return rows

    def parts(self, limit: int, short: int | None = None) -> Iterator[tuple[list[Row], slice | np.ndarray]]:
        """All tokens in forwards of at most ``limit``: the part of each row, and which packed tokens these are.

        Args:
            short: the most tokens of a row in one forward, so that it takes rows side by side; ``None``: as they are packed.
        """
        if short is None:
            for low in range(0, self.tokens, limit):
                yield self.cut(low, low + limit), slice(low, low + limit)
            return
        starts = np.cumsum([0, *(r.end - r.first for r in self.rows)])
        step, longest = min(short, limit), max((r.end - r.first for r in self.rows), default=0)
        for done in range(0, longest, step):
            rows, numbers, count = list[Row](), list[np.ndarray](), 0
            for r, t in zip(self.rows, starts.tolist()):
                first, end = r.first + done, min(r.first + done + step, r.end)
                if first >= end:
                    continue
                if rows and count + end - first > limit:
                    yield rows, np.concatenate(numbers)
                    rows, numbers, count = [], [], 0
                rows.append(Row(r.b, first, r.length, end))
                numbers.append(np.arange(t + done, t + done + end - first))
                count += end - first
            yield rows, np.concatenate(numbers)

    def keep(self, rows: list[Row], wanted: bool, device: torch.device) -> Tensor | bool | None:
        """Whose logits are wanted, as in ``PrefillChunk.keep``: those of the last committed token and of nodes."""
        if not wanted:
            return False
        if all(r.first >= r.length - 1 for r in rows):
            return None
        keep: list[int] = []
        t = 0
        for r in rows:
            keep += range(t + max(r.length - 1 - r.first, 0), t + r.end - r.first)
            t += r.end - r.first
        return to_device(torch.tensor(keep), device) if keep else False


def spans(
    cache: TokenIndex, context: Context, proposal: Proposal | None, start: int | None, rows: Tensor | None
) -> tuple[list[int], list[int]]:
    """Which slots ``first[b]:end[b]`` of each row a call of ``LanguageModel.score`` feeds.

    Raises:
        ValueError: rows do not match, or nodes before ``start`` were not fed in this context.
    """
    length = context.length.tolist()
    end = length
    if proposal is not None and proposal.nodes:
        if len(proposal.size) != len(length):
            raise ValueError(f"the proposal has {len(proposal.size)} rows and the context {len(length)}")
        end = [n + size for n, size in zip(length, proposal.size.tolist())]
    if rows is not None:
        asked = set(rows.tolist())
        end = [e if b in asked else 0 for b, e in enumerate(end)]
    if start is None:
        return cache.matched(context), end
    if start < 0:
        raise ValueError(
            f"start is {start}: give the first node to feed, or None to begin with the committed tokens"
        )
    for b, (n, e) in enumerate(zip(length, end)):
        if n + start < e and not cache.has_nodes(b, n, start):
            raise ValueError(
                f"start is {start} but row {b} has not been fed the nodes before it in this context: score without start first"
            )
    return [n + start for n in length], end


def feed(
    context: Context, proposal: Proposal | None, first: Sequence[int], end: Sequence[int]
) -> PackedBatch:
    """Pack slots ``first[b]:end[b]`` of every row that has any."""
    length, text = context.length.tolist(), context.tokens.numpy()
    out = PackedBatch([Row(b, *span) for b, span in enumerate(zip(first, length, end)) if span[0] < span[2]])
    drafted: list[list[int]] | None = None
    depth: list[list[int]] | None = None
    if proposal is not None:
        parents = proposal.parents.contiguous().numpy()
        out.shape = _shape_of(parents.tobytes(), proposal.size.numpy().tobytes())
        depth = None if out.shape is None else out.shape[1].tolist()
        if proposal.tokens.device.type == "cpu":
            drafted = proposal.tokens.tolist()
        elif any(r.end > r.length for r in out.rows):
            out.drafted = proposal.tokens
    for b, begin, n, stop in out.rows:
        if begin < n:
            out.ids += text[b, begin : min(n, stop)].tolist()
        nodes = range(max(begin - n, 0), stop - n)
        if nodes:
            out.ids += [0] * len(nodes) if drafted is None else drafted[b][nodes.start : nodes.stop]
        if depth is None:
            out.positions += range(begin, stop)
        else:
            out.positions += [*range(begin, min(n, stop)), *(n + depth[b][node] for node in nodes)]
    return out
