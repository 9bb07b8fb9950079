"""The attention plan of one forward: built once on the host, shared by all layers.

``T`` new tokens of ``R`` rows are packed without padding; row ``r`` has ``counts[r]`` of them, and they take the slots
``first[r], first[r] + 1, ...`` of buffer row ``rows[r]``. A query sees the slots of its row up to its own (causal); where the
last slots hold a tree of proposed tokens, it sees its ancestors among them instead (SpecInfer, arXiv 2305.09781). A sliding
window is a matter of *positions*, which in a tree are not slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention.plan_checks import check_counts, check_slots, check_table, check_tree
from specdec.kernels.attention.reach import Reach, Streaming, near, split
from specdec.kernels.device import to_device


class Tree(NamedTuple):
    """The proposed tokens at the end of each row, those of earlier calls included.

    ``root [R]``: slot of node 0 (= its position when its depth is 0); ``ancestors [R, N, N]`` bool: entry ``[r, n, m]`` tells
    that node m is n itself or an ancestor; ``depth [R, N]``. Entries of nodes that do not exist are never read.
    """

    root: np.ndarray
    ancestors: np.ndarray
    depth: np.ndarray


class Segment(NamedTuple):
    """Neighbouring buffer rows with equally many queries: one call of a batched kernel."""

    r0: int  # rows r0:r1 of the plan
    r1: int
    b0: int  # buffer rows b0:b0 + (r1 - r0)
    t0: int  # packed queries t0:t0 + (r1 - r0) * queries
    queries: int
    keys: int  # its rows see slots 0:keys only


def mostly_padding(length: Sequence[int]) -> bool:
    """Whether a batched call, padded to the longest row, would mask more than half of its slots."""
    return len(length) * max(length) > 2 * sum(length) + 64 * len(length)


@dataclass
class AttentionPlan:
    """Where the packed tokens of one forward are stored, and what they see.

    Args:
        rows: ``[R]`` buffer row of each row, in any order; neighbours that ascend one by one share calls. first: ``[R]`` slot of
            its first query. counts: ``[R]`` its queries, at least 1: a row without queries is left out.
        capacity: slots of a buffer row. tree: where the last slots are not causal.
        slots: ``[T]`` indices of the new tokens' slots in a buffer flattened to ``[B * capacity, H, D]``, if they are already known.
        watch: called in every layer, in order, with the queries ``[1, Hq, T, D]`` and the scale, window, softcap and sink logits
            that a backend gets.
        fragment: slots of a fragment, if decomposition is not to choose them.
        table: ``[R][...]`` pages of each row, where buffers are ``[pages, page, H, D]``: slot s of row r is slot ``s % page`` of
            page ``table[r][s // page]``. ``rows`` are then only labels, and ``capacity`` is ignored.
        page: slots of a page; 0 without a table.
    Raises:
        ValueError: rows, first and counts of different lengths, or empty; a row without queries, with a negative slot, or beyond
            the capacity; a table without a page size or vice versa, or with too few pages for a row; a tree with other rows or too
            few nodes; not one slot per query; a fragment below 1.
    """

    rows: Sequence[int]
    first: Sequence[int]
    counts: Sequence[int]
    capacity: int
    tree: Tree | None = None
    slots: Tensor | None = None
    watch: Callable[[Tensor, float, Reach, float | None, Tensor | None], None] | None = None
    fragment: int | None = None
    table: Sequence[Sequence[int]] | None = None
    page: int = 0
    attend: ClassVar[Callable[..., Tensor] | None] = (
        None  # if set, it computes every layer instead of a backend
    )
    ordered: ClassVar[bool] = True  # slot numbers are positions (except for a tree's nodes)
    # Whether every position is one that the model supports, or that of a token whose results are not used.
    bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_counts(self.rows, self.first, self.counts)
        # [R] slots in use, the new ones included
        self.length = [f + c for f, c in zip(self.first, self.counts)]
        check_slots(
            self.first, self.length, sum(self.counts), self.slots,
            None if self.table is not None else self.capacity,
        )  # fmt: skip
        if self.fragment is not None and self.fragment < 1:
            raise ValueError(f"fragment is {self.fragment}: give at least 1 slot, or None")
        if self.tree is not None:
            check_tree(*self.tree, self.length)
        self.layer = 0  # the attending layer, in plans whose ``visible`` depends on it
        self.segments = self._segments()
        self._masks: dict[Any, Any] = {}
        self.known: dict[Any, Any] = {}  # caches shared by all layers
        if self.table is not None or self.page:
            check_table(self.table, self.page, self.length)
        if self.slots is None:
            runs = zip(self.rows, self.first, self.counts)
            if self.table is None:
                flat = [r * self.capacity + f + i for r, f, c in runs for i in range(c)]
            else:
                p = self.page
                flat = [
                    pages[s // p] * p + s % p
                    for pages, (_, f, c) in zip(self.table, runs)
                    for s in range(f, f + c)
                ]
            self.slots = torch.tensor(flat)

    def __getstate__(self) -> dict[str, Any]:
        """All fields except caches, which may hold addresses."""
        return {**vars(self), "known": {}, "_masks": {}}

    def slots_on(self, device: torch.device) -> Tensor:
        """``slots`` on a layer's device: a model may be spread over several."""
        assert self.slots is not None
        if self.slots.device != device:
            key = ("slots", device)
            if key not in self.known:
                self.known[key] = to_device(self.slots, device)
            return self.known[key]
        return self.slots

    def part(self, rows: Sequence[int]) -> tuple[AttentionPlan, Tensor]:
        """The plan of some ``rows`` of this one (ascending, counted from 0), and the indices ``[T']`` of their packed tokens."""
        starts = [0, *accumulate(self.counts)]
        at = torch.tensor([t for r in rows for t in range(starts[r], starts[r + 1])])
        assert self.slots is not None
        tree, which = self.tree, list(rows)
        if tree is not None:
            tree = Tree(tree.root[which], tree.ancestors[which], tree.depth[which])
        made = AttentionPlan(
            [self.rows[r] for r in rows],
            [self.first[r] for r in rows],
            [self.counts[r] for r in rows],
            self.capacity,
            tree,
            self.slots[to_device(at, self.slots.device)],
            fragment=self.fragment,
            table=None if self.table is None else [self.table[r] for r in rows],
            page=self.page,
        )
        return made, at

    def _segments(self) -> list[Segment]:
        return self.runs(mostly_padding(self.length))

    def runs(self, alone: bool = False) -> list[Segment]:
        """Segments of neighbouring rows with equally many queries, or each row ``alone``."""
        rows, counts, length = self.rows, self.counts, self.length
        R = len(rows)
        if R == 1:
            return [Segment(0, 1, rows[0], 0, counts[0], length[0])]
        starts = [
            r for r in range(R) if alone or not r or counts[r] != counts[r - 1] or rows[r] != rows[r - 1] + 1
        ]
        offsets = [0, *accumulate(counts)]
        return [
            Segment(a, b, rows[a], offsets[a], counts[a], max(length[a:b])) for a, b in pairwise([*starts, R])
        ]

    def at(self, s: Segment, r0: int, r1: int, keys: int) -> Segment:
        """Rows ``r0:r1`` of a segment, with ``keys`` slots."""
        skipped = r0 - s.r0
        return Segment(r0, r1, s.b0 + skipped, s.t0 + skipped * s.queries, s.queries, keys)

    def _query_slots(self, s: Segment) -> np.ndarray:
        """``[R, q]`` slot of each query."""
        return np.array(self.first[s.r0 : s.r1])[:, None] + np.arange(s.queries)

    def _query_positions(self, s: Segment) -> np.ndarray:
        """``[R, q]`` position in the text of each query."""
        slot = self._query_slots(s)
        if self.tree is None:
            return slot
        root, depth = self.tree.root[s.r0 : s.r1, None], self.tree.depth[s.r0 : s.r1]
        node = slot - root
        return np.where(node < 0, slot, root + np.take_along_axis(depth, node.clip(0, depth.shape[1] - 1), 1))

    def positions(self, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
        """``[R, q]`` position in the text of each query of a segment, and ``[R, keys]`` of each of its slots."""
        s = segment
        slots = np.repeat(np.arange(s.keys)[None], s.r1 - s.r0, 0)
        if self.tree is not None:
            for slot, root, depth in zip(slots, self.tree.root[s.r0 : s.r1], self.tree.depth[s.r0 : s.r1]):
                nodes = max(0, s.keys - root)
                slot[root:] = root + np.pad(depth, (0, max(0, nodes - len(depth))))[:nodes]
        return self._query_positions(s), slots

    def low(self, segment: Segment, window: int | Streaming) -> int:
        """The slots below are outside every query's window (at most the root of a tree); 0 if first positions are seen beside it."""
        if isinstance(window, Streaming):
            return 0
        key = ("low", segment.r0, segment.r1, window)
        if key not in self.known:
            if self.tree is None:
                low = min(self.first[segment.r0 : segment.r1]) - window + 1
            else:
                low = int(self._query_positions(segment).min()) - window + 1
                low = min(low, int(self.tree.root[segment.r0 : segment.r1].min()))
            self.known[key] = max(0, low)
        return self.known[key]

    def causal(self, segment: Segment, window: Reach, low: int) -> bool:
        """Whether a segment is a text from its beginning, so that a kernel's causal mask is right."""
        s = segment
        alone = s.r1 - s.r0 == 1 and self.ordered and self.tree is None and window is None
        return alone and low == self.first[s.r0] == 0 and 1 < s.queries == s.keys

    def hides(self, segment: Segment, window: Reach, low: int) -> bool:
        """Whether a call for the slots ``low:segment.keys`` may read slots that no query of their row sees."""
        key = ("hides", segment, window, low)
        made = self.known.get(key)
        if made is None:
            rows = slice(segment.r0, segment.r1)
            made = not self.ordered or self.tree is not None or min(self.length[rows]) < segment.keys
            if not made and window is not None:
                made = isinstance(window, Streaming) or max(self.first[rows]) - window + 1 > low
            self.known[key] = made
        return made

    def _open(self, s: Segment, window: Reach, low: int) -> bool:
        """Whether every query of a segment sees all of ``low:s.keys``."""
        key = ("open", s, window, low)
        if key not in self.known:
            rows, tree = slice(s.r0, s.r1), self.tree
            all_seen = self.ordered and min(self.first[rows]) + 1 >= s.keys
            if tree is not None:
                all_seen = all_seen and window is None and int(tree.root[rows].min()) >= s.keys
            if window is not None:
                size, initial = split(window)
                all_seen = all_seen and max(self.length[rows]) - 1 - size < max(low, initial)
            self.known[key] = all_seen
        return self.known[key]

    def blind(self, segment: Segment, window: Reach, low: int, device: torch.device) -> Tensor | None:
        """``[R, 1 or Hq, q]`` bool: which queries see none of ``low:segment.keys``; ``None`` if all see some."""
        key = ("blind", segment, window, low, device, self.layer)
        if key not in self.known:
            blind = ~torch.as_tensor(self.visible(segment, window, low)).any(-1)  # [R, q], or [R, Hq, q]
            blind = blind[:, None] if blind.dim() == 2 else blind
            self.known[key] = to_device(blind, device) if bool(blind.any()) else None
        return self.known[key]

    def visible(self, segment: Segment, window: Reach = None, low: int = 0) -> np.ndarray:
        """``[R, q, keys - low]`` bool: which slots from ``low`` on each query of a segment sees.

        Args:
            window: a query at position p sees positions above p - window only, and the first ones of ``Streaming``.
        """
        s, tree, query = segment, self.tree, self._query_slots(segment)
        if tree is None:
            key = np.arange(low, s.keys)
            seen = key <= query[:, :, None]
            if window is not None:
                seen &= near(query[:, :, None], key, window)
            return seen
        root, ancestors, depth = (t[s.r0 : s.r1] for t in tree)
        N, r = depth.shape[1], np.arange(s.r1 - s.r0)[:, None]
        wanted, low = low, min(low, int(root.min()))
        # Spare columns take nodes beyond a row's end (or the end of this part of it).
        key = np.arange(low, max(s.keys, int(root.max())) + N)
        seen = key <= query[:, :, None]
        node, column = query - root[:, None], root[:, None] - low + np.arange(N)
        above = ancestors[r, node.clip(0, N - 1)] & (node >= 0)[:, :, None]
        seen[r[:, :, None], np.arange(s.queries)[:, None], column[:, None, :]] = above
        if window is not None:
            position = np.repeat(key[None], len(r), 0)
            position[r, column] = root[:, None] + depth
            seen &= near(self._query_positions(s)[:, :, None], position[:, None, :], window)
        return seen[:, :, wanted - low : s.keys - low]

    def mask(
        self, segment: Segment, window: Reach, low: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """An additive mask: 0 where a query sees a slot, -inf elsewhere. Built once per forward.

        Returns:
            ``[R, 1, q, keys - low]``, or ``[q, keys - low]`` for a single chain; ``None`` if all is seen.
        """
        s = segment
        key = (s, window, low, dtype, device)
        made = self._masks.get(key)
        if made is None and not self._open(s, window, low):
            if not isinstance(window, Streaming) and self._band_serves(s):
                at = self.capacity - self.first[s.r0]
                made = _band(s.queries, self.capacity, window, dtype, device)[:, at + low : at + s.keys]
            else:
                seen = torch.from_numpy(self.visible(s, window, low)[:, None])
                made = to_device(additive(seen, dtype), device)
            self._masks[key] = made
        return made

    def folded_mask(
        self, segment: Segment, window: Reach, low: int, dtype: torch.dtype, device: torch.device, group: int
    ) -> Tensor | None:
        """``mask`` for ``group`` heads that share keys folded into queries: ``[..., group * q, keys - low]``."""
        mask = self.mask(segment, window, low, dtype, device)
        if mask is None:
            return None
        if mask.dim() == 4 and mask.shape[1] > 1:  # a mask for each head
            return mask.view(mask.shape[0], mask.shape[1] // group, -1, mask.shape[3])
        key = ("folded", segment, window, low, dtype, device, group)
        if key not in self._masks:
            self._masks[key] = mask.repeat(*(1,) * (mask.dim() - 2), group, 1)
        return self._masks[key]

    def _band_serves(self, s: Segment) -> bool:
        alone = self.ordered and self.tree is None and s.r1 - s.r0 == 1
        return alone and s.queries <= 32 and s.keys <= self.length[s.r0] <= self.capacity


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask: 0 where ``seen``, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


@lru_cache(maxsize=16)
def _band(
    queries: int, capacity: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """``[q, capacity + q]`` additive mask of queries at slots ``capacity + i``; the mask of every chain is a slice of it."""
    i, j = torch.arange(queries)[:, None], torch.arange(capacity + queries)
    hidden = j > capacity + i
    if window is not None:
        hidden |= j <= capacity + i - window
    with torch.inference_mode(False):
        band = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden.clone(), float("-inf"))
        return to_device(band, device)
