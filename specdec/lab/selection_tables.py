"""The documentation's tables of selectors on recorded requests, from the rows of ``recipes/spin_selection.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.lab.markdown import Column, table

Row = Mapping[str, Any]


def documented(rows: Sequence[Row], report: str) -> str:
    """Tables in Markdown, each under a heading and with the comment that names the report's file (``lab.markdown``)."""
    made: list[tuple[str, str]] = []

    def add(title: str, keys: Mapping[str, str], columns: Sequence[Column], **where: Any) -> None:
        if any(all(row.get(name) == value for name, value in where.items()) for row in rows):
            made.append((title, table(rows, report, keys, columns, where)))

    def named(title: str, field: str) -> Column:
        return Column(title, (field, f"{field}_low", f"{field}_high"))

    oracles = [named("best of every request", "request_oracle"), named("best of every round", "round_oracle")]
    by_batch = {"batch": "batch", "requests": "group", "best fixed arm": "best_fixed"}
    for by in ("domain", "temperature"):
        add(f"worth by {by}", by_batch, oracles, part="worth", by=by)
    arms = [row["arm"] for row in rows if row["part"] == "times" and row["arm"] != "verify"]
    shares = [Column(arm, (f"share:{arm}",)) for arm in arms]
    for batch in dict.fromkeys(row["batch"] for row in rows if row["part"] == "worth"):
        for by in ("domain", "temperature"):
            at = {"part": "worth", "by": by, "batch": batch}
            add(f"shares of best arms by {by}, batch {batch}", {"requests": "group"}, shares, **at)
    steps = [
        Column("over the best fixed draft", ("times_faster", "low", "high")),
        named("over plain decoding", "over_plain"),
    ]
    add("what is left of the head-room", {"step": "step"}, steps, part="cost")
    regret = [
        Column(title, (field, f"{field}_low", f"{field}_high"), digits=1)
        for title, field in (
            ("regret, %", "regret"),
            ("over the best fixed arm, %", "over_best_fixed"),
            ("the same in the batch's rounds, %", "elapsed_over_best_fixed"),
        )
    ]
    add("regret", {"selector": "selector"}, regret, part="regret")
    ratio = [Column("times faster", ("times_faster", "low", "high"))]
    keys = {"selector": "selector", "over": "over", "rounds charged": "charged"}
    add("SPIN's selector over others", keys, ratio, part="ratio")
    calls = [
        Column(title, (field,))
        for title, field in (
            ("select", "select_ms"),
            ("update", "update_ms"),
            ("select, tight", "tight_select_ms"),
        )
    ]
    add("milliseconds of a call", {"selector": "selector"}, calls, part="call")
    times = [
        Column(title, (field,), digits=3)
        for title, field in (
            ("a round's draft step, ms", "fixed_milliseconds"),
            ("a row's, ms", "row_milliseconds"),
            ("reading a token, ms", "read_milliseconds"),
        )
    ]
    drafts = [row for row in rows if row.get("arm") != "verify"]
    if drafts:
        made.append(
            ("seconds that are charged", table(drafts, report, {"arm": "arm"}, times, {"part": "times"}))
        )
    return "\n".join(f"### {title}\n\n{text}" for title, text in made)
