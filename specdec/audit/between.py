"""Expected rounds and tokens between two bounds, from chances between two bounds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.audit.rounds import ROUNDING, Rounds


class Between(NamedTuple):
    """Bounds ``[C]`` of the expected rounds and tokens of each text."""

    rounds_low: Tensor
    rounds_high: Tensor
    tokens_low: Tensor
    tokens_high: Tensor

    @property
    def tau(self) -> tuple[float, float]:
        """Bounds of the tokens a round over all texts."""
        return (
            float(self.tokens_low.sum() / self.rounds_high.sum()),
            float(self.tokens_high.sum() / self.rounds_low.sum()),
        )


def between(
    low: Tensor,
    high: Tensor,
    k: int | None = None,
    cut: bool | Tensor = False,
    *,
    n: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Between:
    """Bounds of ``efficiency`` of chains where the chances are at least ``low`` and at most ``high [C, n, N]``; other arguments as there.

    More acceptance does not always mean fewer rounds, because a round may then start where the draft is worse. So the programme runs
    from the end of the text to its start, and takes at every depth whichever bound is the worse, and whichever is the better.

    Raises:
        ValueError: as ``efficiency``, or ``low`` above ``high``.
    """
    C, most, N = low.shape
    if high.shape != low.shape:
        raise ValueError(
            f"low has shape {list(low.shape)} and high {list(high.shape)}: give bounds of the same chances"
        )
    rounds = Rounds.of(low, k, cut, n=n, lengths=lengths)
    used = (torch.arange(N) < rounds.room[..., None]) & rounds.inside[..., None]
    least, largest = (torch.where(used, x.double(), 0) for x in (low, high))
    if not bool(((least <= largest + ROUNDING) & (largest <= 1 + ROUNDING)).all()):
        raise ValueError("high has entries below low or above 1: give bounds of probabilities")
    largest = largest.clamp(max=1)
    ways = rounds.ends.shape[2]
    until = rounds.inside.sum(1)
    # [2, 2, C, n + k + 1]: low and high, of rounds and of tokens, from a position on
    value = torch.zeros(2, 2, C, most + ways, dtype=torch.float64)
    value[:, 1] = torch.arange(most + ways).double()
    value[..., :most] *= torch.arange(most) >= until[:, None]
    upper = torch.tensor([False, True])[:, None, None]
    one = torch.tensor([1.0, 0.0], dtype=torch.float64)[:, None]  # of rounds
    for s in reversed(range(most)):
        *ended, here = (value[..., min(s + d + 1, most + ways - 1)] for d in range(N + 1))  # after d tokens
        for d in reversed(range(N)):
            gain = here - ended[d]
            here = ended[d] + torch.where((gain > 0) == upper, largest[:, s, d], least[:, s, d]) * gain
        value[..., s] = torch.where(rounds.inside[:, s], here + one, value[..., s])
    start = value[..., 0]
    return Between(start[0, 0], start[1, 0], start[0, 1], start[1, 1])
