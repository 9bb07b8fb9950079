"""An adversary for verifiers that look at all siblings at once: everything about a level is settled before any node of it is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.audit.adversaries import Adversary, Seen, choose, mix
from specdec.capabilities import Siblings
from specdec.rng import Key, Rng
from specdec.types import Context, Proposal


@dataclass(frozen=True, eq=False)
class LevelAdversary(Adversary):
    """How many children each node gets, up to ``children``, and the distribution that they are all drawn from, are functions of the whole past
    and of the levels above."""

    children: int = 2
    name = "level adversary"

    @property
    def siblings(self) -> Siblings:
        return "independent" if self.replacement else "distinct"

    def propose(self, state: Seen, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Seen]:
        B, N, V = context.batch, self.limit, self.distributions.shape[-1]
        rows, memory = torch.arange(B), state.memory
        # The last column takes what is not drawn.
        tokens, parents, source = torch.zeros(3, B, N + 1, dtype=torch.long)
        depth, size = torch.full((B, N + 1), -1), torch.zeros(B, dtype=torch.long)
        probs = torch.zeros(B, N + 1, V, dtype=self.distributions.dtype)
        nothing = torch.nn.functional.one_hot(torch.tensor(0), V).to(probs)
        for level in range(min(int(budget.max()), N)):
            settled, level_start, within = memory, size.clone(), torch.zeros(B, dtype=torch.long)
            for up in range(-1, N if level else 0):
                there = torch.full((B,), True) if up < 0 else (up < level_start) & (depth[:, up] == level - 1)
                there &= (level < budget) & (torch.full((B,), up < 0) == (level == 0))
                alike = choose(settled, 1, 2) == 0  # one distribution for the level, or one for each parent
                which = choose(mix(settled, torch.full((B,), up + 1), ~alike), 2, len(self.distributions))
                q = self.distributions[which]
                count = choose(mix(settled, torch.full((B,), up + 1)), 3, self.children + 1)
                if not self.replacement:
                    count = count.minimum((q > 0).sum(1))
                left = q
                for child in range(self.children):
                    go = there & (child < count) & (size < N)
                    law = torch.where(go[:, None], left / left.sum(1, keepdim=True), nothing)
                    token = rng.categorical(law, Key(context.length, level, within))
                    at = torch.where(go, size, N)
                    tokens[rows, at], parents[rows, at], depth[rows, at] = token, up, level
                    probs[rows, at], source[rows, at] = law, at
                    if self.replacement and child:
                        source[rows, at] = torch.where(go, size - child, N)
                    if not self.replacement:
                        left = torch.where(go[:, None], left.scatter(1, token[:, None], 0), left)
                        left = torch.where(left.sum(1, keepdim=True) > 0, left, q)
                    size, within = size + go, within + go
                    memory = mix(memory, token * (N + 1) + up + 1, go)
        proposal = Proposal(
            tokens[:, :N], parents[:, :N], size, probs[:, :N], "sampled", source[:, :N].clamp(max=N - 1)
        )
        return proposal, state
