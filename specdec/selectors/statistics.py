"""A selector's observations: sums per request, per user-defined key, or over all requests. States are values: nothing changes in place.

Goodput is a ratio of sums (tokens over seconds), never a mean of ratios, which would weigh a short round like a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from specdec.arguments import number
from specdec.types import Context, Feedback

PULLS, TOKENS, SECONDS, REWARD = range(4)  # columns of Table.sums
Pool = Literal["global"] | Callable[[Context], Sequence[Hashable]] | None
OUTSTANDING = 64  # choices of a request that await feedback; older ones are dropped


class Index(NamedTuple):
    """Maps hashable keys to rows of arrays: ``enter`` assigns a row, ``drop`` frees it."""

    of: dict[Hashable, int]
    free: tuple[int, ...]
    size: int

    @staticmethod
    def empty(size: int = 16) -> Index:
        return Index({}, tuple(reversed(range(size))), size)

    def find(self, keys: Sequence[Hashable]) -> np.ndarray:
        """``[len(keys)]`` rows, -1 for a key that has none."""
        of = self.of
        return np.array([of.get(key, -1) for key in keys], dtype=np.int64)

    def enter(self, keys: Sequence[Hashable]) -> tuple[np.ndarray, Index]:
        """The keys' rows; new keys are assigned one."""
        of = self.of
        if all(key in of for key in keys):
            return np.array([of[key] for key in keys], dtype=np.int64), self
        of, free, size = dict(of), list(self.free), self.size
        for key in keys:
            if key not in of:
                if not free:
                    free, size = list(reversed(range(size, 2 * size))), 2 * size
                of[key] = free.pop()
        return np.array([of[key] for key in keys], dtype=np.int64), Index(of, tuple(free), size)

    def drop(self, keys: Sequence[Hashable]) -> tuple[np.ndarray, Index]:
        """The rows that become free; unknown keys are ignored."""
        known = [key for key in dict.fromkeys(keys) if key in self.of]
        of = dict(self.of)
        rows = [of.pop(key) for key in known]
        return np.array(rows, dtype=np.int64), Index(of, (*self.free, *rows), self.size)


def room(array: np.ndarray, size: int) -> np.ndarray:
    """The array padded with zero rows to ``size`` rows; itself if it has them."""
    if len(array) >= size:
        return array
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])


class Table(NamedTuple):
    """Sums ``[R, arms, 4]`` (pulls, tokens, seconds, reward), and the row of each key.

    Attributes:
        keys: key -> row; without a pool the key is the request itself. member: request -> row, for user-defined keys only.
    """

    keys: Index
    member: dict[int, int]
    sums: np.ndarray

    @staticmethod
    def empty(arms: int) -> Table:
        """A table without observations. ValueError for fewer than one arm."""
        index = Index.empty()
        return Table(index, {}, np.zeros((index.size, at_least_one(arms), 4)))

    @property
    def arms(self) -> int:
        return self.sums.shape[1]

    def seat(self, pool: Pool, context: Context) -> tuple[np.ndarray, Table]:
        """``[B]`` the row of each request; new requests are assigned one. ``pool`` is called once per request, when it is new."""
        if pool == "global":
            return np.zeros(context.batch, dtype=np.int64), self
        requests = context.request.tolist()
        if pool is None:
            rows, index = self.keys.enter(requests)
            return rows, self if index is self.keys else Table(index, {}, room(self.sums, index.size))
        if all(r in self.member for r in requests):
            return np.array([self.member[r] for r in requests], dtype=np.int64), self
        named = list(pool(context))
        if len(named) != len(requests):
            raise ValueError(
                f"pool gave {len(named)} keys for {len(requests)} rows: give one hashable key for every row of the context"
            )
        asked, index = self.keys.enter(named)
        new = dict(zip(requests, asked.tolist()))
        member = {**new, **self.member}  # a request keeps its row
        rows = np.array([member[r] for r in requests], dtype=np.int64)
        return rows, Table(index, member, room(self.sums, index.size))

    def rows(self, pool: Pool, feedback: Feedback) -> np.ndarray:
        """``[B]`` the rows that feedback is added to; -1 for unknown requests and those that have left."""
        if pool == "global":
            return np.zeros(len(feedback.request), dtype=np.int64)
        requests = feedback.request.tolist()
        if pool is None:
            return self.keys.find(requests)
        return np.array([self.member.get(r, -1) for r in requests], dtype=np.int64)

    def add(self, rows: np.ndarray, arm: np.ndarray, seen: np.ndarray) -> Table:
        """The table with ``seen [B, 4]`` added to ``(rows, arm)``; rows of -1 are dropped."""
        sums, real = self.sums.copy(), rows >= 0
        if not real.all():
            rows, arm, seen = rows[real], arm[real], seen[real]
        np.add.at(sums, (rows, arm), seen)
        return self._replace(sums=sums)

    def leave(self, pool: Pool, requests: Sequence[int]) -> Table:
        """The table without the requests' own sums; shared sums stay."""
        if pool == "global":
            return self
        if pool is not None:
            gone = set(requests)
            return self._replace(member={r: row for r, row in self.member.items() if r not in gone})
        rows, index = self.keys.drop(requests)
        sums = self.sums.copy()
        sums[rows] = 0  # free rows are always empty
        return Table(index, {}, sums)


class Pending(NamedTuple):
    """Choices that await feedback: request -> ((arm, value), ...), oldest first."""

    of: dict[int, tuple[tuple[int, float], ...]]

    def remember(self, requests: Sequence[int], arm: np.ndarray, value: np.ndarray) -> Pending:
        """The pending choices with one more for each request."""
        of = dict(self.of)
        for r, a, v in zip(requests, arm.tolist(), value.tolist()):
            of[r] = (*of.get(r, ())[1 - OUTSTANDING :], (a, v))
        return Pending(of)

    def recall(self, requests: Sequence[int], arm: np.ndarray) -> tuple[np.ndarray, Pending]:
        """``[B]`` the value of each request's oldest pending choice of the arm, NaN if there is none; it is removed."""
        of, values = dict(self.of), np.full(len(requests), np.nan)
        for b, (r, a) in enumerate(zip(requests, arm.tolist())):
            waiting = of.get(r, ())
            for i, (chosen, value) in enumerate(waiting):
                if chosen == a:
                    values[b] = value
                    of[r] = waiting[:i] + waiting[i + 1 :]
                    break
        return values, Pending(of)

    def leave(self, requests: Sequence[int]) -> Pending:
        gone = set(requests)
        return Pending({r: waiting for r, waiting in self.of.items() if r not in gone})


class Pooled:
    """What selectors have in common whose rows may share statistics."""

    pool: Pool

    @property
    def joint(self) -> bool:
        """Whether rows share statistics (``SelectorInfo.joint``)."""
        return self.pool is not None


class Tabled(Pooled):
    """What selectors have in common whose state is a ``Table``.

    Attributes:
        scale: rewards are divided by it and clipped to [0, 1]; ``None``: they are added as they are.
    """

    scale: float | None = None

    def init(self, arms: int) -> Table:
        return Table.empty(arms)

    def update(self, state: Table, feedback: Feedback) -> Table:
        arm, columns = seen(feedback, state.arms)
        if self.scale is not None:
            columns[:, REWARD] = unit(columns[:, REWARD], self.scale)
        return state.add(state.rows(self.pool, feedback), arm, columns)

    def leave(self, state: Table, requests: Tensor) -> Table:
        return state.leave(self.pool, requests.tolist())


def goodput(sums: np.ndarray) -> np.ndarray:
    """Tokens a second as a ratio of sums: ``[..., arms]`` from ``[..., arms, 4]``; 0 for an arm never tried."""
    seconds = sums[..., SECONDS]
    return np.divide(sums[..., TOKENS], seconds, out=np.zeros_like(seconds), where=seconds > 0)


def mean(sums: np.ndarray, column: int = REWARD) -> np.ndarray:
    """Mean of a column per pull, ``[..., arms]``; 0 for an arm never tried."""
    pulls = sums[..., PULLS]
    return np.divide(sums[..., column], pulls, out=np.zeros_like(pulls), where=pulls > 0)


def optimistic(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Values in which an arm never tried is twice as good as any other: finite, so that a matching can add them up."""
    return np.where(seen, values, 2 * (1 + np.abs(values).max(initial=0)))


def seen(feedback: Feedback, arms: int, seconds: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """arm ``[B]`` and the increments ``[B, 4]`` of feedback; the reward is unscaled (with full information, the chosen arm's).

    Raises:
        ValueError: an arm out of range, or, with ``seconds``, seconds that are not positive.
    """
    arm = feedback.arm.numpy()
    if len(arm) and (arm.min() < 0 or arm.max() >= arms):
        raise ValueError(
            f"feedback.arm has {int(arm.min())}..{int(arm.max())}: the selector was made for arms 0..{arms - 1}"
        )
    columns = np.empty((len(arm), 4))
    columns[:, PULLS] = 1
    columns[:, TOKENS] = feedback.tokens.numpy()
    columns[:, SECONDS] = feedback.seconds.numpy()
    reward = feedback.reward.numpy()
    columns[:, REWARD] = reward if reward.ndim == 1 else _chosen(reward, arm, arms)
    if seconds and len(arm) and not columns[:, SECONDS].min() > 0:
        raise ValueError(
            "feedback.seconds has an entry that is not positive: charge every row its share of the round "
            "(specdec.selectors.rewards.charge)"
        )
    return arm, columns


def _chosen(reward: np.ndarray, arm: np.ndarray, arms: int) -> np.ndarray:
    """``[B]`` the chosen arms' column of ``reward [B, arms]``; ValueError for another shape."""
    if reward.shape != (len(arm), arms):
        raise ValueError(
            f"feedback.reward has shape {list(reward.shape)}: give [B] or, with full information, {[len(arm), arms]}"
        )
    return reward[np.arange(len(arm)), arm]


def unit(reward: np.ndarray, scale: float) -> np.ndarray:
    """Rewards over ``scale``, clipped to [0, 1]."""
    return np.clip(reward / scale, 0.0, 1.0)


def poolable(pool: Any) -> None:
    """Raise TypeError unless ``pool`` is None, "global" or callable."""
    if not (pool is None or pool == "global" or callable(pool)):
        raise TypeError(
            f'pool is {pool!r}: give None, "global", or a function from a context to a key per row'
        )


def at_least_one(arms: int) -> int:
    """``arms``; ValueError if it is below 1."""
    if arms < 1:
        raise ValueError(
            f"arms is {arms}: give a selector at least one arm (not to speculate is an arm as well)"
        )
    return arms


def positive(name: str, value: float) -> None:
    """Raise ValueError for a setting that is not above 0 or not finite, TypeError for one that is not a number."""
    number(name, value)
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}: give a number above 0{', and a finite one' * (value > 0)}")
