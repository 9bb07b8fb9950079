"""A head's chain in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.drafts.heads.captured import BlockPlan, StaticPass
from specdec.drafts.heads.chain import Chain
from specdec.drafts.heads.draft import Head
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.features import Features
from specdec.drafts.heads.medusa import Medusa
from specdec.drafts.heads.mtp import MTP
from specdec.drafts.heads.slots import PIECE, HeadState
from specdec.graphs.drafting import Drafting, Given, Passed
from specdec.graphs.ring_plan import RingPlans
from specdec.masks.text import known
from specdec.types import Context

# Each step asks for one slot after the last, or for none, and what was read last is carried.
HEADS = (Eagle3, MTP, Medusa)


class HeadDrafting(Drafting):
    """``Drafting`` of a head that carries what it made of the last committed position from round to round: its output there, or Medusa's state.

    Medusa has no slots. Others' slots are those of positions in the text, also for drafted tokens. Rows of the memory that the batch does not use
    are padding, which writes to their own slots.
    """

    def __init__(self, draft: Head, memory: Ring | None):
        self.model, self.taps = draft.model, draft.info.taps
        if memory is not None:
            self.store = StaticStore(memory)
            self.plans = RingPlans(memory, self.store)
            self.rows = memory._whole[0].shape[1]

    @staticmethod
    def why_not(draft: Head, target: object, length: int) -> str | None:
        """As ``Drafting.why_not``."""
        model, kinds = draft.model, ", ".join(kind.__name__ for kind in HEADS)
        if type(model) not in HEADS:
            return f"runs the heads {kinds}, but the draft's head is a {type(model).__name__}"
        if type(draft.tree) is not Chain:
            return f"runs chains, but the draft's tree is {draft.tree!r}"
        if draft.programs is None:
            return "runs heads with graphs (drafts.Head(model, graphs=True)), but the draft has no graphs"
        draft.check_length(length)
        mask = model.mask
        if mask is not None and not known(mask):
            return f"runs the library's masks, but the head's is {mask!r}"
        if mask is not None and mask.reach is not None and length >= PIECE:
            return f"runs chains of at most {PIECE - 1} tokens of a head with a window, and the length is {length}"
        return None

    @staticmethod
    def modules(draft: Head) -> tuple[Iterable[nn.Module], object]:
        """As ``Drafting.modules``."""
        return draft.model.with_ends(), draft.model

    @staticmethod
    def memory(state: HeadState) -> Ring | None:
        """As ``Drafting.memory``."""
        return state.ring

    @staticmethod
    def carry(state: HeadState) -> Tensor | None:
        """As ``Drafting.carry``: what was read last in each row."""
        return state.carry

    @staticmethod
    def select(memory: Ring, rows: Tensor, context: Context) -> Ring:
        """As ``Drafting.select``."""
        return memory.select(rows)

    def chain(self, given: Given, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        """As ``Drafting.chain``."""
        at, memo = _Anchors(self, state[:, 0] - 1, given.longest), given.carry

        def forward(n: int, tokens: Tensor) -> Tensor:
            nonlocal memo
            logits, memo = self.model.step(n, memo, tokens, at)
            return self.model.widened(logits)

        return forward

    def observe(self, given: Given, passed: Passed) -> Tensor:
        """As ``Drafting.observe``: read all fed positions; what was read at the last that is committed, beside the token after it, is carried.

        Rejected tokens lie at or after the next chain's first position, and each position is written before a query sees it. Without a window
        the ring has a slot for every position, those of a chain beyond the budget included. With one it wraps, and has
        ``window + PIECE - 1`` slots: with steps < PIECE, no slot is overwritten that is seen, also by a round that runs again on the same text.
        """
        (R, count), model, ids = passed.ids.shape, self.model, passed.ids
        last, bonus = passed.accepted[:, None], passed.bonus[:, None]
        position = passed.length[:, None] - 1 + torch.arange(count, device=ids.device)
        following = torch.cat([ids[:, 1:], bonus], 1).scatter(1, last, bonus)
        layers = model.tapped(passed.layers.__getitem__)
        layers = {tap: x.to(model.dtype).view(R, count, -1) for tap, x in layers.items()}
        go: Any = self.slots(position, given.longest) if model.kv_layers else None
        outputs = cast(Tensor, model.read(Features(layers, ids, following), go))
        return outputs[torch.arange(R, device=ids.device), passed.accepted]

    def slots(self, position: Tensor, longest: int) -> StaticPass:
        """A pass over slots at ``position [R]`` or ``[R, n]``, which see all of the text and the chain up to their own positions, below ``longest``."""
        wide = position.view(len(position), -1)
        # No slot has a higher number than its position.
        seen = self.plans.seen(wide, self.model.mask)[..., :longest]
        plan = BlockPlan(seen, self.plans.slots(wide.t()).t().flatten())
        self.store.begin()
        return StaticPass(self.store, plan, position)


class _Anchors:
    """``contract.Anchors`` for heads that ask for one slot at a time."""

    def __init__(self, drafting: HeadDrafting, anchor: Tensor, longest: int):
        self.drafting, self.anchor, self.longest = drafting, anchor, longest

    def slots(self, first: int, count: int | None = None, full: bool = False) -> StaticPass:
        """As ``contract.Anchors.slots``."""
        return self.drafting.slots(self.anchor + first, self.longest)
