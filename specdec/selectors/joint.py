"""Arms for all rows of a batch together: the least seconds in which every row gets equally many tokens."""

from __future__ import annotations

import numpy as np


def together(
    slow: np.ndarray,
    own: np.ndarray,
    shared: np.ndarray,
    once: np.ndarray | float = 0.0,
    later: np.ndarray | None = None,
) -> tuple[float, np.ndarray]:
    """The arms with the least seconds for a token of every row.

    A row that takes ``slow`` rounds for a token pays its own seconds in them, and an equal share of what all rows share. So a row on a slow arm holds up no
    other row, but it is there, and pays, for longer. (To choose the most tokens a second of the rows at hand is another thing: it favours rows that are
    fast anyway. They end, and the slow ones stay.)

    In a batch that is not refilled, what rows share is paid for as long as the slowest row is there. How unequal rows will be is partly known
    of these rows (``slow``), and partly of rows like them (``later``); the larger of the two is counted.

    Args:
        slow: ``[B, arms]`` rounds of a token. own: ``[ways, B, arms]`` seconds that a row adds to a round, infinite for an arm that is closed; of each way, one
            arm or more is open. shared: ``[ways]`` seconds of a round, whatever its rows do. once: ``[B, arms]`` seconds for a token, however many rounds it takes.
        later: ``[B, arms]`` a row's share of what its rounds cost after rows have ended, where rows like it fill a batch; ``None``: the batch is refilled.
    Returns:
        the seconds, and the arms ``[B]``.
    """
    B = max(len(slow), 1)
    seconds = slow * (own + (shared / B)[:, None, None]) + once
    if later is None:
        way = int(seconds.min(-1).sum(-1).argmin())
        return float(seconds[way].min(-1).sum()), seconds[way].argmin(-1)
    lost, row = slow * later, np.arange(len(slow))
    arms = (seconds + lost).argmin(-1)  # [ways, B]
    rounds = slow[row, arms]
    waiting = shared * (rounds.max(-1, initial=0.0) - rounds.sum(-1) / B)
    total = np.take_along_axis(seconds, arms[..., None], -1)[..., 0].sum(-1)
    total += np.maximum(lost[row, arms].sum(-1), waiting)
    way = int(total.argmin())
    return float(total[way]), arms[way]
