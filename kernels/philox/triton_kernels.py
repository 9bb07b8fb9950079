"""Philox-4x32-10 in Triton (Salmon, Moraes, Dror, Shaw, SC 2011), bit-identical to ``specdec.rng.philox4x32``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words(c0, c1, c2, c3, seed):
    """Words 0 and 1, uint32, of uint32 counter words and int64 seeds, which broadcast."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        h0, h1 = tl.umulhi(0xD2511F53, c0), tl.umulhi(0xCD9E8D57, c2)
        l0, l1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1


@triton.jit
def number(w0, w1):
    """53 random bits of two words as a whole float64."""
    return (((w0 >> 5).to(tl.int64) << 26) | (w1 >> 6).to(tl.int64)).to(tl.float64)


@triton.jit
def uniform_kernel(AT, NODE, WHO, SEED, OUT, n, BLOCK: tl.constexpr):
    """``OUT [n]`` float64 in [0, 1) from flat int64 counter words and seeds."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    c0 = tl.load(AT + i, mask=live, other=0).to(tl.uint32)
    c1 = tl.load(NODE + i, mask=live, other=0).to(tl.uint32)
    c2 = tl.load(WHO + i, mask=live, other=0).to(tl.uint32)
    w0, w1 = words(c0, c1, c2, c2 * 0, tl.load(SEED + i, mask=live, other=0))
    tl.store(OUT + i, number(w0, w1) * 1.1102230246251565e-16, mask=live)  # 2^-53


@triton.jit
def race_kernel(
    P,
    SEED,
    AT,
    TIME,
    TOKEN,
    V,
    stride,
    splits,
    TARGET: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first arrival of part ``s`` of row ``r``, STEPS blocks of tokens: ``TIME [R, S]`` float64, ``TOKEN [R, S]`` int64."""
    r, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, at = tl.load(SEED + r), tl.load(AT + r).to(tl.uint32)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("inf"), tl.float64)
    won = tl.full((BLOCK,), 0, tl.int32)
    for step in range(STEPS):
        v = (s * STEPS + step) * BLOCK + lane
        p = tl.load(P + r * stride + v, mask=v < V, other=0.0).to(tl.float64)
        c1 = v.to(tl.uint32)
        w0, w1 = words(c1 * 0 + at, c1, c1 * 0 + TARGET, c1 * 0, seed)
        u = tl.minimum((number(w0, w1) + 0.5) * 1.1102230246251565e-16, 0.9999999999999999)
        time = tl.where(p > 0, -tl.log(u) / tl.where(p > 0, p, 1.0), float("inf"))
        sooner = time < best
        best = tl.where(sooner, time, best)
        won = tl.where(sooner, v, won)
    first = tl.min(best, 0)
    tl.store(TIME + r * splits + s, first)
    # ties go to the first token, as in argmin
    tl.store(TOKEN + r * splits + s, tl.min(tl.where(best == first, won, 2147483647), 0).to(tl.int64))
