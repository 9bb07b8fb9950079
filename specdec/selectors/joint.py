"""Arms for all rows of a batch together: the least seconds in which every row gets equally many tokens."""

from __future__ import annotations

import numpy as np


def together(
    slow: np.ndarray, own: np.ndarray, shared: np.ndarray, once: np.ndarray | float = 0.0
) -> tuple[float, np.ndarray]:
    """The arms with the least seconds for a token of every row, where the batch stays full.

    A row that takes ``slow`` rounds for a token pays its own seconds in them, and an equal share of what all rows share. So a row on a slow arm holds up no
    other row, but it is there, and pays, for longer. (To choose the most tokens a second of the rows at hand is another thing: it favours rows that are
    fast anyway. They end, and the slow ones stay.)

    Args:
        slow: ``[B, arms]`` rounds of a token. own: ``[ways, B, arms]`` seconds that a row adds to a round, infinite for an arm that is closed; of each way, one
            arm or more is open. shared: ``[ways]`` seconds of a round, whatever its rows do. once: ``[B, arms]`` seconds for a token, however many rounds it takes.
    Returns:
        the seconds, and the arms ``[B]``.
    """
    seconds = slow * (own + (shared / max(len(slow), 1))[:, None, None]) + once
    way = int(seconds.min(-1).sum(-1).argmin())
    arm = seconds[way].argmin(-1)
    return float(seconds[way].min(-1).sum()), arm
