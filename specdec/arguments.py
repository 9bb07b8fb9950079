"""Checks of arguments that many parts share; their errors name the argument and say what to give."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def whole(name: str, value: Any, hint: str = "") -> None:
    """Raise TypeError for a value that is not a whole number (``True`` is none); ``hint`` says what else may be given."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give a whole number{hint}")


def at_least(least: int, name: str, value: Any, remedy: str, hint: str = "") -> None:
    """As ``whole``; raises ValueError with the ``remedy`` for a value below ``least``."""
    whole(name, value, hint)
    if value < least:
        raise ValueError(f"{name} is {value}: {remedy}")


def name_of(function: Any, otherwise: str | None = None) -> str:
    """A function's name, for messages; of an object without one ``otherwise``, by default its class's."""
    return str(getattr(function, "__name__", type(function).__name__ if otherwise is None else otherwise))


def counts(name: str, value: Any) -> list[int]:
    """One number, or several, as a list; raises TypeError and ValueError as ``at_least`` of 1 does, and ValueError for none at all."""
    given = listed(value)
    several = isinstance(given, Iterable) and not isinstance(given, str)
    every: list[Any] = list(given) if several else [given]
    for one in every:
        at_least(1, f"{name}, of one," if several else name, one, "give at least 1", ", or several")
    if not every:
        raise ValueError(f"{name} is empty: give a whole number, or several")
    return [int(one) for one in every]


def function(name: str, value: Any) -> None:
    """Raise TypeError for a value that is neither ``None`` nor a function."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {value!r}: give a function, or None")


def number(name: str, value: Any, hint: str = "") -> None:
    """Raise TypeError for a value that is not a real number (``True`` is none) and ValueError for NaN; ``hint`` says what else may be given."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give a number{hint}")
    if value != value:
        raise ValueError(f"{name} is {value}: give a number{hint}")


def listed(value: Any) -> Any:
    """A tensor or an array as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def numbers(part: Any, *names: str) -> None:
    """``number`` for some attributes of a part."""
    for name in names:
        number(name, vars(part)[name])


def positive(part: Any, *names: str, hint: str = "") -> None:
    """As ``numbers``; raises ValueError for one that is not above 0."""
    numbers(part, *names)
    for name in names:
        if not vars(part)[name] > 0:
            raise ValueError(f"{name} is {vars(part)[name]}: give a positive number{hint}")
