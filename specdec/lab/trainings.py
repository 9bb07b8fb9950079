"""Trained drafts of several runs beside each other: scores by source file in the rows of a report, and what they say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import stdev
from typing import Any

import numpy as np

from specdec.audit.tau import Efficiency
from specdec.lab.bootstrap import Clusters, figures

Row = Mapping[str, Any]
ENDS = ("ratio_low", "ratio_high")


def training(made: Efficiency, sources: np.ndarray, **about: Any) -> dict[str, Any]:
    """A row of one training: expected tokens and rounds of its texts, summed by source file, and acceptance by position.

    Args:
        sources: ``[C]`` the file of each text. about: ``method``, ``seed``, ``tokens`` of the training, ``texts`` and ``data``, which name the texts and the training data.
    """
    files = Clusters(sources)
    sums = {
        name: files.by_cluster(values.numpy()).tolist()
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
    out, leads = [], []
    for (tokens, method), known in sorted(seeds.items(), key=lambda item: item[0][0]):
        mine = np.mean(list(known.values()), 0)
        each = [_tau(sums) for seed, sums in known.items() if seed is not None]
        made = _figures(mine, mine)
        row = {"part": "tau", "method": method, "tokens": tokens, "tau": made["tau"]}
        row |= {"low": made["tau_low"], "high": made["tau_high"]}
        if (tokens, reference) in seeds:
            made = _figures(*_paired(known, seeds[tokens, reference]))
            row |= {"ratio_to_vanilla": made["ratio"], **{end: made[end] for end in ENDS}}
        row |= {"acceptance": np.mean(accepted[tokens, method], 0).tolist(), "sources": mine.shape[1]}
        row |= {"seeds": len(each), "by_seed": each, "seed_sd": stdev(each) if len(each) > 1 else None}
        out.append(row)
        if method != first and (top := seeds.get((tokens, first))):
            ratios = [_tau(top[seed]) / _tau(known[seed]) for seed in top if seed in known]
            lead = {"part": "lead", "method": first, "over": method, "tokens": tokens, "by_seed": ratios}
            made = _figures(*_paired(top, known))
            leads.append(lead | {name: made[name] for name in ("ratio", *ENDS)})
    return out + leads


def _paired(a: dict[Any, np.ndarray], b: dict[Any, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The sums of two methods, over the seeds that both have; where there are none, over all of each."""
    mine, other = (np.mean([each[s] for s in a.keys() & b.keys() or each], 0) for each in (a, b))
    return mine, other


def _tau(sums: np.ndarray) -> float:
    """τ of sums ``[2, sources]``."""
    return float(sums[0].sum() / sums[1].sum())


def _figures(mine: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """``bootstrap.figures`` of sums ``[2, sources]``."""
    return figures(mine, other, Clusters(np.arange(mine.shape[1])))
