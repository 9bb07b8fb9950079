"""Rejection verification, lossless for chains, trees and several candidates a node.

Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (arXiv 2302.01318) for chains; siblings are tried in order
against the residual of the rejected ones (recursive rejection: SpecInfer, arXiv 2305.09781, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import ACCEPT, BONUS, Key, Philox, Rng, pick
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.tree_walk import Candidates, keyed, residual, walk


@dataclass(frozen=True)
class Rejection:
    """Accept node x with probability min(1, p(x) / q(x)), else continue with norm(max(p - q, 0)).

    Args:
        trust_declared: accept proposals whose q was declared rather than drawn by the library. The output has the target's
            distribution only if the declaration is true; an argmax declared as softmax(q) is already off by 0.45 on one token.
    """

    trust_declared: bool = False

    @property
    def info(self) -> VerifierInfo:
        own = type(self).__call__ is Rejection.__call__  # a subclass with its own call gets no shortcut
        return VerifierInfo("rejection", lossless=True, compares_tokens=own)

    def check(self, proposal: Proposal) -> None:
        if proposal.provenance == "declared" and not self.trust_declared:
            raise ValueError(
                "the draft declares probabilities that the library did not draw from: leave probs out (the tokens are then "
                "verified as point masses, exactly), draw with rng.categorical and provenance='sampled', or build "
                f"{type(self).__name__}(trust_declared=True) if the declaration is known to be true"
            )

    def for_draft(self, rng: Rng) -> Rng:
        return rng

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        if proposal.nodes == 0:
            path, accepted = proposal.tokens, torch.zeros_like(proposal.size)
            distribution = probs[:, 0]
        elif bool(tree.is_chain(proposal.parents, proposal.size).all()):
            path, accepted, distribution = verify_chain(proposal, probs, context, rng)
        else:
            path, accepted, distribution = verify_tree(proposal, probs, context, rng)
        bonus = draw_bonus(distribution, accepted, context, rng, proposal.nodes)
        return Verdict.of(proposal, path, accepted, bonus, checked=True)

    def greedy(self, proposal: Proposal, tokens: Tensor) -> Verdict:
        """``__call__`` at temperature 0, where every distribution is one-hot, on ``tokens [B, N + 1]``.

        Whatever q was, that token is accepted (p / q >= 1), any other is rejected (p = 0), and the residual is that token again.
        """
        return tree.follow(proposal, tokens)


def draw_bonus(distribution: Tensor, accepted: Tensor, context: Context, rng: Rng, nodes: int) -> Tensor:
    """``[B]`` the tokens after ``accepted [B]`` of at most ``nodes`` nodes, from ``distribution [B, V]``."""
    # Uniforms for every possible depth: the host need not wait to learn which.
    if type(rng) is Philox and not distribution.is_cpu:
        keys = Key(context.length[:, None], torch.arange(nodes + 1), 0, BONUS)
        uniforms = to_device(rng.uniform(keys), distribution.device)
        return pick(distribution, uniforms.gather(1, to_device(accepted, distribution.device)[:, None])[:, 0])
    return rng.categorical(distribution, Key(context.length, accepted.cpu(), 0, BONUS))


def verify_tree(
    proposal: Proposal, probs: Tensor, context: Context, rng: Rng
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide on any trees: ``path [B, N]``, ``accepted [B]`` and the distribution ``[B, V]`` of the bonus token."""
    device, parents, size, N = probs.device, proposal.parents, proposal.size, proposal.nodes
    depths, siblings = tree.depths(parents), tree.sibling_numbers(parents)
    if type(rng) is Philox:
        numbers = rng.uniform(Key(context.length[:, None], depths, siblings, ACCEPT))
        accept = keyed(to_device(numbers, device))
    else:

        def accept(chance: Tensor, depth: int, node: Tensor) -> Tensor:
            at = node.cpu()
            number = torch.where(at < N, siblings.gather(1, at.clamp(max=N - 1)), at)
            return rng.accept(chance, Key(context.length[:, None], depth, number, ACCEPT))

    exists = torch.arange(N, device=device) < to_device(size, device)[:, None]
    tokens, up = torch.where(exists, proposal.tokens, 0), to_device(parents, device)
    if proposal.probs is None:  # a point mass that was rejected has probability 0 the second time
        same = (tokens[:, :, None] == tokens[:, None]) & (up[:, :, None] == up[:, None])
        exists &= ~same.tril(-1).any(2)
    sources = None if proposal.probs is None else proposal.sources(device)
    trees = Candidates(tokens, exists, up, tree.fan(parents, size), proposal.probs, sources)
    path, distribution = walk(trees, probs, accept, wait=probs.is_cpu)
    path = torch.nn.functional.pad(path, (0, N - path.shape[1]), value=-1)
    return path, (path >= 0).sum(1), distribution


def verify_chain(
    proposal: Proposal, probs: Tensor, context: Context, rng: Rng
) -> tuple[Tensor, Tensor, Tensor]:
    """The decisions of ``verify_tree`` for chains, all nodes at once."""
    B, N = proposal.tokens.shape
    device = probs.device
    rows, n = torch.arange(B, device=device), torch.arange(N, device=device)
    size = to_device(proposal.size, device)
    live = n < size[:, None]
    tokens = torch.where(live, proposal.tokens, 0)
    p = probs[:, :N].gather(2, tokens[..., None])[..., 0]
    q = torch.ones_like(p) if proposal.probs is None else proposal.q_of(tokens).to(p)
    key = Key(context.length[:, None], torch.arange(N), 0, ACCEPT)
    accepts = rng.accept(torch.where(live, p / q, 0), key) & live
    accepted = accepts.long().cumprod(1).sum(1)
    path = torch.where(n < accepted[:, None], n, -1)
    if not probs.is_cpu:  # for all rows, so that the host need not wait to learn which rejected a node
        return path, accepted, after_chain(proposal, probs, tokens, size, accepted)
    distribution = probs[rows, accepted]
    cut = (accepted < size).nonzero()[:, 0]  # rows that rejected a node
    if len(cut):
        at, left = accepted[cut], distribution[cut]
        drafted = drawn_from(proposal, cut, at, tokens[cut, at], left)
        distribution = distribution.index_copy(0, cut, residual(left, drafted))
    return path, accepted, distribution


def after_chain(
    proposal: Proposal,
    probs: Tensor,
    tokens: Tensor,
    size: Tensor,
    accepted: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """``[B, V]`` the distribution of the token after ``accepted [B]`` nodes of each chain: ``residual(a p, q)`` where the next was rejected, else p.

    Args:
        tokens: ``[B, N]``, valid ids where there is no node. size: ``[B]``. weight: ``[B, N + 1]``, the a of each number of accepted nodes, by
            default 1. All are where ``probs`` are.
    """
    rows, at = torch.arange(len(tokens), device=probs.device), accepted.clamp(max=tokens.shape[1] - 1)
    p = probs[rows, accepted]
    q = drawn_from(proposal, rows, at, tokens[rows, at], p)
    left = residual(p if weight is None else weight[rows, accepted, None].to(p) * p, q)
    return torch.where((accepted < size)[:, None], left, p)


def drawn_from(proposal: Proposal, rows: Tensor, node: Tensor, token: Tensor, like: Tensor) -> Tensor:
    """``[R, V]`` the distribution that node ``node [R]`` of ``rows [R]`` was drawn from; one-hot on ``token [R]`` for a point mass."""
    if proposal.probs is None:
        return torch.zeros_like(like).scatter_(1, token[:, None], 1)
    source = node if proposal.source is None else proposal.sources(node.device)[rows, node]
    return proposal.probs[rows, source].to(like)
