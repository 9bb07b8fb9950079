"""Coupled verification: the target's own keyed draw at each position decides, so the draft changes only the speed.

Gumbel coupling, "drafter-invariant speculative decoding" (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import Key, Rng
from specdec.types import Context, Proposal, Verdict


@dataclass(frozen=True)
class Coupled:
    """Accept a node iff it equals the target's draw there: the output is bit-identical to plain sampling with the same seeds.

    This holds for every draft, tree, length, selector and executor, whatever they have seen, as long as the target's logits do
    not depend on the batch (float32 and float64 barring ties). The acceptance probability is at most 1 - TV, and at least
    (1 - TV) / (1 + TV) if the draft draws with the same keys, as the library's drafts do.
    """

    @property
    def info(self) -> VerifierInfo:
        own = type(self).__call__ is Coupled.__call__  # a subclass with its own call gets no shortcut
        return VerifierInfo("coupled", lossless=True, compares_tokens=own)

    def check(self, proposal: Proposal) -> None:
        pass

    def for_draft(self, rng: Rng) -> Rng:
        return _Shared(rng)

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B = context.batch
        depth = torch.cat([torch.zeros(B, 1, dtype=torch.long), tree.depths(proposal.parents) + 1], 1)
        return tree.follow(proposal, rng.race(probs, context.length[:, None] + depth))

    def greedy(self, proposal: Proposal, tokens: Tensor) -> Verdict:
        """``__call__`` at temperature 0, where every distribution is one-hot, on ``tokens [B, N + 1]``."""
        return tree.follow(proposal, tokens)


class _Shared:
    """Gives drafts the target's random numbers: the first candidate at a depth races with the key of the token's position."""

    def __init__(self, rng: Rng):
        self.rng = rng

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        sibling = torch.as_tensor(key.sibling)
        if bool((sibling > 0).any()):  # further candidates use keys of their own
            first = self.rng.race(probs, key.at + key.depth)
            return torch.where(
                to_device(sibling == 0, first.device),
                first,
                self.rng.categorical(probs, key).to(first.device),
            )
        return self.rng.race(probs, (key.at + key.depth).expand(probs.shape[:-1]))

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        return self.rng.accept(prob, key)

    def race(self, probs: Tensor, position: Tensor) -> Tensor:
        return self.rng.race(probs, position)

    def select(self, rows: Tensor) -> _Shared:
        return _Shared(self.rng.select(rows))
