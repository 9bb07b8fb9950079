"""What a measured grid says: how well the model names the fastest method, where it must not name one, and SPIRe's rank; as rows and text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import log, sqrt
from statistics import fmean, median
from typing import Any, NamedTuple

from specdec.lab.console import table
from specdec.lab.grid_rows import K, Point, Row

NEAR = 0.03
"""A method this much slower than the fastest is as good as the fastest."""
RIGHT, CLOSE, LOSS = 0.9, 1 / 3, 0.1
"""What is asked of the model at points that it was not fitted to: the least share of right answers, the largest share of "too close", and
the largest loss by following it."""


class Verdict(NamedTuple):
    """The model's answer at a grid point.

    Attributes:
        fastest: as measured, of all methods. named: as modelled. lead: of the named method's modelled speed over the next one's, less 1.
        too_close: the lead over some method is within the model's own error. loss: the fastest method's measured speed over that of the named one, less 1.
    """

    fastest: str
    named: str
    lead: float
    too_close: bool
    loss: float

    @property
    def holds(self) -> bool:
        """The model names the fastest method, or says "too close" and names one that is nearly as fast."""
        return self.loss <= NEAR if self.too_close else self.named == self.fastest


Errors = Mapping[tuple[str, str], float]


def verdict(methods: Mapping[str, Row], errors: Errors) -> Verdict:
    """The model's answer among several methods' rows.

    Args:
        methods: rows with ``multiplier`` and ``modelled``. errors: of the logarithm of the ratio of two methods' modelled times, by pair
            (``Calibrated.errors``). Pairs without an error are never too close.
    """
    fastest, named = winner(methods, "multiplier"), winner(methods, "modelled")
    leads = {o: methods[named]["modelled"] / r["modelled"] for o, r in methods.items() if o != named}
    too_close = any(log(lead) < errors.get(_pair(named, other), 0.0) for other, lead in leads.items())
    loss = methods[fastest]["multiplier"] / methods[named]["multiplier"] - 1
    return Verdict(fastest, named, min(leads.values(), default=float("inf")) - 1, too_close, loss)


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def at_k(rows: list[Row], best: bool) -> dict[Point, dict[str, Row]]:
    """By grid point and method: rows at k = 4, or at each method's own best; plain decoding in both."""
    out: dict[Point, dict[str, Row]] = {}
    for r in rows:
        if r["part"] == "grid" and (r["method"] == "plain" or (r["best_k"] if best else r["k"] == K)):
            out.setdefault((r["batch"], r["context"]), {})[r["method"]] = r
    return out


def winner(methods: Mapping[str, Row], column: str) -> str:
    """The method with the largest value of a column."""
    return max(methods, key=lambda name: methods[name][column])


def errors_of(rows: list[Row]) -> dict[tuple[str, str], float]:
    """The model's own errors by pair, from the rows of its constants."""
    some = (r for r in rows if r.get("quantity") == "error_of_a_difference" and "over" in r)
    return {(r["method"], r["over"]): r["value"] for r in some}


def verdicts(rows: list[Row], best: bool) -> dict[Point, tuple[dict[str, Row], Verdict]]:
    """Rows and verdict at every point to which the model was not fitted."""
    points = at_k(rows, best)
    unseen = {p: m for p, m in points.items() if not m["plain"]["fitted"] and m["plain"]["modelled"]}
    return {p: (methods, verdict(methods, errors_of(rows))) for p, methods in unseen.items()}


def repeated(rows: list[Row], others: list[Row], best: bool) -> dict[Point, Verdict]:
    """Another run's answers in the model's place, at the points to which this run's model was not fitted: what noise alone costs."""
    theirs, out = at_k(others, best), {}
    for p, (methods, _) in verdicts(rows, best).items():
        if p in theirs and methods.keys() <= theirs[p].keys():
            said = {m: r | {"modelled": theirs[p][m]["multiplier"]} for m, r in methods.items()}
            out[p] = verdict(said, {})
    return out


class Statement(NamedTuple):
    """What the model's answers come to at points that it was not fitted to.

    Attributes:
        points: their number. right: how many of them the model names the fastest method at, or says "too close" and is within ``NEAR``.
        close: how many it calls too close. loss: the largest by following it.
    """

    points: int
    right: int
    close: int
    loss: float

    @staticmethod
    def of(said: Iterable[Verdict]) -> Statement:
        """Counts of the answers; ``said`` may be empty."""
        some = list(said)
        right, close = sum(v.holds for v in some), sum(v.too_close for v in some)
        return Statement(len(some), right, close, max((v.loss for v in some), default=0.0))

    @property
    def holds(self) -> bool:
        """Whether the answers meet ``RIGHT``, ``CLOSE`` and ``LOSS``; not without points."""
        shares = self.right >= RIGHT * self.points and self.close <= CLOSE * self.points
        return self.points > 0 and shares and self.loss <= LOSS

    def __str__(self) -> str:
        n = self.points
        if not n:
            return "not judged: the model was fitted to all points"
        return (
            f"{'holds' if self.holds else 'does not hold'} at {self.points} points that the model was not fitted to: "
            f"fastest named, or too close and within {NEAR:.0%}, at {self.right} ({self.right / n:.0%}; wanted {RIGHT:.0%}); "
            f"too close at {self.close} ({self.close / n:.0%}; at most {CLOSE:.0%}); largest loss {self.loss:.1%} (at most {LOSS:.0%})"
        )


def summary(rows: list[Row], seconds: float) -> list[Row]:
    """The model's answers and errors at points that it was not fitted to, and SPIRe's rank. Units are in the names."""
    values: dict[str, Any] = {"wall_seconds": seconds}
    for name, best in (("k4", False), ("best_k", True)):
        points = at_k(rows, best)
        unseen = verdicts(rows, best)
        if unseen:
            said = [v for _, v in unseen.values()]
            stated = Statement.of(said)
            errors = [
                abs(r["modelled"] / r["multiplier"] - 1)
                for methods, _ in unseen.values()
                for r in methods.values()
                if r["method"] != "plain"
            ]
            values |= {
                f"unfitted_points_{name}": stated.points,
                f"model_holds_{name}": stated.holds,
                f"winner_predicted_share_{name}": _share(v.named == v.fastest for v in said),
                f"right_or_too_close_and_within_3_percent_share_{name}": stated.right / stated.points,
                f"too_close_share_{name}": stated.close / stated.points,
                f"winner_predicted_or_within_3_percent_share_{name}": _share(v.loss <= NEAR for v in said),
                f"largest_loss_by_following_the_model_{name}": stated.loss,
                f"median_relative_error_{name}": median(errors),
            }
        values[f"spire_largest_multiplier_{name}"] = max(m["spire"]["multiplier"] for m in points.values())
        large = [m for (b, c), m in points.items() if b * c >= 16 * 1024]
        if large:
            values[f"spire_wins_from_16x1024_{name}"] = all(winner(m, "multiplier") == "spire" for m in large)
            values[f"spire_over_next_from_16x1024_{name}"] = min(
                m["spire"]["multiplier"] / max(r["multiplier"] for n, r in m.items() if n != "spire")
                for m in large
            )
    return [{"part": "summary", "quantity": name, "value": value} for name, value in values.items()]


def noise(rows: list[Row], others: list[Row]) -> list[Row]:
    """How far two runs of a grid agree, at the points to which the model of the first was not fitted.

    Returns:
        for ``at`` = ``k4`` and ``best_k``: ``points``; at how many the other run names the ``same_fastest`` method; the largest ``loss`` by
        following it; the median relative ``difference`` of a multiplier, at all points; the root mean square of what the other run and
        the model differ by in the logarithm of a ratio of two methods' round times, ``run_error`` and ``model_error``, over the methods
        that both runs measured at the same k.
    Raises:
        ValueError: they have no such point in common.
    """
    out = []
    theirs_at = {(r["batch"], r["context"], r["method"], r["k"]): r for r in others if r["part"] == "grid"}
    for name, best in (("k4", False), ("best_k", True)):
        said = repeated(rows, others, best)
        if not said:
            raise ValueError("the two runs have no point in common to which the model was not fitted")
        mine, theirs = at_k(rows, best), at_k(others, best)
        pairs = [
            (r["multiplier"], theirs[p][m]["multiplier"])
            for p, methods in mine.items()
            for m, r in methods.items()
            if m != "plain" and m in theirs.get(p, ())
        ]
        run_errors, model_errors = [], []
        for p in said:
            both = [
                (r, other) for r in mine[p].values() if (other := theirs_at.get((*p, r["method"], r["k"])))
            ]
            run_errors += _differences((r["round_seconds"], other["round_seconds"]) for r, other in both)
            model_errors += _differences((r["round_seconds"], r["modelled_round_seconds"]) for r, _ in both)
        out.append(
            {
                "at": name,
                "points": len(said),
                "same_fastest": sum(v.named == v.fastest for v in said.values()),
                "loss": max(v.loss for v in said.values()),
                "difference": median(abs(b / a - 1) for a, b in pairs),
                "run_error": _root_mean_square(run_errors),
                "model_error": _root_mean_square(model_errors),
            }
        )
    return out


def _differences(seconds: Iterable[tuple[float, float]]) -> list[float]:
    """For every two methods, whose times are given twice: the difference of the logarithms of their ratio."""
    logs = [log(one / other) for one, other in seconds]
    return [a - b for a, b in combinations(logs, 2)]


def _root_mean_square(values: Sequence[float]) -> float | None:
    return sqrt(fmean(v * v for v in values)) if values else None


def _share(which: Any) -> float:
    some = list(which)
    return sum(some) / len(some)


def report(rows: list[Row]) -> None:
    """Print measured multipliers, modelled ones in brackets; * marks points that the model was fitted to. The last lines are the statement."""
    for r in (r for r in rows if r["part"] == "left_out"):
        print(f"\n{r['method']} is left out: {r['why']}")
    ahead = any(r["part"] == "grid" and r.get("executor") == "ahead" for r in rows)
    for title, best in (("k = 4", False), ("each method's best k", True)):
        lines: list[Row] = []
        for (batch, context), methods in sorted(at_k(rows, best).items()):
            plain = methods["plain"]
            line: Row = {"batch": batch, "context": f"{context}{'*' if plain['fitted'] else ''}"}
            line["plain tokens/s"] = plain["tokens_per_second"]
            for name, r in methods.items():
                if name != "plain":
                    shown = "-" if r["modelled"] is None else f"{r['modelled']:.2f}"
                    line[name] = f"{r['multiplier']:.2f} [{shown}]" + (f" {r['k']}" if best else "")
            line["fastest"] = winner(methods, "multiplier")
            line["modelled"] = None if plain["modelled"] is None else winner(methods, "modelled")
            if line["modelled"] is not None and verdict(methods, errors_of(rows)).too_close:
                line["modelled"] += ", too close"
            lines.append(line)
        how = ", whole rounds launched ahead" if ahead else ""
        print(f"\n{title}: multiplier [modelled]{', k' if best else ''}{how}\n")
        print(table(lines, tuple(lines[0])))
    for part, title in (
        ("constant", "constants"),
        ("summary", "summary of the points that the model was not fitted to"),
    ):
        some = [r | {"value": f"{r['value']:.6g}" if isinstance(r["value"], float) else r["value"]}
                for r in rows if r["part"] == part]  # fmt: skip
        print(f"\n{title}:\n{table(some, ('quantity', 'method', 'over', 'value'))}")
    spread = median(r["spread"] for r in rows if r["part"] == "grid")
    print(f"\nrepeats of a round spread over {spread:.0%} of their median (the median over all rows)")
    for title, best in (("k = 4", False), ("best k", True)):
        print(f"\n{title}: {Statement.of(v for _, v in verdicts(rows, best).values())}")
