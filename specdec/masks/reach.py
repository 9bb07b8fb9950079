"""How far back a mask looks: what a cache of constant size must hold for it."""

from __future__ import annotations

from typing import NamedTuple


class Reach(NamedTuple):
    """A bound of what a causal query at q sees: positions below ``sinks``, and those above ``q - window``.

    It is a bound and not the mask: positions within it may be hidden.
    """

    sinks: int
    window: int


def of_both(a: Reach | None, b: Reach | None) -> Reach | None:
    """The reach of what both see: either bound holds, and the smaller one is taken."""
    return min((r for r in (a, b) if r is not None), key=sum, default=None)


def of_either(a: Reach | None, b: Reach | None) -> Reach | None:
    """The reach of what either sees."""
    return None if a is None or b is None else Reach(max(a.sinks, b.sinks), max(a.window, b.window))
