"""Verification functions that take their uniforms as an argument and cannot be looked into, such as compiled code.

The cube of the uniforms is cut into boxes until the function returns the same at all corners of a box.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import name_of
from specdec.audit.external.tape import CannotWalk
from specdec.audit.external.verifier import ids
from specdec.audit.plain import Distribution, Ids


def takes_uniforms(
    f: Callable[..., Any], n: Callable[[int], int], hints: Sequence[float] = (), most: int = 20_000
) -> Callable[[Tensor, Tensor, Tensor], list[int]]:
    """``f(tokens, q, p, u)`` as a function for ``External``, where ``u [n]`` are numbers (float64) in [0, 1).

    It is called at many points u, and what it returns is drawn with the probability of the boxes where it is returned.

    Args:
        n: the number of uniforms for k drafted tokens, at most 8. hints: points at which every uniform is cut first. most: calls of ``f``.
    Raises:
        CannotWalk: more than 1e-9 of the cube is not resolved after ``most`` calls, as for a function of a product of uniforms.
    """

    known: dict[bytes, tuple[Distribution, float]] = {}

    def rule(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
        given = b"|".join(x.cpu().numpy().tobytes() for x in (tokens, q, p))
        if given not in known:
            with torch._C.DisableTorchFunction():  # numbers are numbers here
                found = boxes(lambda u: tuple(ids(f(tokens, q, p, u), f)), n(len(tokens)), hints, most)
            known[given] = found
        law, rest = known[given]
        if rest > 1e-9:
            raise CannotWalk(
                f"{name_of(f, 'the function')} is not constant on boxes of its uniforms: {rest:.2g} of the cube is not resolved "
                f"after {most} calls; write it so that every uniform is compared with numbers, or raise most"
            )
        texts = list(law)
        chosen = torch.multinomial(torch.tensor([law[text] for text in texts], dtype=torch.float64), 1)
        return list(texts[int(chosen)])

    return rule


def boxes(
    f: Callable[[Tensor], Ids], n: int, hints: Sequence[float] = (), most: int = 20_000
) -> tuple[Distribution, float]:
    """The law of ``f(u [n])`` for independent uniforms, and the volume of the boxes that were not resolved.

    A box is taken for constant if ``f`` is the same at all its corners. That is right where the outcome is monotone in each uniform, and ``hints``
    help elsewhere. A change between two corners is located by bisection.
    """
    if not 0 <= n <= 8:
        raise ValueError(f"n is {n}: from 0 to 8 uniforms can be probed; use fewer drafted tokens")
    known: dict[tuple[float, ...], Ids] = {}

    def at(point: tuple[float, ...]) -> Ids:
        if point not in known:
            known[point] = f(torch.tensor(point, dtype=torch.float64))
        return known[point]

    cuts = [0.0, *sorted({float(h) for h in hints if 0 < h < 1}), 1.0]
    heap: list[tuple[float, tuple[tuple[float, float], ...]]] = []
    for box in product(pairwise(cuts), repeat=n):
        heappush(heap, (-_volume(box), box))
    law, rest = dict[Ids, float](), 0.0
    while heap:  # the largest box first
        volume, box = heappop(heap)
        volume = -volume
        inside = [(low + 1e-13 * (high - low), high - 1e-13 * (high - low)) for low, high in box]
        corners = [tuple(c) for c in product(*inside)] if len(known) < most and volume > 1e-12 else []
        found = {corner: at(corner) for corner in corners}
        if len(set(found.values())) == 1:
            text = found[corners[0]]
            law[text] = law.get(text, 0.0) + volume
            continue
        if not corners:
            rest += volume
            continue
        i, cut = _split(at, found, inside)
        start, end = box[i]
        for side in ((start, cut), (cut, end)):
            part = (*box[:i], side, *box[i + 1 :])
            heappush(heap, (-_volume(part), part))
    return law, rest


def _split(
    at: Callable[[tuple[float, ...]], Ids],
    found: dict[tuple[float, ...], Ids],
    inside: list[tuple[float, float]],
) -> tuple[int, float]:
    """A coordinate and where to cut it: at a change between two corners, or, if these are all at the rim of the box, in the middle."""
    for corner, text in found.items():
        for i, (low, high) in enumerate(inside):
            if corner[i] == low and found[_put(corner, i, high)] != text:
                left, right = low, high
                while right - left > 1e-15 and left < (middle := (left + right) / 2) < right:
                    left, right = (middle, right) if at(_put(corner, i, middle)) == text else (left, middle)
                if min(right - low, high - right) > 1e-6 * (high - low):
                    return i, right
    i = max(range(len(inside)), key=lambda i: inside[i][1] - inside[i][0])
    return i, sum(inside[i]) / 2


def _volume(box: Sequence[tuple[float, float]]) -> float:
    return float(np.prod([high - low for low, high in box]))


def _put(point: tuple[float, ...], i: int, value: float) -> tuple[float, ...]:
    return (*point[:i], value, *point[i + 1 :])
