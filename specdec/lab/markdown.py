"""Tables of the documentation from the rows of a report, with the comment by which a test compares them with it (tests/doc_tables.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of figures.

    Attributes:
        title: of the column. fields: one number, or a number and the two ends of its interval, which are left out if a row lacks them. where: values of other fields of the rows to
            take them from, beside the table's. digits: after the point.
    """

    title: str
    fields: tuple[str, ...]
    where: Mapping[str, Any] = field(default_factory=dict)
    digits: int = 2


def table(
    rows: Sequence[Row],
    report: str,
    keys: Mapping[str, str],
    columns: Sequence[Column],
    where: Mapping[str, Any],
) -> str:
    """A Markdown table with its comment.

    Args:
        report: the file's name in docs/results. keys: title -> field, of the columns that say which row it is. where: values of fields that all rows
            of the table have.
    Raises:
        ValueError: several rows fit a cell; the message names its keys.
    """
    some = [row for row in rows if _fits(row, where)]
    found = [tuple(row.get(name) for name in keys.values()) for row in some]
    lines = [dict(zip(keys.values(), values)) for values in dict.fromkeys(found)]
    columns = [_complete(some, column) for column in columns]
    said = [f"={name}" for name in keys.values()]
    for column in columns:
        at = ", ".join(f"{name}={value!r}" for name, value in {**where, **column.where}.items())
        said.append(", ".join(f'of("{name}", {at})' for name in column.fields))
    head = [*keys, *(column.title for column in columns)]
    out = [f"<!-- from: results/{report}", f"cells: {' | '.join(said)}", "-->", ""]
    out += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for line in lines:
        cells = [_shown(line[name]) for name in keys.values()]
        cells += [_cell(some, line, column) for column in columns]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def _complete(rows: Sequence[Row], column: Column) -> Column:
    """The column without its interval, if a row has none."""
    having = [row for row in rows if _fits(row, column.where) and row.get(column.fields[0]) is not None]
    whole = all(row.get(name) is not None for row in having for name in column.fields)
    return column if whole else replace(column, fields=column.fields[:1])


def _fits(row: Row, where: Row) -> bool:
    return all(name in row and row[name] == value for name, value in where.items())


def _cell(rows: Sequence[Row], line: Row, column: Column) -> str:
    found = [row for row in rows if _fits(row, {**line, **column.where})]
    if len(found) > 1:
        raise ValueError(f"{column.title}: {len(found)} rows have {dict(line)}: name more fields in where")
    values = [found[0].get(name) for name in column.fields] if found else [None]
    if None in values[:1]:
        return "–"
    first, *ends = (f"{value:.{column.digits}f}" for value in values if value is not None)
    return f"{first} ({ends[0]} to {ends[1]})" if len(ends) == 2 else first


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
