"""Which draft and block length, at which batch and context, on this machine; and where not to speculate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from specdec.lab import plots
from specdec.lab.bootstrap import DRAWS, FIGURES, LEAST, Clusters, interval
from specdec.lab.clock import middle
from specdec.lab.comparing import Result, by_name, lossy
from specdec.lab.console import Framed, table
from specdec.lab.timing import Times

PLAIN = "plain"


@runtime_checkable
class Clock(Protocol):
    """Seconds of rounds: ``lab.Times``, or a calibrated throughput model (``lab.calibrated.Calibrated``)."""

    def seconds(self, method: str, batch: int, context: float, k: int) -> float: ...


@runtime_checkable
class Uncertain(Protocol):
    """A clock that states its error: of the logarithm of the ratio of two methods' round times, over all pairs (``None``: unknown), and by pair."""

    error: float | None
    errors: Mapping[tuple[str, str], float]


@dataclass(frozen=True, eq=False)
class Decision(Framed):
    """Rows of ``decide``, best first at each place; printed, it says what to use where."""

    rows: list[dict[str, Any]]

    @property
    def best(self) -> list[dict[str, Any]]:
        """The best row of each place."""
        return [row for row in self.rows if row["rank"] == 1]

    def __repr__(self) -> str:
        columns = ("method", "k", "batch", "context", "tokens_per_second", *FIGURES[3:6], "loss")
        simulated = sorted({row["method"] for row in self.rows if not row["exact"]})
        note = [f"tau is simulated, not exact: {', '.join(simulated)}"] if simulated else []
        note += [line] if (line := lossy(self.rows)) else []
        return "\n".join([table(self.rows, columns), *map(_answer, self.best), *note])

    def plot(self) -> Any:
        """A matplotlib figure: the best method's speed over plain decoding's, by batch and context."""
        batches, contexts = (sorted({row[name] for row in self.rows}) for name in ("batch", "context"))
        best = {(row["batch"], row["context"]): row for row in self.best}
        figure, ((axes,),) = plots.panels(1, 1, (1.8 + 1.5 * len(batches), 1.4 + 0.6 * len(contexts)))
        grid = np.array([[best[b, c]["ratio"] for b in batches] for c in contexts])
        axes.imshow(np.log2(grid), cmap="RdYlGn", vmin=-1, vmax=1, origin="lower", aspect="auto")
        for (i, c), (j, b) in ((i, j) for i in enumerate(contexts) for j in enumerate(batches)):
            row = best[b, c]
            name = row["method"] + (f" {row['k']}" if row["k"] else "")
            axes.text(j, i, f"{name}\n{row['ratio']:.2f}", ha="center", va="center", fontsize=9)
        axes.set_xticks(range(len(batches)), batches)
        axes.set_yticks(range(len(contexts)), contexts)
        axes.set_xlabel("batch")
        axes.set_ylabel("context")
        figure.tight_layout()
        return figure


def _answer(row: Mapping[str, Any]) -> str:
    place = f"batch {row['batch']}, context {row['context']}: "
    if row["method"] == PLAIN:
        shown = "do not speculate"
    else:
        shown = f"{row['method']} with k = {row['k']}, {row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}] x plain"
    return place + shown + (f"; too close to call against {', '.join(row['close'])}" if row["close"] else "")


def decide(
    replays: Mapping[str, Result] | Sequence[Result],
    clock: Clock,
    k: int | Sequence[int] | None = None,
    places: Sequence[tuple[int, int]] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Decision:
    """Tokens a second of every method, τ without noise times batch over the seconds of a round, at every batch and context.

    Intervals draw sources of texts and, if the clock is a measurement, its repeats. A clock that is a model may state its error (``error``, ``errors``), which
    is drawn, too. A method is too close to the best one if the interval of their ratio contains 1. τ is the same at all contexts, that of the recorded
    texts. The τ of a draft with a window depends on the context: record texts of the context in question.

    Args:
        replays: by name, all of one trace. clock: seconds of rounds; plain decoding is ``"plain"`` with k = 0. k: block lengths; default:
            each replay's own. places: batches and contexts; default: those that the clock measured.
        draws, seed: of the bootstrap.
    Raises:
        TypeError: the clock is none. ValueError: replays of different traces or of one name, a time that was not measured, too few sources or repeats of the clock for
            an interval, or no places for a clock that is a model.
    """
    named = by_name(replays)
    first = next(iter(named.values()))
    if not isinstance(clock, Clock):
        raise TypeError(
            f"clock is a {type(clock).__name__} without seconds(): give lab.time(decoders, prompts), or a calibrated throughput model"
        )
    if places is None:
        if not isinstance(clock, Times):
            raise ValueError(
                "places is None, and the clock is a model: give batches and contexts, such as [(1, 256)]"
            )
        places = clock.places
    used = [i for i, text in enumerate(first.trace.texts) if text.rounds]
    clusters = Clusters(np.array(first.trace.sources)[used], draws, seed)
    if not clusters.enough:
        raise ValueError(
            f"the texts have {len(clusters)} sources, too few for an interval: record prompts of at least {LEAST} sources"
        )
    one, drawn = np.ones(draws), np.random.default_rng((seed, 2)).standard_normal(draws)
    tau: dict[tuple[str, int], tuple[float, np.ndarray, np.ndarray]] = {(PLAIN, 0): (1.0, one, one)}
    for name, replay in named.items():
        for n in [replay.k] if k is None else np.atleast_1d(k).tolist():
            bounds = [sums.numpy()[:, used] for sums in replay.sums(n)]
            between = float(np.mean([sums[0].sum() / sums[1].sum() for sums in bounds]))
            tau[name, n] = (between, clusters.ratios(*bounds[0]), clusters.ratios(*bounds[1]))
    rows = []
    for batch, context in places:
        speed, low, high = {}, {}, {}
        for (name, n), (mean, least, most) in tau.items():
            seconds = np.array(
                _repeats(clock, name, batch, context, n)
                if isinstance(clock, Times)
                else [clock.seconds(name, batch, context, n)]
            )
            # Methods ran in turn, so draws of repeats are paired, too.
            picks = np.random.default_rng((seed, 1)).integers(0, len(seconds), (draws, len(seconds)))
            again = middle(seconds[picks])
            speed[name, n] = batch * mean / float(middle(seconds))
            low[name, n], high[name, n] = batch * least / again, batch * most / again
        kept = {key: key[0] not in named or named[key[0]].lossless for key in speed}
        order = sorted(speed, key=lambda key: (not kept[key], -speed[key]))  # lossy ones last
        best, plain = order[0], (PLAIN, 0)
        for rank, key in enumerate(order, 1):
            row: dict[str, Any] = {
                "batch": batch,
                "context": context,
                "rank": rank,
                "method": key[0],
                "k": key[1],
            }
            row |= {"tau": tau[key][0], "tokens_per_second": speed[key], "ratio": speed[key] / speed[plain]}
            off = np.exp((0.0 if key == plain else _error(clock, key[0], PLAIN)) * drawn)
            row["ratio_low"] = interval(low[key] / high[plain] * off)[0]
            row["ratio_high"] = interval(high[key] / low[plain] * off)[1]
            row |= {"loss": 1 - speed[key] / speed[best], "exact": key == plain or named[key[0]].exact}
            row["lossless"] = kept[key]
            row["close"] = []
            for other in (o for o in order[1:] if kept[o] and rank == 1):
                off = np.exp(_error(clock, other[0], best[0]) * drawn)
                if interval(high[other] / low[best] * off)[1] >= 1:
                    row["close"].append(f"{other[0]} {other[1]}" if other[1] else other[0])
            rows.append(row)
    return Decision(rows)


def _repeats(clock: Times, name: str, batch: int, context: int, k: int) -> Sequence[float]:
    """The seconds of a method's rounds, enough of them for an interval."""
    found = clock.repeats(name, batch, context, k)
    if len(found) < LEAST:
        raise ValueError(
            f"the clock has {len(found)} repeats, too few for an interval: lab.time(repeats={LEAST}) or more"
        )
    return found


def _error(clock: Clock, one: str, other: str) -> float:
    """A model's standard error of the logarithm of the ratio of two methods' round times; 0 of a clock that states none. One method at two lengths has
    the error of any two methods."""
    if not isinstance(clock, Uncertain):
        return 0.0
    first, second = sorted((one, other))
    return clock.errors.get((first, second), clock.error or 0.0)
