"""EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): expand the most probable nodes, and keep the best of all candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import SlotAnchors
from specdec.drafts.heads.within import within
from specdec.kernels.device import to_device
from specdec.kernels.topk import topk
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class DynamicTree:
    """A tree of point masses, chosen by the head's cumulative log-probabilities at temperature 1.

    Every frontier node gets its ``top_k`` most probable children. The ``top_k`` most probable of all these children are the next
    frontier. After ``depth`` levels the ``total`` most probable candidates stay. They are verified exactly, as point masses.

    Args:
        top_k, depth, total: as above; SafeAILab's defaults are 10, 8 and 59 (60 with the root).
    Raises:
        ValueError: a number below 1.
    """

    top_k: int = 10
    depth: int = 8
    total: int = 59
    trees = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            at_least(1, name, value, "give at least 1")

    def check(self, head: HeadModel) -> None:
        """As ``Grower.check``."""

    @property
    def longest(self) -> int:
        return self.depth

    def nodes(self, length: int) -> int:
        levels = min(length, self.depth)
        return min(self.total, self.top_k + (levels - 1) * self.top_k**2) if levels > 0 else 0

    def grow(
        self,
        head: HeadModel,
        at: SlotAnchors,
        memo: Any,
        given: Tensor,
        context: Context,
        budget: Tensor,
        sampling: Sampling,
        rng: Rng,
    ) -> Proposal:
        """As ``Grower.grow``."""
        known = given.shape[1]
        for n in range(known - 1):  # the text has run ahead of the features
            _, memo = head.step(n, memo, given[:, n], at)
        logits, memo = head.step(known - 1, memo, given[:, -1], at)
        logits = within(head, logits[:, None], context, sampling)[:, 0]
        R, k, ids = len(logits), min(self.top_k, head.outputs), head.ids
        best = topk(logits.log_softmax(-1), k)
        score, token = best.values.cpu(), ids[best.indices]
        scores, tokens = [score], [token]
        parents = [torch.full((R, k), -1)]
        frontier, before = torch.arange(k).expand(R, k), at.used
        memo = _each(memo, lambda x: x[:, None].expand(-1, k, *x.shape[1:]))
        above = np.full((R, k), before - 1)  # the slot that each frontier node continues
        # The frontiers, which are all nodes that have children.
        grown = Proposal(token, parents[0], torch.full((R,), k))
        for level in range(1, min(self.depth, int(budget.max()))):
            begin = at.used
            at.under(above)
            logits, memo = head.step(known - 1 + level, memo, token, at)
            logits = within(head, logits, context, sampling, grown, k * (level - 1))
            best = topk(logits.log_softmax(-1), k)
            children = (score[..., None] + best.values.cpu()).flatten(1)
            known_nodes = sum(t.shape[1] for t in tokens)
            scores.append(children)
            tokens.append(ids[best.indices].flatten(1))
            parents.append(frontier.repeat_interleave(k, 1))
            chosen = children.sort(dim=1, descending=True, stable=True).indices[:, :k]
            frontier, score = known_nodes + chosen, children.gather(1, chosen)
            parent = chosen // k
            above = (begin + parent).numpy()
            token = tokens[-1].gather(1, to_device(chosen, token.device))
            if sampling.reads_text:
                parents_of = torch.cat([grown.parents, k * (level - 1) + parent], 1)
                grown = Proposal(torch.cat([grown.tokens, token], 1), parents_of, grown.size + k)
            where = torch.arange(R, device=token.device)[:, None], to_device(parent, token.device)
            memo = _each(memo, itemgetter(where))
        return self._best(scores, tokens, parents, budget)

    def _best(
        self, scores: list[Tensor], tokens: list[Tensor], parents: list[Tensor], budget: Tensor
    ) -> Proposal:
        """The best candidates whose paths are within ``budget``. Of equal scores a parent comes before its children, so that it stays."""
        score, token, parent = (torch.cat(parts, 1) for parts in (scores, tokens, parents))
        depth = torch.cat([torch.full((s.shape[1],), d) for d, s in enumerate(scores)])
        allowed = depth < budget[:, None]
        size = allowed.sum(1).clamp(max=self.total)
        order = score.masked_fill(~allowed, float("-inf")).sort(dim=1, descending=True, stable=True).indices
        N = int(size.max())
        kept = torch.where(torch.arange(N) < size[:, None], order[:, :N], score.shape[1]).sort(1).values
        live = kept < score.shape[1]
        kept = kept.clamp(max=score.shape[1] - 1)
        place = torch.zeros_like(parent).scatter_(1, kept, torch.arange(N).expand_as(kept).where(live, 0))
        old = parent.gather(1, kept)
        new = torch.where(old < 0, -1, place.gather(1, old.clamp(min=0)))
        new = torch.where(live, new, torch.arange(-1, N - 1).expand_as(new))
        return Proposal(token.gather(1, to_device(kept, token.device)), new, size)


def _each(memo: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """``f`` of a memo that is a tensor, or of each tensor of a named tuple."""
    return f(memo) if isinstance(memo, Tensor) else type(memo)(*map(f, memo))
