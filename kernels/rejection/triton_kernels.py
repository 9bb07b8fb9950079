"""Kernels of rejection verification: masses of all rows, the cut, the residual's block sums, the token. See ``reference.py``.

Sums of one block are float32 for masses and float64 for residuals; sums over blocks are float64 where decisions depend on them.
``KIND`` is the kind of draft: 0 point masses, 1 probabilities, 2 logits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tempered(x, divisor, HOT: tl.constexpr):
    x = x.to(tl.float32)
    if HOT:
        x = tl.div_rn(x, divisor)
    return x


@triton.jit
def mass_kernel(
    X, SIZE, TOP, TOTAL, PLACE, V, R, sb, sr, splits, divisor,
    EXTRA: tl.constexpr, HOT: tl.constexpr, GREEDY: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The largest value and the mass of part ``s`` of a row, if the row is one of the first ``size + EXTRA``. All loads of a part come before its sums,
    because a load after one would wait for it."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, n = row // R, row % R
    if n < tl.load(SIZE + b) + EXTRA:
        v = s * PART + tl.arange(0, PART)
        x = tempered(tl.load(X + b * sb + n * sr + v, mask=v < V, other=float("-inf")), divisor, HOT)
        top = tl.max(x, 0)
        finite = tl.where(top == float("-inf"), 0.0, top)
        tl.store(TOP + row * splits + s, top)
        tl.store(TOTAL + row * splits + s, tl.sum(tl.exp(x - finite), 0))
        if GREEDY:
            tl.store(PLACE + row * splits + s, tl.min(tl.where(x == top, v, 2147483647), 0))


@triton.jit
def combined(TOP, TOTAL, b, rows, count, splits, NODES: tl.constexpr, SPLITS: tl.constexpr):
    """Largest values (finite) and masses of the first ``count`` of ``rows`` rows, ``[NODES]``, from those of their parts."""
    i, s = tl.arange(0, NODES), tl.arange(0, SPLITS)
    at = (b * rows + i)[:, None] * splits + s[None, :]
    known = (i < count)[:, None] & (s < splits)[None, :]
    tops = tl.load(TOP + at, mask=known, other=float("-inf"))
    totals = tl.load(TOTAL + at, mask=known, other=0.0)
    top = tl.max(tops, 1)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return finite, tl.sum(totals * tl.exp(tops - finite[:, None]), 1)


@triton.jit
def worst(i, count, total):
    """1 if one of the first ``count`` masses is 0, infinite or NaN."""
    good = (total > 0) & (total < float("inf"))
    return tl.max(tl.where((i < count) & (good == 0), 1, 0), 0)


@triton.jit
def greedy_kernel(
    TOKENS, SIZE, TOP, TOTAL, PLACE, ACCEPTED, TOKEN, R, splits, NODES: tl.constexpr, SPLITS: tl.constexpr
):
    """At temperature 0 a node is accepted if it is the first of the largest logits."""
    b = tl.program_id(0).to(tl.int64)
    i, s = tl.arange(0, NODES), tl.arange(0, SPLITS)
    size = tl.load(SIZE + b)
    top, total = combined(TOP, TOTAL, b, R, size + 1, splits, NODES, SPLITS)
    at = (b * R + i)[:, None] * splits + s[None, :]
    known = (i <= size)[:, None] & (s < splits)[None, :]
    tops = tl.load(TOP + at, mask=known, other=float("-inf"))
    places = tl.load(PLACE + at, mask=known, other=2147483647)
    best = tl.min(tl.where(tops == top[:, None], places, 2147483647), 1)
    token = tl.load(TOKENS + b * (R - 1) + i, mask=i < size, other=-1)
    accepted = tl.min(tl.where((i < size) & (token != best), i, size), 0)
    tl.store(ACCEPTED + b, tl.where(worst(i, size + 1, total) > 0, -1, accepted))
    tl.store(TOKEN + b, tl.sum(tl.where(i == accepted, best, 0), 0).to(tl.int64))


@triton.jit
def accept_kernel(
    X, Q, U, TOP, TOTAL, QTOP, QTOTAL, splits, TOKENS, SIZE, ACCEPTED, CUT, R, sb, sr, qb, qr, divisor,
    NODES: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr, HOT: tl.constexpr,
):  # fmt: skip
    """``ACCEPTED [B]`` (-1: a row of logits has an invalid mass), ``CUT [B, 4]``: the masses of p and q at the cut."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, NODES)
    size = tl.load(SIZE + b)
    live = i < size
    token = tl.load(TOKENS + b * (R - 1) + i, mask=live, other=0)
    top, total = combined(TOP, TOTAL, b, R, size + 1, splits, NODES, SPLITS)
    x = tempered(tl.load(X + b * sb + i * sr + token, mask=live, other=float("-inf")), divisor, HOT)
    p = tl.exp(x - top) / tl.where(live, total, 1.0)
    q = tl.full((NODES,), 1.0, tl.float32)
    if KIND == 1:
        q = tl.load(Q + b * qb + i * qr + token, mask=live, other=1.0).to(tl.float32)
    if KIND == 2:
        qtop, qtotal = combined(QTOP, QTOTAL, b, R - 1, size, splits, NODES, SPLITS)
        y = tempered(tl.load(Q + b * qb + i * qr + token, mask=live, other=0.0), divisor, HOT)
        q = tl.exp(y - qtop) / tl.where(live, qtotal, 1.0)
    ratio = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), tl.where(p > 0, float("inf"), 0.0))
    u = tl.load(U + b * (R - 1) + i, mask=live, other=0.0)
    accepts = u < ratio.to(tl.float64)
    accepted = tl.min(tl.where(live & (accepts == 0), i, size), 0)
    tl.store(ACCEPTED + b, tl.where(worst(i, size + 1, total) > 0, -1, accepted))
    tl.store(CUT + b * 4, tl.sum(tl.where(i == accepted, top, 0.0), 0))
    tl.store(CUT + b * 4 + 1, tl.sum(tl.where(i == accepted, total, 0.0), 0))
    if KIND == 2:
        tl.store(CUT + b * 4 + 2, tl.sum(tl.where(i == accepted, qtop, 0.0), 0))
        tl.store(CUT + b * 4 + 3, tl.sum(tl.where(i == accepted, qtotal, 0.0), 0))


@triton.jit
def weights(
    X,
    Q,
    v,
    V,
    b,
    TOKENS,
    SIZE,
    ACCEPTED,
    CUT,
    R,
    sb,
    sr,
    qb,
    qr,
    divisor,
    KIND: tl.constexpr,
    HOT: tl.constexpr,
):
    """p and max(p - q, 0) of tokens ``v`` at the cut of row ``b``, float64 of float32 values."""
    n = tl.maximum(tl.load(ACCEPTED + b), 0)
    size = tl.load(SIZE + b)
    x = tempered(tl.load(X + b * sb + n * sr + v, mask=v < V, other=float("-inf")), divisor, HOT)
    p = tl.exp(x - tl.load(CUT + b * 4)) / tl.load(CUT + b * 4 + 1)
    rejected = (v < V) & (v * 0 + n < size)
    if KIND == 0:
        drafted = tl.load(TOKENS + b * (R - 1) + n, mask=n < size, other=-1)
        w = tl.where(v == drafted, 0.0, p)
    if KIND == 1:
        w = p - tl.load(Q + b * qb + n * qr + v, mask=rejected, other=0.0).to(tl.float32)
    if KIND == 2:
        y = tempered(tl.load(Q + b * qb + n * qr + v, mask=rejected, other=float("-inf")), divisor, HOT)
        qtop, qtotal = tl.load(CUT + b * 4 + 2), tl.load(CUT + b * 4 + 3)
        w = p - tl.where(rejected, tl.exp(y - qtop) / tl.where(qtotal > 0, qtotal, 1.0), 0.0)
    return p.to(tl.float64), tl.maximum(w, 0.0).to(tl.float64)


@triton.jit
def residual_kernel(
    X, Q, REST, WHOLE, V, blocks, TOKENS, SIZE, ACCEPTED, CUT, R, sb, sr, qb, qr, divisor,
    KIND: tl.constexpr, HOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over each block of tokens at the cut: of the residual (``REST [B, blocks]``) and of p (``WHOLE``)."""
    b, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = j * BLOCK + tl.arange(0, BLOCK)
    p, w = weights(X, Q, v, V, b, TOKENS, SIZE, ACCEPTED, CUT, R, sb, sr, qb, qr, divisor, KIND, HOT)
    tl.store(REST + b * blocks + j, tl.sum(w, 0))
    tl.store(WHOLE + b * blocks + j, tl.sum(p, 0))


@triton.jit
def first_above(w, base, mark, i):
    """The first index with weight at which ``base`` plus the running sum exceeds ``mark``; with rounding it may be the last one."""
    above = (base + tl.cumsum(w, 0) > mark) & (w > 0)
    first = tl.min(tl.where(above, i, 2147483647), 0)
    last = tl.max(tl.where(w > 0, i, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def pick_kernel(
    X, Q, REST, WHOLE, U, TOKEN, V, blocks, ub, un, TOKENS, SIZE, ACCEPTED, CUT, R, sb, sr, qb, qr, divisor,
    KIND: tl.constexpr, HOT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token at quantile u of the weights at the cut: its block first, then its index."""
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCKS)
    rest = tl.load(REST + b * blocks + j, mask=j < blocks, other=0.0)
    whole = tl.load(WHOLE + b * blocks + j, mask=j < blocks, other=0.0)
    nothing = tl.sum(rest, 0) <= 0
    sums = tl.where(nothing, whole, rest)
    u = tl.load(U + b * ub + tl.maximum(tl.load(ACCEPTED + b), 0) * un)
    mark = u * tl.sum(sums, 0)
    block = first_above(sums, 0.0, mark, j)
    base = tl.sum(tl.where(j < block, sums, 0.0), 0)
    i = tl.arange(0, BLOCK)
    v = block * BLOCK + i
    p, w = weights(X, Q, v, V, b, TOKENS, SIZE, ACCEPTED, CUT, R, sb, sr, qb, qr, divisor, KIND, HOT)
    place = first_above(tl.where(nothing, p, w), base, mark, i)
    tl.store(TOKEN + b, (block * BLOCK + place).to(tl.int64))
