"""Traversal verification of trees: from the leaves to the root, a path is accepted as a whole before its siblings are tried.

Weng et al., "Traversal verification for speculative tree decoding" (arXiv 2505.12398, algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import ACCEPT, Key, Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.rejection import Rejection, draw_bonus, drawn_from


@dataclass(frozen=True)
class Traversal(Rejection):
    """A node is tried after its children. It is then the last accepted one with a probability a that all tokens of its path decide.

    The root has a = 1 and P = p. A child x that was drawn from q gets ``min(1, a P(x) / q(x))``, with its parent's a and P. When x and
    everything below it were rejected, the parent goes on with ``P = norm(max(a P - q, 0))`` and ``a = R / (R + 1 - a)``, where R is the sum
    of ``max(a P - q, 0)``. The bonus token comes from the P of the last accepted node. The output has the target's distribution, for every
    tree that ``Rejection`` takes.

    On chains it accepts as many tokens as ``BlockVerification``, and on siblings without children as many as ``Rejection``. All decisions
    before the first acceptance are rejections. So every a follows from the tokens alone, and one random number chooses the last node.

    Args:
        trust_declared: as for ``Rejection``.
    """

    @property
    def info(self) -> VerifierInfo:
        own = type(self).__call__ is Traversal.__call__  # another call gets no shortcut
        return VerifierInfo("traversal verification", lossless=True, compares_tokens=own)

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B, N = proposal.tokens.shape
        if N == 0:
            return super().__call__(proposal, probs, context, rng)
        chance, left = visits(proposal, probs)
        last = rng.categorical(chance, Key(context.length, 0, 0, ACCEPT))
        path, accepted = tree.path_to(proposal.parents, last - 1)
        bonus = draw_bonus(left[torch.arange(B, device=left.device), last], accepted, context, rng, N)
        return Verdict.of(proposal, path, accepted, bonus, checked=True)


def visits(proposal: Proposal, probs: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, N + 1]`` the probability that each node is the last accepted one, the root first, and ``[B, N + 1, V]`` the P of each then."""
    B, N = proposal.tokens.shape
    rows = torch.arange(B, device=probs.device)
    live = to_device(torch.arange(N) < proposal.size[:, None], probs.device)
    tokens = torch.where(live, proposal.tokens, 0)
    up = torch.where(live, to_device(proposal.parents, probs.device), -1) + 1
    left, weight = probs.clone(), torch.ones(B, N + 1, dtype=torch.float64, device=probs.device)
    for n in range(N):  # elder siblings, which are rejected when n is tried, come first
        x, at, here = tokens[:, n], up[:, n], live[:, n]
        q = drawn_from(proposal, rows, torch.full_like(rows, n), x, probs[:, 0])
        P, a = left[rows, at], weight[rows, at]
        wanted = P[rows, x].double()
        ratio = torch.where(wanted > 0, wanted / q[rows, x].double(), 0).clamp(
            max=torch.finfo(torch.float64).max
        )
        rest = (a[:, None].to(P) * P - q).clamp(min=0)
        R = rest.sum(-1)
        total = R.double()
        later = torch.where(total + (1 - a) > 0, total / (total + (1 - a)), 1)
        weight[:, n + 1] = torch.where(here, a * ratio, 0).clamp(max=1)
        weight[rows, at] = torch.where(here, later, a)
        left[rows, at] = torch.where((here & (R > 0))[:, None], rest / R[:, None], P)
    rejected = 1 - weight  # all of a node's children, and then the node
    rejected[:, 0] = 1
    for n in reversed(range(N)):
        rejected[rows, up[:, n]] *= torch.where(live[:, n], rejected[:, n + 1], 1)
    # The probability that a node's first child, the second, ..., and then the node is tried.
    turn = torch.ones_like(weight)
    for n in range(N):
        turn[:, n + 1] = turn[rows, up[:, n]]
        turn[rows, up[:, n]] *= torch.where(live[:, n], rejected[:, n + 1], 1)
    return weight * turn, left
