"""Alternating timed runs of several methods: decode time without the prefill, in rows of one format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from specdec.decoder import Decoder
from specdec.lab.clock import shuffled
from specdec.lab.peak import Peak
from specdec.types import Round


class Each(NamedTuple):
    """One prompt of a run.

    Attributes:
        tokens, rounds: of the rounds that count for τ. made: tokens of all rounds. seconds: its own, where prompts are decoded one at a time.
    """

    tokens: int
    rounds: int
    made: int
    seconds: float | None = None


@dataclass(frozen=True)
class Sample:
    """One timed run: decoded tokens and seconds, both from the end of the first round to the end of the last.

    Attributes:
        tau: tokens per round and row. full: seconds, tokens and rows times rounds, over the rounds in which no row of the batch had
            ended or was about to. stages: seconds of these rounds by stage. each: the prompts, in order.
    """

    tokens: int
    seconds: float
    ids: list[list[int]]
    tau: float | None = None
    peak_bytes: int | None = None
    full: tuple[float, int, int] = (0.0, 0, 0)
    stages: Counter[str] = field(default_factory=Counter)
    each: list[Each] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Case:
    """One line of a table: a configuration, and its samples so far."""

    engine: str
    method: str
    batch: int
    context: int
    temperature: float
    run: Callable[[], Sample]
    k: int | str | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Median tokens a second."""
        return median(s.speed for s in self.samples)

    @property
    def tau(self) -> float | None:
        return self.samples[-1].tau

    def row(self, plain: Case | None, share: float | None = None) -> dict[str, Any]:
        """The row of a report. ``plain``: the case to compare with. ``share``: of the ideal speed."""
        peaks = [s.peak_bytes for s in self.samples if s.peak_bytes is not None]
        names = ("engine", "method", "batch", "context", "temperature", "k")
        return {name: getattr(self, name) for name in names} | {
            "tokens_per_second": self.speed,
            "tau": self.tau,
            "ratio_to_plain": None if plain is None else self.speed / plain.speed,
            "share_of_ideal": share,
            "peak_bytes": max(peaks) if peaks else None,
        }


def by_category(cases: Sequence[Case], categories: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of every case and category: τ, and tokens a second where prompts were decoded one at a time.

    Args:
        categories: of the prompts, in order, as many as the longest case has.
    """
    rows = []
    names = ("engine", "method", "batch", "context", "temperature", "k")
    for case in cases:
        prompts = len(case.samples[-1].each)
        for category in sorted(set(categories[:prompts])):
            mine = [i for i in range(prompts) if categories[i] == category]
            last = [case.samples[-1].each[i] for i in mine]
            tokens, rounds = sum(one.tokens for one in last), sum(one.rounds for one in last)
            speeds = [_speed([sample.each[i] for i in mine]) for sample in case.samples]
            row = {"part": "category", **{name: getattr(case, name) for name in names}, "category": category}
            row |= {"prompts": len(mine), "tau": tokens / rounds if rounds else None}
            row["tokens_per_second"] = median(found) if (found := [s for s in speeds if s]) else None
            rows.append(row)
    return rows


def _speed(each: Sequence[Each]) -> float | None:
    seconds = [one.seconds for one in each if one.seconds is not None]
    if len(seconds) < len(each) or not sum(seconds):
        return None
    return sum(one.made for one in each) / sum(seconds)


def interleave(cases: Sequence[Case], repeats: int, tell: Callable[[str], None]) -> None:
    """Run all cases alternately, ``repeats`` times, so that a slow minute of the machine affects all of them.

    Args:
        tell: called with a line that names the next run.
    """
    for r in range(repeats):
        for case in shuffled(cases, r):
            tell(f"{case.engine} {case.method} batch {case.batch} T={case.temperature:g} ({r + 1}/{repeats})")
            with Peak() as peak:
                sample = case.run()
            case.samples.append(replace(sample, peak_bytes=peak.bytes))


def decode(
    decoder: Decoder, prompts: Sequence[Sequence[int]], batch: int, new_tokens: int, seed: int
) -> Sample:
    """All prompts through ``decoder`` in batches, timed from the end of each batch's prefill round.

    Args:
        batch: rows at a time. seed: of the first prompt; each prompt has its own seed.
    Raises:
        ValueError: there are several batches, and sampling settings for each request.
    """
    if len(prompts) > batch and (decoder.sampling.by_request or decoder.drafting.by_request):
        raise ValueError(
            "the decoder, or its draft, has sampling settings for each request, and requests are numbered from 0 in every batch: give one "
            f"for all, or batch={len(prompts)}"
        )
    tokens, seconds, ids, each = 0, 0.0, [], list[Each]()
    full_tokens = full_rounds = 0
    full, stages = (0.0, 0, 0), Counter[str]()
    for i in range(0, len(prompts), batch):
        some = [list(p) for p in prompts[i : i + batch]]
        marks: list[float] = []
        all_in: list[tuple[int, int]] = []  # tokens and rows of each round, while all rows are active

        def look(round: Round, marks: list[float] = marks, all_in: list[Any] = all_in) -> None:
            marks.append(perf_counter())
            if round.context.batch == batch and not bool(round.finished.any()):
                all_in.append((int(round.committed.sum()), batch))
                if round.number:
                    parts = dict(round.seconds)
                    stages.update({**parts, "rounds": 1, "other": 2 * parts["total"] - sum(parts.values())})

        seeds = [seed + i + j for j in range(len(some))]
        out = decoder.generate(some, new_tokens, seed=seeds, eos_token_id=(), on_round=look)
        seconds += marks[-1] - marks[0]
        n = len(all_in) - 1  # the first is the prefill
        if n > 0:
            made, rows = (sum(part) for part in zip(*all_in[1:]))
            full = (full[0] + marks[n] - marks[0], full[1] + made, full[2] + rows)
        alone = marks[-1] - marks[0] if batch == 1 else None
        for row in out.row_stats:
            each.append(Each(row.full_tokens, row.full_rounds, row.tokens - row.prefill_tokens, alone))
        tokens += out.stats.tokens - out.stats.prefill_tokens
        full_tokens += out.stats.full_tokens
        full_rounds += out.stats.full_rounds
        ids += out.ids
    tau = full_tokens / full_rounds if full_rounds else None
    return Sample(tokens, seconds, ids, tau, full=full, stages=stages, each=each)
