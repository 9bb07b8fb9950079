"""The GPU suite's report: rows on the screen and in a JSON file, with tables beside it, including earlier rows of other stages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes.gpu.bars import COLUMNS, Row, verdicts
from specdec.lab.report import meta, plain, write

PACKAGES = ("triton", "flash_attn")
TIMED = ("seconds", "ratio", "multiplier", "gain", "over_vanilla")
SAID = ("max_error", "relative_error", "differ", "missed", "tau", "accepted", "same_argmax", "failed")
"""What a row says of times, and what it says that does not depend on the machine's load."""


class Report:
    """The rows of a run, and those of other stages in its file or in other files.

    Args:
        file: rewritten after every row, so that an aborted run keeps its measurements. A stage's first row replaces all of its earlier
            rows in the file. times: whether times, and so bars, are meaningful (not at toy size).
        others: reports whose rows are included; for a stage in several, the last one counts. untimed: leave out times.

    Raises:
        SystemExit: a report cannot be read, or is of toy size and this run is not (or vice versa).
    """

    def __init__(
        self,
        file: str | None,
        seed: int,
        toy: bool,
        times: bool,
        others: Iterable[str] = (),
        untimed: bool = False,
    ):
        self.file = None if file is None else Path(file)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        self.times, self.untimed, self.rows = times, untimed, list[Row]()
        self.meta = {**meta(seed, PACKAGES), "toy": toy}
        self.kept: dict[str, tuple[Row, list[Row]]] = {}  # for each other stage: its metadata and rows
        own = [self.file] if self.file is not None and self.file.exists() else []
        for path in [*own, *map(Path, others)]:
            self._take(path, toy)

    def _take(self, path: Path, toy: bool) -> None:
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            about, rows = said["meta"], said["rows"]
            made = {name: m for m in [*about.get("earlier", []), about] for name in m["stages"].split(",")}
        except (OSError, ValueError, KeyError, TypeError) as why:
            raise SystemExit(f"{path} is no report of this suite ({why}): give another --json FILE") from None
        if about["toy"] != toy:
            sizes = ("toy size", "full size") if about["toy"] else ("full size", "toy size")
            raise SystemExit(
                f"{path} has rows of {sizes[0]}, and these are of {sizes[1]}: give another --json FILE"
            )
        for name in sorted({r["stage"] for r in rows} - {"bars"}):
            how = {k: v for k, v in made.get(name, about).items() if k != "earlier"}
            self.kept[name] = (how, [r for r in rows if r["stage"] == name])

    def add(self, row: Row) -> None:
        """Show a row and write it to the file."""
        self.kept.pop(row["stage"], None)
        self.rows.append(full(row))
        print(line(row), flush=True)
        self.write()

    @property
    def bars(self) -> list[Row]:
        return verdicts(self.every, self.times)

    @property
    def every(self) -> list[Row]:
        """All rows except the bars, by stage."""
        rows = [r for _, some in self.kept.values() for r in some] + self.rows
        if self.untimed:
            rows = [without_times(r) for r in rows]
        return sorted(rows, key=lambda r: r["stage"])

    def write(self) -> None:
        """Write the JSON file, and the tables beside it."""
        if self.file is None:
            return
        earlier: list[Row] = []
        for name, (how, _) in sorted(self.kept.items()):
            same = next((m for m in earlier if m | {"stages": ""} == how | {"stages": ""}), None)
            if same is None:
                earlier.append({**how, "stages": name})
            else:
                same["stages"] += f",{name}"
        stages = ",".join(sorted({r["stage"] for r in self.rows}))
        about = self.meta | {"stages": stages} | ({"earlier": earlier} if earlier else {})
        rows = self.every + self.bars
        write(self.file, rows, about=about)
        tables = self.file.with_name(self.file.stem + ".md.part")
        try:
            tables.write_text(markdown(rows, about), encoding="utf-8")
            tables.replace(
                self.file.with_suffix(".md")
            )  # atomic, as the JSON is: the process may be killed here
        finally:  # it may also be asked to end here
            tables.unlink(missing_ok=True)


def without_times(row: Row) -> Row:
    """The row without what depends on the machine's load."""
    kept = ("stage", "case", "backend", "limit", "bound", "bar", "output", *SAID)
    left = dict.fromkeys(COLUMNS) | {name: row[name] for name in kept if name in row}
    note = re.sub(r" in [\d.]+s$", "", row.get("note") or "")
    if any(row.get(name) is not None for name in TIMED) and not (row.get("failed") or "missed" in row):
        note = "ran"
    return left | ({"note": note} if note else {})


def full(row: Row) -> Row:
    """The row with all columns, as JSON values."""
    return dict.fromkeys(COLUMNS) | {name: plain(value) for name, value in row.items()}


def line(row: Row) -> str:
    """A row as text."""
    parts = [f"{row['stage']}  {row['case']:<66}"]
    if row.get("seconds") is not None:
        parts.append(f"{1e6 * row['seconds']:12.1f} us")
    if row.get("share_of_floor") is not None:
        parts.append(f"{row['share_of_floor']:6.1%} of floor")
    if row.get("max_error") is not None:
        parts.append(f"error {row['max_error']:.1e}")
    if row.get("note"):
        parts.append(f"[{row['note']}]")
    return "  ".join(parts)


def markdown(rows: list[Row], about: Row) -> str:
    """The JSON file's content as Markdown tables."""
    out = []
    for made in [about, *about.get("earlier", [])]:
        versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
        which = f"stages {made['stages']}: " if "earlier" in about and made["stages"] else ""
        commit = f", commit {made['commit'][:7]}" if made.get("commit") else ""
        out += [f"{which}`{made['command']}` — {made['date']}{commit}, {made['machine']}, {versions}", ""]
    columns = (*COLUMNS, "note")
    out += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in rows:
        if r["stage"] != "bars":
            out.append("| " + " | ".join(_cell(r.get(c)) for c in columns) + " |")
    names = ("case", "bound", "value", "verdict", "note")
    out += ["", "| bar | bound | value | verdict | note |", "|---|---|---|---|---|"]
    out += ["| " + " | ".join(_cell(r.get(c)) for c in names) + " |" for r in rows if r["stage"] == "bars"]
    return "\n".join(out) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")
