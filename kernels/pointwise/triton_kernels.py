"""Triton kernels between matrix products: float32 arithmetic, one rounding each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(X, Y, WEIGHT, OUT, n, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """A row of ``X [rows, n] += Y``, and its RMS norm times ``WEIGHT [n]`` to ``OUT``; the norm is of the stored (rounded) sum."""
    row = tl.program_id(0).to(tl.int64) * n
    lane = tl.arange(0, BLOCK)
    live = lane < n
    x = tl.load(X + row + lane, mask=live, other=0.0)
    if ADD:
        y = tl.load(Y + row + lane, mask=live, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(X.dtype.element_ty)
        tl.store(X + row + lane, x, mask=live)
    x = x.to(tl.float32)
    w = tl.load(WEIGHT + lane, mask=live, other=0.0).to(tl.float32)
    norm = x / tl.sqrt(tl.sum(x * x, 0) / n + eps) * w
    tl.store(OUT + row + lane, norm.to(OUT.dtype.element_ty), mask=live)


@triton.jit
def _turned(X, at, live, W, lane, half, c0, c1, s0, s1, eps, NORM: tl.constexpr):
    """Both halves of some heads of a token after the rotation; with NORM, heads are normed before it."""
    a = tl.load(X + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(X + at + half, mask=live, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)
        inside = lane < half
        w0 = tl.load(W + lane, mask=inside, other=0.0).to(tl.float32)
        w1 = tl.load(W + half + lane, mask=inside, other=0.0).to(tl.float32)
        a, b = a * scale[:, None] * w0[None, :], b * scale[:, None] * w1[None, :]
    return a * c0[None, :] - b * s0[None, :], b * c1[None, :] + a * s1[None, :]


@triton.jit(do_not_specialize_on_alignment=["SLOTS"])
def turn_kernel(
    Q,
    K,
    V,
    COS,
    SIN,
    QW,
    KW,
    KEYS,
    VALUES,
    SLOTS,
    q_heads,
    k_heads,
    half,
    S,
    q_t,
    k_t,
    v_t,
    k_row,
    k_slot,
    k_head,
    v_row,
    v_slot,
    v_head,
    eps,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Rotate some heads of a token of ``Q [T, q_heads, 2 half]`` and ``K`` in place; with KEEP, K and V go to their slot instead. Tokens are
    ``q_t``, ``k_t`` and ``v_t`` apart."""
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, HALF)
    inside = lane < half
    c0 = tl.load(COS + t * 2 * half + lane, mask=inside, other=0.0).to(tl.float32)
    c1 = tl.load(COS + t * 2 * half + half + lane, mask=inside, other=0.0).to(tl.float32)
    s0 = tl.load(SIN + t * 2 * half + lane, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(SIN + t * 2 * half + half + lane, mask=inside, other=0.0).to(tl.float32)
    q_parts, k_parts = tl.cdiv(q_heads, HEADS), tl.cdiv(k_heads, HEADS)
    if part < q_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        live = (head < q_heads)[:, None] & inside[None, :]
        at = t * q_t + head[:, None] * 2 * half + lane[None, :]
        a, b = _turned(Q, at, live, QW, lane, half, c0, c1, s0, s1, eps, NORM)
        tl.store(Q + at, a.to(Q.dtype.element_ty), mask=live)
        tl.store(Q + at + half, b.to(Q.dtype.element_ty), mask=live)
    else:
        head = (part - q_parts) % k_parts * HEADS + tl.arange(0, HEADS)
        live = (head < k_heads)[:, None] & inside[None, :]
        at = t * k_t + head[:, None] * 2 * half + lane[None, :]
        if KEEP:
            slot = tl.load(SLOTS + t)
            row, slot = slot // S, slot % S
            if part < q_parts + k_parts:
                a, b = _turned(K, at, live, KW, lane, half, c0, c1, s0, s1, eps, NORM)
                to = row * k_row + slot * k_slot + head[:, None].to(tl.int64) * k_head + lane[None, :]
                tl.store(KEYS + to, a.to(KEYS.dtype.element_ty), mask=live)
                tl.store(KEYS + to + half, b.to(KEYS.dtype.element_ty), mask=live)
            else:
                to = row * v_row + slot * v_slot + head[:, None].to(tl.int64) * v_head + lane[None, :]
                at = t * v_t + head[:, None] * 2 * half + lane[None, :]
                tl.store(VALUES + to, tl.load(V + at, mask=live, other=0.0), mask=live)
                tl.store(VALUES + to + half, tl.load(V + at + half, mask=live, other=0.0), mask=live)
        else:
            a, b = _turned(K, at, live, KW, lane, half, c0, c1, s0, s1, eps, NORM)
            tl.store(K + at, a.to(K.dtype.element_ty), mask=live)
            tl.store(K + at + half, b.to(K.dtype.element_ty), mask=live)


@triton.jit
def silu_mul_kernel(GATE, UP, n, g_t, u_t, BLOCK: tl.constexpr):
    """``GATE [T, n] = silu(GATE) * UP``."""
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    g = tl.load(GATE + t * g_t + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(UP + t * u_t + i, mask=live, other=0.0).to(tl.float32)
    tl.store(GATE + t * g_t + i, (g / (1.0 + tl.exp(-g)) * u).to(GATE.dtype.element_ty), mask=live)
