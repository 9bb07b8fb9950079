"""What a choice of drafts is worth on recorded requests: expected seconds of every arm and of oracles (SPIN, arXiv 2503.15921, section 4).

A request's text was sampled from the target, so each arm's chances of acceptance are known at every position of it, chosen or not
(``audit.tau`` says why). Rounds end at random places of the text, and expectations over them are programmes over block starts: exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.cost.arms import ArmCosts
from specdec.lab.bootstrap import DRAWS, Clusters, interval
from specdec.lab.replays import Replay
from specdec.selectors.opening import Opening


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round of B rows on one device: the arms in use draft one after the other, then the target verifies all rows.

    Attributes:
        draft: by arm, (fixed, per row) seconds of drafting one token. verify: (fixed, per row, per drafted token) seconds.
        read: by arm, seconds for each token of a row's text that the arm has not read. several: by how much a round with several arms in use is longer
            than the sum of its parts, as a factor (``arm_times.several``).
    Raises:
        ValueError: times are negative, or there are not as many draft as read times.
    """

    draft: tuple[tuple[float, float], ...]
    verify: tuple[float, float, float]
    read: tuple[float, ...]
    several: float = 1.0

    def __post_init__(self) -> None:
        if len(self.draft) != len(self.read):
            raise ValueError(
                f"draft has {len(self.draft)} arms and read {len(self.read)}: give both for every arm"
            )
        if min(*self.verify, *self.read, *(x for pair in self.draft for x in pair), self.several) < 0:
            raise ValueError(f"{self} has negative seconds")

    def alone(self, batch: int) -> ArmCosts:
        """A row's round in a batch of ``batch`` rows that all use its arm. No round of at most so many rows costs less than these charges, unless ``several`` is below 1."""
        fixed, row, token = self.verify
        return ArmCosts(tuple(f / batch + r + token for f, r in self.draft), fixed / batch + row)

    def opening(self, lengths: Sequence[int], batch: int) -> Opening:
        """What arms that draft ``lengths`` tokens add to a round by being in use; ``alone(batch)`` charges each row a share of it."""
        return Opening(tuple(k * fixed for k, (fixed, _) in zip(lengths, self.draft)), batch)

    def round(self, arm: np.ndarray, drafted: np.ndarray, unread: np.ndarray) -> tuple[np.ndarray, float]:
        """Drafting by arm ``[A]``, which includes reading ``unread [B]`` tokens, and verification, of one round of B rows."""
        A, fixed_row = len(self.draft), np.array(self.draft)
        steps = np.zeros(A, dtype=np.int64)
        np.maximum.at(steps, arm, drafted)
        spent = steps * fixed_row[:, 0] + np.bincount(arm, drafted * fixed_row[arm, 1], A)
        fixed, row, token = self.verify
        reading = np.bincount(arm, unread * np.array(self.read)[arm], A)
        verify = fixed + row * len(arm) + token * float(drafted.sum())
        if len(arm) and (arm != arm[0]).any():
            verify += (self.several - 1) * (verify + spent.sum())
        return spent + reading, verify


@dataclass(frozen=True)
class Requests:
    """C recorded requests of at most n new tokens each, and what A arms would do along their texts.

    Attributes:
        accept: ``[A, C, n, K]``: the probability that, in a block of the arm that starts after s new tokens, the text's token
            ``s + j`` is accepted if the j before it were. Entries past the text's end or an arm's length are ignored.
        lengths: tokens that each arm drafts in a round, at most K; 0 for the arm that does not speculate.
        prompt: ``[C]`` tokens of each prompt. source: ``[C]`` number of the file that a prompt comes from; intervals are over files.
        names: of the arms. ends: ``[C]`` new tokens of each request; default n. size: ``[A, C, n]`` tokens that a draft proposes at
            most, such as none where an n-gram has no match; default: its length. They are paid for whether or not they are accepted.
        tokens: ``[C, T]`` the prompts' ids, right-padded, for selectors that look at them.
    Raises:
        ValueError: shapes do not fit, or probabilities are outside 0 .. 1.
    """

    accept: Tensor
    lengths: tuple[int, ...]
    prompt: np.ndarray
    source: np.ndarray
    names: tuple[str, ...]
    ends: np.ndarray | None = None
    size: Tensor | None = None
    tokens: Tensor | None = None

    def __post_init__(self) -> None:
        A, C, n, K = self.accept.shape
        if not len(self.lengths) == len(self.names) == A or not len(self.prompt) == len(self.source) == C:
            raise ValueError(
                f"accept is {list(self.accept.shape)}, with {len(self.lengths)} lengths, {len(self.names)} names, {len(self.prompt)} prompts "
                f"and {len(self.source)} sources: give lengths and names of {A} arms, prompts and sources of {C} requests"
            )
        if not C or not all(0 <= k <= K for k in self.lengths):
            raise ValueError(
                f"lengths are {self.lengths} and there are {C} requests: give at least one request, and lengths from 0 to {K}"
            )
        if self.ends is not None and not ((self.ends >= 1) & (self.ends <= n)).all():
            raise ValueError(f"ends has {self.ends.min()} .. {self.ends.max()}: give 1 to {n} new tokens")
        used = torch.arange(K) < torch.from_numpy(self.drafted)[..., None]
        if not bool((((self.accept >= 0) & (self.accept <= 1)) | ~used).all()):
            raise ValueError("accept has entries outside 0 .. 1: give probabilities, min(1, q / p)")

    @staticmethod
    def of(arms: Mapping[str, Replay | None], lengths: Mapping[str, int] | None = None) -> Requests:
        """Requests from replays of chain drafts on one trace; ``None`` is the arm that does not speculate. Sources are numbered.

        Args:
            lengths: of arms that draft fewer tokens than were replayed.
        Raises:
            ValueError: a length exceeds what was replayed, all arms are ``None``, replays are of trees or of different traces, or no text has rounds.
        """
        replays = {name: replay for name, replay in arms.items() if replay is not None}
        if not replays:
            raise ValueError(f"arms are {', '.join(arms) or 'none'}: give the replay of at least one draft")
        first = _first_of_one_trace(replays)
        drafted = {name: replay.k for name, replay in replays.items()}
        for name, length in (lengths or {}).items():
            if not 1 <= length <= drafted.get(name, 0):
                raise ValueError(
                    f"lengths has {length} for arm {name!r}: give 1 to {drafted.get(name, 0)}, the tokens that were replayed"
                )
            drafted[name] = length
        used = [c for c, text in enumerate(first.trace.texts) if text.rounds]
        texts = [first.trace.texts[c] for c in used]
        if not texts:
            raise ValueError("no text has rounds: record longer texts")
        n, K = first.accept.shape[1], max(drafted.values())
        accept = torch.zeros(len(arms), len(texts), n, K, dtype=torch.float64)
        size = torch.zeros(accept.shape[:3], dtype=torch.long)
        for a, name in enumerate(arms):
            if name in replays:
                own, k = replays[name], drafted[name]
                accept[a, ..., :k], size[a] = own.chances()[used][..., :k], own.proposed[used].clamp(max=k)
        return Requests(
            accept,
            tuple(drafted.get(name, 0) for name in arms),
            np.array([text.prompt for text in texts]),
            _numbered([text.source for text in texts], first.trace.sources),
            tuple(arms),
            np.array([text.rounds for text in texts]),
            size,
            _padded([torch.tensor(text.ids[: text.prompt]) for text in texts]),
        )

    @staticmethod
    def join(parts: Sequence[Requests], sources: Sequence[Sequence[Hashable]]) -> Requests:
        """The requests of several traces, such as those of several temperatures, one after the other.

        Args:
            parts: of the same arms and with equally many new tokens at most. sources: of each part's requests: equal ones are one source.
        Raises:
            ValueError: arms or shapes differ.
        """
        first, shape = parts[0], list(parts[0].accept.shape)
        for part in parts:
            same = (part.names, part.lengths) == (first.names, first.lengths)
            if not same or part.accept.shape[2:] != first.accept.shape[2:]:
                raise ValueError(
                    f"parts are of arms {first.names} of lengths {first.lengths} and {part.names} of {part.lengths}, shapes "
                    f"{shape} and {list(part.accept.shape)}: give the same arms, lengths and new tokens"
                )
        every = [source for some in sources for source in some]
        rows = [row for part in parts if part.tokens is not None for row in part.tokens]
        sizes = [part.size for part in parts if part.size is not None]
        return Requests(
            torch.cat([part.accept for part in parts], 1),
            first.lengths,
            np.concatenate([part.prompt for part in parts]),
            _numbered(every, every),
            first.names,
            np.concatenate([part.new_tokens for part in parts]),
            torch.cat(sizes, 1) if len(sizes) == len(parts) else None,
            _padded(rows) if rows else None,
        )

    def select(self, rows: Sequence[int] | np.ndarray) -> Requests:
        """Some of the requests."""
        at = np.asarray(rows)
        return replace(
            self,
            accept=self.accept[:, at],
            prompt=self.prompt[at],
            source=self.source[at],
            ends=None if self.ends is None else self.ends[at],
            size=None if self.size is None else self.size[:, at],
            tokens=None if self.tokens is None else self.tokens[at],
        )

    @cached_property
    def new_tokens(self) -> np.ndarray:
        """``[C]``."""
        C, n = self.accept.shape[1:3]
        return np.full(C, n) if self.ends is None else self.ends

    @cached_property
    def drafted(self) -> np.ndarray:
        """``[A, C, n]``: tokens of a block that starts after s tokens; as in the decoder, one fewer than remain at most."""
        room = self.new_tokens[:, None] - 1 - np.arange(self.accept.shape[2])
        longest = np.array(self.lengths)[:, None, None]
        if self.size is not None:
            longest = np.minimum(longest, self.size.numpy())
        return np.minimum(longest, room.clip(0))

    @cached_property
    def laws(self) -> np.ndarray:
        """``[A, C, n, K + 1]``: the probability that a block accepts m tokens."""
        A, C, n, K = self.accept.shape
        out = np.zeros((A, C, n, K + 1))
        here = np.ones((A, C, n))
        for j in range(K):
            through = np.where(j < self.drafted, here * self.accept[..., j].double().numpy(), 0.0)
            out[..., j] = here - through
            here = through
        out[..., K] = here
        return out

    @cached_property
    def expected(self) -> np.ndarray:
        """``[A, C, n]``: expected tokens of a block, the target's own included."""
        return 1 + self.laws @ np.arange(self.laws.shape[-1])


def _first_of_one_trace(replays: Mapping[str, Replay]) -> Replay:
    """The first of replays of chains on one trace."""
    first = next(iter(replays.values()))
    for name, replay in replays.items():
        same = replay.trace.meta["id"] == first.trace.meta["id"] and len(replay) == len(first)
        if not (replay.chains and same):
            raise ValueError(
                f"arm {name!r} proposes trees, or is of another trace: replay chain drafts on one trace"
            )
    return first


def _numbered(sources: Sequence[Hashable], order: Sequence[Hashable]) -> np.ndarray:
    """The number of each source, in ``order``."""
    number = {source: i for i, source in enumerate(dict.fromkeys(order))}
    return np.array([number[source] for source in sources])


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def fixed_seconds(requests: Requests, times: RoundTimes, batch: int) -> np.ndarray:
    """``[A, C]``: expected seconds of every request on every arm alone, with the reading of its prompt (``RoundTimes.alone``)."""
    A, C, n, K1 = requests.laws.shape
    spend, laws = _spend(requests, times, batch), requests.laws
    left = np.zeros((A, C, n + K1))  # from a block start to the end
    for s in reversed(range(n)):
        ahead = left[:, :, s + 1 : s + 1 + K1]
        left[:, :, s] = spend[:, :, s] + np.einsum("acm,acm->ac", laws[:, :, s], ahead)
    return left[:, :, 0] + np.array(times.read)[:, None] * requests.prompt


@dataclass(frozen=True)
class RoundOracle:
    """The best choice of every round by one who knows the chances but not the draws.

    Its seconds bound those of all selectors from below. The state is the block's start and the set of arms that have read the prompt.
    What such an arm missed while others drafted it catches up at no cost (keeping the places of all arms would be exact, and too much).

    Attributes:
        seconds: ``[C]`` expected. plan: ``[n, C, S]`` the arm to choose after s tokens if the arms of set S have read the prompt.
        bit: by arm, its bit in S; 0 for arms that read at no cost.
    """

    seconds: np.ndarray
    plan: np.ndarray
    bit: tuple[int, ...]


def round_oracle(requests: Requests, times: RoundTimes, batch: int) -> RoundOracle:
    """The oracle of every round: dynamic programming from the end of the text.

    Raises:
        ValueError: more than 10 arms read at a cost.
    """
    A, C, n, K1 = requests.laws.shape
    spend = _spend(requests, times, batch)
    readers = [a for a in range(A) if times.read[a] > 0]
    if len(readers) > 10:
        raise ValueError(
            f"{len(readers)} arms read at a cost: the oracle keeps a value for every set of them, give at most 10"
        )
    bit = tuple(1 << readers.index(a) if a in readers else 0 for a in range(A))
    sets = np.arange(1 << len(readers))
    left = np.zeros((n + K1, C, len(sets)))
    plan = np.zeros((n, C, len(sets)), dtype=np.int16)
    for s in reversed(range(n)):
        cost = np.empty((A, C, len(sets)))
        for a in range(A):
            ahead = left[s + 1 : s + 1 + K1][:, :, sets | bit[a]]
            cost[a] = spend[a, :, s, None] + np.einsum("cm,mcs->cs", requests.laws[a, :, s], ahead)
            cost[a] += times.read[a] * (requests.prompt + s)[:, None] * ((sets & bit[a]) == 0)
        plan[s] = cost.argmin(0)
        left[s] = np.where((s < requests.new_tokens)[:, None], cost.min(0), 0.0)
    return RoundOracle(left[0, :, 0], plan, bit)


def _spend(requests: Requests, times: RoundTimes, batch: int) -> np.ndarray:
    """``[A, C, n]``: seconds of a row's round that starts after s tokens; none after the end."""
    if len(times.draft) != len(requests.names):
        raise ValueError(
            f"times are of {len(times.draft)} arms and the requests of {len(requests.names)}: {', '.join(requests.names)}"
        )
    drafted = torch.from_numpy(requests.drafted)
    arms = torch.arange(len(drafted))[:, None, None].expand(drafted.shape)
    alive = np.arange(drafted.shape[2]) < requests.new_tokens[:, None]
    return times.alone(batch).seconds(arms, drafted).numpy() * alive


def ratio(
    top: np.ndarray, bottom: np.ndarray, source: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float | None, float | None]:
    """Sum over sum, with a 95 % interval by bootstrap over sources and, where there are several, over repeats.

    Args:
        top, bottom: ``[C]``, or ``[R, C]`` with R repeats of the same requests. source: ``[C]``; with fewer than 5 there is no interval.
    """
    top, bottom = np.atleast_2d(top), np.atleast_2d(bottom)
    value, clusters = float(top.mean(0).sum() / bottom.mean(0).sum()), Clusters(source, draws, seed)
    if not clusters.enough:
        return value, None, None
    repeats = max(len(top), len(bottom))
    turns = np.random.default_rng((seed, 1)).integers(0, repeats, (draws, repeats))

    def drawn(values: np.ndarray) -> np.ndarray:
        sums = np.stack([clusters.sums(row) for row in values])
        return sums[turns, np.arange(draws)[:, None]].mean(1) if len(values) > 1 else sums[0]

    return value, *interval(drawn(top) / drawn(bottom))


def worth(
    requests: Requests, times: RoundTimes, batch: int, groups: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """What choices are worth at a batch size (SPIN's Figs 2 to 4), by group of requests and for ``all``.

    A row has ``best_fixed``, the arm that needs the fewest seconds for all requests of the group, ``share:NAME``, the share of the group's
    requests for which an arm is the best, and ``request_oracle`` and ``round_oracle`` with ``_low`` and ``_high``: how many times faster
    than ``best_fixed`` the best arm of every request is, and the best of every round.
    """
    fixed = fixed_seconds(requests, times, batch)
    by_round = round_oracle(requests, times, batch).seconds
    out = []
    labels = np.array(groups if groups is not None else [""] * len(requests.prompt))
    for group in ("all", *(sorted(set(groups)) if groups is not None else ())):
        at = np.flatnonzero((labels == group) | (group == "all"))
        mine, source = fixed[:, at], requests.source[at]
        best = int(mine.sum(1).argmin())
        shares = np.bincount(mine.argmin(0), minlength=len(mine)) / len(at)
        row: dict[str, Any] = {"batch": batch, "group": group, "requests": len(at)}
        row |= {"best_fixed": requests.names[best], "best_fixed_seconds": mine[best].mean()}
        for name, seconds in (("request_oracle", mine.min(0)), ("round_oracle", by_round[at])):
            row |= zip((name, f"{name}_low", f"{name}_high"), ratio(mine[best], seconds, source))
        out.append(row | {f"share:{name}": share for name, share in zip(requests.names, shares.tolist())})
    return out
