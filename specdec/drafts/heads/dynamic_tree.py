"""EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): expand the most probable nodes, and keep the best of all candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import SlotAnchors
from specdec.drafts.heads.within import within
from specdec.kernels.device import to_device, to_host
from specdec.kernels.topk import topk
from specdec.rng import Rng
from specdec.sampling import Sampling, check_finite, logits_of
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

    @property
    def slots(self) -> int:
        """The most slots that a head takes for it: every frontier is read."""
        return (self.depth - 1) * self.top_k

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
        grown: Proposal | None = None  # the nodes that have children, as far as they are known

        def allowed(logits: Tensor, token: Tensor | None, parent: Tensor | None) -> Tensor:
            nonlocal grown
            if not sampling.reads_text:
                return logits
            if token is None or parent is None:
                return within(head, logits, context, sampling)
            k, above = token.shape[1], parent.cpu()
            if grown is None:
                grown = Proposal(token, torch.full_like(above, -1), torch.full((len(token),), k))
            else:
                tokens = torch.cat([grown.tokens, token], 1)
                parents = torch.cat([grown.parents, grown.nodes - k + above], 1)
                grown = Proposal(tokens, parents, grown.size + k)
            return within(head, logits, context, sampling, grown, grown.nodes - k)

        levels = min(self.depth, int(budget.max()))
        found = self.candidates(head, at, memo, given[:, -1], known - 1, levels, allowed)
        with logits_of("a draft's "):
            check_finite(torch.stack([score.amax(1) for score in found.scores], 1))
        token, parent, _, size = self.best(found, to_device(budget, given.device))
        parent, size = to_host(parent, size)
        N = int(size.max())
        return Proposal(token[:, :N], parent[:, :N].contiguous(), size)

    def candidates(
        self,
        head: HeadModel,
        at: Any,
        memo: Any,
        token: Tensor,
        first: int,
        levels: int,
        allowed: Callable[[Tensor, Tensor | None, Tensor | None], Tensor] | None = None,
    ) -> Candidates:
        """Expand ``levels`` depths, without waiting for the device.

        Args:
            at: the head's anchors, with ``under`` as in ``SlotAnchors``. token: ``[R]`` the last token, which step ``first`` reads.
            allowed: what is left of logits ``[R, n, outputs]`` after a frontier's tokens ``[R, n]``, whose parents ``[R, n]`` are numbered in the
                frontier before; both are ``None`` for the last token. By default all logits are left.
        """
        logits, memo = head.step(first, memo, token, at)
        if allowed is not None:
            logits = allowed(logits[:, None], None, None)[:, 0]
        R, k, ids = len(logits), min(self.top_k, head.outputs), head.ids
        best = topk(logits.log_softmax(-1), k)
        score, token = best.values, ids[best.indices]
        numbers = torch.arange(k, device=score.device)
        scores, tokens, parents = [score], [token], [torch.full_like(token, -1)]
        memo = _each(memo, lambda x: x[:, None].expand(-1, k, *x.shape[1:]))
        frontier, parent = numbers.expand(R, k), numbers.expand(R, k)
        above = torch.full_like(token, at.used - 1)  # the slot that each frontier node continues
        for level in range(1, levels):
            begin = at.used
            at.under(above)
            logits, memo = head.step(first + level, memo, token, at)
            if allowed is not None:
                logits = allowed(logits, token, parent)
            best = topk(logits.log_softmax(-1), k)
            children = (score[..., None] + best.values).flatten(1)
            known = sum(t.shape[1] for t in tokens)
            scores.append(children)
            tokens.append(ids[best.indices].flatten(1))
            parents.append(frontier.repeat_interleave(k, 1))
            chosen = children.sort(dim=1, descending=True, stable=True).indices[:, :k]
            frontier, score = known + chosen, children.gather(1, chosen)
            parent = chosen // k
            above, token = begin + parent, tokens[-1].gather(1, chosen)
            memo = _each(memo, itemgetter((torch.arange(R, device=token.device)[:, None], parent)))
        return Candidates(scores, tokens, parents)

    def best(self, found: Candidates, budget: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The best candidates whose paths are within ``budget [R]``: tokens, parents and depths ``[R, N]``, and how many exist, ``[R]``. Of equal
        scores a parent comes before its children, so that it stays."""
        score, token, parent = (torch.cat(parts, 1) for parts in found)
        device, C = score.device, score.shape[1]
        depth = torch.cat([torch.full_like(part, d) for d, part in enumerate(found.parents)], 1)
        allowed = depth < budget[:, None]
        size, N = allowed.sum(1).clamp(max=self.total), min(self.total, C)
        order = score.masked_fill(~allowed, float("-inf")).sort(dim=1, descending=True, stable=True).indices
        number = torch.arange(N, device=device)
        kept = torch.where(number < size[:, None], order[:, :N], C).sort(1).values
        live = kept < C
        kept = kept.clamp(max=C - 1)
        place = torch.zeros_like(parent).scatter_(1, kept, number.expand_as(kept).where(live, 0))
        old = parent.gather(1, kept)
        new = torch.where(old < 0, -1, place.gather(1, old.clamp(min=0)))
        new = torch.where(live, new, number - 1)
        return token.gather(1, kept), new, depth.gather(1, kept), size


class Candidates(NamedTuple):
    """Log-probabilities, tokens and parents of all candidates, ``[R, n]`` for each depth; parents are numbered among all of them."""

    scores: list[Tensor]
    tokens: list[Tensor]
    parents: list[Tensor]


def _each(memo: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """``f`` of a memo that is a tensor, or of each tensor of a named tuple."""
    return f(memo) if isinstance(memo, Tensor) else type(memo)(*map(f, memo))
