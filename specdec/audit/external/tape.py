"""Decisions about foreign random numbers: each number of a run has a key, and what is decided about it goes to an ``Rng``.

The n-th random call of a row's run makes numbers with the keys (block, n, element). A generator that was seeded has keys of its own:
(its state, calls since), so that seeding it again with the same seed gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from specdec.audit.external.races import winners
from specdec.rng import Key, Rng

EXTERNAL = 7  # the stream of foreign numbers
MOST = 4096  # numbers of a call, and calls of a run: what a key has room for


class CannotWalk(RuntimeError):
    """Foreign code does something with random numbers that cannot be enumerated; the message names it."""


@dataclass(frozen=True)
class _Call:
    """A random call: its key's block start (``None``: the row's own), attempt and number."""

    at: int | None
    attempt: int
    depth: int


@dataclass
class _Race:
    first: np.ndarray
    winner: int
    second: np.ndarray | None = None
    then: int = -1


class Tape:
    """The random numbers of one run of a foreign function.

    Args:
        rng: decides; its rows are the run's. at: ``[B]`` where the block of each row starts.
        batched: the leading dimension of every random call is the rows. If not, there is one row.
        whole: the run is a whole ``generate``, so that what a seeded generator gives later is on this tape, too.
    """

    def __init__(self, rng: Rng, at: Tensor, batched: bool = False, whole: bool = False):
        self.rng, self.at, self.batched, self.whole = rng, at, batched, whole
        self._calls: list[_Call] = []
        self._expected: dict[object, tuple[bytes, int | None, int, int]] = {}
        self._races: dict[tuple[int, ...], _Race] = {}
        self._raced: set[int] = set()
        self._compared: set[int] = set()

    def numbers(self, shape: Sequence[int], source: object = None, state: bytes | None = None) -> Tensor:
        """``[shape]`` int64 names of new numbers.

        Args:
            source: the generator. state: its state before the call; ``None`` or the one that ``advanced`` left: the next call.
        """
        shape = tuple(shape)
        B = len(self.at)
        if self.batched and shape[:1] != (B,):
            raise CannotWalk(
                f"a random call of shape {list(shape)} in a function of {B} rows: its first dimension must be the rows, so that every "
                "number belongs to one row"
            )
        each = int(np.prod(shape[1:] if self.batched else shape, dtype=np.int64))
        if each > MOST:
            raise CannotWalk(
                f"a random call of {each} numbers: at most {MOST} can be walked; use a smaller vocabulary"
            )
        names = self._next(source, state) * B * MOST + torch.arange(each)
        if self.batched:
            names = names + MOST * torch.arange(B)[:, None]
        return names.reshape(shape)

    def _next(self, source: object, state: bytes | None) -> int:
        if state is not None and state != self.state(source):
            self.seeded(source, state)
        before, at, attempt, depth = self._expected.get(source, (b"", None, 0, 0))
        if depth >= MOST:
            raise CannotWalk(f"more than {MOST} random calls in one run: use a smaller budget")
        self._expected[source] = (before, at, attempt, depth + 1)
        call = _Call(at, attempt, depth)
        if call not in self._calls:  # a generator that was seeded as before gives the numbers that it gave
            self._calls.append(call)
        return self._calls.index(call)

    def advanced(self, source: object, state: bytes) -> None:
        """The state of a generator after its last call, or its first state if its calls belong to the run."""
        _, at, attempt, depth = self._expected.get(source, (b"", None, 0, 0))
        self._expected[source] = (state, at, attempt, depth)

    def seeded(self, source: object, seed: bytes) -> None:
        """A generator's next calls are named by its seed: the same seed gives the same numbers, in every block."""
        name = blake2b(seed, digest_size=4).digest()
        self._expected[source] = (
            seed,
            int.from_bytes(name[:2]),
            1 + int.from_bytes(name[2:]) % (MOST - 1),
            0,
        )

    def state(self, source: object) -> bytes | None:
        """The state that a generator has if nothing but this tape drew from it."""
        return self._expected[source][0] if source in self._expected else None

    def is_seeded(self, names: Tensor) -> bool:
        """Whether these are the numbers of a generator that was seeded."""
        return self._calls[int(names.flatten()[0]) // (len(self.at) * MOST)].at is not None

    def below(self, names: Tensor, level: Tensor, closed: bool | Tensor = False) -> Tensor:
        """``[...]`` whether each number is below ``level [...]`` (or at it, where ``closed``; the probability is the same)."""
        flat = names.reshape(-1).numpy()
        self._separate(self._raced, flat, "compared")
        self._compared.update(flat.tolist())
        return self._each(flat, level.reshape(-1), lambda rng, p, key: rng.accept(p, key)).reshape(
            names.shape
        )

    def draw(self, names: Tensor, probs: Tensor) -> Tensor:
        """``[...]`` tokens of ``probs [..., V]``."""
        flat = names.reshape(-1).numpy()
        laws = probs.reshape(len(flat), -1)
        return self._each(flat, laws, lambda rng, p, key: rng.categorical(p, key)).reshape(names.shape)

    def race(self, names: Tensor, weights: Tensor, flipped: bool = False) -> Tensor:
        """``[...]`` who arrives first of ``names [..., V]``, exponential numbers divided by ``weights [..., V]``.

        Args:
            flipped: the exponential numbers are -log(1 - u) of their uniforms, not -log(u).
        """
        V = names.shape[-1]
        if not self.whole and self.is_seeded(names):
            raise CannotWalk(
                "a race of the exponential numbers of a seeded generator, or its `multinomial`, inside External: what it gives in other blocks "
                "cannot be followed; certify the whole generate with certify_function"
            )
        rows, laws = names.reshape(-1, V), weights.double().reshape(-1, V).numpy()
        if not (np.isfinite(laws).all() and (laws >= 0).all() and (laws.sum(-1) > 0).all()):
            raise CannotWalk("a race with negative, infinite, NaN or no weights has no law")
        out = [self._one_race(name, law / law.sum(), flipped) for name, law in zip(rows, laws)]
        return torch.tensor(out).reshape(names.shape[:-1])

    def _one_race(self, names: Tensor, law: np.ndarray, flipped: bool) -> int:
        key = (int(flipped), *names.tolist())
        known = self._races.get(key)
        if known is None:
            self._separate(self._raced, names.numpy(), "in a race with others")
            self._separate(self._compared, names.numpy(), "in a race")
            self._raced.update(key[1:])
            winner = int(self.draw(names[0], torch.from_numpy(law)))
            self._races[key] = _Race(law, winner)
            return winner
        if np.array_equal(law, known.first):
            return known.winner
        if known.second is None:
            after = winners(known.first, law)[known.winner]
            known.second = law
            known.then = (
                int(self.draw(names[1], torch.from_numpy(after / after.sum()))) if len(law) > 1 else 0
            )
        if not np.array_equal(law, known.second):
            raise CannotWalk(
                "a third race of the same exponential numbers: at most two different races can be walked"
            )
        return known.then

    def _separate(self, used: set[int], names: np.ndarray, how: str) -> None:
        if used and not used.isdisjoint(names.tolist()):
            raise CannotWalk(
                f"random numbers are {how} after another use of the same numbers: it cannot be walked"
            )

    def _each(self, names: np.ndarray, values: Tensor, ask: Callable[[Rng, Tensor, Key], Tensor]) -> Tensor:
        """``ask`` for every name with its value ``[n, ...]``; rows that have equally many are asked together."""
        B = len(self.at)
        call, row = names // (B * MOST), names // MOST % B
        if B == 1 and len(names) and (call == call[0]).all():  # the usual case, without sorting
            one = self._calls[call[0]]
            at = self.at if one.at is None else torch.full_like(self.at, one.at)
            key = Key(at[:, None], one.depth, torch.from_numpy(names % MOST)[None], EXTERNAL, one.attempt)
            return ask(self.rng, values[None], key)[0].cpu().long()
        out = torch.zeros(len(names), dtype=torch.long)
        for c in np.unique(call):
            here = np.flatnonzero(call == c)
            here = here[np.argsort(row[here], kind="stable")]
            counts = np.unique(row[here], return_counts=True)[1]
            together = [here] if len(set(counts.tolist())) == 1 else np.split(here, counts.cumsum()[:-1])
            for some in together:
                who = torch.from_numpy(np.unique(row[some]))
                shape = (len(who), len(some) // len(who))
                one = self._calls[c]
                at = self.at[who] if one.at is None else torch.full_like(who, one.at)
                sibling = torch.from_numpy(names[some] % MOST).reshape(shape)
                key = Key(at[:, None].expand(shape), one.depth, sibling, EXTERNAL, one.attempt)
                asked = values[torch.from_numpy(some)].reshape(*shape, *values.shape[1:])
                out[torch.from_numpy(some)] = ask(self.rng.select(who), asked, key).reshape(-1).cpu().long()
        return out
