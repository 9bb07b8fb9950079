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
    of these rows (``slow``), and partly of rows like them (``later``); the larger of the two is counted. There the arms are found row by row with
    no limit on ``slow``, with the least that all rows can keep to, and with one half way between; the best of the three is taken.

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
    lost, row, best = slow * later, np.arange(len(slow)), (np.inf, np.zeros(len(slow), dtype=np.int64))
    if not len(slow):
        return 0.0, best[1]
    least = float(np.where(np.isfinite(own).any(0), slow, np.inf).min(-1).max())
    for limit in (np.inf, least, (least + float(slow.max())) / 2):
        kept = np.where(slow <= limit, seconds, np.inf)
        arms = (kept + lost).argmin(-1)  # [ways, B]
        rounds = slow[row, arms]
        total = np.take_along_axis(kept, arms[..., None], -1)[..., 0].sum(-1)
        total += np.maximum(lost[row, arms].sum(-1), shared * (rounds.max(-1) - rounds.mean(-1)))
        if total.min() < best[0]:
            best = float(total.min()), arms[int(total.argmin())]
    return best
