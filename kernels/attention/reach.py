"""How far back a query sees: a sliding window, and the first positions beside it (StreamingLLM, Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple


class Streaming(NamedTuple):
    """A query at position p sees positions above ``p - window``, and those below ``initial`` whatever the window."""

    window: int
    initial: int


Reach = int | Streaming | None
"""A sliding window alone, one beside the first positions, or everything up to the query."""


def reach(window: int | None, initial: int = 0) -> Reach:
    """Window and first positions as one value; ``None`` without a window.

    Raises:
        ValueError: ``initial`` below 0, or an argument that is not a whole number.
    """
    if not (window is None or isinstance(window, int)):
        window = _whole("window", window)
    if not isinstance(initial, int):
        initial = _whole("initial", initial)
    if initial < 0:
        raise ValueError(f"initial is {initial}: give how many of the first positions stay visible, or 0")
    return Streaming(window, initial) if window is not None and initial else window


def _whole(name: str, given: Any) -> int:
    try:
        return index(given)
    except TypeError:
        raise ValueError(f"{name} is {given!r}: give a whole number of positions") from None


def split(window: int | Streaming) -> tuple[int, int]:
    """The window, and how many first positions are seen beside it."""
    return window if isinstance(window, Streaming) else (window, 0)


def near(query: Any, key: Any, window: int | Streaming) -> Any:
    """Whether position ``key`` is within the reach of a query at position ``query``, ignoring causality; arrays and tensors broadcast."""
    size, initial = split(window)
    reached = key > query - size
    return reached | (key < initial) if initial else reached


def binding(window: Reach, length: int) -> Reach:
    """``window``, or ``None`` if it hides nothing of a text of ``length`` positions."""
    return None if window is None or sum(split(window)) >= length else window
