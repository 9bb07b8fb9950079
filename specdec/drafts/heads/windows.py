"""Sliding windows of a head's layers: which layers have one, and the pass that each layer attends in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.drafts.heads.contract import Pass, Sight

ORIGINS = ("anchor", "slot")


def sights_of(
    windows: Sequence[int | None] | None, blocks: int, slots: int, origin: str = "anchor", causal: bool = True
) -> tuple[Sight | None, ...]:
    """What each of ``blocks`` layers sees; ``None``: all that its pass shows.

    Args:
        windows: a number of positions for each layer, or ``None`` for a layer without a window; ``None``: no layer has one.
        slots: how many a drafted block has. origin: the head's ``windows_from``, ``"anchor"`` or ``"slot"``. causal: the head's ``windows_causal``.
    Raises:
        TypeError: ``windows`` is no list, or ``causal`` neither true nor false.
        ValueError: ``windows`` has not one entry for each layer, a window is no whole number above 0, a window that is counted from slots is shorter than the drafted block, or
            the origin is another one.
    """
    if origin not in ORIGINS:
        raise ValueError(f"windows_from is {origin!r}: give {' or '.join(map(repr, ORIGINS))}")
    if not isinstance(causal, bool):
        raise TypeError(f"windows_causal is {causal!r}: give True or False")
    if windows is None:
        return (None,) * blocks
    if not isinstance(windows, Sequence) or isinstance(windows, str):
        raise TypeError(f"windows is {windows!r}: give a list, a number of positions or None for each block")
    if len(windows) != blocks:
        raise ValueError(
            f"windows has {len(windows)} entries and the head {blocks} blocks: give one for each, None for a layer that sees all of the text"
        )
    fixed = origin == "anchor"
    least = 1 if fixed else max(slots, 1)
    for window in windows:
        if window is not None and (not isinstance(window, int) or window is True or window < least):
            why = (
                ""
                if fixed
                else f": windows from a slot are implemented where they contain the block's {slots} slots"
            )
            raise ValueError(
                f"windows has {window!r}: give numbers of positions from {least} on, or None{why}"
            )
    return tuple(None if window is None else Sight(window, fixed, causal) for window in windows)


def passes(go: Any, sights: Sequence[Sight | None]) -> list[Pass]:
    """The pass of each layer: ``go`` itself, or what is made of it once for each sight."""
    made: dict[Sight | None, Any] = {None: go}
    for sight in sights:
        if sight is not None and sight not in made:
            made[sight] = go.narrowed(sight)
    return [made[sight] for sight in sights]
