"""Coupled verification: the target's own keyed draw at each position decides, so the draft changes nothing but the speed.

Gumbel coupling, "drafter-invariant speculative decoding" (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.kernels.device import to_device
from specdec.rng import Key, Rng
from specdec.types import Context, Proposal, Verdict


@dataclass(frozen=True)
class Coupled:
    """Accept a node iff it equals the target's draw there: output bit-identical to plain sampling with the same seeds.

    Holds for every draft, tree, length, selector and executor, whatever they have seen, as long as the target's logits do
    not depend on the batch (float32 and float64 barring ties). Accepts at most 1 - TV, at least (1 - TV) / (1 + TV) when the
    draft draws with the same keys, as the library's own do.
    """

    name = "coupled"
    lossless = True

    def check(self, proposal: Proposal) -> None:
        pass

    def for_draft(self, rng: Rng) -> Rng:
        return _Shared(rng)

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B = context.batch
        depth = torch.cat([torch.zeros(B, 1, dtype=torch.long), tree.depths(proposal.parents) + 1], 1)
        return tree.follow(proposal, rng.race(probs, context.length[:, None] + depth))

    def greedy(self, proposal: Proposal, tokens: Tensor) -> Verdict:
        """``__call__`` at temperature 0, where every law lies on one token: ``tokens [B, N + 1]``."""
        return tree.follow(proposal, tokens)


class _Shared:
    """Gives drafts the target's numbers: the first candidate at a depth races with the key of the token's position."""

    def __init__(self, rng: Rng):
        self.rng = rng

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        sibling = torch.as_tensor(key.sibling)
        if bool((sibling > 0).any()):  # further candidates are drawn on their own
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
