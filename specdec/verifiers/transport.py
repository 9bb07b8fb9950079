"""Optimal transport for independent siblings: at each node the largest acceptance that any verifier can reach, for any k and any vocabulary.

Every verifier of several candidates chooses one of them and accepts it as if it had been drawn from w, the distribution of the choice (Khisti et
al., "Multi-draft speculative sampling: canonical decomposition and theoretical limits", arXiv 2410.18234). Here sorting gives w and a way
to choose with it: the minimum over sets of Hu et al. (arXiv 2502.18779) is attained by a prefix of the sorted vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.capabilities import VerifierInfo
from specdec.rng import Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.kseq import check_independent
from specdec.verifiers.levels import descend
from specdec.verifiers.rejection import Rejection


@dataclass(frozen=True)
class OptimalTransport(Rejection):
    """One of k siblings is chosen and accepted with min(1, p / w); else the token comes from norm(max(p - w, 0)).

    w is the distribution of the choice, and ``acceptance.optimum(p, q, k)`` the acceptance probability. The output has the target's distribution.

    Siblings must be drawn as for ``KSeq``. If several siblings have the accepted token, it goes on with their children as ``KSeq`` does. It
    is optimal at each node; no verifier is known to be optimal over several levels. Chains and point masses are verified as by ``Rejection``.
    It sorts the vocabulary at each level, and takes a few passes over it for each node.

    Args:
        trust_declared: as for ``Rejection``.
    """

    @property
    def info(self) -> VerifierInfo:
        return VerifierInfo("optimal transport", lossless=True, siblings=("independent",))

    def check(self, proposal: Proposal) -> None:
        super().check(proposal)
        check_independent(proposal, type(self).__name__)

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        return descend(proposal, probs, context, rng, rule, merge=True)


def moved(place: Tensor, q: Tensor, mean: Tensor, lacks: Tensor, spare: Tensor) -> Tensor:
    """``[B, V]`` the distribution of the token to which a candidate at ``place [B]`` is moved.

    What the first tokens lack is taken from the first tokens that have it to spare. Amounts are matched in order, as whole multiples of
    2^-60, so that the parts of an amount add up to it. To move an amount from token l to an earlier token j, a mass of
    amount / (mean_l - mean_j) of q is exchanged between them. This mass is at most q_j and at most q_l, because w / q rises and is between
    the two means.
    """
    at, index = place[:, None], torch.arange(q.shape[1], device=q.device)
    mine = lacks.gather(1, at) > 0
    own, other = ((torch.where(mine, x, y) * 2.0**60).long() for x, y in ((lacks, spare), (spare, lacks)))
    high, end = own.cumsum(1).gather(1, at), other.cumsum(1)
    low = high - own.gather(1, at)
    amount = (torch.minimum(high, end) - torch.maximum(low, end - other)).clamp(min=0).to(q) * 2.0**-60
    apart = torch.where(mine, mean - mean.gather(1, at), mean.gather(1, at) - mean) * q.gather(1, at)
    law = torch.where((apart > 0) & (torch.where(mine, index > at, index < at)), amount / apart, 0)
    law = law / law.sum(1, keepdim=True).clamp(min=1)
    return law.scatter_add(1, at, 1 - law.sum(1, keepdim=True))


def rule(
    p: Tensor, q: Tensor, tokens: Tensor, asked: Tensor, move: Callable[..., Tensor] = moved
) -> tuple[Tensor, Tensor]:
    """The probability that each candidate is the accepted one, and the residual: ``levels.Rule``.

    Tokens are sorted by p / q. Suppose that the candidate that comes last in this order were chosen. It would be token j with probability
    ``q_j r_j``, where r_j is the mean of k x^(k - 1) between the cumulative sums of q before and after j. This is too much for the last
    tokens and too little for the first. So each candidate is moved to another token before they are compared. The moves exchange a mass of
    q between a token that is chosen too seldom and a later one that is chosen too often, so moved candidates are still independent draws from q.
    """
    k = asked.sum(1).clamp(min=1)
    p, q = (x / x.sum(1, keepdim=True) for x in (p, q))
    order = torch.where(q > 0, torch.where(p > 0, p / q, 0), torch.inf).argsort(dim=1, stable=True)
    p, q = p.gather(1, order), q.gather(1, order)
    mean = last_of(q, k)
    w = choice(p, q, k)
    lacks, spare = (w - q * mean).clamp(min=0), (q * mean - w).clamp(min=0)
    place = order.argsort(dim=1).gather(1, tokens)  # where each candidate is in the order
    laws = [move(place[:, n], q, mean, lacks, spare) for n in range(tokens.shape[1])]
    cdfs = [torch.where(asked[:, n, None], law.cumsum(1).clamp(max=1), 1) for n, law in enumerate(laws)]
    later, wins = [torch.ones_like(p)], []
    for cdf in reversed(cdfs[1:]):
        later.append(later[-1] * cdf)
    elder = torch.ones_like(p)  # elder candidates come strictly before, in the order
    for n, law in enumerate(laws):
        wins.append((law * elder * later[-1 - n]).sum(1))
        elder = elder * torch.nn.functional.pad(cdfs[n], (1, 0), value=0.0)[:, :-1].where(
            asked[:, n, None], 1
        )
    accepts = torch.where(p > 0, torch.where(w > 0, p / w, torch.inf).clamp(max=1), 0)
    chance = torch.where(asked, torch.stack(wins, 1) * accepts.gather(1, place), 0)
    rest = torch.zeros_like(p).scatter(1, order, (p - w).clamp(min=0))
    total = rest.sum(1, keepdim=True)
    return chance, torch.where(total > 0, rest / total, torch.zeros_like(p).scatter(1, order, p))


def last_of(q: Tensor, k: Tensor) -> Tensor:
    """``[B, V]`` the probability that a token comes last among k draws, over q: (b^k - a^k) / (b - a), the mean of k x^(k - 1) from a to b."""
    b = q.cumsum(1).clamp(max=1)
    a = torch.nn.functional.pad(b, (1, 0))[:, :-1]
    mean = torch.zeros_like(q)
    for i in range(int(k.max())):
        mean = torch.where(i < k[:, None], mean * a + b**i, mean)
    return mean


def choice(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """``[B, V]`` the distribution w of the choice, for tokens in the order of rising p / q: its sum of min(p, w) is the optimum.

    A distribution is possible if no set S of tokens gets less than q(S)^k, the probability that all candidates are in S. Let S be the prefix
    for which p(S) - q(S)^k is the smallest. Inside S, w is max(p, σ q), with a sum of q(S)^k. Outside it is min(p, τ q).
    """
    P, Q = p.cumsum(1), q.cumsum(1).clamp(max=1)
    least, at = (P - Q ** k[:, None]).min(1, keepdim=True)
    missing = -least.clamp(max=0)
    inside = (torch.arange(p.shape[1], device=p.device) <= at) & (missing > 0)
    floor = torch.where(inside & (Q > 0), (P + missing) / Q, torch.inf).amin(1, keepdim=True)
    rest, left = (x.flip(1).cumsum(1).flip(1) for x in (p, q))  # of a token and those after it
    cap = torch.where(~inside & (left > 0), (rest - missing) / left, 0).amax(1, keepdim=True)
    return torch.where(inside, torch.maximum(p, torch.where(inside, floor, 0) * q), torch.minimum(p, cap * q))
