"""Speculative sampling on logits, in plain PyTorch (Leviathan et al., arXiv 2211.17192, algorithm 1).

The computation, here and in the kernels, for ``x = logits / temperature`` (in float32, or in float64 for float64 logits):

1. for each row of logits the largest value m and ``z = sum(exp(x - m))``; then ``p(v) = exp(x_v - m) / z``, for single tokens;
2. node n is accepted with probability ``min(1, p_n(x_n) / q_n(x_n))``; the *cut* is the first rejected node, or the position after
   the last node if all are accepted;
3. there, ``w = max(p - q, 0)`` (p itself after the last node, or if that is all zero); for a point mass p without the drafted token;
4. the bonus is the first token at which the running sum of w, in float64, exceeds the quantile u times the total.

``verifiers.Rejection`` does the same with rounded probabilities, which it normalises once more. With equal random numbers the
decisions are equal except if a random number is within rounding of a threshold. The ratio of step 2 differs by about 2^-22 of its
value (slightly more for large vocabularies). In step 4 the token differs with the probability of falling between two running sums
that should be equal, which adds up over the vocabulary: for random float32 logits about 10^-6 at V = 256, 10^-5 to 10^-4 at 4,096,
10^-3 at 32,000, and up to several percent at 150,000, if the tail is flat and p and q are close. The *distribution* is off by about
10^-5, and then usually ``Rejection``, whose p carry the rounding of a longer float32 sum, is further from the exact decision. In
float64 all of this is 10^9 times rarer. The kernels add block by block and the reference token by token: a difference of 2^-53 of
the total per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.device import defer, to_device


class Decision(NamedTuple):
    """``accepted [B]``: the number of accepted nodes. ``token [B]``: the next token. Both int64."""

    accepted: Tensor
    token: Tensor


def decide(
    logits: Tensor,
    tokens: Tensor,
    size: Tensor,
    accept: Callable[[Tensor], Tensor],
    draw: Callable[[Tensor, Tensor], Tensor],
    draft: Tensor | None = None,
    draft_logits: bool = False,
    temperature: float = 1.0,
    inspect: Callable[[Tensor], None] | None = None,
) -> Decision:
    """Verify chains with random decisions by ``accept`` and ``draw``; other arguments as for ``fused.verify``.

    Args:
        accept: ratios ``[B, N]`` -> ``[B, N]`` bool, True with probability ``min(1, ratio)``; the ratio is 0 for nodes that do not exist.
        draw: unnormalised weights ``[B, V]`` and ``accepted [B]`` -> tokens ``[B]``.
        inspect: is given ``[B]`` bool, whether a row's logits are distributions, before any decision. Default: ``check``.
    """
    B, N = tokens.shape
    size = to_device(size, logits.device)
    live = torch.arange(N, device=logits.device) < size[:, None]
    rows = torch.arange(B, device=logits.device)
    x = tempered(logits, temperature or 1.0)
    m, z = masses(x)
    finite = (z > 0) & z.isfinite()
    (inspect or check)(finite[:, 0] & (~live | finite[:, 1:]).all(1))
    if temperature == 0:
        best = x.argmax(-1)
        accepted = ((tokens == best[:, :N]) & live).long().cumprod(1).sum(1)
        return Decision(accepted, best[rows, accepted])
    y = None if draft is None else tempered(draft, temperature) if draft_logits else draft
    qm, qz = masses(y) if draft_logits and y is not None else (None, None)
    drafted = tokens[..., None]
    p = (x[:, :N].gather(2, drafted)[..., 0] - m[:, :N]).exp() / z[:, :N]
    q = torch.ones_like(p)
    if y is not None:
        q = y.gather(2, drafted)[..., 0].to(p)
        q = q if qm is None or qz is None else (q - qm).exp() / qz
    accepts = accept(torch.where(live, p / q, 0)) & live
    accepted = accepts.long().cumprod(1).sum(1)
    whole = (x[rows, accepted] - m[rows, accepted][:, None]).exp() / z[rows, accepted][:, None]
    if not N:
        return Decision(accepted, draw(whole, accepted))
    at = accepted.clamp(max=N - 1)
    if y is None:
        rest = whole.scatter(1, tokens.gather(1, at[:, None]), 0)
    else:
        q = y[rows, at].to(p)
        if qm is not None and qz is not None:
            q = (q - qm[rows, at][:, None]).exp() / qz[rows, at][:, None]
        rest = (whole - q).clamp(min=0)
    left = (accepted < size)[:, None] & (rest.sum(-1, keepdim=True) > 0)
    return Decision(accepted, draw(torch.where(left, rest, whole), accepted))


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, in float32 or float64."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature


def masses(x: Tensor) -> tuple[Tensor, Tensor]:
    """Over the last dimension: the largest value, and the sum of ``exp(x - largest)``."""
    m = x.amax(-1)
    return m, (x - m[..., None]).exp().sum(-1)


def check(good: Tensor) -> None:
    """Raise ValueError naming the first row that is not good (on a device within ``DeferredChecks``: at the next ``to_host``)."""

    def refuse(good: Tensor) -> None:
        if not bool(good.all()):
            raise ValueError(
                f"logits of row {int((~good).nonzero()[0, 0])} have NaN, +inf or nothing but -inf, which is no distribution: a "
                "model in float16 may need bfloat16 or float32"
            )

    defer(good, refuse)
