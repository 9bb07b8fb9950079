"""The largest of many scores without a selection over all of them.

The k largest scores lie in the k blocks with the largest maxima. On a CPU these maxima, and a selection from these blocks alone, take less time
than ``torch.topk`` of a large vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Scores of a block."""


def topk(scores: Tensor, k: int) -> torch.return_types.topk:
    """``scores.topk(k, -1)``: the ``k`` largest scores of each row ``[..., V]``, the largest first, and their places ``[..., k]``.

    Of equal scores it may name others than ``torch.topk``, which promises no order either. NaN counts as the largest, as there.
    """
    V = scores.shape[-1]
    if scores.device.type != "cpu" or 4 * k * BLOCK > V:
        return scores.topk(k, -1)
    tail = V - V % BLOCK
    blocks = scores[..., :tail].unflatten(-1, (-1, BLOCK))
    some = blocks.amax(-1).topk(k, -1).indices[..., None]
    few = torch.cat(
        (blocks.gather(-2, some.expand(*some.shape[:-1], BLOCK)).flatten(-2), scores[..., tail:]), -1
    )
    place = (some * BLOCK + torch.arange(BLOCK)).flatten(-2)
    place = torch.cat((place, torch.arange(tail, V).expand(*place.shape[:-1], -1)), -1)
    top = few.topk(k, -1)
    return torch.return_types.topk((top.values, place.gather(-1, top.indices)))
