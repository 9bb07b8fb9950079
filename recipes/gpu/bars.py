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
    """

    name: str
    key: str
    bound: float
    read: Callable[[Row], float | None]
    points: int
    most: bool = True
    alone: bool = False

    def verdict(self, rows: list[Row]) -> Row:
        """A row for the bar; it is *met* only if every point is measured and none failed."""
        mine = [r for r in rows if r.get("bar") == self.key]
        found = {r["case"]: r for r in mine}
        failed = [r["case"] for r in mine if r.get("failed")]
        known = {case: value for case, r in found.items() if (value := self.read(r)) is not None}
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


BARS = (
    Bar("ragged verify, 6 tokens a row, batch 64, context 8192: times its floor", "verify", 1.3, _times_floor, 2, alone=True),
    Bar("sinks + window decode, 4 + 512, batch 64: times its floor", "sinks_window", 2.0, _times_floor, 1, alone=True),
    Bar("fused rejection, [64, 6, 128256]: times its floor", "rejection", 2.0, _times_floor, 4, alone=True),
    Bar("plain decode step of the 8B shape: times its floor, worst of all points", "decode_step", 1.25, _times_floor, 9),
    Bar("tokens a second at batch 16 over transformers' generate", "generate", 3.0, lambda r: r.get("ratio"), 2, most=False),
    Bar("batch-invariant bf16: logits or tokens that differ from plain decoding", "invariant", 0.0, lambda r: r.get("differ"), 3),
)  # fmt: skip


def verdicts(rows: list[Row], measured: bool) -> list[Row]:
    """A row for every bar. ``measured``: whether times are meaningful (not at toy size)."""
    return [bar.verdict(rows if measured else []) for bar in BARS]
