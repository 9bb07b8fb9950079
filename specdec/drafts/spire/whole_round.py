"""SPIRe's chain in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from specdec.cache.ring import Ring
from specdec.drafts.spire.draft import Spire
from specdec.drafts.spire.layers import remember
from specdec.drafts.spire.model import SpireModel
from specdec.drafts.spire.steps import forwards
from specdec.drafts.stops import why_stop
from specdec.graphs.drafting import Given, Passed, RingDrafting
from specdec.masks.text import known
from specdec.protocols import LanguageModel


class SpireDrafting(RingDrafting):
    """``Drafting`` of a SPIRe model."""

    def __init__(self, draft: Spire, memory: Ring):
        super().__init__(memory)
        self.model, self.taps = draft.model, draft.model.layers

    @staticmethod
    def why_not(draft: Spire, target: LanguageModel, length: int) -> str | None:
        model = draft.model
        if type(model) is not SpireModel:
            return f"runs a SpireModel, but the draft's model is a {type(model).__name__}"
        if draft.programs is None:
            return "runs SPIRe with graphs (Spire(model, graphs=True)), but the draft has no graphs"
        if not known(model.mask):
            return f"runs the library's masks, but the draft's is {model.mask!r}"
        if model.vocab_size != target.vocab_size:
            return f"needs equal vocabularies, but the target has {target.vocab_size} tokens and the draft {model.vocab_size}"
        draft.check_length(length)
        return why_stop(draft.stop)

    @staticmethod
    def modules(draft: Spire) -> tuple[Iterable[nn.Module], object]:
        return draft.model.modules(), draft.model

    def chain(self, given: Given, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        position = self._positions(state[:, 0], given.steps).t()
        plans = self.plans.of(position)
        forward = forwards(self.model, self.store, position, given.steps)

        def run(n: int, tokens: Tensor) -> Tensor:
            self.store.begin()
            return forward(n, tokens, plans[n])

        return run

    def observe(self, given: Given, passed: Passed) -> None:
        """As ``Drafting.observe``: write the entries of all fed positions from the target's activations, those of rejected tokens, too.

        With ``h = length - 1 + steps`` fed last, this is right in a ring of ``W = window + steps`` slots or more:

        - Rejected tokens lie at or after the next chain's first position, which is at least ``length``. That chain overwrites each position before
          a query can see it.
        - No overwritten slot is still seen. Position h overwrites ``h - W <= length - 1 - window``, and the next query, at ``length`` or later,
          sees positions above ``length - window``. A round that runs again on the same text (captures do that, and rows that have ended) queries
          at ``length - 1``, which sees positions from ``length - window`` on: with graphs, ``Spire.ring`` has one slot more for this.
        - All steps + 1 slots of a row differ, since ``W > steps``, and they are in the row's own ring.
        """
        model, position = self.model, self._positions(passed.length, given.steps + 1)
        slots, rotary = self.plans.slots(position.t()).t().flatten(), model.rotary(position.flatten())
        self.store.begin()
        fed = [passed.layers[layer].to(model.dtype) for layer in model.layers]
        remember(model, self.store, slots, fed, rotary)

    @staticmethod
    def _positions(length: Tensor, count: int) -> Tensor:
        """``[R, count]`` positions from each row's last committed token on; ``length [R]``: committed tokens."""
        return length[:, None] - 1 + torch.arange(count, device=length.device)
