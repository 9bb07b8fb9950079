"""A head's reduced vocabulary: some of the target's ids, ascending, stored as offsets (EAGLE-3's ``d2t``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def offsets(ids: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    """``[K]``: entry j is ``ids[j] - j``, for ascending ids of a target's vocabulary of ``vocab_size``.

    Raises:
        ValueError: ids that do not exist, are repeated, or do not ascend.
    """
    kept = torch.as_tensor(ids, dtype=torch.long).cpu()
    if kept.dim() != 1 or not len(kept):
        raise ValueError(
            f"vocabulary has shape {list(kept.shape)}: give a list of ids of the target, at least one"
        )
    if int(kept[0]) < 0 or int(kept[-1]) >= vocab_size or bool((kept.diff() <= 0).any()):
        raise ValueError(f"vocabulary: give ascending ids from 0 to {vocab_size - 1}, each once")
    return kept - torch.arange(len(kept))


def check_offsets(d2t: Tensor, vocab_size: int, t2d: Tensor | None = None) -> None:
    """Refuse a map that is not one of offsets.

    Args:
        d2t: ``[K]``, the offset of each id of the head. t2d: ``[V]`` which ids of the target the head has, where a checkpoint has it.
    Raises:
        ValueError: the ids that the offsets give do not exist, do not ascend, or are not those of ``t2d``.
    """
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    wrong = (
        not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or bool((ids.diff() <= 0).any())
    )
    if not wrong and t2d is not None:
        wrong = not torch.equal(t2d.bool().nonzero()[:, 0], ids.to(t2d.device))
    if wrong:
        raise ValueError(
            f"d2t holds no offsets: id j of the head is id j + d2t[j] of the target, these ascend, and the target has {vocab_size}; if d2t has "
            "ids, subtract torch.arange(len(d2t))"
        )


def widened(logits: Tensor, d2t: Tensor | None, vocab_size: int) -> Tensor:
    """``[..., K]`` logits over the target's vocabulary ``[..., V]``: -inf for ids that the head does not have."""
    if d2t is None:
        return logits
    wide = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    return wide.index_copy(-1, d2t + torch.arange(len(d2t), device=d2t.device), logits)
