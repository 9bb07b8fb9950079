"""Assigns requests to arms under capacities: maximum-weight matching (SPIN, arXiv 2503.15921, section 4), and keyed random choices.

All arrays are small and on the host: numpy, because a selection must take microseconds. CPU tensors are accepted, too.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from specdec.rng import SELECT, Key, Rng

TIE = 1e-9  # relative to the largest weight: totals closer than this count as equal


def checked(capacities: Tensor | np.ndarray, arms: int, batch: int) -> np.ndarray:
    """``capacities [arms]`` as int64; ValueError when they cannot serve ``batch`` rows."""
    room = np.asarray(capacities)
    if room.shape != (arms,):
        raise ValueError(
            f"capacities has shape {list(room.shape)}: give one number for each of the {arms} arms"
        )
    if room.min() < 0:
        raise ValueError(f"capacities is {room.tolist()}: an arm that takes no row has capacity 0, not less")
    if room.sum() < batch:
        raise ValueError(
            f"capacities {room.tolist()} serve {int(room.sum())} rows but {batch} need an arm: raise a capacity, or select for "
            "fewer rows at a time"
        )
    return room.astype(np.int64, copy=False)


def assign(weights: Any, capacities: Any) -> np.ndarray:
    """The arm of every row in a matching of the largest total weight; exact (Jonker-Volgenant, through scipy).

    Args:
        weights: ``[B, arms]`` finite, in any unit: the gain if the row has the arm.
        capacities: ``[arms]`` the most rows of each arm; their sum is at least B.
    Returns:
        ``[B]`` int64 array. Ties go to the first arm; totals within 1e-9 of the largest weight are ties.
    Raises:
        ValueError: weights are not finite, or the capacities serve fewer than B rows.
    """
    weights = np.asarray(weights, dtype=np.float64)
    B, arms = weights.shape
    best = weights.argmax(1)
    room = checked(capacities, arms, B)
    if not np.isfinite(weights).all():
        raise ValueError(
            "weights has NaN or infinite entries: give an arm that was never seen a large finite weight"
        )
    if not B or (np.bincount(best, minlength=arms) <= room).all():
        return best  # every row has its best arm
    slot_arm = np.repeat(np.arange(arms), np.minimum(room, B))
    step = TIE * max(float(np.abs(weights).max()), 1e-300) / arms
    _, slot = linear_sum_assignment((weights - step * np.arange(arms))[:, slot_arm], maximize=True)
    return slot_arm[slot]


def within(wanted: Any, scores: Any, capacities: Any) -> np.ndarray:
    """The wanted arms where they fit; other arms for the rest.

    Where more rows want an arm than it takes, those with the highest score for it keep it (ties: the first row). The
    others are assigned to what is left, by the largest total score. This is cheaper than ``assign``, and no other row moves.

    Args:
        wanted: ``[B]`` arm numbers. scores: ``[B, arms]`` finite. capacities: ``[arms]``.
    Returns:
        ``[B]`` int64 array.
    """
    wanted, scores = np.asarray(wanted, dtype=np.int64), np.asarray(scores, dtype=np.float64)
    arms = scores.shape[1]
    room = checked(capacities, arms, len(wanted))
    count = np.bincount(wanted, minlength=arms)
    if (count <= room).all():
        return wanted
    out = np.zeros(len(wanted), dtype=bool)
    for arm in (count > room).nonzero()[0]:
        rows = (wanted == arm).nonzero()[0]
        order = np.argsort(-scores[rows, arm], kind="stable")
        out[rows[order[room[arm] :]]] = True
    kept = np.bincount(wanted[~out], minlength=arms)
    wanted = wanted.copy()
    wanted[out] = assign(scores[out], room - kept)
    return wanted


def draw(
    probs: np.ndarray, capacities: np.ndarray, rng: Rng, length: Tensor, scores: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A keyed random arm for every row, and its probability *given the choices of the rows before it*.

    Other rows change nothing until an arm is full. From then on its probability goes to the free arm with the best score. Rows
    are served in order.

    Args:
        probs: ``[B, arms]`` float64, rows sum to 1. capacities: ``[arms]`` with room for B rows (``checked``).
        length: ``[B]`` committed lengths, the key of the decision (stream SELECT). scores: ``[B, arms]``; default ``probs``.
    Returns:
        arm ``[B]`` int64 and its conditional probability ``[B]`` float64.
    """
    B, arms = probs.shape
    arm = rng.categorical(torch.from_numpy(probs), Key(length, 0, 0, SELECT)).numpy()
    prob = probs[np.arange(B), arm]
    if (np.bincount(arm, minlength=arms) < capacities).all():
        return arm, prob
    arm, prob, scores = arm.copy(), prob.copy(), probs if scores is None else scores
    room, free = capacities.tolist(), capacities > 0
    for b, drawn in enumerate(arm.tolist()):
        best = -1 if free.all() else int(np.where(free, scores[b], -np.inf).argmax())
        if not free[drawn]:
            arm[b] = best
        if arm[b] == best:
            prob[b] = probs[b][~free].sum() + probs[b, best]
        room[arm[b]] -= 1
        free[arm[b]] = room[arm[b]] > 0
    return arm, prob


def scatter(capacities: np.ndarray, rng: Rng, length: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A keyed arm for every row, uniform over the arms with room left; rows are served in order.

    One random number per row is enough for any number f of free arms: it selects one of M equal parts, M being a multiple of 1, ...,
    arms, and the free arms share the parts equally. (Above 10 arms the shares differ by at most 1 / M, and the returned
    probability is still exact.) While no arm is full the result is that of a draw from ``arms`` equal parts.

    Args:
        capacities: ``[arms]`` with room for B rows (``checked``). length: ``[B]`` committed lengths, the key (stream SELECT).
    Returns:
        arm ``[B]`` int64 and its probability given the rows before it, ``[B]`` float64.
    """
    B, arms = len(length), len(capacities)
    ample = capacities.min() >= B
    parts = arms if ample else lcm(*range(1, min(arms, 10) + 1)) * (1 if arms <= 10 else arms)
    distribution = torch.full((1, 1), 1 / parts, dtype=torch.float64).expand(B, parts)
    part = rng.categorical(distribution, Key(length, 0, 0, SELECT)).numpy()
    if ample:
        return part, np.full(B, 1 / arms)
    arm, prob = np.zeros(B, dtype=np.int64), np.zeros(B)
    room, free = capacities.tolist(), [j for j, c in enumerate(capacities.tolist()) if c > 0]
    for b, m in enumerate(part.tolist()):
        f = len(free)
        i = m * f // parts
        arm[b] = j = free[i]
        prob[b] = (-(-(i + 1) * parts // f) + (-i * parts // f)) / parts
        room[j] -= 1
        if not room[j]:
            free.remove(j)
    return arm, prob
