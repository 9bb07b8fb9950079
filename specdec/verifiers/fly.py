"""FLy, which is lossy: it keeps a rejected token where the target is uncertain and the tokens that follow pass.

Li et al., "Training-free loosely speculative decoding: accepting semantically correct drafts beyond exact match" (arXiv 2511.22972); sampled
tokens are tested as in vllm#53987.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec import tree
from specdec.arguments import at_least, positive
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import ACCEPT, Key, Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.rejection import Rejection, after_chain, draw_bonus

LARGEST = 3  # probabilities whose entropy is taken


@dataclass(frozen=True, kw_only=True)
class FLy(Rejection):
    """``Rejection`` of chains that keeps a rejected token under three conditions. **The output is not the target's.**

    The conditions: the three largest probabilities of p have an entropy (the sum of -p log p) of at least ``entropy`` nats; the chain has
    ``window`` more tokens, which all pass their own tests; and the token has p > 0. So whether a token is kept depends on the tokens after
    it, and the distance from the target has no closed form. ``audit.certify`` computes it for small examples. At temperature 0 the entropy is
    0, and no token is kept that ``Rejection`` drops.

    Args:
        entropy: in nats. window: how many tokens must follow. trust_declared: as for ``Rejection``.
    Raises:
        TypeError: an argument is no number. ValueError: the entropy is not positive, or the window is below 1.
    """

    entropy: float = 0.3
    window: int = 6

    def __post_init__(self) -> None:
        positive(self, "entropy")
        at_least(1, "window", self.window, "give at least 1 token that must follow")

    @staticmethod
    def example(model: object) -> FLy:
        return FLy(window=1)

    @property
    def info(self) -> VerifierInfo:
        # Another call gets no shortcut, and may take trees.
        own = type(self).__call__ is FLy.__call__
        takes: Any = {"siblings": ()} if own else {}
        return VerifierInfo("FLy (lossy)", compares_tokens=own, **takes)

    def check(self, proposal: Proposal) -> None:
        super().check(proposal)
        branched = ~tree.is_chain(proposal.parents, proposal.size)
        if bool(branched.any()):
            raise ValueError(
                f"FLy takes chains, and row {int(branched.nonzero()[0])} of the proposal is a tree: use a draft that proposes chains, or "
                "Rejection(), which takes trees"
            )

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        N = proposal.nodes
        if N == 0:
            return super().__call__(proposal, probs, context, rng)
        nodes = torch.arange(N, device=probs.device)
        size = to_device(proposal.size, probs.device)
        live = nodes < size[:, None]
        tokens = torch.where(live, proposal.tokens, 0)
        p = probs[:, :N].gather(2, tokens[..., None])[..., 0]
        q = torch.ones_like(p) if proposal.probs is None else proposal.q_of(tokens).to(p)
        key = Key(context.length[:, None], torch.arange(N), 0, ACCEPT)
        passes = live & rng.accept(torch.where(live, p / q, 0), key)
        largest = probs[:, :N].topk(min(LARGEST, probs.shape[-1])).values
        uncertain = torch.special.entr(largest).sum(-1) >= self.entropy
        after = torch.nn.functional.pad(passes[:, 1:], (0, self.window))
        followed = after.unfold(1, self.window, 1).all(-1)
        stands = passes | (live & uncertain & followed & (p > 0))
        accepted = stands.long().cumprod(1).sum(1)
        distribution = after_chain(proposal, probs, tokens, size, accepted)
        bonus = draw_bonus(distribution, accepted, context, rng, N)
        path = torch.where(nodes < accepted[:, None], nodes, -1)
        return Verdict.of(proposal, path, accepted, bonus, checked=True)
