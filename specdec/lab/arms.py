"""Runs of a pool of drafts: tokens and seconds after the prefill, each row's arm in every round, and the best arm in hindsight."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.decoder import Decoder
from specdec.stats import Stats
from specdec.types import Context, Round


@dataclass(frozen=True)
class Assigned:
    """A selector with a fixed arm for each request, ``arm [requests]``: an oracle's choice."""

    arm: Tensor

    @classmethod
    def example(cls) -> Assigned:
        return cls(torch.zeros(64, dtype=torch.long))

    def init(self, arms: int) -> None:
        return None

    def select(
        self, state: None, context: Context, capacities: Tensor, rng: Any
    ) -> tuple[Tensor, Tensor, None]:
        return self.arm[context.request], torch.ones(context.batch), None

    def update(self, state: None, feedback: Any) -> None:
        return None


class Brief(NamedTuple):
    """The stored part of a round: whole rounds hold logits, and memory would grow with the repeats. All fields but the number are ``[B]``."""

    number: int
    request: Tensor
    arm: Tensor
    committed: Tensor
    truncated: Tensor


@dataclass(frozen=True)
class PoolRun:
    """One timed decode: tokens and seconds after the prefill, a summary of every round, and the seconds that the selector took."""

    tokens: int
    seconds: float
    stats: Stats
    rounds: list[Brief]
    ids: list[list[int]]
    selector_seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def rate(self, rows: Sequence[bool]) -> float:
        """Tokens a second of a batch of the requests in ``rows [requests]`` (bool), at this run's seconds per row and round."""
        tokens = count = 0
        for round in self.rounds:
            if round.number:
                mine = torch.tensor([rows[r] for r in round.request.tolist()]) & ~round.truncated
                tokens += int(round.committed[mine].sum())
                count += int(mine.sum())
        counted = sum(len(r.committed) for r in self.rounds if r.number)
        return tokens / max(count, 1) / (self.seconds / counted)

    def choices(self, group: Sequence[str], window: int) -> dict[tuple[int, str], Counter[int]]:
        """How often each arm was used, by window of rounds (named by its first round) and group of requests."""
        counts: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
        for round in self.rounds:
            if round.number:
                for request, arm in zip(round.request.tolist(), round.arm.tolist()):
                    counts[round.number // window * window, group[request]][arm] += 1
        return dict(sorted(counts.items()))


def pool_run(
    decoder: Decoder, rows: Sequence[list[int]], tokens: int, seed: int, selection: Any = None
) -> PoolRun:
    """Decode all requests to the same number of new tokens.

    Args:
        rows: ids of the prompts. selection: a selector's earlier state (``Decoder.begin``), which this run continues.
    """
    marks: list[tuple[float, int, int, float]] = []
    rounds: list[Brief] = []

    def mark(round: Round) -> None:
        spent = selection.seconds if selection else 0.0
        marks.append((perf_counter(), round.number, int(round.committed.sum()), spent))
        rounds.append(Brief(round.number, round.context.request, round.arm, round.committed, round.truncated))

    if selection is None and decoder.selecting is not None:
        selection = decoder.begin(len(rows))
    out = decoder.generate(list(rows), tokens, seed=seed, eos_token_id=(), on_round=mark, selection=selection)
    start, _, _, before = max(mark for mark in marks if mark[1] == 0)
    made = sum(tokens for at, _, tokens, _ in marks if at > start)
    return PoolRun(made, marks[-1][0] - start, out.stats, rounds, out.ids, marks[-1][3] - before)


def best_in_hindsight(runs: Sequence[PoolRun], group: Sequence[str]) -> Tensor:
    """``[requests]``: the arm whose single-arm run was fastest on the request's group.

    Args:
        runs: of each arm. group: of each request.
    """
    marks: Mapping[str, list[bool]] = {g: [g == other for other in group] for g in group}
    best = {g: max(range(len(runs)), key=lambda arm: runs[arm].rate(mark)) for g, mark in marks.items()}
    return torch.tensor([best[g] for g in group])
