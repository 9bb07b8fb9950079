"""Verification against a mixture of target and draft, which is lossy.

"DIVERSE" (arXiv 2604.07622); transformers' ``assistant_ensemble_weight`` is the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.arguments import number
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Mixture:
    """``Rejection`` with ``weight p + (1 - weight) q`` in place of p wherever a node was drafted. **The output is not the target's.**

    The token at a drafted position has exactly that mixture as its distribution, which has a total variation of ``(1 - weight) TV(p, q)``
    from the target's. The token after the last accepted node of a path, where nothing was drafted, comes from p. In a tree, q is the
    distribution of a node's first child, and siblings are tried as by ``Rejection``.

    Args:
        weight: of the target, 0 to 1; 1 is ``Rejection``, and at 0 the draft is never rejected. trust_declared: as for ``Rejection``.
    Raises:
        TypeError: the weight is no number. ValueError: it is not in 0 to 1.
    """

    weight: float
    trust_declared: bool = False

    def __post_init__(self) -> None:
        number("weight", self.weight)
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight is {self.weight}: give the target's share, 0 to 1 (1 loses nothing)")

    @staticmethod
    def example(model: object) -> Mixture:
        return Mixture(0.5)

    info = VerifierInfo("mixture (lossy)")

    def check(self, proposal: Proposal) -> None:
        if proposal.provenance == "declared" and not self.trust_declared:
            raise ValueError(
                "the draft declares probabilities that the library did not draw from, so the mixture would not be the one that is meant: draw "
                "with rng.categorical and provenance='sampled', leave probs out, or build Mixture(weight, trust_declared=True)"
            )

    def for_draft(self, rng: Rng) -> Rng:
        return rng

    def law(self, p: Tensor, q: Tensor, depth: Tensor | int = 0) -> Tensor:
        """The distribution ``[..., V]`` of a token for which candidates were drawn from q, given the text before it.

        Args:
            p, q: ``[..., V]`` the target's and the draft's distributions. depth: makes no difference.
        """
        return self.weight * p + (1 - self.weight) * q

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        mixed, device = probs.clone(), probs.device
        rows, live = torch.arange(context.batch, device=device), torch.arange(proposal.nodes)
        exists = to_device(live < proposal.size[:, None], device)
        parent = to_device(torch.where(live < proposal.size[:, None], proposal.parents, -1) + 1, device)
        tokens = torch.where(exists, proposal.tokens, 0)
        for n in reversed(range(proposal.nodes)):  # a node's first child comes last
            at, here = parent[:, n], exists[:, n, None]
            if proposal.probs is None:
                q = torch.zeros_like(probs[:, 0]).scatter_(1, tokens[:, n : n + 1], 1)
            else:
                q = proposal.q(n).to(probs)
            mixed[rows, at] = torch.where(here, self.law(probs[rows, at], q), mixed[rows, at])
        return Rejection()(proposal, mixed, context, rng)
