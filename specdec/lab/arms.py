"""Runs of a pool of drafts: tokens and seconds after the prefill, which arms were used, and goodput with intervals over workloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from specdec.decoder import Decoder
from specdec.lab.bootstrap import Clusters, ends
from specdec.stats import Stats
from specdec.types import Round


@dataclass(frozen=True)
class PoolRun:
    """One timed decode.

    Attributes:
        tokens, seconds: after the prefill. arms: how many rows and rounds each arm served. selector_seconds: that the selector took.
        rounds: of the batch, as long as any row is left. call: seconds of the whole call, with the prefill.
        timed: ``(rows, seconds)`` of each round; empty in a pipeline, where rounds overlap.
    """

    tokens: int
    seconds: float
    stats: Stats
    arms: Counter[int]
    ids: list[list[int]]
    selector_seconds: float = 0.0
    rounds: float = 0.0
    call: float = 0.0
    timed: tuple[tuple[int, float], ...] = ()

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def pool_run(
    decoder: Decoder, rows: Sequence[list[int]], tokens: int, seed: int, selection: Any = None
) -> PoolRun:
    """Decode all requests to the same number of new tokens.

    Args:
        rows: ids of the prompts. selection: a selector's earlier state (``Decoder.begin``), which this run continues.
    """
    marks: list[tuple[float, int, int, float]] = []
    sizes: list[int] = []
    arms = Counter[int]()

    def mark(round: Round) -> None:
        spent = selection.seconds if selection else 0.0
        marks.append((perf_counter(), round.number, int(round.committed.sum()), spent))
        sizes.append(len(round.committed))
        if round.number:
            arms.update(round.arm.tolist())

    if selection is None and decoder.selecting is not None:
        selection = decoder.begin(len(rows))
    began = perf_counter()
    out = decoder.generate(list(rows), tokens, seed=seed, eos_token_id=(), on_round=mark, selection=selection)
    call = perf_counter() - began
    start, _, _, before = max(mark for mark in marks if mark[1] == 0)
    made = sum(tokens for at, _, tokens, _ in marks if at > start)
    # In a pipeline each micro-batch has its own prefill and its own rounds.
    parts = sum(not number for _, number, _, _ in marks)
    rounds = len(marks) / parts - 1
    times = [mark[0] for mark in marks]
    timed = tuple((n, b - a) for n, a, b in zip(sizes[1:], times, times[1:])) if parts == 1 else ()
    spent = marks[-1][3] - before
    return PoolRun(made, marks[-1][0] - start, out.stats, arms, out.ids, spent, rounds, call, timed)


def goodput(
    runs: Sequence[PoolRun], base: Sequence[PoolRun] | None = None
) -> tuple[float, float | None, float | None]:
    """Tokens of all runs over their seconds, with a 95 % interval by bootstrap over workloads; ``None`` for too few of them.

    Args:
        runs: one for each workload. base: give the ratio to another configuration's goodput on the same workloads.
    Raises:
        ValueError: ``base`` has another number of runs.
    """
    if base is not None and len(base) != len(runs):
        raise ValueError(
            f"base has {len(base)} runs and runs {len(runs)}: give one of each for every workload"
        )
    sums = [
        np.array([(run.tokens, run.seconds) for run in some]).T for some in (runs, base) if some is not None
    ]
    clusters = Clusters(np.arange(len(runs)))
    values = [float(tokens.sum() / spent.sum()) for tokens, spent in sums]
    drawn = [clusters.ratios(*each) for each in sums] if clusters.enough else []
    if base is None:
        return values[0], *ends(drawn[0] if drawn else None)
    return values[0] / values[1], *ends(drawn[0] / drawn[1] if drawn else None)
