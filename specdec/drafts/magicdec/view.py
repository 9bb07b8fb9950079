"""A constant-size view of a target's own KV, for the target's own weights to draft with (MagicDec, arXiv 2408.11049).

At committed positions a view holds *the target's* keys and values, each copied once; the target's cache is read and never written.
The draft's own entries lie after the committed text and are replaced as soon as the text grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache, check_memory
from specdec.cache.ring_cache import RingCache
from specdec.cache.token_index import Row
from specdec.drafts.magicdec.observation import choices
from specdec.drafts.magicdec.pruned_view import PrunedPlan, PrunedView
from specdec.drafts.magicdec.rotation import Rotation
from specdec.kernels.attention import ExplicitPlan
from specdec.kernels.device import to_device
from specdec.masks import sees
from specdec.models.hf import HFModel
from specdec.models.masked import Masked
from specdec.pruning.pruner import Pruner


class ViewCache(RingCache):
    """A ring over a target's cache, followed by slots for entries that a pruner chose for each KV head.

    Attributes:
        source: the target's cache, with the same rows. exact: ``[B]`` how many first positions equal the target's.
        kept: for each layer the positions ``[B, H, K]`` in the chosen slots, -1 for none.
    """

    def __init__(self, view: View, source: SlotCache):
        super().__init__(
            source.shapes, source.batch, source.capacity, *view.ring(source), view.extra, mask=view.mask
        )
        self.look(view, source)

    def look(self, view: View, source: SlotCache) -> None:
        """Become a view of ``source``, still empty."""
        self.empty(source.batch, source.capacity)
        self.source, self.view = source, view
        self.exact = [0] * source.batch
        self.kept = [
            torch.full((source.batch, s.heads, self.extra), -1, dtype=torch.long, device=s.device)
            for s in self.shapes
        ]

    def unleased(self) -> ViewCache:
        """As ``Slots.unleased``: without the target's cache."""
        new: ViewCache = super().unleased()
        del new.source
        return new

    def catch_up(self) -> None:
        """Copy the entries that the target's cache has and the view lacks: one gather of the new positions for all layers.

        Raises:
            RuntimeError: the target's cache has other rows by now.
        """
        if self.source.batch != self.batch:
            raise RuntimeError(
                f"the target's cache has {self.source.batch} rows and the draft's view of it {self.batch}: after cache.select(rows) "
                "and draft.select(state, rows) an executor calls draft.follow(state, cache)"
            )
        source: list[int] = []
        target: list[np.ndarray] = []
        for b, n in enumerate(self.source._lengths):
            have = self.exact[b]
            if have > n or not self.safe(self._high[b], n):
                have, self._high[b] = 0, -1
                for kept in self.kept:
                    kept[b] = -1
            new = [*range(have, min(n, self.sinks)), *range(max(have, self.sinks, n - self.size), n)]
            source += [b * self.source.slots + p for p in new]
            target.append(b * self.slots + self.slot(np.array(new, dtype=np.int64)))
            self._high[b] = max(self._high[b], n - 1)
            self._tokens[b, have:n] = self.source._tokens[b, have:n]
            self._lengths[b] = self.exact[b] = n
            self._fed[b] = 0
        self.copy(source, np.concatenate(target).tolist(), self.source)

    def select(self, rows: Tensor) -> ViewCache:
        """The view of some rows; its ``source`` still has all of them."""
        order = rows.tolist()
        new: Any = super().select(rows)
        if new is not self:
            new.exact = [self.exact[b] for b in order]
            new.kept = [kept[to_device(rows, kept.device)] for kept in self.kept]
        return new

    def join(self, other: RingCache) -> ViewCache:
        """The view of both views' rows, these first; its ``source`` is to be set to the cache of all."""
        assert isinstance(other, ViewCache)
        new: Any = super().join(other)
        new.exact = [*self.exact, *other.exact]
        new.kept = [torch.cat(pair) for pair in zip(self.kept, other.kept)]
        return new

    def place(self, rows: list[Row], device: torch.device) -> tuple[Any, ExplicitPlan]:
        """As ``RingCache.place``, with sinks rotated to the positions at which the row's last query sees them."""
        store, plan = super().place(rows, device)
        if self.view.rotation is not None:
            self._turn({r.b: r.end - 1 for r in rows})
        if self.extra and store is self:
            queries = torch.tensor([q for r in rows for q in range(r.first, r.end)])
            heads = self.view.clone.config.get_text_config().num_attention_heads
            chosen = PrunedPlan(plan, queries, self.kept, heads, self.shows)
            return PrunedView(self, chosen), chosen
        return store, plan

    def _turn(self, queries: dict[int, int]) -> None:
        """Rotate the sinks' keys by the number of hidden positions between them and the window of ``queries`` (by row)."""
        gone = [max(0, q - self.window + 1 - self.sinks) for q in queries.values()]
        if not self.sinks:
            return
        rows = torch.tensor(list(queries))
        whole = len(rows) == self.batch
        for mine, theirs, places in zip(self._blocks, self.source._blocks, self._places):
            layers = torch.tensor([i for i, (_, which) in enumerate(places) if which == 0])
            if not len(layers):
                continue
            at, layers = to_device(rows, mine.device), to_device(layers, mine.device)
            keys = theirs[:, :, : self.sinks].index_select(0, layers)
            if not whole:
                keys = keys.index_select(1, at)
            assert self.view.rotation is not None
            turned = self.view.rotation(keys, gone)
            sinks = mine[:, :, : self.sinks]
            if whole:
                sinks.index_copy_(0, layers, turned)
            else:
                sinks[layers[:, None], at] = turned

    def shows(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Whether ``queries`` (positions) see earlier ``positions`` without a pruner; tensors broadcast."""
        return sees(self.mask, queries, positions.clamp(min=0))

    def candidates(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The committed positions ``[R, C]`` of some rows that the view does not show to the next query, and how many ``[R]``.

        They ascend; rows with fewer are padded with other positions.
        """
        length = torch.tensor([self.source._lengths[b] for b in rows])[:, None]
        positions = torch.arange(int(length.max()))
        hidden = (positions < length) & ~self.shows(length, positions)
        number = hidden.sum(1)
        return hidden.long().argsort(dim=1, descending=True, stable=True)[:, : int(number.max())], number

    def choose(self, pruner: Pruner, budgets: Sequence[int], count: int, rows: Sequence[int]) -> None:
        """Let ``pruner`` choose for ``rows``, for each layer and KV head, up to ``budgets[layer]`` entries of the target's cache.

        It chooses from those that the view does not show (``candidates``). Nothing is chosen for rows with fewer than ``count`` committed
        tokens.
        """
        for kept in self.kept:
            kept[list(rows)] = -1
        rows = [b for b in rows if self.source._lengths[b] >= count]
        candidates = self.candidates(rows) if rows else None
        if candidates is None or not candidates[0].numel():
            return
        first = self.slots - self.extra
        made = choices(pruner, self.view, self.source, rows, candidates, budgets, count)
        for layer, (positions, *entries) in enumerate(made):
            at, K = torch.tensor(rows, device=positions.device), positions.shape[2]
            self.kept[layer][at, :, :K] = positions
            for mine, theirs in zip(self.layers[layer], entries):
                mine[at, first : first + K] = theirs.transpose(1, 2)


class View(Masked):
    """The target's weights over a ``ViewCache``.

    Args:
        model, mask, block: as for ``Masked``. Where the mask has no reach, the view is as long as the text.
        in_cache: positions are those in the cache (StreamingLLM), so that the sinks are right before a query's window.
        extra: slots for each head, for entries that a pruner chooses.
    Raises:
        UnsupportedModel: ``in_cache`` for a family whose keys cannot be rotated; see ``Rotation``.
        ValueError: the model keeps its KV in pages, or rounded.
    """

    def __init__(self, model: HFModel, mask: Any, block: int, in_cache: bool = False, extra: int = 0):
        super().__init__(model, mask, block=block)
        self.supports_trees = self._scores_trees = False
        if model.page is not None:
            raise ValueError(
                f"the target's KV is in pages of {model.page} tokens, and a view of it reads slots: make the target without page"
            )
        if model.kv_dtype is not None:
            raise ValueError(
                f"the target's KV is kept in {model.kv_dtype}, and a view of it rotates and chooses keys that were not rounded: make the target "
                "without kv_dtype"
            )
        self.extra = extra
        self.rotation = Rotation(self) if in_cache else None

    @property
    def fast_chain(self) -> Literal["slots", "ring"] | None:
        """``None`` with rotated sinks or pruned entries, which a captured chain does not support."""
        return "ring" if type(self) is View and self.rotation is None and not self.extra else None

    def ring(self, source: SlotCache) -> tuple[int, int, int]:
        """The sinks, the window and the block that a view of ``source`` has room for."""
        return (0, source.capacity, self.block) if self.reach is None else self.constant

    def of(self, source: SlotCache) -> ViewCache:
        """A view of ``source``, which must hold at least the sinks.

        Raises:
            MemoryError: the view does not fit.
        """
        cache = None
        if self.reach is not None:  # captured rounds over it rotate sinks, or do not
            alike = lambda other: (other.view.rotation is None) == (self.rotation is None)  # noqa: E731
            cache = self._lent(ViewCache, source.batch, self.extra, alike)
        if cache is None:
            check_memory(self._shapes, source.batch, sum(self.ring(source)) - 1 + self.extra)
            cache = ViewCache(self, source)
            if self.steps is not None:
                self.steps.kept(cache)
        else:
            cache.look(self, source)
        cache.catch_up()
        return cache
