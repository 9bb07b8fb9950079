"""A target that is not computed: what a trace has of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec import tree
from specdec.lab.traces import Trace
from specdec.models.table import TableCache
from specdec.types import Context, Fed, Proposal, Scores


class Recorded:
    """The target of a trace, as far as it was recorded: activations, where there are any. Its logits mean nothing.

    It stands in for the target where a draft reads nothing else, so that a replay does not compute the target again. The round that a draft observes
    has NaN in place of logits and probabilities: a draft that reads them fails instead of using wrong ones.
    """

    def __init__(self, trace: Trace, which: Sequence[int]):
        self.trace, self.vocab_size, self.supports_trees = trace, trace.vocab_size, trace.meta["trees"]
        self.activations = [trace.activations(i) for i in which] if trace.taps else []
        self.logits = torch.empty(0)  # of the last call

    def cache(self, batch: int, capacity: int) -> TableCache:
        return TableCache(torch.zeros(batch, dtype=torch.long))

    def prefill(self, cache: TableCache, context: Context, rows: Tensor | None = None) -> None:
        """Does nothing."""

    def score(
        self,
        cache: TableCache,
        context: Context,
        proposal: Proposal | None = None,
        start: int | None = None,
        rows: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Scores:
        """Zeros in place of logits; ``forget`` makes NaN of them, once the round has no more use for numbers."""
        self.logits = torch.zeros(
            context.batch, 1 if proposal is None else proposal.nodes + 1, self.vocab_size
        )
        fed = self._fed(cache, context, proposal, taps) if taps else None
        cache.length = context.length
        return Scores(self.logits, fed)

    def forget(self, probs: Tensor) -> None:
        """Make NaN of the last logits, and of the ``probs`` that were computed from them."""
        self.logits.fill_(torch.nan)
        probs.fill_(torch.nan)

    def _fed(
        self, cache: TableCache, context: Context, proposal: Proposal | None, taps: Sequence[int]
    ) -> Fed:
        row, position, node, values = [], [], [], []
        depths = None if proposal is None else tree.depths(proposal.parents)
        for b, text in enumerate(context.request.tolist()):
            first, length = int(cache.length[b]), int(context.length[b])
            at = list(range(first, length))
            nodes = [-1] * len(at)
            if proposal is not None and depths is not None:
                size = int(proposal.size[b])
                at += (length + depths[b, :size]).tolist()
                nodes += range(size)
            held = self.activations[text]
            values.append(held[torch.tensor(at).clamp(max=len(held) - 1)])
            row += [b] * len(at)
            position += at
            node += nodes
        which = [self.trace.taps.index(tap) for tap in taps]
        every = torch.cat(values)
        layers = {tap: every[:, i] for tap, i in zip(taps, which)}
        return Fed(layers, torch.tensor(row), torch.tensor(position), torch.tensor(node))
