"""Keyed random decisions: a draw is a function of its key alone, never of batch mates, order or executor.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), checked on
its published known-answer vectors. Parts ask for decisions, ``categorical`` and ``accept``; a key that is asked again answers
from the *same* number, and docs/design.md says why no key is ever used for two decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

DRAFT, ACCEPT, BONUS, TARGET, SELECT = range(5)  # streams: who asks
_WORD = 0xFFFFFFFF


class Key(NamedTuple):
    """Names one decision of a row. Fields are ints or host tensors that broadcast against each other, rows first.

    ``at`` is the committed length at the start of the block (``[B]`` or ``[B, 1]``...), ``depth`` and ``sibling`` name a
    node of it, ``stream`` who asks, ``attempt`` counts repeated drafts of the same block.
    """

    at: Tensor
    depth: Tensor | int = 0
    sibling: Tensor | int = 0
    stream: int = DRAFT
    attempt: int = 0


class Rng(Protocol):
    """Where random decisions come from: ``Philox`` in earnest, a walk over all branches in the certifier."""

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        """A token from ``probs [..., V]``; the key has the shape of the result."""
        ...

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        """True with probability ``min(1, prob)``."""
        ...

    def race(self, probs: Tensor, position: Tensor) -> Tensor:
        """A token from ``probs [..., V]`` by exponential races keyed by (row, position, token) alone."""
        ...

    def select(self, rows: Tensor) -> Rng:
        """The decisions of some rows."""
        ...


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
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def seeds(seed: int | Sequence[int] | None, rows: int) -> Tensor:
    """``[rows]`` int64 row seeds.

    A sequence is taken as it is, one seed a row; an int is spread over the rows by Philox; ``None`` draws from torch's
    default generator (so ``torch.manual_seed`` governs).
    """
    if seed is None:
        return torch.randint(0, 2**62, (rows,))
    if isinstance(seed, (int, Integral)):
        seed = int(seed)
        k = (seed & _WORD, (seed >> 32) & _WORD)
        words = [philox4x32((row, 0, 0, 0x5EED), k) for row in range(rows)]
        return torch.tensor([w[0] | ((w[1] >> 2) << 32) for w in words])
    if len(seed) != rows:
        raise ValueError(
            f"seed has {len(seed)} entries for {rows} rows: give one int, or one seed for every row"
        )
    return torch.tensor([int(s) & (2**63 - 1) for s in seed])


def pick(probs: Tensor, u: Tensor) -> Tensor:
    """The token at quantile ``u [...]`` (float64, in [0, 1)) of ``probs [..., V]``, in float64; never one of probability 0."""
    cdf = probs.double().cumsum(-1)
    total = cdf[..., -1:].contiguous()
    last = torch.searchsorted(cdf, total)  # the last token with any probability
    return torch.minimum(torch.searchsorted(cdf, u.to(cdf.device)[..., None] * total, right=True), last)[
        ..., 0
    ]


class Philox:
    """Keyed decisions of a batch of rows, each with its own 64-bit seed (``seed [B]``)."""

    def __init__(self, seed: Tensor):
        self.seed = seed

    def select(self, rows: Tensor) -> Philox:
        return Philox(self.seed[rows])

    def uniform(self, key: Key) -> Tensor:
        """float64 in [0, 1) with 53 random bits, in the broadcast shape of the key's fields."""
        at, depth, sibling = np.broadcast_arrays(*(np.asarray(f, dtype=np.int64) for f in key[:3]))
        seed = self.seed.numpy().reshape(-1, *[1] * (at.ndim - 1))
        counter = (at, depth | (sibling << 16), np.int64(key.stream | (key.attempt << 8)), np.int64(0))
        w = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
        return torch.from_numpy((((w[0] >> 5) << 26) | (w[1] >> 6)) * 2.0**-53)

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        if bool(((probs > 0).sum(-1) == 1).all()):  # greedy: no number can change the answer
            return probs.argmax(-1)
        return pick(probs, self.uniform(key))

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        sure = prob >= 1
        if bool((sure | (prob <= 0)).all()):
            return sure
        return self.uniform(key).to(prob.device) < prob

    def race(self, probs: Tensor, position: Tensor) -> Tensor:
        """Argmin of ``E_v / p_v`` with ``E_v`` exponential, keyed by (seed, position, v): a draw from ``probs [B, ..., V]``.

        Two laws raced with the same key agree with probability at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh,
        "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978). Only tokens with
        positive probability are drawn for, so a greedy or truncated law is cheap.
        """
        support = probs > 0
        widest = int(support.sum(-1).max())
        if widest <= 1:
            return probs.argmax(-1)
        device = probs.device
        if widest <= probs.shape[-1] // 8:
            p, lane = probs.topk(widest, -1)
        else:
            p, lane = probs, torch.arange(probs.shape[-1], device=device).expand_as(probs)
        shape = (-1, *[1] * (probs.dim() - 1))
        seed = self.seed.to(device).reshape(shape)
        at = position.to(device)[..., None]
        c2 = torch.full_like(lane[..., :1], TARGET)
        w = philox4x32((at, lane, c2, torch.zeros_like(c2)), (seed & _WORD, (seed >> 32) & _WORD))
        u = ((((w[0] >> 5) << 26) | (w[1] >> 6)).double() + 0.5) * 2.0**-53
        arrival = -u.log() / p.double()
        return lane.gather(-1, arrival.argmin(-1, keepdim=True))[..., 0]


class Attempt:
    """The same rows' decisions under another attempt number: fresh numbers for a second draft of the same block.

    Two drafts whose trees are merged must not draw from one number, or the second's candidates depend on the first's.
    """

    def __init__(self, rng: Rng, attempt: int):
        self.rng, self.attempt = rng, attempt

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        return self.rng.categorical(probs, key._replace(attempt=self.attempt))

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        return self.rng.accept(prob, key._replace(attempt=self.attempt))

    def race(self, probs: Tensor, position: Tensor) -> Tensor:
        return self.rng.race(probs, position)

    def select(self, rows: Tensor) -> Attempt:
        return Attempt(self.rng.select(rows), self.attempt)
