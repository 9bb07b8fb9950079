"""What ``sd.auto`` measures: the seconds of rounds, and how many of a draft's tokens are accepted, for each kind of request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy.stats import trim_mean

from specdec.capabilities import DraftPart
from specdec.decoder import Decoder
from specdec.lab.clock import sync
from specdec.selectors.kinds import ByTemperature
from specdec.types import Context, Round

Kind = Callable[[Context], Sequence[Hashable]]
BURSTS = 4.0
"""A row's failures come in bursts, so as many say less about the rest of its text than their number does; chosen on validation prompts."""


@dataclass
class Measured:
    """A decoder and what was measured of it.

    Attributes:
        seconds: by batch, of drafting and of everything else, of every round. proposals: by batch, share of rows with a proposal, of every round.
        rows: of each row of each run: its kind, and ``[1 + K, 2]``, rounds (all, with a proposal) and (tested, accepted) by position.
    """

    decoder: Decoder
    kind: Kind | None
    seconds: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    proposals: dict[int, list[float]] = field(default_factory=dict)
    rows: list[tuple[Hashable, np.ndarray]] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0

    def measure(
        self, prompts: list[list[int]], temperatures: list[int], new_tokens: int, seed: int, counted: bool
    ) -> None:
        """Decode once; rounds in which all rows are active are timed. ``temperatures``: which ones, where each request has its own."""
        B, k, decoder, kind = len(prompts), self.decoder.length, self.decoder, self.kind
        tested = np.zeros((B, 1 + k, 2))
        began, kinds = [0.0], dict[int, Hashable]()
        if isinstance(every := decoder.sampling.temperature, tuple):
            mine = tuple(every[i] for i in temperatures)
            decoder = decoder.with_sampling(replace(decoder.sampling, temperature=mine))
            kind = kind or ByTemperature(mine)

        def mark(round: Round) -> None:
            sync()
            now = perf_counter()
            if not round.number and kind is not None:
                kinds.update(zip(round.context.request.tolist(), kind(round.context)))
            if counted and round.number and len(round.committed) == B and not bool(round.truncated.any()):
                draft = round.seconds["draft"]
                self.seconds.setdefault(B, []).append((draft, now - began[0] - draft))
                self.proposals.setdefault(B, []).append(float((round.proposal.size > 0).float().mean()))
            if counted and round.number:
                for row, size, m, cut in zip(
                    round.context.request.tolist(),
                    round.proposal.size.tolist(),
                    round.verdict.accepted.tolist(),
                    round.truncated.tolist(),
                ):
                    if not cut:
                        tested[row, 0] += (1, size > 0)
                        tested[row, 1 : 1 + min(m + 1, size), 0] += 1
                        tested[row, 1 : 1 + m, 1] += 1
                        self.tokens, self.rounds = self.tokens + m + 1, self.rounds + 1
            began[0] = perf_counter()

        seeds = [seed + i for i in range(B)]
        decoder.generate(prompts, new_tokens, seed=seeds, eos_token_id=(), on_round=mark)
        if counted:
            self.rows += [(kinds.get(row), tested[row]) for row in range(B)]


def estimates(
    runs: Sequence[tuple[int, Sequence[tuple[Hashable, np.ndarray]]]], drafts: int, longest: int
) -> tuple[tuple[Hashable, ...], tuple[Any, ...], tuple[Any, ...]]:
    """The kinds of requests, all of them together first, and ``prior`` and ``spread`` for ``Planner``.

    Args:
        runs: the number of a draft, and the rows that it drafted (``Measured.rows``). longest: length of all drafts.
    """
    counted = [
        (draft, kind, np.pad(row, ((0, 1 + longest - len(row)), (0, 0))))
        for draft, rows in runs
        for kind, row in rows
    ]
    found = sorted({kind for _, kind, _ in counted if kind is not None}, key=repr)
    prior, spread = [], []
    for kind in (None, *found):
        mine = [
            np.array([row for d, k, row in counted if d == draft and kind in (None, k)])
            for draft in range(drafts)
        ]
        prior.append(tuple(tuple(map(tuple, rows.sum(0).tolist())) for rows in mine))
        spread.append(tuple(BURSTS * spread_of(rows[:, 1:]) for rows in mine))
    return ("all", *found), tuple(prior), tuple(spread)


def mean(seconds: Iterable[float]) -> float:
    """The mean without the 5 % at each end: rounds with and without proposals differ, so a median would be that of one kind."""
    return float(trim_mean(list(seconds), 0.05))


def each(run: Measured, batch: int, seconds: float, plain: float) -> float:
    """What a row that has a proposal adds to a plain round beside drafting; not less than nothing."""
    rows = batch * float(np.mean(run.proposals[batch]))
    return max(0.0, (seconds - plain) / rows) if rows else 0.0


def spread_of(rows: np.ndarray) -> float:
    """How many expected failures of a row weigh as much as all rows together: the method of moments for a gamma factor on a row's failures.

    Args:
        rows: ``[R, K, 2]`` tested and accepted tokens of each row by position.
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
