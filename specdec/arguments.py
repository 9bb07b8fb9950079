"""A check of arguments that many parts share; its errors name the argument and say what to give."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def whole(name: str, value: Any, hint: str = "") -> None:
    """Raise TypeError for a value that is not a whole number (``True`` is none); ``hint`` says what else may be given."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give a whole number{hint}")
