"""Attention of packed queries over slots or pages, and the merge of its parts, as Triton kernels.

One program takes the queries of one row that share a KV head (all heads of the group, so keys and values are read once), and one
chunk of the row's slots: flash-decoding (Dao et al., 2023) with an online softmax (Milakov & Gimelshein, arXiv 1805.02867).

The arithmetic is batch-invariant: a query's result does not depend on the other queries of the call. Slots are read in tiles that
begin at multiples of BN, in order, and a tile that a query does not see changes nothing: its weights are exactly 0, and the factor
that rescales earlier sums is exactly 1. Products that feed sums are fused explicitly, since a compiler may fuse them in one variant
of a kernel and not in another. With equal chunks, BM and BN, a query therefore gets equal bits in a step of one query or of many.

This module imports triton; nothing else of the library does.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

INTERPRET: bool = bool(triton.knobs.runtime.interpret)  # read once, since decorators use it, too

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

loop: Any = tl.range
if INTERPRET:

    def loop(start: Any, end: Any, step: int, **_: Any) -> range:
        """``tl.range`` with tensors as bounds, which the interpreter does not support with every NumPy version."""
        low, high = (int(b.handle.data.item()) if isinstance(b, tl.tensor) else b for b in (start, end))
        return range(low, high, step)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _offsets(table, s0, s, inside, row, by_row, by_slot, PAGE: tl.constexpr, BN: tl.constexpr):
    """int64 ``[BN]``: where slots ``s`` (from ``s0`` on) are in a buffer."""
    if PAGE > 0:
        if PAGE % BN == 0:  # one page holds the tile
            row = tl.load(table + s0 // PAGE).to(tl.int64)
        else:
            row = tl.load(table + s // PAGE, mask=inside, other=0).to(tl.int64)
        s = s % PAGE
    return row * by_row + s.to(tl.int64) * by_slot


@triton.jit
def _load(pointers, mask, Query, UPCAST: tl.constexpr):
    """In the dtype of queries: keys and values may have eight bits."""
    x = tl.load(pointers, mask=mask, other=0.0).to(Query.dtype.element_ty)
    if UPCAST:  # products of half precision are wrong in the interpreter
        x = x.to(tl.float32)
    return x


@triton.jit(
    do_not_specialize=[
        "factor",
        "bend",
        "window",
        "initial",
        "chunk",
        "align",
        "tiles",
        "nodes",
        "l_c",
        "depth_r",
        "table_r",
        "seen_h",
        "seen_t",
        "ring_first",
        "ring_size",
        "ring_far",
    ],
    do_not_specialize_on_alignment=["Position"],
)
def attend_kernel(
    Query,  # [T, Hq, D]
    Keys,  # [B, S, Hkv, D], or pages
    Values,  # [B, S, Hkv, DV]
    Out,  # [chunks, T, Hq, DV] float32, or [T, Hq, DV] with DIRECT
    Lse,  # [chunks, T, Hq] float32 to base 2, or [T, Hq] natural with DIRECT; None: not returned
    Starts,  # these are the fields of Lowered
    Length,
    Rows,
    Root,
    Words,
    Depth,
    Table,
    Seen,
    Position,  # [R] int64, of a row's only query, if slots are a ring; else None
    Sinks,  # [Hq] or None
    factor,  # from scores to exponents of base 2: scale * log2(e), or softcap * log2(e) with a soft cap
    bend,  # 2 * log2(e) * scale / softcap
    window,
    initial,  # slots below it are seen whatever the window, or None
    chunk,  # slots, a multiple of BN
    align,  # the slots of a row's windows begin at a multiple of this, a multiple of BN
    tiles,  # of BM for the largest row
    nodes,  # N of Depth
    q_t,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    o_c,
    o_t,
    o_h,
    l_c,
    l_t,
    depth_r,
    table_r,
    seen_h,
    seen_t,
    ring_first,  # slots before the ring, of the first positions
    ring_size,
    ring_far,  # first positions are seen less than this far back; those in the ring less than ``window``
    G: tl.constexpr,  # query heads that share a KV head
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PAGE: tl.constexpr,  # 0: slots
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIRECT: tl.constexpr,  # there is one chunk: no partial results
    UPCAST: tl.constexpr,
):
    r = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    h = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2)

    # The loads come before the branch, so that they do not wait for its condition.
    t0 = tl.load(Starts + r)
    count = tl.load(Starts + r + 1) - t0
    n = tl.load(Length + r)
    root = tl.load(Root + r)
    row = tl.load(Rows + r).to(tl.int64)
    if tile * BM < count * G:
        first = n - count

        m = tile * BM + tl.arange(0, BM)
        i = m // G
        valid = i < count
        head = h * G + m % G
        token = (t0 + i).to(tl.int64)
        slot = first + i
        last = first + tl.minimum(count - 1, (tile * BM + BM - 1) // G)

        position = slot
        if Words is not None:
            word = tl.load(Words + token, mask=valid, other=0)
            if WINDOW:
                node = slot - root
                own = tl.load(Depth + r * depth_r + node, mask=valid & (node >= 0) & (node < nodes), other=0)
                position = tl.where(node >= 0, root + own, slot)
                # Clear the bits of ancestors outside the window.
                each = tl.arange(0, 64)
                theirs = root + tl.load(Depth + r * depth_r + each, mask=each < nodes, other=0)
                flag = tl.full([64], 1, tl.int64) << each.to(tl.int64)
                near = theirs[None, :] > position[:, None] - window
                if initial is not None:
                    near = near | (theirs < initial)[None, :]
                word = word & tl.sum(tl.where(near, flag[None, :], 0), 1)
            union = tl.reduce(word, 0, _either)

        # These queries see slots low:high and the first ones. The first slots and those of the row's windows, from base on, are cut
        # into chunks as if adjacent, and begin:end is one chunk.
        low = n * 0
        high = last + 1
        if Words is not None or Seen is not None or Position is not None:
            high = n
        base = n * 0
        if (
            Position is not None
        ):  # the query's own slot in the ring, for positions before the ring the one that it would have
            mine = tl.load(Position + r).to(tl.int32)
            own_slot = (mine - ring_first) % ring_size
            own_slot = ring_first + tl.where(own_slot < 0, own_slot + ring_size, own_slot)
        if WINDOW:
            low = tl.min(tl.where(valid, position, n), 0) - window + 1
            base = tl.minimum(first, root) - window + 1
            if Words is not None:
                low = tl.minimum(low, root)
            low = tl.maximum(low, 0)
            base = tl.maximum(base, 0) // align * align
        begin = base + c * chunk
        end = tl.minimum(begin + chunk, high)
        if initial is not None:
            ahead = (initial + align - 1) // align * align
            skipped = tl.maximum(base - ahead, 0)
            begin = c * chunk
            end = tl.minimum(begin + chunk, high - skipped)
            begin = tl.where(begin < ahead, begin, tl.maximum(begin, low // BN * BN - skipped))
        else:
            begin = tl.maximum(begin, low // BN * BN)

        d = tl.arange(0, BD)
        dv = tl.arange(0, BDV)
        q = _load(
            Query + token[:, None] * q_t + head[:, None] * q_h + d[None, :],
            valid[:, None] & (d < D)[None, :],
            Query,
            UPCAST,
        )
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BDV], tl.float32)

        for at0 in loop(begin, end, BN):
            s0 = at0
            if initial is not None:
                s0 = tl.where(at0 < ahead, at0, at0 + skipped)
            s = s0 + tl.arange(0, BN)
            inside = s < high
            at = _offsets(Table + r * table_r if PAGE > 0 else Table, s0, s, inside, row, k_b, k_s, PAGE, BN)
            k = _load(
                Keys + h * k_h + at[None, :] + d[:, None], inside[None, :] & (d < D)[:, None], Query, UPCAST
            )
            score = tl.dot(q, k, input_precision="ieee")
            if SOFTCAP:  # softcap * tanh(scale * score / softcap), without the factor
                score = 1.0 - 2.0 / (tl.exp2(score * bend) + 1.0)

            # Which slots each query sees, and which any query here sees: others may hold anything.
            if Seen is not None:
                seen = tl.load(
                    (Seen + head * seen_h + token * seen_t)[:, None] + s[None, :],
                    mask=valid[:, None] & inside[None, :],
                    other=0,
                ).to(tl.int32)
                needed = tl.max(seen, 0) > 0
                visible = seen > 0
            elif Position is not None:
                # A slot of the ring holds the latest position up to the query's that belongs there.
                behind = own_slot - s
                behind = tl.where(behind < 0, behind + ring_size, behind)
                late = (behind < window) & (mine - behind >= ring_first)
                needed = inside & tl.where(s < ring_first, (s <= mine) & (mine - s < ring_far), late)
                visible = needed[None, :] & valid[:, None]
            else:
                visible = (s[None, :] <= slot[:, None]) & valid[:, None]
                needed = inside & (s <= last)
                if WINDOW:
                    reached = s[None, :] > position[:, None] - window
                    lately = s >= low
                    if initial is not None:
                        reached = reached | (s < initial)[None, :]
                        lately = lately | (s < initial)
                    visible = visible & reached
                    needed = needed & lately
                if Words is not None:
                    column = tl.where(s < root, 0, tl.minimum(s - root, 63))
                    bit = tl.where(s < root, 0, tl.full([BN], 1, tl.int64) << column.to(tl.int64))
                    above = (s < root)[None, :] & visible
                    visible = above | ((word[:, None] & bit[None, :]) != 0)
                    needed = tl.where(s < root, needed, (union & bit) != 0)
                    visible = visible & inside[None, :]
                    needed = needed & inside
            score = tl.where(visible, score, float("-inf"))

            highest = tl.maximum(top, tl.max(score, 1) * factor)
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp2(
                tl.fma(score, tl.zeros_like(score) + factor, tl.zeros_like(score) - shift[:, None])
            )
            rescale = tl.exp2(top - shift)
            total = tl.fma(total, rescale, tl.sum(weight, 1))
            top = highest

            at = _offsets(Table + r * table_r if PAGE > 0 else Table, s0, s, inside, row, v_b, v_s, PAGE, BN)
            v = _load(
                Values + h * v_h + at[:, None] + dv[None, :],
                needed[:, None] & (dv < DV)[None, :],
                Query,
                UPCAST,
            )
            weight = weight.to(Query.dtype.element_ty)
            if UPCAST:
                weight = weight.to(tl.float32)
            acc = tl.dot(weight, v, acc * rescale[:, None], input_precision="ieee")

        some = total != 0.0
        out = acc / tl.where(some, total, 1.0)[:, None]
        lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        to = Out + token[:, None] * o_t + head[:, None] * o_h + dv[None, :]
        keep = valid[:, None] & (dv < DV)[None, :]
        if DIRECT:
            if Sinks is not None:
                sink = tl.load(Sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
                most = tl.maximum(lse, sink)
                most = tl.where(most == float("-inf"), 0.0, most)
                share = tl.exp2(lse - most)
                both = share + tl.exp2(sink - most)
                out = out * share[:, None] / tl.where(both == 0.0, 1.0, both)[:, None]
                lse = tl.where(both == 0.0, lse, most + tl.log2(tl.where(both == 0.0, 1.0, both)))
            tl.store(to, out.to(Out.dtype.element_ty), mask=keep)
            if Lse is not None:
                tl.store(Lse + token * l_t + head, lse * LN2, mask=valid)
        else:
            tl.store(to + c.to(tl.int64) * o_c, out, mask=keep & some[:, None])
            tl.store(Lse + c.to(tl.int64) * l_c + token * l_t + head, lse, mask=valid)


@triton.jit(do_not_specialize=["F", "l_n", "l_f", "l_q", "z_n", "z_q"])
def merge_kernel(
    Parts,  # [N, F, Q, DV] by strides
    PartLse,  # [N, F, Q]
    Out,  # [N, Q, DV]
    Lse,  # [N, Q] natural; None: not returned
    Sinks,  # [Q] or None
    F,
    p_n,
    p_f,
    p_q,
    l_n,
    l_f,
    l_q,
    o_n,
    o_q,
    z_n,
    z_q,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    NATURAL: tl.constexpr,  # PartLse is to base e, else 2
):
    """Merges parts of attention by their log-sum-exps, in order; a part that sees nothing changes nothing."""
    n = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BDV)
    Parts += n * p_n + q * p_q
    PartLse += n * l_n + q * l_q
    unit = LOG2E if NATURAL else 1.0

    top = tl.full([], float("-inf"), tl.float32)
    at = PartLse
    for _ in loop(0, F, 1, loop_unroll_factor=4):
        top = tl.maximum(top, tl.load(at).to(tl.float32) * unit)
        at += l_f
    if Sinks is not None:
        sink = tl.load(Sinks + q).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)

    acc = tl.zeros([BDV], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for _ in loop(0, F, 1, loop_unroll_factor=4):
        lse = tl.load(PartLse).to(tl.float32) * unit
        share = tl.exp2(lse - top)
        part = tl.load(Parts + d, mask=d < DV, other=0.0).to(tl.float32)  # does not wait for lse
        part = tl.where(lse == float("-inf"), 0.0, part)  # it was not written, and 0 * NaN would be NaN
        acc = tl.fma(part, tl.zeros([BDV], tl.float32) + share, acc)
        total += share
        Parts += p_f
        PartLse += l_f
    if Sinks is not None:
        total += tl.exp2(sink - top)
    some = tl.where(total == 0.0, 1.0, total)
    out = acc / some
    tl.store(Out + n * o_n + q * o_q + d, out.to(Out.dtype.element_ty), mask=d < DV)
    if Lse is not None:
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(some))
        tl.store(Lse + n * z_n + q * z_q, lse * LN2)
