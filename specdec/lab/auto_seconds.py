"""The seconds that ``sd.auto`` measured: a table for ``selectors.Planner``, and a row for each method and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.arm_policy import Arm
from specdec.cost.rounds import RoundTable
from specdec.lab.auto_runs import DecoderRuns, drained, of_kind, reading, share_once


@dataclass(frozen=True)
class Seconds:
    """Of a round, by batch, unless said otherwise.

    Attributes:
        plain: without a pool. draft: by arm, of drafting. rest: of everything else, by arm and for ``none``. read: by arm, of its draft's reading of one token of a
            prompt. idle: by arm and kind of request, what a round costs later, when those that it has finished early are missing; empty: nothing.
        draft_once, verify_once: by arm, what is taken as soon as any row uses it, of drafting and of everything else. verify: by arm, what each row with a
            proposal adds to everything else.
    """

    plain: Sequence[float]
    draft: Mapping[str, Sequence[float]]
    rest: Mapping[str, Sequence[float]]
    read: Mapping[str, float]
    idle: Mapping[str, Sequence[Sequence[float]]]
    draft_once: Mapping[str, Sequence[float]]
    verify_once: Mapping[str, Sequence[float]]
    verify: Mapping[str, Sequence[float]]


def measured_seconds(
    arms: Mapping[str, Arm],
    number: Mapping[str, int],
    runs: Mapping[str, DecoderRuns],
    halves: Mapping[str, DecoderRuns],
    sizes: Sequence[int],
    longest: list[int],
    kinds: Sequence[Any],
) -> Seconds:
    """What was measured, with the reading of the ``longest`` prompt.

    Args:
        number: of each arm's draft. halves: by the longest arm of each draft, batches of which half the rows use it. kinds: those of requests whose rows are
            missed when they end early.
    """
    spent = {name: [run.mean(B) for B in sizes] for name, run in runs.items()}
    plain = tuple(map(sum, spent.pop("plain")))
    own = [drawn for drawn, _ in spent["none"]]  # of asking for no draft: a part of every round
    draft = {name: tuple(max(0.0, d - o) for (d, _), o in zip(spent[name], own)) for name in arms}
    rest = {name: tuple(r + o for (_, r), o in zip(found, own)) for name, found in spent.items()}
    reads = {
        key: reading(draft, longest) for key, draft in {id(a.draft): a.draft for a in arms.values()}.items()
    }
    read = {name: reads[id(arm.draft)] for name, arm in arms.items()}
    idle = {name: [_idle(runs[name], one, sizes, rest[name], draft[name]) for one in kinds] for name in arms}
    several = [B for B in sizes if B > 1]
    # At batch 1 nothing can be told apart, so its shares are those of the next size.
    once = {
        number[name]: [
            _once(runs[name], half, runs["none"], max(B, several[0])) if several else (0.0, 0.0)
            for B in sizes
        ]
        for name, half in halves.items()
    }
    draft_once, verify_once, verify = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name in arms:
        more = [max(r - n, 0.0) for r, n in zip(rest[name], rest["none"])]
        drafted, other = zip(*once[number[name]])
        rows = [B * float(np.mean(runs[name].proposals[B])) for B in sizes]
        draft_once[name] = [share * d for share, d in zip(drafted, draft[name])]
        verify_once[name] = [share * m for share, m in zip(other, more)]
        verify[name] = [(1 - share) * m / n if n else 0.0 for share, m, n in zip(other, more, rows)]
    return Seconds(plain, draft, rest, read, idle, draft_once, verify_once, verify)


def _once(run: DecoderRuns, half: DecoderRuns, none: DecoderRuns, batch: int) -> tuple[float, float]:
    """Shares of what a draft takes beyond ``none``, of drafting and of everything else, that are taken once in a batch, however many rows use it."""
    (own, least), (draft, rest), (half_draft, half_rest) = (one.mean(batch) for one in (none, run, half))
    rows, fewer = (batch * float(np.mean(one.proposals[batch])) for one in (run, half))
    drafting = share_once(draft - own, half_draft - own, batch, batch // 2)
    return drafting, share_once(rest - least, half_rest - least, rows, fewer)


def round_table(spent: Seconds, sizes: tuple[int, ...]) -> RoundTable:
    """What ``Planner`` reads: first of no draft, then of each arm."""
    nothing = (0.0,) * len(sizes)

    def table(by_arm: Mapping[str, Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return nothing, *map(tuple, by_arm.values())

    return RoundTable(
        sizes,
        tuple(spent.rest["none"]),
        table(spent.draft),
        table(spent.verify),
        (0.0, *spent.read.values()),
        tuple((nothing, *map(tuple, by_arm)) for by_arm in zip(*spent.idle.values())),
        table(spent.draft_once),
        table(spent.verify_once),
    )


def _idle(
    run: DecoderRuns, kind: Any, sizes: Sequence[int], rest: Sequence[float], draft: Sequence[float]
) -> tuple[float, ...]:
    """By batch: what a round of rows of a kind costs later, when those that it has finished early are missing."""
    whole, mine = np.add(rest, draft), of_kind(run.rows, kind)
    return tuple(
        max(0.0, drained(mine, B, lambda rows: np.interp(rows, sizes, whole)) - float(now))
        for B, now in zip(sizes, whole)
    )


def method_rows(
    arms: Mapping[str, Arm],
    runs: Mapping[str, DecoderRuns],
    sizes: Sequence[int],
    spent: Seconds,
    prompts: float,
) -> list[dict[str, Any]]:
    """Tokens a second of each method at each batch. ``prompts``: tokens of a prompt, which an arm's draft reads, for each new token."""
    rows = []
    for i, B in enumerate(sizes):
        plain, none = spent.plain[i], spent.rest["none"][i]
        speed = {"plain": (B / plain, plain, 1.0), "none": (B / none, none, 1.0)}
        for name in arms:
            seconds = spent.rest[name][i] + spent.draft[name][i]
            tau = runs[name].tokens / max(runs[name].rounds, 1)
            later = spent.idle[name][0][i] if spent.idle.get(name) else 0.0  # of all kinds
            reads = B * tau * spent.read[name] * prompts
            speed[name] = (B * tau / (seconds + later + reads), seconds, tau)
        best = max((name for name in speed if name != "none"), key=lambda name: speed[name][0])
        for name, (rate, seconds, tau) in speed.items():
            arm = arms.get(name)
            rows.append({
                "method": name, "k": 0 if arm is None else arm.length, "batch": B, "tau": tau, "milliseconds": 1e3 * seconds,
                "tokens_per_second": rate, "ratio": rate / speed["plain"][0],
                "lossless": arm is None or runs[name].decoder.verifying.lossless, "best": name == best,
            })  # fmt: skip
    return rows
