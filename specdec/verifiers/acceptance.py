"""The probability that one of k candidates is accepted at a node: for several verifiers, and at most for any exact verifier.

All functions take the target's distribution p and the draft's q, ``[..., V]``, and return ``[...]`` in float64. They use no random numbers.
The optimum is that of Hu et al., "Towards optimal multi-draft speculative decoding" (arXiv 2502.18779); k-SEQ is from Sun et al., "SpecTr"
(arXiv 2310.15141, algorithm 2).
"""

from __future__ import annotations

from math import ceil, log

import torch
from torch import Tensor

from specdec.arguments import at_least


def single(p: Tensor, q: Tensor) -> Tensor:
    """One draw from q: the sum of min(p, q), which is 1 - TV(p, q). No verifier accepts more, and ``Rejection`` accepts as much."""
    p, q = _checked(p, q)
    return torch.minimum(p, q).sum(-1)


def recursive(p: Tensor, q: Tensor, k: int, replacement: bool = True, most: int = 4096) -> Tensor:
    """The probability that one of k draws from q is accepted by recursive rejection (``verifiers.Rejection``).

    Args:
        replacement: ``True``: the draws are independent. ``False``: each draw is from q without the tokens drawn before it; when all
            tokens of q have been drawn, the draws end.
        most: the most passes over the vocabulary. Draws without replacement need V^(k - 2), because the residual that a draw is tested
            against depends on the tokens before it.
    Raises:
        ValueError: more than ``most`` passes.
    """
    p, q = _checked(p, q, k)
    if replacement:
        left = p
        for _ in range(k):
            left = (left - left.sum(-1, keepdim=True) * q).clamp(min=0)
        return 1 - left.sum(-1)
    V = p.shape[-1]
    if k > 2 and V ** (k - 2) > most:
        raise ValueError(
            f"k is {k} without replacement for a vocabulary of {V}: that takes V^(k - 2) passes, and most is {most}: give a smaller k, or "
            "replacement=True"
        )
    return 1 - _all_rejected(p, q, k)


def kseq(p: Tensor, q: Tensor, k: int) -> Tensor:
    """k independent draws from q under k-SEQ (``verifiers.KSeq``): at least ``1 - (1 - 1/k)^k`` of the optimum."""
    p, q = _checked(p, q, k)
    beta = torch.minimum(q, p / kseq_scale(p, q, k)[..., None]).sum(-1)
    return 1 - (1 - beta) ** k


def kseq_scale(p: Tensor, q: Tensor, k: int | Tensor) -> Tensor:
    """``[...]`` the ρ of k-SEQ: the smallest in [1, k] for which its residual is a distribution.

    Let β(ρ) be the sum of min(q, p / ρ). Then ρ solves 1 - (1 - β)^k = ρ β. The left side falls in ρ and the right side does not, so
    bisection finds the root, down to two neighbouring numbers. The upper one is returned: every ρ above the root is exact, none below it is.

    Args:
        k: the number of draws, at least 1, or ``[...]`` one for each distribution.
    """
    p, q = p.double(), q.double()
    k = torch.as_tensor(k, dtype=torch.float64, device=p.device).expand(p.shape[:-1])
    low, high = torch.ones_like(k), k.clone()
    for _ in range(54):
        rho = (low + high) / 2
        beta = torch.minimum(q, p / rho[..., None]).sum(-1)
        enough = 1 - (1 - beta).clamp(min=0) ** k <= rho * beta
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    return high


def optimum(p: Tensor, q: Tensor, k: int, replacement: bool = True) -> Tensor:
    """The largest probability with which any verifier can accept one of k draws from q and keep the target's distribution.

    It is 1 + the minimum of p(S) - Pr(all draws are in S) over all sets S of tokens. The minimum is attained by a set of the first tokens
    in the order of falling q / p, so V sets are compared.

    Args:
        replacement: as for ``recursive``. Without replacement, ``Pr`` is an integral: the draws are the first k arrivals of independent
            exponential clocks with rates q. The trapezoidal rule gives it to about 1e-13.
    """
    p, q = _checked(p, q, k)
    order = torch.where(p > 0, q / p, torch.inf).argsort(dim=-1, descending=True, stable=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    inside = q.cumsum(-1) ** k if replacement or k == 1 else _drawn_inside(q, k)
    return 1 + (p.cumsum(-1) - inside).amin(-1).clamp(max=0)


def greedy_set(p: Tensor, q: Tensor, k: int) -> Tensor:
    """The optimum for a greedy set: the k - 1 most probable tokens of q, chosen without randomness, and one draw from the rest of q.

    ``Rejection`` attains it if the drawn token is tried first.
    """
    p, q = _checked(p, q, k)
    top = q.topk(min(k - 1, q.shape[-1]), -1).indices
    rest = normalised(q.scatter(-1, top, 0))
    return p.gather(-1, top).sum(-1) + torch.minimum(p.scatter(-1, top, 0), rest).sum(-1)


def top_points(p: Tensor, q: Tensor, k: int) -> Tensor:
    """The acceptance of the k most probable tokens of q, chosen without randomness: their probability under p, by any exact verifier."""
    p, q = _checked(p, q, k)
    return p.gather(-1, q.topk(min(k, q.shape[-1]), -1).indices).sum(-1)


def _checked(p: Tensor, q: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    at_least(1, "k", k, "give the number of candidates, at least 1")
    if p.shape != q.shape:
        raise ValueError(
            f"p has shape {list(p.shape)} and q {list(q.shape)}: give distributions over the same tokens, [..., V]"
        )
    return p.double(), q.double()


def left_without(q: Tensor) -> Tensor:
    """``[..., V]`` what ``q [..., V]`` has without each token. The sum of the others is taken for the most probable one, of which ``1 - q`` may keep no digit."""
    top = q.argmax(-1, keepdim=True)
    others = q.scatter(-1, top, 0).sum(-1, keepdim=True)
    return (others + q.gather(-1, top) - q).scatter(-1, top, others)


def _all_rejected(p: Tensor, q: Tensor, k: int) -> Tensor:
    """The probability that recursive rejection rejects k draws without replacement."""
    if k == 1:
        return 1 - torch.minimum(p, q).sum(-1)
    rejected, rest = (q - p).clamp(min=0), normalised((p - q).clamp(min=0))
    # A rejected token has none of the rest, so the second draw is from q over what it has without that token, wherever it matters.
    if k == 2:
        left = left_without(q)
        scale = torch.where(left > 0, 1 / left, 0)
        ratio, order = torch.where(q > 0, rest / q, torch.inf).sort(-1)
        below = torch.nn.functional.pad(rest.gather(-1, order).cumsum(-1), (1, 0))
        above = torch.nn.functional.pad(q.gather(-1, order).flip(-1).cumsum(-1).flip(-1), (0, 1))
        at = torch.searchsorted(ratio, scale.contiguous())
        some = (rejected * (1 - below.gather(-1, at) - scale * above.gather(-1, at))).sum(-1)
        return torch.where((q > 0).any(-1), some, 1)  # nothing is left to draw
    every = torch.zeros_like(p[..., 0])
    for v in range(q.shape[-1]):
        others = normalised(q.index_fill(-1, torch.tensor([v], device=q.device), 0))
        every = every + rejected[..., v] * _all_rejected(rest, others, k - 1)
    return every


def normalised(x: Tensor) -> Tensor:
    """``x [..., V]`` over its sum; zeros stay zeros."""
    total = x.sum(-1, keepdim=True)
    return torch.where(total > 0, x / total, 0)


def _drawn_inside(q: Tensor, k: int, step: float = 0.25) -> Tensor:
    """``[..., V]`` the probability that k draws from q without replacement are all among the first 1, 2, ..., V tokens.

    Draws without replacement are the first arrivals of independent exponential clocks with rates q. All are among the first j tokens if k
    of these arrive before any other token does, at a time t with density c exp(-c t), where c is the others' rate. The number of arrivals
    until t is a sum of independent 0s and 1s; the probability of m is exp(-t sum q) E_m, with E_m the m-th elementary symmetric sum of
    exp(q t) - 1, which cumulative sums give for all j at once. The integrand is smooth in log t, where the trapezoidal rule converges
    exponentially.
    """
    supported = q > 0
    k_of = supported.sum(-1, keepdim=True).clamp(max=k)  # there are no more draws than tokens
    total = q.cumsum(-1)
    others = torch.nn.functional.pad(q.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
    first, last = -14.0, log(60 / float(q[supported].min())) if q.numel() else 0.0
    inside = torch.zeros_like(q)
    count = ceil((last - first) / step)
    for x in torch.linspace(first, last, count + 1, dtype=torch.float64).tolist():
        t = torch.tensor(x, dtype=torch.float64, device=q.device).exp()
        weight = torch.where(supported, q * t + torch.log(-torch.expm1(-q * t)), -torch.inf)
        # log E_0, and the probability of fewer than k arrivals.
        symmetric, some = torch.zeros_like(q), torch.exp(-total * t)
        for m in range(1, k):
            before = torch.nn.functional.pad(symmetric[..., :-1], (1, 0), value=0.0 if m == 1 else -torch.inf)
            symmetric = (weight + before).logcumsumexp(-1)
            some = some + torch.where(m < k_of, torch.exp(symmetric - total * t), 0)
        inside += t * others * torch.exp(-others * t) * (1 - some).clamp(min=0)
    inside *= (last - first) / count
    enough = supported.cumsum(-1) >= k_of
    return torch.where(others > 0, torch.where(enough, inside, 0), 1).clamp(max=1)
