"""The keyed generator in plain arithmetic: keys, Philox-4x32-10 words, and the token at a quantile.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. ``specdec.rng`` makes its decisions with it, and
the Triton kernels beside it are bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.device import to_device

DRAFT, ACCEPT, BONUS, TARGET, SELECT = range(5)  # streams: the kind of decision
WORD = 0xFFFFFFFF


class Key(NamedTuple):
    """Identifies one decision of a row. Fields are ints or host tensors that broadcast against each other, rows first.

    ``at`` is the committed length at the start of the block (``[B]`` or ``[B, 1]``...), ``depth`` and ``sibling`` identify a node
    of it, ``stream`` the kind of decision, ``attempt`` counts repeated drafts of the same block.
    """

    at: Tensor
    depth: Tensor | int = 0
    sibling: Tensor | int = 0
    stream: int = DRAFT
    attempt: int = 0


def philox4x32(counter: Sequence[Any], key: Sequence[Any], rounds: int = 10) -> list[Any]:
    """Philox-4x32: four 32-bit words from a counter of four words and a key of two.

    Works on anything with 64-bit integer arithmetic, elementwise: Python ints, int64 numpy arrays, int64 tensors (products
    wrap, and the mask undoes the sign).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & WORD) ^ c1 ^ k0,
            p1 & WORD,
            ((p0 >> 32) & WORD) ^ c3 ^ k1,
            p0 & WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def uniforms(seed: Tensor, at: Tensor, depth: Tensor, stream: int) -> Tensor:
    """``[R, D]`` float64 in [0, 1) of ``seed [R]``, ``at [R]`` and ``depth`` (``[D]`` or ``[R, D]``) on one device, bit-identical to ``Philox(seed).uniform``.

    Tensor operators only, without a branch on values, so that a captured step may contain it.
    """
    stream_word, zero = torch.full_like(at, stream)[:, None], torch.zeros_like(at)[:, None]
    w = philox4x32((at[:, None], depth, stream_word, zero), _key(seed[:, None]))
    return (((w[0] >> 5) << 26) | (w[1] >> 6)).double() * 2.0**-53


def race_uniforms(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """``[R, V]`` float64 in (0, 1) of ``seed [R]``, ``position [R]`` and ``token`` (``[V]`` or ``[R, V]``): the numbers of exponential races."""
    at = position[:, None]
    stream, zero = torch.full_like(at, TARGET), torch.zeros_like(at)
    w = philox4x32((at, token.expand(len(seed), -1), stream, zero), _key(seed[:, None]))
    return ((((w[0] >> 5) << 26) | (w[1] >> 6)).double() + 0.5) * 2.0**-53


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed & WORD, (seed >> 32) & WORD


def pick(probs: Tensor, u: Tensor) -> Tensor:
    """The token at quantile ``u [...]`` (float64, in [0, 1)) of ``probs [..., V]``.

    It is the first whose cumulative sum exceeds ``u * total``. Sums are float64: on a CPU in the order of the vocabulary, on a device by
    ``pick_in_blocks``. A token of probability 0 is never picked, whatever the rounding. If the last dimension but one is expanded, its
    sums are computed once.
    """
    shape = probs.shape[:-1]
    shared = probs.dim() > 1 and probs.stride(-2) == 0 and shape[-1] > 1
    if shared:
        probs = probs[..., 0, :]
    u = to_device(u, probs.device)
    u = u.expand(shape) if shared else u[..., None]
    at = (_pick if probs.is_cpu else pick_in_blocks)(probs, u)
    return at if shared else at[..., 0]


def _pick(probs: Tensor, u: Tensor) -> Tensor:
    cdf = probs.cumsum(-1, dtype=torch.float64)
    return _pick_at(cdf, u * cdf[..., -1:])


def pick_in_blocks(probs: Tensor, u: Tensor, block: int = 512) -> Tensor:
    """``[..., n]`` the tokens at quantiles ``u [..., n]`` of ``probs [..., V]``: first the block of tokens, then the token in it.

    A GPU adds up blocks side by side, while a cumulative sum in float64 over a large vocabulary is slow. The sums are rounded in another
    order than ``pick``'s on a CPU, so a quantile within rounding of a border may give the neighbouring token.
    """
    V = probs.shape[-1]
    many = V // block
    sums = [probs[..., : many * block].unflatten(-1, (many, block)).sum(-1, dtype=torch.float64)]
    if V % block:
        sums.append(probs[..., many * block :].sum(-1, dtype=torch.float64, keepdim=True))
    ends = torch.cat(sums, -1).cumsum(-1)
    goal = u * ends[..., -1:]
    # NaN gives a valid token, too, and is detected by a later check.
    which = _pick_at(ends, goal).clamp(max=ends.shape[-1] - 1)
    before = torch.where(which > 0, ends.gather(-1, (which - 1).clamp(min=0)), 0)
    token = which[..., None] * block + torch.arange(block, device=probs.device)  # [..., n, block]
    chances = probs[..., None, :].expand(*u.shape, V).gather(-1, token.clamp(max=V - 1))
    chances = torch.where(token < V, chances.double(), 0)
    at = _pick_at(chances.cumsum(-1), (goal - before)[..., None])[..., 0]
    return (which * block + at).clamp(max=V - 1)


def _pick_at(cdf: Tensor, goal: Tensor) -> Tensor:
    """The first entries above ``goal``, and at most the last one that is above the entry before it."""
    last = torch.searchsorted(cdf, cdf[..., -1:].contiguous())
    return torch.minimum(torch.searchsorted(cdf, goal, right=True), last)
