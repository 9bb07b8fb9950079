"""Some rows of a proposal are verified by one rule and the others by another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.device import to_device
from specdec.rng import Rng
from specdec.types import Context, Proposal, Verdict

Verify = Callable[[Proposal, Tensor, Context, Rng], Verdict]


def apart(
    some: Tensor, one: Verify, other: Verify, proposal: Proposal, scores: Tensor, context: Context, rng: Rng
) -> Verdict:
    """The verdicts of ``one`` on the rows ``some [B]`` (bool, on the host), and of ``other`` on the rest: as each row alone would get.

    Args:
        scores: ``[B, N + 1, V]``, what the two rules read: probabilities or logits.
    """
    groups = [(some.nonzero()[:, 0], one), ((~some).nonzero()[:, 0], other)]
    parts = [
        verify(
            proposal.select(rows),
            scores[to_device(rows, scores.device)],
            context.select(rows),
            rng.select(rows),
        )
        for rows, verify in groups
    ]
    back = torch.cat([rows for rows, _ in groups]).argsort()
    fields = zip(*((part.path, part.accepted, part.bonus, part.tokens) for part in parts))
    return Verdict(*(torch.cat(field)[back] for field in fields))
