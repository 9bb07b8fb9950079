"""Keyed random decisions: a draw is a function of its key alone, never of other rows, their order or the executor.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), checked on
its published known-answer vectors. Parts ask for decisions, ``categorical`` and ``accept``. A key that is used again gives the
*same* uniform, and docs/design.md says why no key is used for two decisions.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import listed, whole
from specdec.kernels.device import to_device
from specdec.kernels.native import library
from specdec.kernels.native.ops import race_numbers
from specdec.kernels.philox.reference import (
    ACCEPT,
    BONUS,
    DRAFT,
    SELECT,
    TARGET,
    WORD,
    Key,
    philox4x32,
    pick,
    race_uniforms,
)

__all__ = [
    "ACCEPT",
    "BONUS",
    "DRAFT",
    "SELECT",
    "TARGET",
    "Attempt",
    "Key",
    "Philox",
    "Rekeyed",
    "Rng",
    "philox4x32",
    "pick",
    "race_arrivals",
    "seeds",
    "triton_kernels",
]


class Rng(Protocol):
    """The source of random decisions: ``Philox`` in decoding, a walk over all branches in the certifier."""

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        """A token from ``probs [..., V]``; the key has the shape of the result."""
        ...

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        """True with probability ``min(1, prob)``."""
        ...

    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        """A token from ``probs [..., V]`` by exponential races keyed by (row, position, token, stream) alone; of several streams, the first
        token to arrive in any."""
        ...

    def select(self, rows: Tensor) -> Rng:
        """The decisions of some rows."""
        ...


def seeds(seed: int | Sequence[int] | None, rows: int) -> Tensor:
    """``[rows]`` int64 row seeds.

    A sequence has one seed for each row; an int is spread over the rows by Philox; ``None`` draws from torch's
    default generator (so ``torch.manual_seed`` governs).

    Raises:
        TypeError: a seed is no whole number.
        ValueError: a seed is not in 0 ... 2^63 - 1, or there are not as many seeds as rows.
    """
    if seed is None:
        return torch.randint(0, 2**62, (rows,))
    given: Any = listed(seed)
    if isinstance(given, str) or not isinstance(given, Collection):
        given = _seed("seed", given, ", or one for every row")
        word, low = np.zeros((2, rows), np.uint64), np.zeros((2, rows), np.uint32)
        word[0], low[1] = np.arange(rows), 0x5EED
        w0, w1 = _two_words(word, low, _round_keys(np.array([given])))
        return torch.from_numpy((w0 | ((w1 >> 2).astype(np.uint64) << 32)).astype(np.int64))
    if len(given) != rows:
        raise ValueError(
            f"seed has {len(given)} entries for {rows} rows: give one int, or one seed for every row"
        )
    return torch.tensor([_seed("seed, in a list,", one) for one in given], dtype=torch.long)


def _seed(name: str, value: Any, hint: str = "") -> int:
    whole(name, value, hint)
    if not 0 <= value < 2**63:
        raise ValueError(
            f"{name} is {value}: give a number from 0 to 2^63 - 1 (of a longer one, seed % 2**63)"
        )
    return int(value)


class Philox:
    """Keyed decisions of a batch of rows, each with its own 64-bit seed (``seed [B]``).

    With small batches Python takes longer than arithmetic. So the uniforms of a whole block (three streams, a few depths) are computed
    when the first is needed, and the others are looked up. They are functions of their keys, so the order makes no difference.
    """

    def __init__(self, seed: Tensor):
        if not isinstance(seed, Tensor) or seed.dtype != torch.long or seed.dim() != 1:
            raise TypeError(f"seed is {seed!r}: give an int64 tensor [B], such as specdec.rng.seeds(0, rows)")
        self.seed = seed
        self._keys: np.ndarray | None = None  # the round keys, [10, 2, B]
        # The last two; replaced as a whole, since threads of several micro-batches share it.
        self._blocks: tuple[_Block, ...] = ()
        self._reach = 4  # depths in a block

    def __reduce__(self) -> tuple[type[Philox], tuple[Tensor]]:
        return Philox, (self.seed,)

    def select(self, rows: Tensor) -> Philox:
        chosen = Philox(self.seed[rows])
        chosen._reach = self._reach
        return chosen

    def uniform(self, key: Key) -> Tensor:
        """float64 in [0, 1) with 53 random bits, in the broadcast shape of the key's fields."""
        found = self._look_up(key)
        if found is None:
            at, depth, sibling = (np.asarray(f, dtype=np.int64) for f in key[:3])
            found = self._uniforms(at, depth | (sibling << 16), key.stream | (key.attempt << 8))
        return torch.from_numpy(found)

    def _uniforms(self, at: Any, node: Any, stream: Any) -> np.ndarray:
        """Uniforms of broadcast counter words, rows first: ``at``, ``depth | sibling << 16``, ``stream | attempt << 8``."""
        if self._keys is None:
            self._keys = _round_keys(self.seed.numpy())
        shape = np.broadcast_shapes(np.shape(at), np.shape(node), np.shape(stream)) or (1,)
        keys = self._keys.reshape(10, 2, -1, *[1] * (len(shape) - 1))
        shape = np.broadcast_shapes(shape, keys.shape[2:])
        word, low = np.empty((2, *shape), np.uint64), np.zeros((2, *shape), np.uint32)
        word[0], word[1], low[0] = at, stream, node
        w0, w1 = _two_words(word, low, keys)
        return (((w0 >> 5) << 26) | (w1 >> 6)).view(np.int64) * 2.0**-53  # 27 and 26 bits

    def _look_up(self, key: Key) -> np.ndarray | None:
        """The uniforms of a chain's keys; ``None`` for other keys."""
        at, depth, sibling, stream, attempt = key
        if not (isinstance(sibling, int) and sibling == 0 and stream in (DRAFT, ACCEPT, BONUS)):
            return None
        B = len(self.seed)
        plain = isinstance(at, Tensor) and at.dtype == torch.long and at.shape in ((B,), (B, 1))
        if not plain or B > 256:
            return None
        if isinstance(depth, int):
            if not 0 <= depth < 64:
                return None
            uniforms = self._block(at, attempt, depth)[:, stream, depth].copy()
            return uniforms if at.dim() == 1 else uniforms[:, None]
        depths = np.asarray(depth)
        if depths.dtype != np.int64 or depths.ndim != 1 or (at.dim() == 1 and len(depths) != B):
            return None
        deepest = int(depths.view(np.uint64).max(initial=0))  # negative numbers become huge
        if deepest >= 64:
            return None
        uniforms = self._block(at, attempt, deepest)[:, stream]
        return uniforms[np.arange(B), depths] if at.dim() == 1 else uniforms[:, depths]

    def _block(self, at: Tensor, attempt: int, deepest: int) -> np.ndarray:
        """``[B, 3, D]`` the uniforms of a block's chain: streams DRAFT, ACCEPT, BONUS, depths 0 to at least ``deepest``."""
        start = at.numpy()
        name = (attempt, start.tobytes())
        for block in self._blocks:
            if block.name == name and block.uniforms.shape[2] > deepest:
                return block.uniforms
        self._reach = max(self._reach, deepest // 4 * 4 + 4)
        streams = np.array([DRAFT, ACCEPT, BONUS])[:, None] | (attempt << 8)
        uniforms = self._uniforms(start.reshape(-1, 1, 1), np.arange(self._reach), streams)
        self._blocks = (_Block(name, uniforms), *(b for b in self._blocks[:1] if b.name != name))
        return uniforms

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        return pick(probs, self.uniform(key))

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        return to_device(self.uniform(key), prob.device) < prob

    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        """Argmin of ``E_v / p_v`` with ``E_v`` exponential, keyed by (seed, position, v): a draw from ``probs [B, ..., V]``.

        Two distributions raced with the same key agree with probability at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh,
        "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978). Only tokens with
        positive probability take part, so a greedy or truncated distribution is cheap.

        Args:
            streams: numbers of independent sets of ``E_v``. The least time over several is a race, too: all rates are multiplied
                by their number (Rowan, Phan, Khisti, arXiv 2506.05632).
        """
        if len(streams) > 1 or streams[0]:
            return self._first_of(probs, position.expand(probs.shape[:-1]), streams)
        shape, V = probs.shape[:-1], probs.shape[-1]
        if not shape.numel():
            return torch.zeros(shape, dtype=torch.long, device=probs.device)
        flat = probs.reshape(-1, V)
        seed = self.seed.reshape(-1, *[1] * (len(shape) - 1)).expand(shape).reshape(-1)
        at = position.expand(shape).reshape(-1)
        if probs.is_cuda and triton_kernels():
            from specdec.kernels.philox import race

            return race(flat, seed, at).view(shape)
        token = None
        if flat.is_cpu:  # on a device, the check would wait
            widest = int((flat > 0).sum(-1).max())
            if widest <= 1:
                return probs.argmax(-1)
            if widest <= V // 8:
                flat, token = flat.topk(widest, -1)
        won = _race(flat, seed, at, token)
        return (won if token is None else token.gather(1, won[:, None])[:, 0]).view(shape)

    def _first_of(self, probs: Tensor, position: Tensor, streams: Sequence[int]) -> Tensor:
        """``race`` of numbered streams: each stream's winner, and of these the one that arrives first."""
        winners, times = [], []
        for stream in streams:
            rng = Philox(_seed_of(self.seed, stream))
            winners.append(rng.race(probs, position))
            if len(streams) > 1:
                token = winners[-1].reshape(-1, 1)
                seed = rng.seed.reshape(-1, *[1] * (position.dim() - 1)).expand(position.shape)
                of_winner = probs.reshape(-1, probs.shape[-1]).gather(1, token)
                times.append(race_arrivals(of_winner, seed.reshape(-1), position.reshape(-1), token)[:, 0])
        if len(streams) == 1:
            return winners[0]
        first = torch.stack(times).argmin(0).view(1, *position.shape)
        return torch.stack(winners).gather(0, first)[0]


class _Block(NamedTuple):
    name: tuple[int, bytes]  # attempt, at
    uniforms: np.ndarray


def _race(probs: Tensor, seed: Tensor, position: Tensor, token: Tensor | None) -> Tensor:
    """``[R]`` the columns that arrive first, tile by tile, so that the working set stays in the processor's cache."""
    R, V = probs.shape
    if probs.device.type != "cpu":
        return race_arrivals(probs, seed, position, token).argmin(-1)
    won, best = torch.zeros(R, dtype=torch.long), torch.full((R,), float("inf"), dtype=torch.float64)
    wide, numbers = min(V, _TILE), torch.arange(V)
    rows = _TILE // wide
    for v in range(0, V, wide):
        for r in range(0, R, rows):
            here, there = slice(r, r + rows), slice(v, v + wide)
            lane = numbers[there] if token is None else token[here, there]
            arrival = race_arrivals(probs[here, there], seed[here], position[here], lane)
            first = torch.from_numpy(arrival.numpy().argmin(-1))
            time = arrival.gather(1, first[:, None])[:, 0]
            sooner = time < best[here]
            best[here] = torch.where(sooner, time, best[here])
            won[here] = torch.where(sooner, first + v, won[here])
    return won


def race_arrivals(probs: Tensor, seed: Tensor, position: Tensor, token: Tensor | None = None) -> Tensor:
    """When each token arrives in a race: ``-log(u) / p`` in float64, ``[R, V]``; the first to arrive is drawn.

    u is (k + 1/2) 2^-53, k the number of key (seed, position, token), and at most 1 - 2^-53: a token without probability arrives
    at infinity. Compiled versions replace this function and agree with it bit for bit.

    Args:
        probs: ``[R, V]``. seed, position: ``[R]`` int64. token: ``[V]`` or ``[R, V]`` int64, the numbers of the columns (default
            0 ... V - 1), where probs are.
    """
    if token is None:
        token = torch.arange(probs.shape[1], device=probs.device)
    if probs.device.type == "cpu" and library() is not None:
        u = race_numbers(token, position, seed, probs.shape[1])
    else:
        seed, position = (to_device(t, probs.device) for t in (seed, position))
        u = race_uniforms(seed, position, token)
    return u.clamp_(max=1 - 2.0**-53).log_().neg_().div_(probs.double())


def _seed_of(seed: Tensor, stream: int) -> Tensor:
    """``[B]`` the seeds of a numbered stream; those of stream 0 are the rows' own."""
    if not stream:
        return seed
    # No decision has a counter whose last word is not 0.
    w = philox4x32((stream, 0, 0, 1), (seed & WORD, (seed >> 32) & WORD))
    return w[0] | ((w[1] >> 2) << 32)


_TILE = 1 << 14  # numbers at a time: six arrays of 128 KiB
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_STEPS = np.arange(10, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)


def _round_keys(seed: np.ndarray) -> np.ndarray:
    """``[10, 2, B]`` uint32: both key words of every round."""
    words = np.stack([seed & WORD, (seed >> 32) & WORD]).astype(np.uint64)
    return ((words + _STEPS[..., None]) & np.uint64(WORD)).astype(np.uint32)


def _two_words(word: np.ndarray, low: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words 0 and 1 of ``philox4x32`` in three array operations a round, for small arrays, where the number of operations determines the time.

    Args:
        word: ``[2, ...]`` uint64, counter words 0 and 2; overwritten. low: ``[2, ...]`` uint32, words 1 and 3. keys: as from
            ``_round_keys``, broadcast.
    """
    into = _halves(word)[0]  # word's high halves stay 0
    multiplier = _MULTIPLIERS.reshape(2, *[1] * (word.ndim - 1))
    products = [np.empty_like(word), np.empty_like(word)]  # one buffer is read while the other is written
    halves = [tuple(half[::-1] for half in _halves(p)) for p in products]
    for step in range(10):
        np.multiply(word, multiplier, out=products[step & 1])
        below, above = halves[step & 1]
        np.bitwise_xor(above, low, out=into)
        np.bitwise_xor(into, keys[step], out=into)
        low = below
    return word[0], low[0]


def _halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of the lower and the upper 32 bits of uint64 words."""
    pairs = words.view(np.uint32)
    first, second = pairs[..., ::2], pairs[..., 1::2]
    return (first, second) if sys.byteorder == "little" else (second, first)


@cache
def triton_kernels() -> bool:
    """Whether races on a GPU can run in one kernel."""
    return importlib.util.find_spec("triton") is not None


NESTED = 8
"""Numbers of an ``Attempt``; two around one another have a number below its square, which executors leave to drafts."""


class Rekeyed:
    """The decisions of ``rng``, under other keys in derived classes."""

    def __init__(self, rng: Rng):
        self.rng = rng

    def rekeyed(self, key: Key) -> Key:
        """The key under which ``rng`` makes a decision that is asked for with ``key``."""
        return key

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        return self.rng.categorical(probs, self.rekeyed(key))

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        return self.rng.accept(prob, self.rekeyed(key))

    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        return self.rng.race(probs, position, streams)

    def select(self, rows: Tensor) -> Rekeyed:
        return type(self)(self.rng.select(rows))


class Attempt(Rekeyed):
    """The same rows' decisions under another attempt number: fresh uniforms for a second draft of the same block.

    Two drafts whose trees are merged must not draw with the same uniform, or the second's candidates would depend on the first's. Give one
    ``Attempt(rng, 0)`` and the other ``Attempt(rng, 1)``; then each may merge two drafts in the same way.
    """

    def __init__(self, rng: Rng, attempt: int):
        whole("attempt", attempt)
        if not 0 <= attempt < NESTED:
            raise ValueError(f"attempt is {attempt}: give a number from 0 to {NESTED - 1}")
        super().__init__(rng)
        self.attempt = attempt

    def rekeyed(self, key: Key) -> Key:
        return key._replace(attempt=self.within(key.attempt))

    def within(self, attempt: int) -> int:
        """The number of a decision whose own is ``attempt``: that of an ``Attempt`` around this one, or of the key."""
        if attempt >= NESTED:
            raise ValueError(
                "three Attempts are around one another: merge at most four drafts, two and two, or number the keys of the draws yourself"
            )
        return NESTED * attempt + self.attempt

    def select(self, rows: Tensor) -> Attempt:
        return Attempt(self.rng.select(rows), self.attempt)
