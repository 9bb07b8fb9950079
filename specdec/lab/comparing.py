"""Comparing drafts by their replays: τ by category, and paired ratios, with intervals by a bootstrap over sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.audit.tau import Efficiency
from specdec.lab import plots
from specdec.lab.bootstrap import DRAWS, FIGURES, LEAST, Clusters, bounded_figures, interval
from specdec.lab.console import Framed, table
from specdec.lab.replays import Replay
from specdec.lab.simulating import Simulation

Result = Replay | Simulation


@dataclass(frozen=True, eq=False)
class Comparison(Framed):
    """Rows of ``compare``; printed, it is a table with the answer below. ``close``: the methods whose ratio to the best one may be 1."""

    rows: list[dict[str, Any]]
    reference: str
    close: list[str]

    @property
    def answer(self) -> str:
        """Which draft has the most tokens a round over all texts, and whether the texts show it; lossy methods are left out."""
        every = [row for row in self.rows if row["category"] == "all" and row["lossless"]]
        if len(every) < 2:
            return ""
        best = max(every, key=lambda row: row["tau"])
        shown = f"{_label(best)} has the most tokens a round, {best['tau']:.2f}"
        if best["method"] != self.reference:
            shown += f", {best['ratio']:.2f} [{best['ratio_low']:.2f}, {best['ratio_high']:.2f}] of {self.reference}'s"
        return shown + (f"; too close to call against {', '.join(self.close)}" if self.close else "")

    def __repr__(self) -> str:
        columns = ("method", "category", "k", *FIGURES)
        simulated = sorted({row["method"] for row in self.rows if not row["exact"]})
        note = f"simulated, not exact: {', '.join(simulated)}" if simulated else ""
        lines = [table(self.rows, columns), self.answer, note, lossy(self.rows)]
        return "\n".join(line for line in lines if line)

    def plot(self) -> Any:
        """A matplotlib figure: τ of every draft with its interval, a panel for each category."""
        groups = list(dict.fromkeys(row["category"] for row in self.rows))
        figure, (panels,) = plots.panels(
            1, len(groups), (2.2 + 2.4 * len(groups), 3.4), bare=True, sharey=True
        )
        for axes, group in zip(panels, groups):
            rows = [row for row in self.rows if row["category"] == group]
            for i, row in enumerate(rows):
                low, high = row["tau_low"], row["tau_high"]
                if low is not None:
                    axes.plot([i, i], [low, high], color="#1f77b4", lw=2)
                axes.plot(i, row["tau"], "o", color="#1f77b4")
            same = len({row["k"] for row in rows}) == 1
            names = [row["method"] if same else f"{row['method']}, k = {row['k']}" for row in rows]
            axes.set_xticks(range(len(rows)), names, rotation=40, ha="right")
            axes.set_title(group, loc="left")
        panels[0].set_ylabel("tokens a round")
        figure.tight_layout()
        return figure


def by_name(replays: Mapping[str, Result] | Sequence[Result]) -> dict[str, Result]:
    """Replays and simulations of one trace, by name.

    Raises:
        TypeError: one is neither. ValueError: there are none, two have one name, or they are of different traces.
    """
    if isinstance(replays, Result):
        raise TypeError("replays is one alone: give several, by name, {name: replay}, or as a list")
    named = dict(replays) if isinstance(replays, Mapping) else {}
    for replay in () if isinstance(replays, Mapping) else replays:
        if replay.name in named:
            raise ValueError(
                f"replays has two of one name, {replay.name!r}: give replays by name, {{name: replay}}, or replay(..., name=)"
            )
        named[replay.name] = replay
    if not named:
        raise ValueError("replays is empty: give replays by name, {name: replay}")
    first = next(iter(named.values()))
    for name, replay in named.items():
        if not isinstance(replay, Result):
            raise TypeError(
                f"replay {name!r} is a {type(replay).__name__}: give lab.replay(trace, draft), or lab.simulate(...)"
            )
        if replay.trace.id != first.trace.id:
            raise ValueError(
                f"the replays are of different traces, {name!r} of another trace than the first: replay all drafts on one"
            )
    return named


def compare(
    replays: Mapping[str, Result] | Sequence[Result],
    k: int | Sequence[int] | None = None,
    reference: str | None = None,
    by_category: bool = True,
    draws: int = DRAWS,
    seed: int = 0,
) -> Comparison:
    """τ of drafts on the same texts, and its ratio to a reference's, with 95 % intervals.

    The bootstrap draws sources, so texts of one source count together; ratios are paired, on the same draws. τ is a ratio of sums. Where a
    replay has only bounds (trees on a trace of the largest probabilities), τ is the middle of its bounds, and intervals contain both.

    Args:
        replays: replays and simulations by name, all of one trace. k: block lengths; default: each replay's own. reference: the method that ratios are to; default: the
            first. by_category: also give rows for each category of prompts; those with fewer than 5 sources have no interval.
        draws, seed: of the bootstrap.
    Raises:
        ValueError: the replays are of different traces, there is no such reference, or the texts have fewer than 5 sources.
    """
    named = by_name(replays)
    first = next(iter(named.values()))
    reference = next(iter(named)) if reference is None else reference
    if reference not in named:
        raise ValueError(f"reference is {reference!r}: there are {', '.join(named)}")
    used = [i for i, text in enumerate(first.trace.texts) if text.rounds]
    sources = np.array(first.trace.sources)[used]
    if len(set(sources)) < LEAST:
        raise ValueError(
            f"the texts have {len(set(sources))} sources, too few for an interval: record prompts of at least {LEAST} sources"
        )
    groups = np.array(first.trace.categories)[used]
    names = ["all", *sorted(set(groups))] if by_category and len(set(groups)) > 1 else ["all"]
    lengths: dict[str, list[int]] = {
        name: [replay.k] if k is None else [int(one) for one in np.atleast_1d(k)]
        for name, replay in named.items()
    }
    sums = {(name, n): named[name].sums(n) for name in named for n in lengths[name]}
    rows = []
    for group in names:
        at = np.array(used)[[group in ("all", own) for own in groups]]
        clusters = Clusters(np.array(first.trace.sources)[at], draws, seed)
        for (name, n), bounds in sums.items():
            other = sums.get((reference, n)) or sums[reference, lengths[reference][0]]
            row: dict[str, Any] = {"method": name, "category": group, "k": n}
            row |= bounded_figures(
                [b.numpy()[:, at] for b in bounds], [b.numpy()[:, at] for b in other], clusters
            )
            if name == reference and bounds is other:  # also where it is bounded
                row |= dict.fromkeys(("ratio", "ratio_low", "ratio_high"), 1.0)
            row |= {"exact": named[name].exact, "lossless": named[name].lossless}
            row["acceptance"] = _acceptance(named[name].efficiency(n), at)
            rows.append(row)
    return Comparison(rows, reference, _close(rows, sums, np.array(used), first.trace.sources, draws, seed))


def lossy(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line that names the methods whose texts do not have the target's distribution, if there are any."""
    names = list(dict.fromkeys(row["method"] for row in rows if not row["lossless"]))
    return f"lossy, so these texts are not the target's: {', '.join(names)}" if names else ""


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['method']} (k = {row['k']})"


def _close(
    rows: Sequence[Mapping[str, Any]],
    sums: Mapping[Any, Any],
    used: np.ndarray,
    sources: Sequence[str],
    draws: int,
    seed: int,
) -> list[str]:
    """The methods that are too close to the best one, by paired draws."""
    clusters = Clusters(np.array(sources)[used], draws, seed)
    every = [row for row in rows if row["category"] == "all" and row["lossless"]]
    if not every:
        return []
    best = max(every, key=lambda row: row["tau"])
    least = clusters.ratios(*sums[best["method"], best["k"]][0].numpy()[:, used])
    found = []
    for row in every:
        most = clusters.ratios(*sums[row["method"], row["k"]][1].numpy()[:, used])
        if row is not best and interval(most / least)[1] >= 1:
            found.append(_label(row))
    return found


def _acceptance(one: Efficiency, at: np.ndarray) -> list[float]:
    """By depth, the share of reached tokens that were accepted."""
    accepted, reached = one.accepted[at].sum(0), one.reached[at].sum(0)
    return (accepted / reached.clamp(min=1e-300)).tolist()
