"""Whether the arguments of an ``AttentionPlan`` fit each other: errors that name the argument, and what to give instead."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

import numpy as np
from torch import Tensor


def check_counts(rows: Sequence[int], first: Sequence[int], counts: Sequence[int]) -> None:
    """Refuse lists of different lengths, or of none, and rows without queries."""
    if not len(rows) or not len(rows) == len(first) == len(counts):
        raise ValueError(
            f"rows, first and counts have {len(rows)}, {len(first)} and {len(counts)} entries: give one for "
            "each row, and at least one row"
        )
    if min(counts) < 1:
        r = next(r for r, count in enumerate(counts) if count < 1)
        raise ValueError(
            f"counts[{r}] is {counts[r]}: give rows at least 1 query, and leave rows without queries out of the plan"
        )


def check_slots(
    first: Sequence[int], length: Sequence[int], queries: int, slots: Tensor | None, capacity: int | None
) -> None:
    """Refuse negative slots, rows beyond the ``capacity`` (``None`` for pages), and not one slot for each query."""
    if min(first) < 0:
        r = next(r for r, slot in enumerate(first) if slot < 0)
        raise ValueError(f"first[{r}] is {first[r]}: give the slot of its first query, 0 or above")
    if capacity is not None and max(length) > capacity:
        r = next(r for r, n in enumerate(length) if n > capacity)
        raise ValueError(
            f"row {r} of the plan has queries up to slot {length[r] - 1} and capacity is {capacity}: give rows of "
            "more slots, or fewer queries"
        )
    if slots is not None and slots.shape != (queries,):
        raise ValueError(
            f"slots is {tuple(slots.shape)} and the plan has {queries} queries: give one number for each"
        )


def check_tree(root: np.ndarray, ancestors: np.ndarray, depth: np.ndarray, length: Sequence[int]) -> None:
    """Refuse a tree of other rows, of negative slots, or of too few nodes."""
    (R, N), rows = depth.shape, len(length)
    if not len(root) == R == rows or ancestors.shape != (R, N, N):
        raise ValueError(
            f"tree has root {root.shape}, ancestors {ancestors.shape} and depth {depth.shape}: give [R], "
            f"[R, N, N] and [R, N] for the {rows} rows of the plan"
        )
    at = root.tolist()
    if min(at) < 0:
        raise ValueError(f"tree.root is {at}: give slots, 0 or above")
    used = max(map(sub, length, at))
    if used > N:
        raise ValueError(
            f"tree has {N} nodes and a row of the plan {used} slots from its root on: give the tree all of its nodes"
        )


def check_table(table: Sequence[Sequence[int]] | None, page: int, length: Sequence[int]) -> None:
    """Refuse a table without a page size or the other way round, and too few pages for a row."""
    if table is None or page < 1:
        raise ValueError(
            f"page is {page} and table is {'not ' if table is None else ''}given: give both, or neither"
        )
    if len(table) != len(length):
        raise ValueError(
            f"table has {len(table)} rows and the plan {len(length)}: give the pages of each row"
        )
    for r, (pages, n) in enumerate(zip(table, length)):
        if len(pages) * page < n:
            raise ValueError(
                f"table[{r}] has {len(pages)} pages of {page} slots and the row {n} slots in use: give more pages"
            )
