"""Arms for all rows of a batch together: the least seconds in which every row gets equally many tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def together(
    slow: np.ndarray, cost: np.ndarray, seconds: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, np.ndarray]:
    """The arms with the least product of a round's seconds and the rounds that a token takes, summed over rows.

    That is what equally many tokens for every row take, divided by the batch, where each row that ends makes room for another one like it. (The most tokens a second
    of the rows at hand is another thing: it favours the rows that are fast anyway. They end, and the slow ones stay.)

    The product is the least where no row gains by another arm at the price of a second that the choice itself sets. That is sought from the two ends, the
    fewest rounds and the shortest round, each way by itself. It finds the best in nearly all cases.

    Args:
        slow: ``[B, arms]`` rounds of a token. cost: ``[ways, B, arms]`` what a row adds to the seconds of a round, infinite for arms that are closed; at
            least one is open. seconds: of a round, by arms ``[ways, B]``: ``[ways]``, above 0.
    Returns:
        the product, and the arms ``[B]``.
    """
    rows, least, best = np.arange(len(slow)), np.inf, np.zeros(len(slow), dtype=np.int64)
    for arm in (np.where(np.isfinite(cost), slow, np.inf).argmin(-1), cost.argmin(-1)):
        for _ in range(8):
            spent, needed = seconds(arm), slow[rows, arm].sum(-1)
            product = spent * needed
            way = int(product.argmin())
            if product[way] < least:
                least, best = float(product[way]), arm[way]
            after = (slow + (needed / spent)[:, None, None] * cost).argmin(-1)
            if np.array_equal(after, arm):
                break
            arm = after
    return least, best
