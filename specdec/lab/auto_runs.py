"""What ``sd.auto`` measures: the seconds of rounds, and how many of a draft's tokens are accepted, for each kind of request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy.stats import trim_mean
from torch import Tensor

from specdec.capabilities import DraftPart
from specdec.decoder import Decoder
from specdec.lab.clock import sync
from specdec.rng import Rng
from specdec.selectors.fixed import HELD, Arms, Fixed
from specdec.selectors.kinds import Kind, kinds_of
from specdec.types import Context, Round

BATCHES = 2000  # drawn of the measured rows, to see how a batch gets smaller
FEW = 8  # rounds of all rows that count for each kind, and rows of a kind of which no spread is estimated
FEWER = 0.1  # the least difference of two numbers of rows, as a share of the larger, for a difference of seconds to say what a row adds
BURSTS = 4.0
"""A row's failures come in bursts, so as many say less about the rest of its text than their number does; chosen on validation prompts."""


@dataclass(frozen=True)
class Half(Fixed):
    """Arm ``arm`` for the first half of a batch's requests, and arm 0, which does not speculate, for the others."""

    def select(
        self, state: Arms, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Arms]:
        """As ``Selector.select``."""
        arm, prob, state = super().select(state, context, capacities, rng)
        return torch.where(context.request < context.batch // 2, arm, 0), prob, state

    def hold(self, state: Arms) -> int:
        """As ``Fixed`` does."""
        return HELD - 1


@dataclass
class DecoderRuns:
    """A decoder, whose drafts are ``length`` deep at most, and what was measured of it.

    Attributes:
        seconds: by batch, of drafting and of everything else, of every round. proposals: by batch, share of rows with a proposal, of every round.
        rows: of each row of each run: its kind, and ``[1 + K, 2]``, rounds (all, with a proposal) and (tested, accepted) by depth.
    """

    decoder: Decoder
    kind: Kind | None
    length: int
    seconds: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    proposals: dict[int, list[float]] = field(default_factory=dict)
    rows: list[tuple[Hashable, np.ndarray]] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    as_request: dict[tuple[int, ...], Decoder] = field(default_factory=dict)

    def measure(
        self, prompts: list[list[int]], requests: list[int], new_tokens: int, seed: int, counted: bool
    ) -> None:
        """Decode once; rounds in which all rows are active are timed.

        Args:
            requests: whose temperatures the rows have, where each request has its own.
        """
        B, k = len(prompts), self.length
        tested = np.zeros((B, 1 + k, 2))
        began, kinds = [0.0], dict[int, Hashable]()

        def mark(round: Round) -> None:
            sync()
            now, rows = perf_counter(), round.context.request.tolist()
            if not round.number and self.kind is not None:  # as a selector sees them first
                first = round.context.append(round.verdict.tokens, round.committed)
                seen = replace(first, request=torch.tensor([requests[row] for row in rows]))
                kinds.update(zip(rows, kinds_of(self.kind, seen)))
            if counted and round.number and len(round.committed) == B and not bool(round.truncated.any()):
                draft = round.seconds["draft"]
                self.seconds.setdefault(B, []).append((draft, now - began[0] - draft))
                self.proposals.setdefault(B, []).append(float((round.proposal.size > 0).float().mean()))
            if counted and round.number:
                for row, size, m, cut in zip(
                    rows,
                    round.proposal.size.tolist(),
                    round.verdict.accepted.tolist(),
                    round.truncated.tolist(),
                ):
                    if not cut:
                        tested[row, 0] += (1, size > 0)
                        tested[row, 1 : 2 + m, 0] += size > 0  # also where the path ends there
                        tested[row, 1 : 1 + m, 1] += 1
                        self.tokens, self.rounds = self.tokens + m + 1, self.rounds + 1
            began[0] = perf_counter()

        seeds = [seed + i for i in range(B)]
        decoder = self._as(tuple(requests))
        decoder.generate(prompts, new_tokens, seed=seeds, eos_token_id=(), on_round=mark)
        if counted:
            self.rows += [(kinds.get(row), tested[row]) for row in range(B)]

    def mean(self, batch: int) -> tuple[float, float]:
        """Mean seconds of drafting and of everything else, without the 5 % at each end. Rounds with a proposal and rounds without one differ, so
        each kind is trimmed by itself, and counts by its number."""
        seconds, some = np.array(self.seconds[batch]), np.array(self.proposals[batch]) > 0
        kinds = [seconds[mask] for mask in (some, ~some) if mask.any()]
        draft, rest = sum(len(kind) * trim_mean(kind, 0.05) for kind in kinds) / len(seconds)
        return float(draft), float(rest)

    def _as(self, requests: tuple[int, ...]) -> Decoder:
        """The decoder with the temperatures of these requests, made once."""
        every = self.decoder.sampling.temperature
        if not isinstance(every, tuple):
            return self.decoder
        if requests not in self.as_request:
            mine = replace(self.decoder.sampling, temperature=tuple(every[r] for r in requests))
            self.as_request[requests] = self.decoder.with_sampling(mine)
        return self.as_request[requests]


def estimates(
    runs: Sequence[tuple[int, Sequence[tuple[Hashable, np.ndarray]]]], drafts: int, longest: int
) -> tuple[tuple[Hashable, ...], tuple[Any, ...], tuple[Any, ...]]:
    """The kinds of requests, all of them together first, and ``prior`` and ``spread`` for ``Planner``.

    Args:
        runs: the number of a draft, and the rows that it drafted (``DecoderRuns.rows``). longest: length of all drafts.
    """
    counted = [
        (draft, kind, np.pad(row, ((0, 1 + longest - len(row)), (0, 0))))
        for draft, rows in runs
        for kind, row in rows
    ]
    found = sorted({kind for _, kind, _ in counted if kind is not None}, key=repr)
    prior, spread = [], []
    for kind in (None, *found):
        counts, spreads = [], []
        for draft in range(drafts):
            every = np.array([row for d, _, row in counted if d == draft])
            mine = every[[kind in (None, k) for d, k, _ in counted if d == draft]]
            whole = every.sum(0)
            few = 0 if kind is None else min(1, FEW / max(whole[0, 0], 1))
            counts.append(tuple(map(tuple, (mine.sum(0) + few * whole).tolist())))
            spreads.append(BURSTS * spread_of((every if len(mine) < FEW else mine)[:, 1:]))
        prior.append(tuple(counts))
        spread.append(tuple(spreads))
    return ("all", *found), tuple(prior), tuple(spread)


def share_once(whole: float, half: float, rows: float, fewer: float) -> float:
    """``rows`` rows take ``whole`` seconds, and ``fewer`` rows take ``half``: the share of ``whole`` that does not depend on the number of rows; 0 where
    the two numbers hardly differ."""
    if whole <= 0 or rows - fewer <= FEWER * rows:
        return 0.0
    each = (whole - half) / (rows - fewer)
    return min(max(1 - rows * each / whole, 0.0), 1.0)


def drained(
    rows: Sequence[tuple[Hashable, np.ndarray]], batch: int, seconds: Callable[[np.ndarray], np.ndarray]
) -> float:
    """Seconds of a round of a batch of equal budgets, with those that it costs later, when rows that have ended are missing and are not replaced: by
    the rows' own rounds, in batches drawn anew. For one row, and where a round's seconds are in proportion to its rows, those of the round.

    Args:
        rows: ``DecoderRuns.rows``. seconds: of a round of so many rows.
    """
    rounds = np.array([row[0, 0] for _, row in rows])
    tokens = rounds + np.array([row[1:, 1].sum() for _, row in rows])
    some = rounds > 0
    if not some.any():
        return float(seconds(np.array([batch]))[0])
    each = np.sort(np.random.default_rng(0).choice(rounds[some] / tokens[some], (BATCHES, batch)), 1)
    stages = np.diff(each, prepend=0.0, axis=1)  # in each, the rows that need more rounds are left
    return float((stages * seconds(np.arange(batch, 0, -1))).sum(1).mean() / each.mean())


def of_kind(
    rows: Sequence[tuple[Hashable, np.ndarray]], kind: Hashable
) -> Sequence[tuple[Hashable, np.ndarray]]:
    """The rows of a kind; all rows for ``"all"``, and where there are only a few of the kind."""
    mine = [row for row in rows if row[0] == kind]
    return rows if kind == "all" or len(mine) < FEW else mine


def spread_of(rows: np.ndarray) -> float:
    """How many expected failures of a row weigh as much as all rows together: the method of moments for a gamma factor on a row's failures.

    Args:
        rows: ``[R, K, 2]`` tested and accepted tokens of each row by depth.
    """
    total = rows.sum(0)
    failing = 1 - total[:, 1] / total[:, 0].clip(1)
    expected, found = (rows[..., 0] * failing).sum(1), (rows[..., 0] - rows[..., 1]).sum(1)
    excess = ((found - expected) ** 2 - (rows[..., 0] * failing * (1 - failing)).sum(1)).sum()
    return float((expected**2).sum() / excess) if excess > 0 else float("inf")


def reading(draft: Any, ids: list[int]) -> float:
    """Seconds for a draft to read one token of a prompt."""
    waits = DraftPart.of(draft).waits
    if waits is None or not ids:
        return 0.0
    spent = []
    for _ in range(2):  # the first warms up
        context = Context.of([ids])
        with torch.inference_mode():
            state = waits.empty(context)
            began = perf_counter()
            waits.prepare(state, context, None)
            sync()
        spent.append(perf_counter() - began)
    return spent[-1] / len(ids)
