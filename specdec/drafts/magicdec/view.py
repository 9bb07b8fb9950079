"""A constant-size view of a target's own KV, for the target's own weights to draft with (MagicDec, arXiv 2408.11049).

At committed positions a view holds *the target's* keys and values, copied from its cache once each; the target's cache is read and
never written. What the draft writes itself is provisional: it lies past the committed text and is replaced as soon as that grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache, check_memory
from specdec.cache.ring_cache import RingCache
from specdec.cache.token_index import Row
from specdec.drafts.magicdec.observation import last_queries
from specdec.drafts.magicdec.pruned_view import PrunedView
from specdec.drafts.magicdec.rotation import Rotation
from specdec.kernels.attention import ExplicitPlan
from specdec.kernels.device import to_device
from specdec.models.hf import HFModel
from specdec.models.masked import Masked


class ViewCache(RingCache):
    """A ring over a target's cache, and after it slots for entries that a pruner chose, per KV head.

    Attributes:
        source: the target's cache, with the same rows. exact: ``[B]`` how many first positions hold what the target's do.
        kept: for each layer the positions ``[B, H, K]`` in the chosen slots, -1 for none.
    """

    def __init__(self, view: View, source: SlotCache):
        super().__init__(
            source.shapes, source.batch, source.capacity, *view.ring(source), view.extra, mask=view.mask
        )
        self.look(view, source)

    def look(self, view: View, source: SlotCache) -> None:
        """It is a view of ``source``, of which it holds nothing yet."""
        self.empty(source.batch, source.capacity)
        self.source, self.view = source, view
        self.exact = [0] * source.batch
        self.kept = [
            torch.full((source.batch, s.heads, self.extra), -1, dtype=torch.long, device=s.device)
            for s in self.shapes
        ]

    def catch_up(self) -> None:
        """Copy what the target's cache holds and this one does not: a gather of the new positions, for all layers at once.

        Raises:
            RuntimeError: the target's cache is not of these rows any more.
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
        """The view of some rows; its ``source`` is still that of all of them."""
        order = rows.tolist()
        new: Any = super().select(rows)
        if new is not self:
            new.exact = [self.exact[b] for b in order]
            new.kept = [kept[to_device(rows, kept.device)] for kept in self.kept]
        return new

    def place(self, rows: list[Row], device: torch.device) -> tuple[Any, ExplicitPlan]:
        """As ``RingCache.place``; sinks are turned to where the row's last query is to see them."""
        memo, plan = super().place(rows, device)
        if self.view.rotation is not None:
            self._turn({r.b: r.end - 1 for r in rows})
        if self.extra and memo is self:
            queries = torch.tensor([q for r in rows for q in range(r.first, r.end)])
            chosen = PrunedView(plan, self, queries)
            return chosen, chosen.plan
        return memo, plan

    def _turn(self, queries: dict[int, int]) -> None:
        """Rotate the sinks' keys by the number of positions between them and the window that ``queries`` (by row) do not see."""
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

    def choose(self, pruner: Callable[..., Tensor], budgets: Sequence[int], observe: int) -> None:
        """Let ``pruner`` choose, for each layer and KV head, up to ``budgets[layer]`` entries of the target's cache.

        Rows that do not have ``observe`` committed tokens yet choose nothing: the window shows them all.
        """
        n = self.source._lengths
        rows = [b for b in range(self.batch) if n[b] >= observe]
        for kept in self.kept:
            kept.fill_(-1)
        if not rows:
            return
        length = torch.tensor([n[b] for b in rows])
        queries = last_queries(self.view, self.source, rows, observe)
        low, top = self.sinks + self.size, int(length.max())
        for layer, (keys, values) in enumerate(self.source.layers):
            at = torch.tensor(rows, device=keys.device)
            every = len(rows) == self.batch
            full = [(t if every else t[at])[:, :top].transpose(1, 2) for t in (keys, values)]
            kept = pruner(*full, length, budgets[layer], queries=queries[layer])
            if kept.dim() != 3 or kept.shape[:2] != full[0].shape[:2] or kept.shape[2] > self.extra:
                raise ValueError(
                    f"the pruner chose {list(kept.shape)} slots: expected {[*full[0].shape[:2], self.extra]} or fewer, for rows, KV "
                    "heads and the budget"
                )
            K = kept.shape[2]
            self.kept[layer][at, :, :K] = kept
            for mine, theirs in zip(self.layers[layer], full):
                index = kept.clamp(min=0)[..., None].expand(-1, -1, -1, theirs.shape[-1])
                mine[at, low : low + K] = theirs.gather(2, index).transpose(1, 2)


class View(Masked):
    """The target's weights over a ``ViewCache``.

    Args:
        model, mask, block: as for ``Masked``. Where the mask has no reach, the view is as long as the text.
        in_cache: positions are those in the cache (StreamingLLM): a query sees the sinks as if they stood right before its window.
        extra: slots a head for entries that a pruner chooses.
    Raises:
        UnsupportedModel: ``in_cache`` for a family whose keys cannot be turned; see ``Rotation``.
        ValueError: the model keeps its KV in pages.
    """

    def __init__(
        self,
        model: HFModel,
        mask: Any,
        block: int,
        in_cache: bool = False,
        extra: int = 0,
    ):
        super().__init__(model, mask, block=block)
        self.supports_trees = False
        if model.page is not None:
            raise ValueError(
                f"the target's KV is in pages of {model.page} tokens and a view of it reads slots: make the target without page"
            )
        self.extra = extra
        self.rotation = Rotation(self) if in_cache else None

    def ring(self, source: SlotCache) -> tuple[int, int, int]:
        """The first positions, the window and the block that a view of ``source`` has room for."""
        return (0, source.capacity, self.block) if self.reach is None else self.constant

    def of(self, source: SlotCache) -> ViewCache:
        """A view of what ``source`` holds now, which must be the sinks at least.

        Raises:
            MemoryError: it would not fit.
        """
        cache = None if self.reach is None else self._lent(ViewCache, source.batch, self.extra)
        if cache is None:
            check_memory(self._shapes, source.batch, sum(self.ring(source)) - 1 + self.extra)
            cache = ViewCache(self, source)
        else:
            cache.look(self, source)
        cache.catch_up()
        return cache
