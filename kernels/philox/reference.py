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


def pick(probs: Tensor, u: Tensor) -> Tensor:
    """The token at quantile ``u [...]`` (float64, in [0, 1)) of ``probs [..., V]``.

    It is the first whose cumulative sum exceeds ``u * total``. Sums are float64, in the order of the vocabulary. A token of
    probability 0 is never picked, whatever the rounding. If the last dimension but one is expanded, its sums are computed once.
    """
    shape = probs.shape[:-1]
    shared = probs.dim() > 1 and probs.stride(-2) == 0 and shape[-1] > 1
    if shared:
        probs = probs[..., 0, :]
    cdf = probs.cumsum(-1, dtype=torch.float64)
    total = cdf[..., -1:].contiguous()
    last = torch.searchsorted(cdf, total)  # the last token with any probability
    if not probs.is_cpu:  # NaN gives a valid token, too, and is detected by a later check
        last = last.clamp(max=probs.shape[-1] - 1)
    u = to_device(u, cdf.device)
    at = torch.searchsorted(cdf, (u.expand(shape) if shared else u[..., None]) * total, right=True)
    at = torch.minimum(at, last)
    return at if shared else at[..., 0]
