"""Tables of the documentation beside the reports that they come from.

A comment above a table says how each of its cells follows from a report::

    <!-- from: results/bench.json
    where: engine == "specdec" and method == "vanilla"
    cells: =temperature | =batch | tau | ratio_to_plain | max(every("tokens_per_second", method="assisted")), 100 * share
    let: here = 1000 * float(key("batch"))
    label: no feedback memory -> no_feedback
    -->

``cells`` has one entry a column. ``=field`` is a key: the cell's text is that field's value (``=mode, workers``: two of them), or stands for
it (``label``). Every other entry is a Python expression, or several, for the numbers of the cell in their order; ``-`` is not checked. In
an expression, names are fields of the report's only row that has the keys and meets ``where``; ``of(field, method="spire", ...)`` is a field
of the only row that has the keys and the given values, and ``every(...)`` the same of all such rows. A value may be given as a function
(``context=lambda c: c > 500``), may replace a key's, and ``None`` fits rows without the field. ``key("batch")`` is a key's text, ``let``
names an expression for those after it, and ``from`` may name several reports, whose rows are taken together. A comment ``<!-- from: no report: why -->`` exempts a table.

After a measurement, ``python tests/doc_tables.py docs/spin.md`` writes the reports' numbers into the page's tables, at the digits that are
there, and says what it cannot fill. Rows and sentences are the author's.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

NUMBER = re.compile(r"(?<![\w.])(?<!\w[-−])[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
COMMENT = re.compile(r"<!-- from: (?P<text>.*?)-->", re.DOTALL)
REPORT = re.compile(r"docs/results/\w+\.json")
Row = dict[str, Any]


class Table(NamedTuple):
    """Body rows of a table, the line of its header, and the text of the comment directly above it."""

    page: Path
    line: int
    header: list[str]
    body: list[list[str]]
    comment: str | None

    @property
    def of_figures(self) -> bool:
        """Whether most cells outside of its first column are numbers."""
        cells = [cell for row in self.body for cell in row[1:] if cell]
        return sum(bool(re.match(r"\W*\d", cell)) and len(cell) < 30 for cell in cells) > len(cells) / 2


def tables(page: Path) -> Iterator[Table]:
    """The tables of a page, those in fenced blocks aside."""
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), page.read_text(), flags=re.M | re.S)
    for found in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        before = text[: found.start()]
        last = list(COMMENT.finditer(before))[-1:]
        near = last[0]["text"].strip() if last and not before[last[0].end() :].strip() else None
        rows = [
            [cell.strip() for cell in line.strip().strip("|").split("|")] for line in found[0].splitlines()
        ]
        yield Table(page, before.count("\n") + 1, rows[0], rows[2:], near)


def numbers(cell: str) -> list[tuple[float, float]]:
    """The numbers of a cell, each with half a unit of its last digit."""
    found = []
    for said in NUMBER.findall(cell):
        said = said.replace("−", "-").replace(",", "")
        digits, _, power = said.partition("e")
        decimals = len(digits.partition(".")[2])
        found.append((float(said), 0.5 * 10.0 ** (int(power or 0) - decimals)))
    return found


class Cell(NamedTuple):
    """A cell that a report decides: its place in the table's body, and the report's values, or why there are none."""

    row: int
    column: int
    entry: str
    values: list[Any]
    problem: str = ""


def reported(table: Table, folder: Path) -> Iterator[Cell]:
    """The cells with numbers of a table whose comment names a report below ``folder``."""
    assert table.comment is not None
    file, *lines = table.comment.splitlines()
    said: dict[str, list[str]] = {}
    for line in lines:
        name, colon, rest = line.partition(": ")
        if colon and name in ("where", "cells", "label", "let"):
            said.setdefault(name, []).append(rest)
        else:
            said[next(reversed(said))][-1] += " " + line
    report = [
        row for name in file.split(", ") for row in json.loads((folder / name.strip()).read_text())["rows"]
    ]
    cells = [cell.strip() for cell in said["cells"][0].split(" | ")]
    labels = dict(label.split(" -> ") for label in said.get("label", []))
    where = said.get("where", ["True"])[0]
    for number, row in enumerate(table.body):
        if len(row) != len(cells):
            yield Cell(number, 0, "cells", [], f"{len(row)} cells, and the comment has {len(cells)}")
            continue
        keys: Row = {}
        for cell, entry in zip(row, cells):
            if entry.startswith("="):
                keys |= _keys(labels.get(plain(cell), plain(cell)), entry[1:].split(", "))
        for column, (cell, entry) in enumerate(zip(row, cells)):
            if entry.startswith("=") or entry == "-" or not numbers(cell):
                continue
            try:
                yield Cell(number, column, entry, _evaluate(entry, report, keys, where, said.get("let", [])))
            except Exception as why:
                yield Cell(number, column, entry, [], f"{entry}: {type(why).__name__}: {why}")


def wrong(table: Table, folder: Path) -> list[str]:
    """What is wrong with a table whose comment names a report below ``folder``."""
    out, checked = [], 0
    for found in reported(table, folder):
        at = f"{table.page.name}:{table.line + 2 + found.row}, {table.header[found.column]}"
        cell = table.body[found.row][found.column]
        shown = numbers(cell)
        checked += not found.problem
        if found.problem:
            out.append(f"{at}: {found.problem}")
        elif len(found.values) != len(shown) or not all(_same(s, v) for s, v in zip(shown, found.values)):
            out.append(f"{at}: says {cell}, and the report has {found.values}")
    if not checked:
        out.append(f"{table.page.name}:{table.line}: no number is checked")
    return out


def fill(page: Path, folder: Path) -> list[str]:
    """Write the reports' numbers into a page's tables. Returns what is wrong with them afterwards."""
    lines = page.read_text().splitlines(keepends=True)
    made = [t for t in tables(page) if t.comment is not None and not t.comment.startswith("no report: ")]
    for table in made:
        for found in reported(table, folder):
            line = table.line + 1 + found.row  # counted from 0
            cells = lines[line].split("|")
            cells[found.column + 1] = _written(cells[found.column + 1], found.values)
            lines[line] = "|".join(cells)
    page.write_text("".join(lines))
    return [
        said
        for table in tables(page)
        if table.comment in {t.comment for t in made}
        for said in wrong(table, folder)
    ]


def _written(cell: str, values: list[Any]) -> str:
    """A cell with other numbers at its own digits; as it is, if they are not as many or one is missing."""
    if len(values) != len(numbers(cell)) or None in values:
        return cell
    pairs = iter(zip(values, numbers(cell)))

    def one(found: re.Match[str]) -> str:
        value, shown = next(pairs)
        if _same(shown, value):  # a half may be rounded up or down
            return found[0]
        said = found[0].rstrip(",")
        digits, power, _ = said.partition("e")
        decimals = len(digits.partition(".")[2])
        text = (
            f"{value:{',' if ',' in digits else ''}.{decimals}{'e' if power else 'f'}}"
            + found[0][len(said) :]
        )
        return text.replace("-", "−") if "−" in said else text

    return NUMBER.sub(one, cell)


def plain(cell: str) -> str:
    """A cell without marks of emphasis and code."""
    return re.sub(r"[*`]", "", cell).strip()


def _same(shown: tuple[float, float], value: Any) -> bool:
    number, half = shown
    return value is not None and math.isclose(number, value, rel_tol=1e-9, abs_tol=half * (1 + 1e-6))


def _keys(cell: str, fields: list[str]) -> Row:
    parts: list[Any] = cell.split(", ", len(fields) - 1)
    parts += [None] * (len(fields) - len(parts))
    return dict(zip(fields, parts))


def _meets(row: Row, wanted: Row) -> bool:
    return all(_meets_one(row.get(name), want) for name, want in wanted.items())


def _meets_one(value: Any, want: Any) -> bool:
    if callable(want):
        return value is not None and bool(want(value))
    if isinstance(value, bool) and isinstance(want, str):
        return want == ("yes" if value else "no")
    if isinstance(value, int | float) and isinstance(want, str):
        return [float(value)] == [n for n, _ in numbers(want)]
    return value == want


def _evaluate(entry: str, report: list[Row], keys: Row, where: str, lets: list[str]) -> list[Any]:
    def every(field: str, **filters: Callable | Any) -> list[Any]:
        return [row[field] for row in report if field in row and _meets(row, keys | filters)]

    def of(field: str, **filters: Callable | Any) -> Any:
        return _only(every(field, **filters), f"{keys | filters}")

    class Names(dict):
        def __missing__(self, name: str) -> Any:
            if name in known:
                raise KeyError(name)  # then it is looked up there
            having = [row for row in report if name in row and _meets(row, keys)]
            if not having:
                raise LookupError(f"no row with {keys} has {name!r}")
            fields = {field for row in report for field in row}
            meeting = [row for row in having if eval(where, {}, dict.fromkeys(fields) | row)]
            return _only([row[name] for row in meeting], f"{keys} where {where}")

    known = {
        "of": of,
        "every": every,
        "max": max,
        "min": min,
        "key": keys.get,
        "float": float,
        "__builtins__": {},
    }
    for let in lets:
        name, _, value = let.partition(" = ")
        known[name] = eval(value, known, Names())
    return list(eval(f"({entry},)", known, Names()))


def _only(found: list[Any], what: str) -> Any:
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {what}")
    return found[0]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join(fill(Path(name), Path(__file__).parents[1] / "docs")) or f"{name}: filled")
