"""Trained drafts of several runs beside each other: scores by source file in the rows of a report, and what they say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import stdev
from typing import Any

import numpy as np

from specdec.audit.tau import Efficiency
from specdec.lab.bootstrap import Clusters, interval

Row = Mapping[str, Any]


def training(made: Efficiency, sources: np.ndarray, **about: Any) -> dict[str, Any]:
    """A row of one training: expected tokens and rounds of its texts, summed by source file, and acceptance by position.

    Args:
        sources: ``[C]`` the file of each text. about: ``method``, ``seed``, ``tokens`` of the training, ``texts`` and ``data``, which name the texts and the training data.
    """
    names, place = np.unique(sources, return_inverse=True)
    sums = {
        name: np.bincount(place, values.numpy(), len(names)).tolist()
        for name, values in (("expected_tokens", made.tokens), ("expected_rounds", made.rounds))
    }
    accepted = (made.accepted.sum(0) / made.reached.sum(0)).tolist()
    return {"part": "training", **about, **sums, "accepted": accepted}


def together(rows: Iterable[Row], first: str = "spire", reference: str = "vanilla") -> list[dict[str, Any]]:
    """Rows ``tau`` of every method and number of tokens, and rows ``lead``: ``first`` over each other method, by number of tokens.

    A method's τ is tokens over rounds of all its seeds, a ratio is over the seeds that both methods have. Intervals are bootstraps over source
    files, paired for ratios: they do not contain the spread between seeds, which ``by_seed`` shows.

    Args:
        rows: of ``training``. The same training may occur twice.
    Raises:
        ValueError: the trainings were scored on different texts, or are of different data, or one has two scores.
    """
    some = sorted(
        (r for r in rows if r["part"] == "training"), key=lambda r: -1 if r["seed"] is None else r["seed"]
    )
    texts = {row["texts"] for row in some}
    if len(texts) > 1:
        raise ValueError(f"the rows are of {len(texts)} sets of texts: score all drafts on the same")
    if len({(row["tokens"], row["data"]) for row in some}) > len({row["tokens"] for row in some}):
        raise ValueError("trainings with as many tokens are of different data: train all drafts on the same")
    seeds: dict[tuple[int, str], dict[Any, np.ndarray]] = {}
    accepted: dict[tuple[int, str], list[Sequence[float]]] = {}
    for row in some:
        at, sums = (row["tokens"], row["method"]), np.array([row["expected_tokens"], row["expected_rounds"]])
        known = seeds.setdefault(at, {})
        if row["seed"] in known and not np.allclose(known[row["seed"]], sums):
            raise ValueError(
                f"{at[1]}, seed {row['seed']}, {at[0]} tokens has two scores: give each training once"
            )
        if row["seed"] not in known:
            accepted.setdefault(at, []).append(row["accepted"])
        known[row["seed"]] = sums
    out, leads, ends = [], [], ("ratio_low", "ratio_high")
    for (tokens, method), known in sorted(seeds.items(), key=lambda item: item[0][0]):
        mine = np.mean(list(known.values()), 0)
        each = [float(s[0].sum() / s[1].sum()) for seed, s in known.items() if seed is not None]
        row = {"part": "tau", "method": method, "tokens": tokens} | _ratio(mine, None, "tau", ("low", "high"))
        if (tokens, reference) in seeds:
            row |= _ratio(*_paired(known, seeds[tokens, reference]), "ratio_to_vanilla", ends)
        row |= {"acceptance": np.mean(accepted[tokens, method], 0).tolist(), "sources": mine.shape[1]}
        row |= {"seeds": len(each), "by_seed": each, "seed_sd": stdev(each) if len(each) > 1 else None}
        out.append(row)
        if method != first and (top := seeds.get((tokens, first))):
            ratios = [_ratio(top[seed], known[seed], "ratio")["ratio"] for seed in top if seed in known]
            lead = {"part": "lead", "method": first, "over": method, "tokens": tokens, "by_seed": ratios}
            leads.append(lead | _ratio(*_paired(top, known), "ratio", ends))
    return out + leads


def _paired(a: dict[Any, np.ndarray], b: dict[Any, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The sums of two methods, over the seeds that both have; where there are none, over all of each."""
    mine, other = (np.mean([each[s] for s in a.keys() & b.keys() or each], 0) for each in (a, b))
    return mine, other


def _ratio(
    mine: np.ndarray, other: np.ndarray | None, name: str, ends: tuple[str, str] | None = None
) -> dict[str, Any]:
    """τ of sums ``[2, sources]``, or its ratio to another's, with an interval over sources if ``ends`` are named and there are enough."""
    value = mine[0].sum() / mine[1].sum()
    if other is not None:
        value /= other[0].sum() / other[1].sum()
    if ends is None:
        return {name: float(value)}
    clusters = Clusters(np.arange(mine.shape[1]))
    drawn = clusters.ratios(*mine)
    if other is not None:
        drawn = drawn / clusters.ratios(*other)
    return {name: float(value), **dict(zip(ends, interval(drawn) if clusters.enough else (None, None)))}
