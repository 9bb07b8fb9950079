"""Checks of arguments that many parts share; their errors name the argument and say what to give."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def whole(name: str, value: Any, hint: str = "") -> None:
    """Raise TypeError for a value that is not a whole number (``True`` is none); ``hint`` says what else may be given."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give a whole number{hint}")


def methods(name: str, part: Any, *wanted: str, hint: str = "") -> None:
    """Raise TypeError for a part that is a class, or that lacks something that its protocol has."""
    if isinstance(part, type):
        raise TypeError(f"{name} is the class {part.__name__}: give an object, {part.__name__}(...)")
    lacking = [attribute for attribute in wanted if not hasattr(part, attribute)]
    if lacking:
        what = repr(part) if isinstance(part, str) else f"a {type(part).__name__}"
        raise TypeError(
            f"{name} is {what}, which has no {' or '.join(lacking)}: give {hint or 'an object that has'}"
        )
