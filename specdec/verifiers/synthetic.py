"""Prescribed acceptance, which is lossy: for tests of systems and for fitting costs without a trained draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.arguments import number
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import ACCEPT, Key, Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.rejection import draw_bonus


@dataclass(frozen=True)
class Synthetic:
    """Accept a drafted token with a given probability, whatever the models say. **The output is not the target's.**

    A round then has as many tokens as with a draft of this acceptance, and costs what its parts cost. So the speed of a draft that is yet to
    be trained can be measured with random weights of the same shape. In a tree, the first child of the last accepted node is accepted
    with that probability, and its siblings never. The token after the accepted ones comes from p.

    Args:
        acceptance: the probability that a token is accepted if those before it were: one number, or one for each depth (``rates``).
    Raises:
        TypeError: it is no number, nor a sequence of them. ValueError: it is empty, or a number is not in 0 to 1.
    """

    acceptance: float | tuple[float, ...]

    def __post_init__(self) -> None:
        given = self.acceptance
        if isinstance(given, Sequence) and not isinstance(given, str):
            object.__setattr__(self, "acceptance", tuple(given))
            if not given:
                raise ValueError("acceptance is empty: give a probability, or one for each depth")
        for rate in self.rates:
            number("acceptance", rate, ", or one for each depth")
            if not 0 <= rate <= 1:
                raise ValueError(f"acceptance is {given}: give probabilities, 0 to 1")

    @staticmethod
    def example(model: object) -> Synthetic:
        return Synthetic((0.9, 0.6))

    info = VerifierInfo("synthetic acceptance (lossy)")

    @property
    def rates(self) -> tuple[float, ...]:
        """The acceptance by depth; the last one holds for all deeper tokens."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    def tau(self, k: int) -> float:
        """Expected tokens a round, bonus included, of blocks of ``k`` drafted tokens."""
        return 1 + float(self._at(torch.arange(k)).cumprod(0).sum())

    def check(self, proposal: Proposal) -> None:
        pass

    def for_draft(self, rng: Rng) -> Rng:
        return rng

    def law(self, p: Tensor, q: Tensor, depth: Tensor | int = 0) -> Tensor:
        """The distribution ``[..., V]`` of a token for which the first candidate was drawn from q, given the text before it.

        Args:
            p, q: ``[..., V]`` the target's and the draft's distributions. depth: ``[...]`` of the token in its block.
        """
        rate = to_device(self._at(torch.as_tensor(depth)), p.device)[..., None]
        return rate * q + (1 - rate) * p

    def _at(self, depth: Tensor) -> Tensor:
        return torch.tensor(self.rates, dtype=torch.float64)[depth.cpu().clamp(max=len(self.rates) - 1)]

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B, N = proposal.tokens.shape
        nodes = torch.arange(N)
        live = nodes < proposal.size[:, None]
        parents = torch.where(live, proposal.parents, -1)
        depths = tree.depths(parents)
        key = Key(context.length[:, None], nodes, 0, ACCEPT)
        yes = rng.accept(self._at(nodes).expand(B, N), key)  # by depth
        here, rows = torch.full((B,), -1), torch.arange(B)
        tried = torch.zeros(B, N + 1, dtype=torch.bool)  # nodes whose first child was tried, the root first
        for n in range(N):
            up = parents[:, n]
            asked = live[:, n] & (up == here) & ~tried[rows, up + 1]
            tried[rows, up + 1] |= asked
            here = torch.where(asked & yes[rows, depths[:, n]], n, here)
        path, accepted = tree.path_to(parents, here)
        last = probs[to_device(rows, probs.device), to_device(here + 1, probs.device)]
        bonus = draw_bonus(last, accepted, context, rng, N)
        return Verdict.of(proposal, path, accepted, bonus, checked=True)
