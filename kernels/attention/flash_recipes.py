"""How FlashAttention kernels serve an ``AttentionPlan``: each recipe is a few calls of one primitive, merged by log-sum-exps.

The primitive is ``Call``: N sequences of queries, each over an interval of the slots of one buffer row, causal (aligned at the
bottom right, with or without a window) or not. Such kernels split the keys over the device and let the heads of a group share
them only for *one query a sequence*, and their masks know neither trees nor positions. Hence:

- **Decoding** is one query a sequence over the interval that it sees; a window only moves the beginning of the interval.
- **A verify pass** over a long context *folds* the queries of a row into heads: below its first new slot all of them see the
  same, so for the kernel they are one query with ``count * heads`` heads. The block of new slots is small and computed densely;
  the two parts are merged. ``plan.fragment`` cuts the first part further (request decomposition, SPIN).
- **A tree** is the same with the ancestors as the mask of the dense block. Under a window its queries see the slots below it
  from different positions on, so each is a sequence of its own there.
- **A plan made of intervals** is a sequence for each interval of each query.
- **First positions beside a window** are one more call, in which neighbouring queries that see as many of them are a sequence.
- **All else** (prompts, windowed chains, short contexts) is one causal call.
- **A sink logit s** takes part of the weight: ``out * sigmoid(lse - s)``, and ``lse`` becomes ``logaddexp(lse, s)``.

Folded queries are padded to those of the largest row; where that would be mostly padding, rows are grouped by their number of
queries, rounded up to a power of two. Slots that no query of a row sees are never read, but for slots of committed tokens below a
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention.merge import merge, merge_two
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, Streaming, binding, near, split
from specdec.kernels.device import to_device

FOLD = 64  # queries of a row up to which a chain may be folded
INTERVALS = 4  # of a query, up to which a plan made of intervals is served
FOLD_FROM = 1024  # slots from which folding is worth its merge; not measured yet


class Sequences:
    """The sequences of one call: int32 tensors on its device, and what is known of them on the host.

    Args:
        rows: ``[N]`` buffer row of each. counts: ``[N]`` its queries, packed. low, high: ``[N]`` its keys are slots ``low:high``.
        table: ``[N, P]`` its pages, where buffers are pages; ``low`` is 0 then.
    Attributes:
        starts: ``[N + 1]`` first query of each. used: ``[N]`` number of its keys.
        max_count, max_used, max_high: of the largest. blind: whether any has no keys.
        known: what a backend remembers about them.
    """

    def __init__(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        device: torch.device,
        table: np.ndarray | None = None,
    ):
        high = np.maximum(low, high)
        starts = np.concatenate([[0], np.cumsum(counts)])
        self.host = rows, counts, low, high
        self.starts, self.rows, self.low, self.high, self.used = upload(
            [starts, rows, low, high, high - low], device
        )
        self.table = None if table is None else upload([table], device)[0]
        self.max_count, self.max_high = int(counts.max()), int(high.max())
        self.max_used = int((high - low).max())
        self.blind, self.from_zero = bool((high <= low).any()), not low.any()
        self.known: dict[Any, Any] = {}


class Call(Protocol):
    """One FlashAttention call: ``query [T, Hq, D]``, the queries of all sequences packed.

    ``keys`` and ``values`` are the buffers that a layer was given. ``causal``: the last query of a sequence sees all of its keys,
    the one before it one less; ``left``: no more than as many keys below its own, -1 for all. Not causal: every query sees all.
    Returns ``[T, Hq, D]`` and the log-sum-exp ``[T, Hq]``, -inf (and 0) for a query without keys.
    """

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sequences: Sequences,
        scale: float,
        softcap: float | None,
        causal: bool,
        left: int,
    ) -> tuple[Tensor, Tensor]: ...


def attend_with_lse(
    call: Call,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as for ``api.attention``; returns output ``[1, T, Hq, D]`` and lse ``[1, T, Hq]``, the sink logits included."""
    q = query[0].transpose(0, 1)
    if q.stride(-1) != 1:
        q = q.contiguous()
    if plan.ordered:
        window = binding(window, max(plan.length))
    key = ("flash", window, query.device)
    recipe = plan.known.get(key)
    if recipe is None:
        recipe = plan.known[key] = _recipe(plan, window, query.device)
    if recipe.whole is not None:
        left = -1 if window is None else split(window)[0] - 1
        out, lse = call(q, keys, values, recipe.whole, scale, softcap, True, left)
    else:
        parts = [g.run(call, q, keys, values, scale, softcap) for g in recipe.groups]
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(p) for p in zip(*parts))
        if recipe.back is not None:
            out, lse = out.index_select(0, recipe.back), lse.index_select(0, recipe.back)
    if recipe.initial is not None:
        out, lse = recipe.initial.onto(out, lse, call, q, keys, values, scale, softcap)
    if sinks is not None:
        logit = sinks.to(lse.dtype)
        lowest = torch.finfo(lse.dtype).min  # -inf - -inf would be NaN
        out = out * torch.sigmoid(lse - logit.clamp_min(lowest))[..., None]
        lse = torch.logaddexp(lse, logit)
    return out.to(query.dtype)[None], lse[None]


@dataclass(frozen=True)
class _Group:
    """Rows with about equally many queries, padded to ``count`` each.

    Attributes:
        take: ``[rows * count]`` the packed query at each place; ``None``: they are all queries in order.
        prefix: one query a sequence, for each row (``folded``) or for each of its queries; ``None``: no slots below the blocks.
        pieces: as many times over, each with its share of the slots. block: the slots above.
    """

    rows: int
    count: int
    take: Tensor | None
    prefix: Sequences | None
    pieces: int
    folded: bool
    block: _Block | None

    def run(
        self, call: Call, q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """``[rows * count, Hq, D]`` and lse ``[rows * count, Hq]``."""
        if self.take is not None:
            q = q.index_select(0, self.take)
        block = None if self.block is None else self.block.run(q, keys, values, scale, softcap)
        if self.prefix is None:
            assert block is not None
            return block
        out, lse = self._below(call, q, keys, values, scale, softcap)
        if block is None:
            return out, lse
        return merge_two(out.to(block[0].dtype), lse, *block)

    def _below(
        self, call: Call, q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        n, width = (self.rows, self.count) if self.folded else (self.rows * self.count, 1)
        (_, heads, size), shared = q.shape, keys.shape[2]
        if width > 1:  # [n, width, Hkv, G, D] -> [n, Hkv, width, G, D]
            q = q.reshape(n, width, shared, -1, size).transpose(1, 2)
        q = q.reshape(n, width * heads, size)
        if self.pieces > 1:
            q = q.repeat(self.pieces, 1, 1)
        assert self.prefix is not None
        out, lse = call(q, keys, values, self.prefix, scale, softcap, False, -1)
        if self.pieces > 1:
            wide = out.to(lse.dtype).reshape(self.pieces, -1, size)
            out, lse = merge(wide, lse.reshape(self.pieces, -1))
        if width > 1:
            out = out.reshape(n, shared, width, -1, size).transpose(1, 2)
            lse = lse.reshape(n, shared, width, -1).transpose(1, 2)
        return out.reshape(-1, heads, size), lse.reshape(-1, heads)


@dataclass(frozen=True)
class _Block:
    """The last slots of some rows, written out: ``buffer_row, slot [rows, K]`` and what is ``hidden [rows, 1, 1, count, K]``."""

    buffer_row: Tensor
    slot: Tensor
    hidden: Tensor

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """``[rows * count, Hq, D]`` in float32 at least, and lse ``[rows * count, Hq]``; every query sees a slot."""
        (_, heads, size), (rows, _, _, count, _), shared = q.shape, self.hidden.shape, keys.shape[2]
        wide = torch.promote_types(q.dtype, torch.float32)
        k = keys[self.buffer_row, self.slot].to(wide)  # [rows, K, Hkv, D]
        v = values[self.buffer_row, self.slot].to(wide)
        folded = q.reshape(rows, count, shared, -1, size).to(wide)
        scores = torch.einsum("rqhgd,rkhd->rhgqk", folded, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(self.hidden, float("-inf"))
        lse = scores.logsumexp(-1)
        out = torch.einsum("rhgqk,rkhd->rqhgd", (scores - lse[..., None]).exp(), v)
        return out.reshape(-1, heads, v.shape[-1]), lse.permute(0, 3, 1, 2).reshape(-1, heads)


@dataclass(frozen=True)
class _Initial:
    """What the packed queries ``take`` (``None``: all) see of the slots below their windows, and below a tree."""

    take: Tensor | None
    sequences: Sequences

    def onto(
        self,
        out: Tensor,
        lse: Tensor,
        call: Call,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """``out [T, Hq, D]`` and ``lse [T, Hq]`` with it."""
        take = self.take
        some = q if take is None else q.index_select(0, take)
        more, more_lse = call(some, keys, values, self.sequences, scale, softcap, False, -1)
        more = more.to(out.dtype)
        if take is None:
            return merge_two(out, lse, more, more_lse)
        made = merge_two(out.index_select(0, take), lse.index_select(0, take), more, more_lse)
        return out.index_copy(0, take, made[0]), lse.index_copy(0, take, made[1])


@dataclass(frozen=True)
class _Recipe:
    """One causal call for everything, or groups of rows; ``back [T]``: where each packed query is among theirs.

    ``initial``: what packed queries see below their windows; ``None``: nothing.
    """

    whole: Sequences | None
    groups: list[_Group]
    back: Tensor | None
    initial: _Initial | None = None


def _recipe(plan: AttentionPlan, window: Reach, device: torch.device) -> _Recipe:
    made = _latest(plan, window, device)
    return replace(made, initial=_initial(plan, window, device)) if isinstance(window, Streaming) else made


def _initial(plan: AttentionPlan, window: Streaming, device: torch.device) -> _Initial | None:
    """Neighbouring queries of a row that see equally many of the first slots are one sequence; ``None``: no query sees any."""
    rows, counts = np.asarray(plan.rows), np.asarray(plan.counts)
    row = np.repeat(np.arange(len(rows)), counts)
    slot = np.concatenate([np.arange(f, f + n) for f, n in zip(plan.first, plan.counts)])
    high = np.minimum(window.initial, _positions(plan, row, slot[:, None])[:, 0] - window.window + 1)
    if plan.tree is not None:  # from there on it is the block's matter
        high = np.minimum(high, np.minimum(plan.first, plan.tree.root)[row])
    take = np.flatnonzero(high > 0)
    if not len(take):
        return None
    row, high = row[take], high[take]
    starts = np.flatnonzero(np.diff(row, prepend=-1) | np.diff(high, prepend=-1))
    length, low, table = np.diff(starts, append=len(take)), np.zeros_like(starts), pages(plan)
    table = None if table is None else table[row[starts]]
    sequences = Sequences(rows[row[starts]], length, low, high[starts], device, table)
    return _Initial(None if len(take) == len(slot) else upload([take], device, np.int64)[0], sequences)


def _latest(plan: AttentionPlan, window: Reach, device: torch.device) -> _Recipe:
    """All but the first positions beside a window."""
    intervals = getattr(plan, "intervals", None)
    if intervals is not None:
        return _Recipe(None, [_ranges(plan, intervals, device)], None)
    counts, most = np.asarray(plan.counts), max(plan.counts)
    folds = most <= FOLD and (plan.fragment is not None or max(plan.length) >= FOLD_FROM)
    if most == 1:
        chain = window is not None and plan.table is not None  # pages have no intervals, but windows
    else:
        chain = window is not None or not folds
    if plan.tree is None and chain:
        zero, rows, length = np.zeros_like(counts), np.asarray(plan.rows), np.asarray(plan.length)
        return _Recipe(Sequences(rows, counts, zero, length, device, pages(plan)), [], None)
    groups, places = [], []
    starts = np.concatenate([[0], np.cumsum(counts)])
    padding = len(counts) * most > 4 * counts.sum()  # a little costs less than more calls
    for rows in by_count(counts) if padding else [np.arange(len(counts))]:
        count = int(counts[rows].max())
        query = np.minimum(np.arange(count), counts[rows][:, None] - 1)  # [n, count], the last one repeated
        take = starts[rows][:, None] + query
        places.append(take.reshape(-1))
        groups.append(_group(plan, window, device, rows, count, query))
    order = np.concatenate(places)
    if (order == np.arange(len(order))).all():
        return _Recipe(None, groups, None)
    back = np.zeros(int(starts[-1]), dtype=np.int64)
    back[order[::-1]] = np.arange(len(order))[::-1]  # the first of those that are repeated
    takes = upload([*places, back], device, np.int64)
    groups = [
        _Group(g.rows, g.count, t, g.prefix, g.pieces, g.folded, g.block) for g, t in zip(groups, takes)
    ]
    return _Recipe(None, groups, takes[-1])


def _ranges(
    plan: AttentionPlan, intervals: Sequence[Sequence[tuple[int, int]]], device: torch.device
) -> _Group:
    """Every interval of every query as a sequence of its own; those of one query are merged."""
    T, pieces = len(intervals), max(1, *map(len, intervals))
    ends = np.zeros((2, pieces, T), dtype=np.int64)  # no slots, where a query has fewer
    for t, own in enumerate(intervals):
        for n, interval in enumerate(own):
            ends[:, n, t] = interval
    rows = np.tile(np.repeat(plan.rows, plan.counts), pieces)
    sequences = Sequences(
        rows, np.ones(T * pieces, dtype=np.int64), ends[0].reshape(-1), ends[1].reshape(-1), device
    )
    return _Group(T, 1, None, sequences, pieces, False, None)


def _group(
    plan: AttentionPlan,
    window: Reach,
    device: torch.device,
    rows: np.ndarray,
    count: int,
    query: np.ndarray,
) -> _Group:
    """``rows [n]`` of the plan; ``query [n, count]`` numbers of their queries."""
    n = len(rows)
    first, length = np.asarray(plan.first)[rows], np.asarray(plan.length)[rows]
    slot = first[:, None] + query
    buffer_rows, table = np.asarray(plan.rows)[rows], pages(plan)
    table = None if table is None else table[rows]
    if count == 1 and plan.tree is None:  # a query sees itself too: nothing is left for a block
        low = np.zeros_like(first) if window is None else np.maximum(0, first - split(window)[0] + 1)
        bottom, block = length, None
    else:
        low = np.zeros_like(first)
        bottom = first if plan.tree is None else np.minimum(first, np.asarray(plan.tree.root)[rows])
        block = _block(plan, window, device, rows, slot, bottom, length - bottom)
    if not (bottom > low).any():
        return _Group(n, count, None, None, 1, True, block)
    if window is not None and plan.tree is not None:
        low = np.maximum(0, _positions(plan, rows, slot) - split(window)[0] + 1).reshape(-1)
        ones = np.ones(n * count, dtype=np.int64)
        prefix = Sequences(np.repeat(buffer_rows, count), ones, low, np.repeat(bottom, count), device)
        return _Group(n, count, None, prefix, 1, False, block)
    size = plan.fragment if plan.fragment is not None and table is None else int(bottom.max())
    pieces = max(1, -(-int((bottom - low).max()) // size))
    begin = (low + size * np.arange(pieces)[:, None]).reshape(-1)
    end = np.minimum(begin + size, np.tile(bottom, pieces)) if pieces > 1 else bottom
    begin = np.minimum(begin, np.tile(bottom, pieces))
    ones = np.ones(n * pieces, dtype=np.int64)
    prefix = Sequences(np.tile(buffer_rows, pieces), ones, begin, end, device, table)
    return _Group(n, count, None, prefix, pieces, True, block)


def _block(
    plan: AttentionPlan,
    window: Reach,
    device: torch.device,
    rows: np.ndarray,
    slot: np.ndarray,
    bottom: np.ndarray,
    slots: np.ndarray,
) -> _Block:
    """The slots ``bottom:bottom + slots`` of ``rows [n]`` for the queries at ``slot [n, count]``."""
    key = bottom[:, None] + np.arange(int(slots.max()))  # [n, K]
    seen = _seen(plan, rows, slot, key) & (key < (bottom + slots)[:, None])[:, None]
    if window is not None:
        seen &= near(_positions(plan, rows, slot)[:, :, None], _positions(plan, rows, key)[:, None], window)
    used = seen.any(1)
    some = np.take_along_axis(key, used.argmax(1)[:, None], 1)
    key = np.where(used, key, some)  # slots that nothing sees may hold anything, or not exist
    if plan.table is None:
        buffer_row = np.broadcast_to(np.asarray(plan.rows)[rows][:, None], key.shape)
    else:
        table = pages(plan)
        assert table is not None
        buffer_row = np.take_along_axis(table[rows], key // plan.page, 1)
        key = key % plan.page
    row, at = upload([buffer_row, key], device, np.int64)
    return _Block(row, at, to_device(torch.from_numpy(~seen[:, None, None]), device))


def _seen(plan: AttentionPlan, rows: np.ndarray, slot: np.ndarray, key: np.ndarray) -> np.ndarray:
    """``[n, q, K]``: whether the queries at ``slot [n, q]`` see the slots ``key [n, K]``, windows aside."""
    seen = key[:, None] <= slot[:, :, None]
    if plan.tree is not None:
        root, last = np.asarray(plan.tree.root)[rows][:, None], plan.tree.depth.shape[1] - 1
        node, other = slot - root, key - root
        above = plan.tree.ancestors[
            rows[:, None, None], node.clip(0, last)[:, :, None], other.clip(0, last)[:, None]
        ]
        seen = np.where((other >= 0)[:, None], above & (node >= 0)[:, :, None], seen)
    return seen


def _positions(plan: AttentionPlan, rows: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """``[n, q]`` positions in the text of ``slot [n, q]``."""
    if plan.tree is None:
        return slot
    root, depth = np.asarray(plan.tree.root)[rows][:, None], np.asarray(plan.tree.depth)[rows]
    node = slot - root
    return np.where(node < 0, slot, root + np.take_along_axis(depth, node.clip(0, depth.shape[1] - 1), 1))


def by_count(counts: np.ndarray) -> list[np.ndarray]:
    """Rows with about equally many queries: those whose counts have the same power of two above them, in order."""
    power = np.ceil(np.log2(counts)).astype(int)
    return [np.flatnonzero(power == p) for p in np.unique(power)]


def pages(plan: AttentionPlan) -> np.ndarray | None:
    """``[R, P]`` pages of each row, 0 beyond its last; ``None`` for slots."""
    if plan.table is None:
        return None
    made = np.zeros((len(plan.table), max(map(len, plan.table))), dtype=np.int64)
    for row, own in zip(made, plan.table):
        row[: len(own)] = own
    return made


def upload(arrays: Sequence[np.ndarray], device: torch.device, dtype: Any = np.int32) -> list[Tensor]:
    """All in one copy."""
    flat = np.concatenate([np.asarray(a, dtype=dtype).reshape(-1) for a in arrays])
    parts = to_device(torch.from_numpy(flat), device).split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays)]
