"""Walks down a tree, level by level, for verifiers that look at all candidates for the next token at once."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from specdec import tree
from specdec.kernels.device import to_device
from specdec.rng import ACCEPT, Key, Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.apart import apart
from specdec.verifiers.rejection import Rejection, draw_bonus


class Rule(Protocol):
    """How one of several candidates is accepted."""

    def __call__(self, p: Tensor, q: Tensor, tokens: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
        """The probability that each candidate is the accepted one, ``[B, K]``, and the distribution of the token if none is, ``[B, V]``.

        Args:
            p, q: ``[B, V]`` float64, the target's distribution and the first candidate's. tokens: ``[B, K]``, in the order in which they were
                drawn. asked: ``[B, K]`` which of them are candidates: the first ones of each row, and rows may have none.
        """
        ...


def descend(
    proposal: Proposal, probs: Tensor, context: Context, rng: Rng, rule: Rule, merge: bool
) -> Verdict:
    """At each level one candidate is accepted and its children are the next candidates; or none is, and the bonus token ends the block.

    Point masses are verified as by ``Rejection``.

    Args:
        merge: if siblings of the accepted node have its token, their children are candidates, too, provided that they were drawn from the
            same distribution. So several chains go on together as long as they are equal.
    """
    if proposal.probs is None:
        return Rejection()(proposal, probs, context, rng)
    points = of_points(proposal)
    if bool(points.any()):
        if bool(points.all()):
            return Rejection()(proposal, probs, context, rng)
        drawn = partial(descend, rule=rule, merge=merge)
        return apart(points, Rejection(), drawn, proposal, probs, context, rng)
    B, N = proposal.tokens.shape
    device = probs.device
    rows = torch.arange(B, device=device)
    live = torch.arange(N) < proposal.size[:, None]
    levels = 1 + int(torch.where(live, tree.depths(proposal.parents), -1).max()) if N and B else 0
    live = to_device(live, device)
    up = torch.where(live, to_device(proposal.parents, device), -1) + 1
    tokens = torch.where(live, proposal.tokens, 0)
    # The nodes whose tokens, and those above them, are the accepted ones; the root is first.
    inside = (torch.arange(N + 1, device=device) == 0).expand(B, -1)
    here = torch.zeros(B, dtype=torch.long, device=device)  # the last accepted node, plus 1
    law = probs[:, 0]
    for depth in range(levels):
        asked = live & inside.gather(1, up)
        first = asked.int().argmax(1)
        sources = proposal.sources(device)
        q = proposal.probs[rows, sources[rows, first]]
        if merge:
            asked &= (proposal.probs == q[:, None]).all(-1).gather(1, sources)
        widest = max(1, int(asked.sum(1).max()))
        some = asked.int().argsort(dim=1, descending=True, stable=True)[:, :widest]
        passes, rest = rule(law.double(), q.to(law).double(), tokens.gather(1, some), asked.gather(1, some))
        chance = torch.zeros_like(asked, dtype=torch.float64).scatter(1, some, passes)
        chance = torch.where(asked, chance, 0)
        none = (1 - chance.sum(1, keepdim=True)).clamp(min=0)
        chosen = rng.categorical(torch.cat([chance, none], 1), Key(context.length, depth, 0, ACCEPT))
        yes = chosen < N
        node = chosen.clamp(max=N - 1)
        equal = asked & (tokens == tokens.gather(1, node[:, None]))
        alike = equal if merge else torch.arange(N, device=device) == node[:, None]
        inside = torch.nn.functional.pad(alike & yes[:, None], (1, 0))
        failed = asked.any(1) & ~yes
        law = torch.where(failed[:, None], rest.to(law), law)
        law = torch.where(yes[:, None], probs[rows, node + 1], law)
        here = torch.where(yes, node + 1, here)
    path, accepted = tree.path_to(proposal.parents, here - 1)
    return Verdict.of(proposal, path, accepted, draw_bonus(law, accepted, context, rng, N), checked=True)


def of_points(proposal: Proposal) -> Tensor:
    """``[B]`` bool, on the host: rows that have nodes, each of them the only token of its distribution, as those of a greedy draft among others."""
    live = torch.arange(proposal.nodes) < proposal.size[:, None]
    tokens = torch.where(to_device(live, proposal.tokens.device), proposal.tokens, 0)
    only = (proposal.q_of(tokens) == 1).cpu()
    return (only | ~live).all(1) & (proposal.size > 0)
