"""Merges partial attention outputs exactly by their log-sum-exps (online softmax, Milakov & Gimelshein, arXiv 1805.02867).

A fragment f of a row's slots gives ``o_f``, attention over its own slots alone, and ``l_f``, the log of the sum of its
exponentiated scores. Then ``l = log sum_f exp(l_f)`` and ``o = sum_f exp(l_f - l) o_f`` are those of all slots together. A query
that sees nothing in a fragment has ``l_f = -inf`` there, and its ``o_f`` is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(outputs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge any number of fragments.

    Args:
        outputs: ``[..., F, q, D]``, finite where ``lse`` is. lse: ``[..., F, q]``, natural logarithms.
    Returns:
        output ``[..., q, D]`` and lse ``[..., q]``; 0 and -inf for a query that sees nothing in any fragment.
    Raises:
        ValueError: shapes that do not match.
    """
    if outputs.shape[:-1] != lse.shape or lse.dim() < 2:
        raise ValueError(
            f"outputs is {tuple(outputs.shape)} and lse {tuple(lse.shape)}: give [..., F, q, D] and [..., F, q]"
        )
    top = lse.amax(-2, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)  # -inf - -inf would be NaN
    weight = (lse - top).exp()
    total = weight.sum(-2)
    some = torch.where(weight[..., None] > 0, outputs, 0.0)  # 0 * NaN would be NaN
    out = (weight[..., None] * some).sum(-3) / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return out.to(outputs.dtype), total.log() + top.squeeze(-2)


def merge_two(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``merge`` of two fragments in four operations; outputs ``[..., q, D]`` must be finite everywhere, lse is ``[..., q]``.

    ``exp(l_b - l) = sigmoid(l_b - l_a)``.
    """
    # NaN if the query sees nothing in either.
    share = torch.sigmoid(torch.nan_to_num(lse_b - lse_a))[..., None]
    if share.dtype != a.dtype:  # in half precision outputs are rounded, sums are not
        out = torch.lerp(a.to(share.dtype), b.to(share.dtype), share).to(a.dtype)
    else:
        out = torch.lerp(a, b, share)
    return out, torch.logaddexp(lse_a, lse_b)
