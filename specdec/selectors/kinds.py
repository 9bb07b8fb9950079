"""Kinds of requests: what ``Spin(pool=...)`` and ``Planner(kind=...)`` take to keep statistics apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from specdec.arguments import listed
from specdec.types import Context

Kind = Callable[[Context], Sequence[Hashable]]
"""Given some rows, the kind of each."""


@dataclass(frozen=True)
class ByTemperature:
    """A request's kind is its temperature. ``temperatures``: of the requests, by number, as ``Sampling`` has them; other requests have the kind ``None``."""

    temperatures: tuple[float, ...]

    def __call__(self, context: Context) -> Sequence[float | None]:
        known = len(self.temperatures)
        return [self.temperatures[r] if 0 <= r < known else None for r in context.request.tolist()]


@dataclass(frozen=True)
class Product:
    """A request's kind is the tuple of what ``parts`` say of it: the temperature and the task, for example."""

    parts: tuple[Kind, ...]

    def __call__(self, context: Context) -> Sequence[tuple[Hashable, ...]]:
        return list(zip(*(kinds_of(part, context) for part in self.parts)))


def kinds_of(kind: Kind, context: Context) -> list[Hashable]:
    """What ``kind`` says of the rows of ``context``.

    Raises:
        TypeError: it is no function, or gave nothing to go through. ValueError: it did not give one kind for each row.
    """
    if not callable(kind):
        raise TypeError(
            f"kind is {kind!r}: give a function of a Context, which returns the kind of each of its rows"
        )
    said = listed(kind(context))
    if not isinstance(said, Iterable):
        raise TypeError(f"kind gave {said!r}: give a list, with the kind of each row")
    said = list(said)
    if len(said) != context.batch:
        raise ValueError(f"kind gave {len(said)} kinds for {context.batch} rows: give one for each row")
    return said
