"""A head's chain in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specdec.cache.ring import Ring
from specdec.drafts.heads.captured import StaticPass
from specdec.drafts.heads.chain import Chain
from specdec.drafts.heads.contract import Sight
from specdec.drafts.heads.draft import Head
from specdec.drafts.heads.features import Features
from specdec.drafts.heads.load import HEADS
from specdec.drafts.heads.slots import PIECE, HeadState, whole
from specdec.graphs.drafting import Given, Passed, RingDrafting
from specdec.masks.text import known


class HeadDrafting(RingDrafting):
    """``Drafting`` of a head. From round to round, it carries what it made of the last committed position: its output there, Medusa's state, or nothing.

    Medusa has no slots. Others' slots are those of positions in the text, also for drafted tokens, and for blocks at the text's end.
    """

    def __init__(self, draft: Head, memory: Ring | None):
        self.model, self.taps = draft.model, draft.info.taps
        self.grower: Any = draft.tree
        if memory is not None:
            super().__init__(memory, whole(memory))

    @staticmethod
    def why_not(draft: Head, target: object, length: int) -> str | None:
        model, kinds = draft.model, ", ".join(kind.__name__ for kind in HEADS if not kind.leading)
        if type(model) not in HEADS:
            return f"runs the heads {kinds}, but the draft's head is a {type(model).__name__}"
        if model.leading:
            return f"runs heads that read pairs of activations and tokens, but a {type(model).__name__} also reads each text's first token, before which there are no activations"
        if draft.tree != Chain():
            return f"runs chains without a stop, DynamicTree and StaticTree, but the draft's tree is {draft.tree!r}"
        if draft.programs is None:
            return "runs heads with graphs (drafts.Head(model, graphs=True)), but the draft has no graphs"
        draft.check_length(length)
        mask = model.mask
        if mask is not None and not known(mask):
            return f"runs the library's masks, but the head's is {mask!r}"
        if mask is not None and mask.reach is not None and max(length, model.block_slots - 1) >= PIECE:
            return (
                f"runs chains of at most {PIECE - 1} tokens and blocks of at most {PIECE} slots of a head with a window, and the length is "
                f"{length}" + (f" and the block {model.block_slots}" if model.block_slots else "")
            )
        return None

    @staticmethod
    def modules(draft: Head) -> tuple[Iterable[nn.Module], object]:
        return draft.model.with_ends(), draft.model

    @staticmethod
    def carry(state: HeadState) -> Tensor | None:
        """As ``Drafting.carry``: what was read last in each row."""
        return state.carry

    def chain(self, given: Given, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        at: Any = Anchored(self, state[:, 0] - 1, given.longest + self.model.block_slots)
        memo: Any = given.carry

        def forward(n: int, tokens: Tensor) -> Tensor:
            nonlocal memo
            logits, memo = self.model.step(n, memo, tokens, at)
            return self.model.widened(logits)

        return forward

    def observe(self, given: Given, passed: Passed) -> Tensor | None:
        """As ``Drafting.observe``: read all fed positions; what was read at the last that is committed, beside the token after it, is carried.

        Rejected tokens lie at or after the next chain's first position, and each position is written before a query sees it. Without a window
        the ring has a slot for every position, those of a chain beyond the budget included, and of a block in its extra slots. With one it wraps, and has
        ``window + PIECE - 1`` slots: with steps < PIECE and blocks of at most PIECE slots, no slot is overwritten that is seen, also by a round that
        runs again on the same text.
        """
        (R, count), model, ids = passed.ids.shape, self.model, passed.ids
        last, bonus = passed.accepted[:, None], passed.bonus[:, None]
        position = passed.length[:, None] - 1 + torch.arange(count, device=ids.device)
        following = torch.cat([ids[:, 1:], bonus], 1).scatter(1, last, bonus)
        layers = model.tapped(passed.layers.__getitem__)
        layers = {tap: x.to(model.dtype).view(R, count, -1) for tap, x in layers.items()}
        go: Any = self.slots(position, given.longest) if model.kv_layers else None
        outputs = model.read(Features(layers, ids, following), go)
        return None if outputs is None else outputs[torch.arange(R, device=ids.device), passed.accepted]

    def slots(
        self, position: Tensor, longest: int, full: bool = False, anchor: Tensor | None = None
    ) -> StaticPass:
        """A pass over slots at ``position [R]`` or ``[R, n]``, below ``longest``. They see the text and the chain up to their own positions, and with
        ``full`` each other. ``anchor [R]``: of a chain's; ``None`` where committed positions are read."""
        wide = position.view(len(position), -1)
        last = wide[:, -1:].expand_as(wide) if full else None
        # No slot has a higher number than its position.
        seen = self.plans.seen(wide, self.model.mask, last)[..., :longest]

        def narrow(sight: Sight) -> Tensor:
            held = self.plans.held(wide if last is None else last)[..., :longest]
            lowest = (wide + 1 if anchor is None or not sight.fixed else anchor[:, None]) - sight.window
            near = seen & (held >= lowest[..., None])
            return near & (held <= wide[..., None]) if sight.causal else near

        at = self.plans.slots(wide.t()).t().flatten()
        self.store.begin()
        return StaticPass(self.store, at, seen, position, narrow)


class Anchored:
    """``contract.Anchors`` of a chain, whose slots follow one another in the text."""

    def __init__(self, drafting: HeadDrafting, anchor: Tensor, longest: int):
        self.drafting, self.anchor, self.longest = drafting, anchor, longest

    def count(self, most: int) -> int:
        """As ``contract.Anchors.count``."""
        return most

    def slots(self, first: int, count: int | None = None, full: bool = False) -> StaticPass:
        """As ``contract.Anchors.slots``."""
        position = self.anchor + first
        if count is not None:
            position = position[:, None] + torch.arange(count, device=position.device)
        return self.drafting.slots(position, self.longest, full, self.anchor)
