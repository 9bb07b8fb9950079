"""Coupled verification: the target's own keyed draw at each position decides, so the draft changes only the speed.

Gumbel coupling, "drafter-invariant speculative decoding" (Daliri, Musco, Suresh, arXiv 2408.07978); with several candidates, "list-level
distribution coupling" (Rowan, Phan, Khisti, arXiv 2506.05632).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.arguments import at_least
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.rng import Key, Rekeyed, Rng
from specdec.types import Context, Proposal, Verdict


@dataclass(frozen=True)
class Coupled:
    """Accept a node iff it equals the target's draw there: the output is bit-identical to plain sampling with the same seeds.

    This holds for every draft, tree, length, selector and executor, whatever these have seen, as long as the target's logits do not depend
    on the batch (float32 and float64, except for ties). With one race, the acceptance probability is at most 1 - TV. It is at least
    (1 - TV) / (1 + TV) if the draft draws with the same keys, as the library's drafts do.

    With ``candidates`` K there are K independent races. Candidate j of a node is the winner of race j over q. The target's draw is the
    token that arrives first in any of the races over p. This draw has the distribution p as well, but it differs from the draw with one race,
    so plain decoding gives the same text only with the same K. K should be the number of children of every node, as in
    ``drafts.Tree(model, (K, K))``: a race without a candidate lowers the acceptance, and candidate K repeats candidate 0.

    Args:
        candidates: K, the number of races.
    Raises:
        TypeError: it is no whole number. ValueError: it is below 1.
    """

    candidates: int = 1

    def __post_init__(self) -> None:
        at_least(1, "candidates", self.candidates, "give at least 1, the children of every node")

    @property
    def info(self) -> VerifierInfo:
        own = type(self).__call__ is Coupled.__call__  # a subclass with its own call gets no shortcut
        return VerifierInfo("coupled", lossless=True, compares_tokens=own)

    def check(self, proposal: Proposal) -> None:
        pass

    def for_draft(self, rng: Rng) -> Rng:
        return _Shared(rng) if self.candidates == 1 else _Streams(rng, self.candidates)

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B = context.batch
        depth = torch.cat([torch.zeros(B, 1, dtype=torch.long), tree.depths(proposal.parents) + 1], 1)
        drawn = rng.race(probs, context.length[:, None] + depth, range(self.candidates))
        return tree.follow(proposal, drawn)

    def greedy(self, proposal: Proposal, tokens: Tensor) -> Verdict:
        """``__call__`` at temperature 0, where every distribution is one-hot, on ``tokens [B, N + 1]``."""
        return tree.follow(proposal, tokens)


class _Shared(Rekeyed):
    """Gives drafts the target's random numbers: the first candidate at a depth is drawn by a race with the key of the token's position."""

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


class _Streams(_Shared):
    """Gives drafts the target's races: candidate j of a node runs race j, for all nodes that have ``count`` children."""

    def __init__(self, rng: Rng, count: int):
        super().__init__(rng)
        self.count = count

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        # A key numbers the nodes of a depth. If each node above has ``count`` children, the remainder numbers them among their siblings.
        stream = torch.as_tensor(key.sibling) % self.count
        position = (key.at + key.depth).expand(probs.shape[:-1])
        out: Tensor | None = None
        for j in stream.unique().tolist():
            drawn = self.rng.race(probs, position, (j,))
            out = drawn if out is None else torch.where(to_device(stream == j, drawn.device), drawn, out)
        assert out is not None
        return out

    def select(self, rows: Tensor) -> _Streams:
        return _Streams(self.rng.select(rows), self.count)
