"""Rejection verification, lossless for chains, trees and several candidates a node.

Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (arXiv 2302.01318) for chains; siblings are tried in order
against the residual that their elders left (recursive rejection: SpecInfer, arXiv 2305.09781, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.kernels.device import to_device
from specdec.rng import ACCEPT, BONUS, Key, Philox, Rng, pick
from specdec.types import Context, Proposal, Verdict


@dataclass(frozen=True)
class Rejection:
    """Accept node x with probability min(1, p(x) / q(x)), else go on with norm(max(p - q, 0)).

    Args:
        trust_declared: accept proposals whose q was declared rather than drawn by the library. The output has the target's
            law only if the declaration is true; an argmax declared as softmax(q) is already off by 0.45 on one token.
    """

    trust_declared: bool = False
    name = "rejection"
    lossless = True

    def check(self, proposal: Proposal) -> None:
        if proposal.provenance == "declared" and not self.trust_declared:
            raise ValueError(
                "the draft declares probabilities that the library did not draw from: leave probs out (the tokens are then "
                "verified as point masses, exactly), draw with rng.categorical and provenance='sampled', or build "
                "Rejection(trust_declared=True) if the declaration is known to be true"
            )

    def for_draft(self, rng: Rng) -> Rng:
        return rng

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        if proposal.nodes == 0:
            path, accepted = proposal.tokens, torch.zeros_like(proposal.size)
            law = probs[:, 0]
        elif tree.is_chain(proposal.parents):
            path, accepted, law = verify_chain(proposal, probs, context, rng)
        else:
            path, accepted, law = verify_tree(proposal, probs, context, rng)
        bonus = draw_bonus(law, accepted, context, rng, proposal.nodes)
        return Verdict.of(proposal, path, accepted, bonus, checked=True)

    def greedy(self, proposal: Proposal, tokens: Tensor) -> Verdict:
        """``__call__`` at temperature 0, where every law lies on one token: ``tokens [B, N + 1]``.

        Whatever q was, that token is accepted (p / q >= 1), any other is not (p = 0), and the residual is that token again.
        """
        return tree.follow(proposal, tokens)


def draw_bonus(law: Tensor, accepted: Tensor, context: Context, rng: Rng, nodes: int) -> Tensor:
    """``[B]`` the tokens after ``accepted [B]`` of at most ``nodes`` nodes, from ``law [B, V]``."""
    if type(rng) is Philox and not law.is_cpu:  # numbers of all that it may be: nobody waits to learn which
        keys = Key(context.length[:, None], torch.arange(nodes + 1), 0, BONUS)
        numbers = to_device(rng.uniform(keys), law.device)
        return pick(law, numbers.gather(1, to_device(accepted, law.device)[:, None])[:, 0])
    return rng.categorical(law, Key(context.length, accepted.cpu(), 0, BONUS))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) of ``[B, V]`` laws; p itself where nothing is left (then rejection has probability 0)."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def verify_tree(
    proposal: Proposal, probs: Tensor, context: Context, rng: Rng
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference: walk the nodes in order, carrying the law that is left at the node where each row stands.

    Returns ``path [B, N]``, ``accepted [B]`` and the law ``[B, V]`` of the bonus token.
    """
    B, N = proposal.tokens.shape
    device = probs.device
    rows = torch.arange(B, device=device)
    parents, size = to_device(proposal.parents, device), to_device(proposal.size, device)
    key = Key(
        context.length[:, None], tree.depths(proposal.parents), tree.sibling_numbers(proposal.parents), ACCEPT
    )
    here = torch.full((B,), -1, device=device)
    law = probs[:, 0]
    path = torch.full((B, N + 1), -1, device=device)  # the last is for nodes that do not stand
    accepted = torch.zeros(B, dtype=torch.long, device=device)
    for n in range(N):
        x = proposal.tokens[:, n]
        if proposal.probs is None:
            q = torch.zeros_like(law).scatter_(1, x[:, None], 1)
        else:
            q = proposal.probs[:, n].to(law)
        asked = (parents[:, n] == here) & (n < size)
        ratio = torch.where(asked, law[rows, x] / q[rows, x], 0)
        yes = asked & rng.accept(ratio, Key(key.at[:, 0], key.depth[:, n], key.sibling[:, n], ACCEPT))  # type: ignore[index]
        law = torch.where(
            yes[:, None], probs[:, n + 1], torch.where((asked & ~yes)[:, None], residual(law, q), law)
        )
        path.scatter_(1, torch.where(yes, accepted, N)[:, None], n)
        accepted = accepted + yes
        here = torch.where(yes, n, here)
    return path[:, :N], accepted, law


def verify_chain(
    proposal: Proposal, probs: Tensor, context: Context, rng: Rng
) -> tuple[Tensor, Tensor, Tensor]:
    """The same decisions as ``verify_tree`` for chains, with one residual instead of one a node."""
    B, N = proposal.tokens.shape
    device = probs.device
    rows, n = torch.arange(B, device=device), torch.arange(N, device=device)
    size = to_device(proposal.size, device)
    p = probs[:, :N].gather(2, proposal.tokens[..., None])[..., 0]
    q = (
        torch.ones_like(p)
        if proposal.probs is None
        else proposal.probs.gather(2, proposal.tokens[..., None])[..., 0].to(p)
    )
    key = Key(context.length[:, None], torch.arange(N), 0, ACCEPT)
    live = n < size[:, None]
    stands = rng.accept(torch.where(live, p / q, 0), key) & live
    accepted = stands.long().cumprod(1).sum(1)
    path = torch.where(n < accepted[:, None], n, -1)
    law = probs[rows, accepted]
    if not probs.is_cpu:  # for all rows, so that nobody waits to learn which rejected a node
        at = accepted.clamp(max=N - 1)
        if proposal.probs is None:
            drafted = torch.zeros_like(law).scatter_(1, proposal.tokens.gather(1, at[:, None]), 1)
        else:
            drafted = proposal.probs[rows, at].to(law)
        return path, accepted, torch.where((accepted < size)[:, None], residual(law, drafted), law)
    cut = (accepted < size).nonzero()[:, 0]  # rows that rejected a node
    if len(cut):
        at = accepted[cut]
        if proposal.probs is None:
            drafted = torch.zeros_like(law[cut]).scatter_(1, proposal.tokens[cut, at][:, None], 1)
        else:
            drafted = proposal.probs[cut, at].to(law)
        law = law.index_copy(0, cut, residual(law[cut], drafted))
    return path, accepted, law
