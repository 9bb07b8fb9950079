"""Any packed Hugging Face model under a mask: a ``Mask`` says what every layer's queries see, and the KV is as small as it allows.

A mask that looks back no further than some first positions and a window of the latest (its ``reach``) is served from constant memory
(``cache.ring_cache``). Any other mask needs the whole text in slots, where trees of proposed tokens can also be verified.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from specdec.arguments import whole
from specdec.cache.contiguous import SlotCache, check_memory
from specdec.cache.ring_cache import RingCache
from specdec.forward.families import UnsupportedModel
from specdec.forward.pack import PackedBatch, PrefillChunk
from specdec.forward.packed import Packed
from specdec.kernels.attention import AttentionPlan, ExplicitPlan
from specdec.kernels.device import to_device
from specdec.masks import Mask, Reach, for_model, sees
from specdec.masks.sight import check_length, check_sight, longest
from specdec.models.hf import HFModel
from specdec.types import Context, Proposal

PIECE = 256  # tokens of a prompt that a row is fed at a time, at least


class MaskedCache(SlotCache):
    """Slots for the whole text under a mask; a class of its own, so that no kernel treats them as a plain model's."""


class Masked(HFModel):
    """The weights of ``model``; every layer sees what ``mask`` shows, within the limits of its own attention.

    Its distribution is not that of ``model``: use it as a draft, ``drafts.Model(Masked(small, mask))``; as a target, its output follows
    the masked model. Positions are those of the text; in a tree of proposed tokens a node's position is its parent's plus 1.

    Args:
        model: of a family that runs packed, or its name or folder. It is shared, neither copied nor changed.
        mask: a ``masks.Mask``, or a function ``(b, h, q_position, kv_position) -> bool``, of positions alone.
        block: the most proposed tokens of a row in flight, where the memory is constant.
        storage: ``"ring"``, constant memory; ``"dense"``, the whole text; ``"auto"``, a ring where the mask has a reach.
    Attributes:
        reach: of the mask; ``None`` where the whole text is held.
    Raises:
        TypeError: ``mask`` is no mask, or ``model`` no HFModel and no name. ValueError: ``masks.for_model`` refuses the mask; storage is a ring and the
            mask has no reach; the whole text is needed and the model has pages.
        UnsupportedModel: the family runs padded, where masks are by slot.
    """

    mask: Mask
    block: int
    reach: Reach | None

    def __init__(
        self,
        model: HFModel | str | os.PathLike[str],
        mask: Any,
        *,
        block: int = 16,
        storage: Literal["auto", "ring", "dense"] = "auto",
    ):
        if isinstance(model, (str, os.PathLike)):
            model = HFModel.from_pretrained(model)
        if isinstance(model, Masked):
            raise TypeError(
                f"model has a mask already, {model.mask!r}: give the HFModel that it was made from, and combine masks with &"
            )
        if isinstance(model, HFModel):
            model = model.plain
        if type(model) is not HFModel:  # a subclass's own forward would be lost
            raise TypeError(
                f"model is a {type(model).__name__}: give an HFModel, HFModel(your_model); a mask would bypass the score of another class"
            )
        whole("block", block)
        if block < 1:
            raise ValueError(f"block is {block}: give how many tokens are in flight at a time, 1 or more")
        mask = for_model(mask, positions=model.max_positions)
        if storage not in ("auto", "ring", "dense"):
            raise ValueError(f"storage is {storage!r}: give 'auto', 'ring' or 'dense'")
        if storage == "ring" and mask.reach is None:
            raise ValueError(
                f"storage is 'ring' and {mask!r} has no reach: some queries see unboundedly many or old positions, which constant "
                "memory cannot hold. Join it with a window, Causal() & Window(n) & ..., or give storage='dense'"
            )
        if not isinstance(model._path, Packed):
            raise UnsupportedModel(
                f"{model.clone.config.model_type!r} runs padded, where masks are by slot and not by position: use a family that "
                "runs packed (models.SUPPORTED)"
            )
        vars(self).update(vars(model))
        self.mask, self.block = mask, block
        self.max_positions, self._limited = longest(mask, model.max_positions), longest(mask) is not None
        self.reach = None if storage == "dense" else mask.reach
        if self.reach is None:
            if model.page is not None:
                raise ValueError(
                    f"the model keeps its KV in pages of {model.page} tokens and {mask!r} needs slots: make the HFModel without page"
                )
            if model.graphs == "auto":
                self.steps = None
            elif model.steps is not None:
                raise ValueError(
                    f"the model has graphs, whose steps do not support {mask!r}: make the HFModel without graphs"
                )
        else:
            self.supports_trees = self._scores_trees = False

    def __repr__(self) -> str:
        return f"Masked({super().__repr__()}, {self.mask!r})"

    @property
    def constant(self) -> tuple[int, int, int]:
        """The sinks, the window and the block of constant memory, in tokens."""
        assert self.reach is not None
        return self.reach.sinks, max(self.reach.window, 1), self.in_flight

    @property
    def in_flight(self) -> int:
        """The block of a ring. With captured steps it is one more than ``block``: a capture runs a step twice on the same text, and the second run may
        query one position earlier than the next round would."""
        return self.block + (self.steps is not None)

    @property
    def longest_chain(self) -> int | None:
        """The most proposed tokens of a row in a chain: a ring has room for a block of them."""
        return None if self.reach is None else self.block

    @property
    def fast_chain(self) -> Literal["slots", "ring"] | None:
        return "ring" if type(self) is Masked and self.reach is not None else None

    def cache(self, batch: int, capacity: int) -> Any:
        """An empty cache for ``batch`` rows of texts of up to ``capacity`` tokens, nodes included; where the mask has a reach, its KV does
        not grow with the text.

        Raises:
            MemoryError, RuntimeError: as for ``HFModel``.
        """
        self._check_storage()
        if self.reach is None:
            check_memory(self._shapes, batch, capacity)
            return MaskedCache(self._shapes, batch, capacity)
        lent = self._lent(RingCache, batch)
        if lent is not None:
            lent.empty(batch, capacity)
            return lent
        sinks, window, block = self.constant
        check_memory(self._shapes, batch, sinks + window + block - 1)
        cache = RingCache(self._shapes, batch, capacity, sinks, window, block, mask=self.mask)
        return cache if self.steps is None else self.steps.kept(cache)

    def _lent(
        self, kind: Any, batch: int, extra: int = 0, alike: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        """A cache of class ``kind`` in free memory over which steps were captured, of caches that are ``alike``; ``None`` if there is none."""
        size = (*self.constant, extra, self.mask)

        def fits(cache: Any) -> bool:
            mine = type(cache) is kind and (cache.sinks, cache.window, cache.block, cache.extra, cache.mask)
            return mine == size and alike(cache)

        return None if self.steps is None else self.steps.lent(batch, fits)

    def _feed(
        self,
        cache: Any,
        context: Context,
        proposal: Proposal | None,
        first: Sequence[int],
        end: Sequence[int],
    ) -> PackedBatch:
        packed = super()._feed(cache, context, proposal, first, end)
        if self._limited:
            check_length(self.mask, max(packed.positions, default=-1) + 1)
        most = max((r.end - r.length for r in packed.rows), default=0)
        if self.reach is not None and most > self.block:
            raise ValueError(
                f"{most} tokens or more are proposed and this model has room for {self.block} in flight: make it with block={most} or more, the "
                "length of the longest chain, or propose fewer"
            )
        return packed

    def _pieces(
        self, cache: Any, packed: PackedBatch, limit: int, wanted: bool
    ) -> Iterator[tuple[Any, PrefillChunk]]:
        if self.reach is None:
            for store, chunk in super()._pieces(cache, packed, limit, wanted):
                yield store, chunk._replace(plan=masked(chunk.plan, self.mask))
            return
        ids, positions = packed.tensors(self.device)
        # Long pieces of a row would have masks that are mostly hidden. The order of logits, where they are wanted, is that of the packed tokens.
        short = None if wanted else max(PIECE, sum(self.constant))
        for rows, part in packed.parts(limit, short):
            store, plan = cache.place(rows, self.device)
            some = part if isinstance(part, slice) else to_device(torch.from_numpy(part), self.device)
            keep = packed.keep(rows, wanted, self.device)
            yield store, PrefillChunk(plan, ids[some], positions[some], keep)


def masked(plan: AttentionPlan, mask: Mask) -> ExplicitPlan:
    """``plan`` restricted to ``mask``: a query sees what both show. The plan shows the text before it, or its branch of a tree."""
    S, T = max(plan.length), sum(plan.counts)
    seen, distance = np.zeros((T, S), dtype=bool), np.zeros((T, S), dtype=np.int32)
    queries = np.empty(T, dtype=np.int64)
    for s in plan.segments:
        query, slot = plan.positions(s)  # [R, q], [R, keys]
        behind = query[:, :, None] - slot[:, None]
        shown = sees(mask, torch.from_numpy(query)[:, :, None], torch.from_numpy(slot)[:, None]).numpy()
        at = slice(s.t0, s.t0 + query.size)
        seen[at, : s.keys] = (plan.visible(s) & shown).reshape(-1, s.keys)
        distance[at, : s.keys] = behind.reshape(-1, s.keys)
        queries[at] = query.ravel()
    check_sight(mask, seen, queries)
    return ExplicitPlan(plan.rows, plan.counts, seen, distance, plan.slots)
