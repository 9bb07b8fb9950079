"""The GPU suite's bars: bounds on figures of its rows, each met, not met, partly measured or not measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]
COLUMNS = ("stage", "case", "seconds", "floor_seconds", "share_of_floor", "max_error")
"""The columns of every row of the report, bars included; ``None`` where a column does not apply."""


class Bar(NamedTuple):
    """The worst of the rows whose ``bar`` is ``key`` is compared with ``bound``.

    Attributes:
        read: a row's figure. points: number of rows (of different cases) in a complete run. most: whether the bound is an upper one.
        alone: whether only the device's work should be timed, so that rows timed by events, which include launches, are noted.
        over: another key: figures are divided by the largest one of its rows; without such rows nothing is measured.
    """

    name: str
    key: str
    bound: float
    read: Callable[[Row], float | None]
    points: int
    most: bool = True
    alone: bool = False
    over: str | None = None

    def verdict(self, rows: list[Row]) -> Row:
        """A row for the bar; it is *met* only if every point is measured and none failed."""
        mine = [r for r in rows if r.get("bar") == self.key]
        found = {r["case"]: r for r in mine}
        failed = [r["case"] for r in mine if r.get("failed")]
        known = {case: value for case, r in found.items() if (value := self.read(r)) is not None}
        if self.over is not None:
            theirs = [r for r in rows if r.get("bar") == self.over]
            failed += [r["case"] for r in theirs if r.get("failed")]
            best = max((value for r in theirs if (value := self.read(r))), default=None)
            known = {} if best is None else {case: value / best for case, value in known.items()}
        value = None if not known else (max if self.most else min)(known.values())
        within = value is not None and (value <= self.bound if self.most else value >= self.bound)
        here = f"{len(known)} of {self.points} points"
        if failed or (known and not within):
            said = "not met"
        elif not known:
            said = "not measured"
        else:
            said = "met" if len(known) >= self.points else f"partly measured ({here})"
        notes = [here] if known or failed else []
        notes += [f"failed: {', '.join(failed)}"] if failed else []
        by_events = [c for c in known if self.alone and found[c].get("clock") != "graph"]
        notes += [f"with the host's launches, not replayed: {', '.join(by_events)}"] if by_events else []
        return dict.fromkeys(COLUMNS) | {
            "stage": "bars", "case": self.name, "bound": self.bound, "value": value, "verdict": said,
            "points": len(known), "of_points": self.points, "note": "; ".join(notes) or None,
        }  # fmt: skip


def _times_floor(row: Row) -> float | None:
    if not row.get("seconds") or not row.get("floor_seconds"):
        return None
    return row["seconds"] / row["floor_seconds"]


def _promised(row: Row) -> float | None:
    return row.get("promised_share")


def _over_theirs(row: Row) -> float | None:
    """The limit of a row's error is twice theirs."""
    return (
        2 * row["max_error"] / row["bound"] if row.get("max_error") is not None and row.get("bound") else None
    )


def _differ(row: Row) -> float | None:
    return row.get("differ")


STEP, THEIRS = "plain decode step of the 8B shape", "transformers' generate, compiled"
GAIN = "gain of a drafted round over a plain one, over what their floors promise"
BARS = (
    Bar("ragged verify, 6 tokens a row, batch 64, context 8192: times its floor", "verify", 1.3, _times_floor, 2, alone=True),
    Bar("sinks + window decode, 4 + 512, batch 64: times its floor", "sinks_window", 1.5, _times_floor, 1, alone=True),
    Bar("fused rejection, [64, 6, 128256]: times its floor", "rejection", 2.0, _times_floor, 4, alone=True),
    Bar(f"{STEP}, (1, 1024) and (16, 1024): times its floor", "decode_step", 1.25, _times_floor, 2),
    Bar(f"{STEP}, (64, 8192): times its floor", "long_step", 1.15, _times_floor, 1),
    *(
        Bar(f"tokens a second at batch {batch}{how} over {THEIRS}", f"ours {batch}{how}", bound, lambda r: r.get("tokens_per_second"), 1,
            most=False, over=f"theirs {batch}")
        for batch, bound in ((1, 1.4), (16, 1.8)) for how in ("", ", ahead")
    ),
    *(Bar(f"{GAIN}{how}", f"round{how}", 0.9, _promised, 2, most=False) for how in ("", ", ahead")),
    Bar("logits of whole models: error over that of transformers in bfloat16", "logits", 2.0, _over_theirs, 12),
    Bar("greedy texts with graphs, pages and whole rounds: tokens that differ", "texts", 0.0, _differ, 56),
    Bar("tests that need a GPU: failed or skipped", "tests", 0.0, lambda r: r.get("missed"), 10),
    Bar("batch-invariant bf16: logits or tokens that differ from plain decoding", "invariant", 0.0, _differ, 3),
)  # fmt: skip


def verdicts(rows: list[Row], measured: bool) -> list[Row]:
    """A row for every bar. ``measured``: whether times are meaningful (not at toy size)."""
    return [bar.verdict(rows if measured else []) for bar in BARS]
