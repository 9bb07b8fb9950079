"""Typical acceptance, which is lossy: a token is accepted if the target finds it probable enough for its entropy.

Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads" (arXiv 2401.10774, section 2.3.1), and
the function ``evaluate_posterior`` of its code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.arguments import positive
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.rejection import draw_bonus


@dataclass(frozen=True)
class TypicalAcceptance:
    """Accept token x if p(x) > min(epsilon, delta exp(-H(p))), where H is the entropy in nats. **The output is not the target's.**

    The longest path of accepted nodes is committed; among several, the one with the largest probability under the target. The token after it
    comes from p. (Medusa's code takes the most probable one, and adds 1e-5 inside the entropy's logarithm.) The rule does not depend on how the
    nodes were drawn, so every proposal is taken. The distance from the target does depend on the draft: ``law`` gives the distribution of
    one token.

    Args:
        epsilon: no token with a larger probability is rejected. delta: share of exp(-H) that suffices. The defaults are those of Medusa's code.
    Raises:
        TypeError: an argument is no number. ValueError: it is not positive.
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self) -> None:
        positive(self, "epsilon", "delta")

    info = VerifierInfo("typical acceptance (lossy)")

    def check(self, proposal: Proposal) -> None:
        pass

    def for_draft(self, rng: Rng) -> Rng:
        return rng

    def threshold(self, p: Tensor) -> Tensor:
        """The probability ``[...]`` that a token must exceed under ``p [..., V]``."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)

    def law(self, p: Tensor, q: Tensor, depth: Tensor | int = 0) -> Tensor:
        """The distribution ``[..., V]`` of a token for which one candidate was drawn from q, given the text before it.

        Args:
            p, q: ``[..., V]`` the target's and the draft's distributions. depth: makes no difference.
        """
        accepted = torch.where(p > self.threshold(p)[..., None], q, 0)
        return accepted + (1 - accepted.sum(-1, keepdim=True)) * p

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B, N = proposal.tokens.shape
        if N == 0:
            none = torch.zeros_like(proposal.size)
            bonus = draw_bonus(probs[:, 0], none, context, rng, N)
            return Verdict.of(proposal, proposal.tokens, none, bonus, checked=True)
        device, nodes = probs.device, torch.arange(N)
        live = nodes < proposal.size[:, None]
        parents = torch.where(live, proposal.parents, -1)
        rows, above = torch.arange(B, device=device), to_device(parents + 1, device)
        exists = to_device(live, device)
        p = probs[rows[:, None], above, torch.where(exists, proposal.tokens, 0)]
        passes = exists & (p > self.threshold(probs).gather(1, above))
        # Column 0 is the root.
        stands = torch.ones(B, N + 1, dtype=torch.bool, device=device)
        likelihood = torch.zeros(B, N + 1, dtype=torch.float64, device=device)
        for n in range(N):
            up = above[:, n : n + 1]
            stands[:, n + 1] = passes[:, n] & stands.gather(1, up)[:, 0]
            likelihood[:, n + 1] = likelihood.gather(1, up)[:, 0] + p[:, n].double().log()
        depth = torch.nn.functional.pad(to_device(tree.depths(parents) + 1, device), (1, 0))
        depth = torch.where(stands, depth, 0)
        accepted = depth.amax(1)
        longest = stands & (depth == accepted[:, None])
        last = torch.where(longest, likelihood, -torch.inf).argmax(1)
        bonus = draw_bonus(probs[rows, last], accepted, context, rng, N)
        path, _ = tree.path_to(parents, last - 1)
        return Verdict.of(proposal, path, accepted, bonus, checked=True)
