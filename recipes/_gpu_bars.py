"""What the GPU suite is held to: bars over its rows, each met, not met or not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Row = dict[str, Any]
COLUMNS = ("stage", "case", "seconds", "floor_seconds", "share_of_floor", "max_error")
"""Of every row of the report, bars included; ``None`` where one means nothing."""


class Bar(NamedTuple):
    """``value(rows)`` is compared with ``bound``; ``None``: not measured. ``most``: the bound is an upper one."""

    name: str
    bound: float
    value: Callable[[list[Row]], float | None]
    most: bool = True

    def verdict(self, rows: list[Row]) -> Row:
        value = self.value(rows)
        met = value is not None and (value <= self.bound if self.most else value >= self.bound)
        said = "not measured" if value is None else "met" if met else "not met"
        return dict.fromkeys(COLUMNS) | {
            "stage": "bars",
            "case": self.name,
            "bound": self.bound,
            "value": value,
            "verdict": said,
        }


def _times_floor(bar: str) -> Callable[[list[Row]], float | None]:
    """The worst of the rows that belong to a bar: seconds over floor."""

    def value(rows: list[Row]) -> float | None:
        found = [r for r in rows if r.get("bar") == bar]
        known = [
            r["seconds"] / r["floor_seconds"] for r in found if r.get("seconds") and r.get("floor_seconds")
        ]
        return max(known) if known else None

    return value


def _column(
    bar: str, column: str, worst: Callable[[Iterable[float]], float]
) -> Callable[[list[Row]], float | None]:
    def value(rows: list[Row]) -> float | None:
        known = [r[column] for r in rows if r.get("bar") == bar and r.get(column) is not None]
        return worst(known) if known else None

    return value


BARS = (
    Bar("ragged verify, 6 tokens a row, batch 64, context 8192: times its floor", 1.3, _times_floor("verify")),
    Bar("sinks + window decode, 4 + 512, batch 64: times its floor", 2.0, _times_floor("sinks_window")),
    Bar("fused rejection, [64, 6, 128256]: times its floor", 2.0, _times_floor("rejection")),
    Bar("plain decode step of the 8B shape: times its floor, worst of all points", 1.25, _times_floor("decode_step")),
    Bar("tokens a second at batch 16 over transformers' generate", 3.0, _column("generate", "ratio", min), most=False),
    Bar("batch-invariant bf16: tokens that differ from plain decoding", 0.0, _column("invariant", "differ", max)),
)  # fmt: skip


def verdicts(rows: list[Row], measured: bool) -> list[Row]:
    """A row for every bar. ``measured``: times are worth something (not at toy size)."""
    return [bar.verdict(rows if measured else []) for bar in BARS]
