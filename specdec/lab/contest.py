"""Rows of a comparison of drafts: τ by length and domain, acceptance by depth, trees, equal drafting time, windows, and tokens a second.

Every row has the contender's name, parameters and training tokens; the field ``part`` says which table it is of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.lab.bootstrap import FIGURES, Clusters, ends, figures, interval
from specdec.lab.comparing import compare
from specdec.lab.contenders import Contender, Way, kept
from specdec.lab.multipliers import Taus, ratio, speed
from specdec.lab.replays import Replay
from specdec.lab.steady import Measured
from specdec.lab.turns import PLAIN, TimedWay, drafting_ms

Row = dict[str, Any]


def tau_rows(
    field: Sequence[Contender], replays: Mapping[str, Replay], reference: str, at: Row, part: str = "tau"
) -> list[Row]:
    """τ of every chain at every length, for all texts and by domain.

    Args:
        replays: of the chains, by label. reference: the contender that ratios are to, paired. at: fields of all rows.
    """
    rows = []
    for k in range(1, max(one.longest for one in field) + 1):
        long = {one.name: replays[one.chain.label] for one in field if one.longest >= k}
        for row in compare(long, k, reference if reference in long else None).rows:
            over = reference if reference in long else next(iter(long))
            here = {"part": part, "method": row["method"], "drafting": "chain", **at, "k": k}
            rows.append(
                here | {"domain": row["category"], "over": over} | {name: row[name] for name in FIGURES}
            )
    return rows


def depth_rows(field: Sequence[Contender], replays: Mapping[str, Replay], at: Row) -> list[Row]:
    """Acceptance at each depth of the longest chain, given that the depth is reached, with 95 % intervals by bootstrap over sources."""
    rows = []
    for one in field:
        replay = replays[one.chain.label]
        made, clusters = replay.efficiency(), Clusters(replay.trace.sources)
        for d in range(replay.k):
            accepted, reached = (t[:, d].numpy() for t in (made.accepted, made.reached))
            row = {"part": "depth", "method": one.name, **at, "k": replay.k, "depth": d + 1}
            row |= {
                "acceptance": float(accepted.sum() / max(reached.sum(), 1e-300)),
                "low": None,
                "high": None,
            }
            if clusters.enough and (drawn := clusters.sums(reached)).min() > 0:
                row["low"], row["high"] = interval(clusters.sums(accepted) / drawn)
            rows.append(row)
    return rows


def tree_rows(
    field: Sequence[Contender], trees: Sequence[Way], replays: Mapping[str, Replay], at: Row
) -> list[Row]:
    """τ of trees, and its paired ratio to that of the same head's chain of as many tokens as the tree has levels."""
    named, rows = {one.name: one for one in field}, []
    for way in trees:
        one, k = named[way.method], way.longest
        chain = replays[one.chain.label]
        row = {"part": "tree", "method": one.name, "drafting": way.drafting, **at, "k": k, "nodes": way.nodes}
        row |= _paired(replays[way.label], None, chain, k)
        rows.append(row | {"chain_tau": chain.efficiency(k).tau})
    return rows


def window_row(
    one: Contender, way: Way, k: int, replays: Mapping[str, Replay], times: Mapping[str, Measured], at: Row
) -> Row:
    """What a window costs and saves.

    Args:
        way: of the windowed head. replays: by label. times: by label of the case, plain decoding's included.
    """
    narrow, full = replays[way.label], replays[one.chain.label]
    row = {"part": "window", "method": one.name, "drafting": way.drafting, **at, "k": k}
    row |= _paired(narrow, k, full, k) | {"full_tau": full.efficiency(k).tau}
    for name, which in (("", way), ("full_", one.chain)):
        row[f"{name}draft_ms"] = drafting_ms(times[TimedWay(which).label], times[PLAIN])
        row[f"{name}kv_positions"] = kept(which, at["context"] + k)
    return row


def _paired(mine: Replay, k: int | None, other: Replay, other_k: int) -> Row:
    """τ with an interval, and its paired ratio to another replay's."""
    each = (mine.efficiency(k), other.efficiency(other_k))
    ours, theirs = (torch.stack(e[:2]).numpy() for e in each)
    made = figures(ours, theirs, Clusters(mine.trace.sources))
    return {name: made[name] for name in FIGURES[:6]}


def speed_rows(
    field: Sequence[Contender],
    cases: Sequence[TimedWay],
    measured: Sequence[Measured],
    taus: Taus,
    batch: int,
    at: Row,
) -> list[Row]:
    """Tokens a second of every case, τ times rows over a round's time, and its paired ratio to plain decoding; fastest first.

    ``close``: whether the interval of the ratio to the fastest case contains 1.
    """
    context, plain = at["context"], next(m for m in measured if m.method == PLAIN)
    best = max(measured, key=lambda m: speed(m, context, taus))
    rows = []
    for case, m in sorted(zip(cases, measured), key=lambda pair: -speed(pair[1], context, taus)):
        if case.way is None:
            row: Row = {"part": "speed", "method": PLAIN}
            row |= {"drafting": PLAIN, "verifier": None}
        else:
            row = {"part": "speed", "method": case.way.method}
            row |= {"drafting": case.way.drafting, "verifier": case.verifier}
        row |= at | {"batch": batch, "k": m.k, "nodes": case.nodes}
        low, high = ends(taus.drawn(m.method, context, m.k))
        row |= {"tau": taus.tau(m.method, context, m.k), "tau_low": low, "tau_high": high, "live_tau": m.tau}
        row |= {"draft_ms": drafting_ms(m, plain), "round_ms": 1e3 * m.round_seconds}
        row |= {"tokens_per_second": batch * speed(m, context, taus)}
        names = ("ratio_to_plain", "ratio_low", "ratio_high")
        row |= dict(zip(names, ratio(m, plain, context, taus)))
        most = ratio(m, best, context, taus)[2]
        row |= {"close": None if most is None else most >= 1, "repeats": len(m.runs)}
        rows.append(row)
    return rows


def equal_rows(
    field: Sequence[Contender],
    measured: Mapping[tuple[str, int], Measured],
    replays: Mapping[str, Replay],
    reference: str,
    at: Row,
) -> list[Row]:
    """τ at equal drafting time: for the time of the reference's chains of 2, 4, ... tokens, the longest chain of each draft that takes no longer.

    Args:
        measured: by contender and k, plain decoding's with k = 0. A draft that needs more for one token has k = 0, which is τ = 1.
    """
    plain = measured[PLAIN, 0]
    times = {key: drafting_ms(case, plain) for key, case in measured.items() if key[1]}
    rows = []
    for given in sorted(k for name, k in times if name == reference and k in (1, 2, 4, 8)):
        most = times[reference, given]
        for one in field:
            k = max((n for n in range(1, one.longest + 1) if times[one.name, n] <= most), default=0)
            row = {
                "part": "equal_ms",
                "method": one.name,
                "drafting": "chain",
                **at,
                "over": reference,
                "over_k": given,
            }
            row |= {"budget_ms": most, "k": k, "draft_ms": times[one.name, k] if k else 0.0}
            rows.append(row | {"tau": replays[one.chain.label].efficiency(k).tau if k else 1.0})
    return rows


def choice_rows(cases: Sequence[TimedWay], replays: Mapping[str, Replay], batch: int, at: Row) -> list[Row]:
    """What was chosen on the development prompts, with τ there."""
    rows = []
    for case in cases:
        if case.way is not None:
            k = case.k if replays[case.way.label].chains else None
            row: Row = {"part": "choice", "method": case.way.method, "drafting": case.way.drafting}
            row |= {"verifier": case.verifier, **at, "batch": batch, "k": case.k}
            rows.append(row | {"tau": replays[case.way.label].efficiency(k, case.verifier).tau})
    return rows
