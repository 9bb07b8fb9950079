"""How far back a mask sees, and so what a cache of constant size must hold for it."""

from __future__ import annotations

from typing import NamedTuple


class Reach(NamedTuple):
    """A bound on what a causal query at q sees: positions below ``sinks``, and those above ``q - window``.

    Positions within the bound may be hidden, too.
    """

    sinks: int
    window: int


def of_both(a: Reach | None, b: Reach | None) -> Reach | None:
    """The reach of ``a & b``: both bounds hold, so the smaller one is returned."""
    return min((r for r in (a, b) if r is not None), key=sum, default=None)


def of_either(a: Reach | None, b: Reach | None) -> Reach | None:
    """The reach of ``a | b``."""
    return None if a is None or b is None else Reach(max(a.sinks, b.sinks), max(a.window, b.window))
