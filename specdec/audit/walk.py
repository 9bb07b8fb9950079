"""A scripted ``Rng`` that visits every outcome of the random decisions of a real run, each with its exact measure.

Each key of a row has one number in [0, 1), of which the script knows an interval. A decision cuts the interval where its result
changes; the run continues with the first piece, and every other piece becomes a new branch that is run from the start. If a key
is used again, the *same* interval is refined, so a part that uses a number twice is enumerated correctly. The pieces always
partition the unit cube, so the measures of all branches sum to 1 whatever decisions the parts make.

Decisions may come from several threads: they are made one at a time, and since those of one row have a fixed order (a row is
drafted or verified, never both), the result does not depend on the order of the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from specdec.rng import TARGET, Key

SLIVER = 1e-13  # thinner pieces are rounding errors of equal cut points; they show up as unaccounted mass
_BITS = (16, 12, 12, 8, 12)  # of Key's fields in one int64


def pack(key: Key) -> np.ndarray:
    """One int64 for all five fields of a key, in their broadcast shape."""
    fields = np.broadcast_arrays(*(np.asarray(f, dtype=np.int64) for f in key))
    code = np.zeros_like(fields[0])
    for name, bits, field in zip(Key._fields, _BITS, fields):
        if field.size and (field.min() < 0 or field.max() >= 1 << bits):
            raise ValueError(
                f"a key's {name} is {int(field.min())}..{int(field.max())}: need 0..{(1 << bits) - 1}"
            )
        code = (code << bits) | field
    return code


@dataclass(frozen=True, eq=False)
class Branches:
    """``R`` scripts of up to ``M`` keys: ``key [R, M]`` (-1 where there is none) and intervals ``low``, ``high [R, M]``."""

    key: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def root() -> Branches:
        """The one branch without decisions."""
        return Branches(np.full((1, 1), -1), np.zeros((1, 1)), np.ones((1, 1)))

    def __len__(self) -> int:
        return len(self.key)

    def select(self, rows: np.ndarray | slice, width: int | None = None) -> Branches:
        """A copy of some scripts with their first ``width`` keys."""
        return Branches(*(a[rows, :width].copy() for a in (self.key, self.low, self.high)))

    def widen(self, width: int) -> Branches:
        """The same scripts with room for ``width`` keys."""
        rows, held = self.key.shape
        wide = Branches(np.full((rows, width), -1), np.zeros((rows, width)), np.ones((rows, width)))
        wide.key[:, :held], wide.low[:, :held], wide.high[:, :held] = self.key, self.low, self.high
        return wide

    @staticmethod
    def join(parts: Sequence[Branches]) -> Branches:
        """The scripts of all parts, in order."""
        width = max(part.key.shape[1] for part in parts)
        wide = [part if part.key.shape[1] == width else part.widen(width) for part in parts]
        return Branches(
            np.concatenate([w.key for w in wide]),
            np.concatenate([w.low for w in wide]),
            np.concatenate([w.high for w in wide]),
        )

    def measure(self) -> np.ndarray:
        """``[R]`` the product of the lengths of each script's intervals."""
        return (self.high - self.low).prod(1)


class Walk:
    """The branches of one run, a row each, and the alternatives that remain to be run.

    Args:
        branches: one script a row.
        distribution_number: ``[..., V] -> [...]`` maps a distribution to its number, -1 if it is not the target's; needed for ``race``.
    """

    def __init__(
        self, branches: Branches, distribution_number: Callable[[np.ndarray], np.ndarray] | None = None
    ):
        self.branches = branches.select(slice(None))
        self.used = (branches.key >= 0).sum(1)
        self.distribution_number = distribution_number
        self._left: list[tuple[np.ndarray, Branches]] = []
        self._lock = Lock()

    @property
    def left(self) -> list[tuple[np.ndarray, Branches]]:
        """The alternatives: rows that they come from, and scripts, in an order that does not depend on the order of threads."""
        return sorted(self._left, key=lambda entry: int(entry[0][0]))

    def rng(self) -> ScriptedRng:
        return ScriptedRng(self, np.arange(len(self.used)))

    def decide(self, row: np.ndarray, code: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        """``[R]`` the piece of ``cuts [R, C + 1]`` (0 ... 1, ascending) in which the number of key ``code [R]`` lies."""
        with self._lock:
            return self._decide(row, code, cuts)

    def _decide(self, row: np.ndarray, code: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        every, known = np.arange(len(row)), self.branches.key[row] == code[:, None]
        found = known.any(1)
        slot = np.where(found, known.argmax(1), self.used[row])
        if slot.max(initial=0) >= known.shape[1]:
            self.branches = self.branches.widen(2 * known.shape[1])
        branches, fresh = self.branches, row[~found]
        branches.key[fresh, slot[~found]] = code[~found]
        self.used[fresh] += 1
        low = np.maximum(cuts[:, :-1], branches.low[row, slot][:, None])
        high = np.minimum(cuts[:, 1:], branches.high[row, slot][:, None])
        real = high - low > SLIVER
        answer = np.where(real.any(1), real.argmax(1), (high - low).argmax(1))
        for piece in range(real.shape[1]):
            other = (real[:, piece] & (piece > answer)).nonzero()[0]
            if len(other):
                scripts = branches.select(row[other], int(self.used.max()))
                at = (np.arange(len(other)), slot[other])
                scripts.low[at], scripts.high[at] = low[other, piece], high[other, piece]
                self._left.append((row[other], scripts))
        branches.low[row, slot], branches.high[row, slot] = low[every, answer], high[every, answer]
        return answer


def take(stack: list[Branches], count: int) -> Branches:
    """Remove up to ``count`` branches from the top, those with the most decisions, so that the stack stays small."""
    parts: list[Branches] = []
    have = 0
    while stack and have < count:
        top = stack.pop()
        if len(top) > count - have:
            stack.append(top.select(slice(len(top) - (count - have))))
            top = top.select(slice(len(top) - (count - have), None))
        parts.append(top)
        have += len(top)
    return Branches.join(parts)


class ScriptedRng:
    """The ``Rng`` of a decoder's run: the decisions of ``rows`` of a walk."""

    def __init__(self, walk: Walk, rows: np.ndarray):
        self.walk, self.rows = walk, rows

    def select(self, rows: Tensor) -> ScriptedRng:
        return ScriptedRng(self.walk, self.rows[rows.numpy()])

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        return self._ask(_cuts(probs), key).to(probs.device)

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        p = np.nan_to_num(prob.double().cpu().numpy(), nan=0.0).clip(0, 1)[..., None]
        return (self._ask(np.concatenate([np.zeros_like(p), p, np.ones_like(p)], -1), key) == 0).to(
            prob.device
        )

    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        """Any function of (position, distribution) is a possible outcome of the races: one free choice for each such pair.

        A race over a distribution that is not the target's affects only proposals; it returns its first possible token. So do other streams than the
        target's, which are not told apart.
        """
        if self.walk.distribution_number is None:
            raise ValueError("certify cannot enumerate races: certify a Coupled decoder with certify_coupled")
        number = self.walk.distribution_number(probs.double().cpu().numpy())
        certain = torch.nn.functional.one_hot((probs > 0).int().argmax(-1), probs.shape[-1])
        ours = torch.from_numpy(number >= 0).to(probs.device)
        distribution = torch.where(ours[..., None], probs, certain.to(probs))
        at = position.cpu().expand(probs.shape[:-1])
        return self._ask(_cuts(distribution), race_key(at, number)).to(probs.device)

    def _ask(self, cuts: np.ndarray, key: Key) -> Tensor:
        code, shape = pack(key), cuts.shape[:-1]
        if code.shape != shape or shape[0] != len(self.rows):
            raise ValueError(
                f"a key of shape {list(code.shape)} for decisions of shape {list(shape)} of {len(self.rows)} rows: give every "
                "decision of every row its own key, rows first"
            )
        code, cuts = code.reshape(shape[0], -1), cuts.reshape(shape[0], -1, cuts.shape[-1])
        answer = np.zeros(code.shape, dtype=np.int64)
        for question in range(code.shape[1]):
            answer[:, question] = self.walk.decide(self.rows, code[:, question], cuts[:, question])
        return torch.from_numpy(answer.reshape(shape))


def race_key(position: Tensor, number: np.ndarray) -> Key:
    """The key of the race for distribution ``number`` at a position (all distributions that are not the target's share one)."""
    return Key(position, torch.from_numpy(np.asarray(number) + 1), 0, TARGET)


def _cuts(probs: Tensor) -> np.ndarray:
    """``[..., V + 1]`` the ends of the tokens' pieces of [0, 1), normalised as ``rng.pick`` does."""
    cdf = probs.double().cpu().numpy().cumsum(-1)
    total = cdf[..., -1:]
    if not (np.isfinite(total).all() and (total > 0).all() and (np.diff(cdf, axis=-1) >= 0).all()):
        raise ValueError("a categorical decision got a distribution with negative, NaN or no probabilities")
    cuts = np.concatenate([np.zeros_like(total), cdf / total], -1)
    cuts[..., -1] = 1
    return cuts
