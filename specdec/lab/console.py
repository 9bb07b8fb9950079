"""The console output of measurements: progress and tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def quiet() -> None:
    """Switch off transformers' progress bars and advice, which would interrupt tables."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def short_errors() -> Iterator[None]:
    """Inside, a ValueError, a FileNotFoundError or a hub that does not answer ends the script with the message alone: for input that the user gave."""
    try:
        yield
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        raise SystemExit(str(error)) from None


def progress(line: str = "", stays: bool = False) -> None:
    """Write a line on stderr.

    Args:
        stays: whether the line stays, also if stderr is a file. Otherwise it is written to a terminal only, and the next line
            replaces it; an empty one clears it.
    """
    terminal = sys.stderr.isatty()
    if stays or terminal:
        clear, end = "\r\033[K" if terminal else "", "\n" if stays else ""
        print(f"{clear}{line}", end=end, file=sys.stderr, flush=True)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text: numbers to two decimals (none from 100 on), ``-`` for missing values. The first two columns are left-aligned."""

    def show(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
        return str(value)

    lines = [
        [c.replace("tokens_per_second", "tokens/s").replace("_", " ") for c in columns],
        *[[show(row.get(c)) for c in columns] for row in rows],
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def text(line: Sequence[str]) -> str:
        return "  ".join(v.ljust(w) if i < 2 else v.rjust(w) for i, (v, w) in enumerate(zip(line, widths)))

    return "\n".join([text(lines[0]), "  ".join("-" * w for w in widths), *map(text, lines[1:])])


class Framed:
    """A result with ``rows`` of figures."""

    rows: Any

    def frame(self) -> Any:
        """The rows as a pandas ``DataFrame``."""
        import pandas

        return pandas.DataFrame(self.rows)
