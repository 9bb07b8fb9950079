"""Two races of the same exponential numbers: the law of both winners.

Number ``E_v`` is exponential and token v arrives at ``E_v / w_v``. The first to arrive has the law norm(w).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def winners(q: np.ndarray, r: np.ndarray) -> np.ndarray:
    """``[V, V]`` the probability that token a wins under weights ``q [V]`` and b under ``r [V]``, with the same numbers.

    With m the ratio of the numbers of b and a, a wins under q and b under r if m is between ``q_b / q_a`` and ``r_b / r_a``, and
    every other number is at least ``max(q_v / q_a, m r_v / r_b)`` times that of a. So the probability is the integral over m of
    ``(1 + m + sum of these) ** -2``, where the sum is piecewise linear.
    """
    V = len(q)
    law = np.zeros((V, V))
    for a in np.flatnonzero(q):
        for b in np.flatnonzero(r):
            if a == b:
                law[a, a] = 1 / np.maximum(q / q[a], r / r[a]).sum()
                continue
            low, high = q[b] / q[a], r[b] / r[a] if r[a] > 0 else np.inf
            others = np.setdiff1d(np.arange(V), (a, b))
            still, moving = q[others] / q[a], r[others] / r[b]
            bends = still[moving > 0] / moving[moving > 0]
            cuts = np.concatenate([[low], np.sort(bends[(bends > low) & (bends < high)]), [high]])
            for start, end in pairwise(cuts):
                if start < end:
                    middle = (start + end) / 2 if end < np.inf else start + 1
                    linear = middle * moving > still
                    constant, slope = 1 + still[~linear].sum(), 1 + moving[linear].sum()
                    until = 1 / (constant + slope * end) if end < np.inf else 0
                    law[a, b] += (1 / (constant + slope * start) - until) / slope
    return law
