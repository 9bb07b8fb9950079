"""Block verification of chains: a prefix is accepted as a whole, so that a likely token makes up for an unlikely one before it.

Sun et al., "Block verification accelerates speculative decoding" (arXiv 2403.10444, algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import ACCEPT, Key, Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.rejection import Rejection, after_chain, draw_bonus, drawn_from


@dataclass(frozen=True)
class BlockVerification(Rejection):
    """At least the first i tokens of a chain are accepted with probability ``a_i = min(1, a_(i-1) p(x_i) / q(x_i))``, where ``a_0 = 1``.

    The bonus token comes from norm(max(a_i p - q, 0)) after i accepted tokens, or from p if the whole chain was accepted. The output has the
    target's distribution. From the same drawn chains it accepts on average at least as many tokens as ``Rejection``; from point masses it
    accepts equally many.

    The paper tests every prefix independently, and accepts the longest that passes. Here the tokens are tested from the first on, each with
    its probability given that those before it were accepted. The number of accepted tokens has the same distribution.

    Args:
        trust_declared: as for ``Rejection``.
    """

    @property
    def info(self) -> VerifierInfo:
        # Another call gets no shortcut, and may take trees.
        own = type(self).__call__ is BlockVerification.__call__
        takes: Any = {"siblings": ()} if own else {}
        return VerifierInfo("block verification", lossless=True, compares_tokens=own, **takes)

    def check(self, proposal: Proposal) -> None:
        super().check(proposal)
        branched = ~tree.is_chain(proposal.parents, proposal.size)
        if bool(branched.any()):
            raise ValueError(
                f"BlockVerification takes chains, and row {int(branched.nonzero()[0])} of the proposal is a tree: use a draft of chains, or Traversal() or Rejection(), which take trees"
            )

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        N = proposal.nodes
        if N == 0:
            return super().__call__(proposal, probs, context, rng)
        nodes = torch.arange(N, device=probs.device)
        size = to_device(proposal.size, probs.device)
        tokens = torch.where(nodes < size[:, None], proposal.tokens, 0)
        weight, chance = tests(proposal, probs, tokens, size)
        key = Key(context.length[:, None], torch.arange(N), 0, ACCEPT)
        accepted = rng.accept(chance, key).long().cumprod(1).sum(1)
        distribution = after_chain(proposal, probs, tokens, size, accepted, weight)
        bonus = draw_bonus(distribution, accepted, context, rng, N)
        path = torch.where(nodes < accepted[:, None], nodes, -1)
        return Verdict.of(proposal, path, accepted, bonus, checked=True)


def tests(proposal: Proposal, probs: Tensor, tokens: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """``weight [B, N + 1]``, the paper's a_i, and ``chance [B, N]``, the probability that node n is accepted if those before it were.

    In the paper, the prefix of i tokens passes its test with probability h_i. For the whole chain h_i is a_i. For shorter prefixes it is
    R / (R + 1 - a_i), where R is the sum of max(a_i p - q, 0) at the node after the prefix. Some prefix of at least i tokens passes with
    probability H_i = h_i + (1 - h_i) H_(i+1), and ``chance[:, i - 1]`` is H_i / H_(i-1).

    Args:
        tokens: ``[B, N]``, valid ids where there is no node. size: ``[B]``. Both are where ``probs [B, N + 1, V]`` are.
    """
    B, N = tokens.shape
    rows, nodes = (torch.arange(n, device=probs.device) for n in (B, N))
    live = nodes < size[:, None]
    p = probs[:, :N].gather(2, tokens[..., None])[..., 0].double()
    q = torch.ones_like(p) if proposal.probs is None else proposal.q_of(tokens).to(p)
    ratio = torch.where(live & (p > 0), p / q, 0).clamp(max=torch.finfo(p.dtype).max)
    weights = [torch.ones_like(p[:, 0])]
    for n in range(N):
        weights.append((weights[-1] * ratio[:, n]).clamp(max=1))
    passes, some = torch.zeros_like(p), torch.zeros_like(p[:, 0])
    for n in reversed(range(N)):
        a = whole = weights[n + 1]
        if n + 1 < N:
            drawn = drawn_from(proposal, rows, torch.full_like(rows, n + 1), tokens[:, n + 1], probs[:, 0])
            left = (a[:, None].to(probs) * probs[:, n + 1] - drawn).clamp(min=0).sum(-1).double()
            part = torch.where(left + (1 - a) > 0, left / (left + (1 - a)), 1)
            whole = torch.where(n + 1 < size, part, a)
        some = torch.where(live[:, n], whole + (1 - whole) * some, 0)
        passes[:, n] = some
    before = torch.cat([torch.ones_like(p[:, :1]), passes[:, :-1]], 1)
    return torch.stack(weights, 1), torch.where(before > 0, passes / before, 0)
