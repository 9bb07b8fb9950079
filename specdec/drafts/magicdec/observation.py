"""What the last tokens of a text look for: their queries, from a forward over a cache that already holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache
from specdec.kernels.attention import AttentionPlan
from specdec.models.hf import HFModel


class _Reader(NamedTuple):
    """Stands in for a cache while tokens that it holds already are fed once more: it is read, and not written."""

    source: SlotCache
    seen: list[int]

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(layer)
        return self.source.layers[layer]


def last_queries(model: HFModel, source: SlotCache, rows: Sequence[int], count: int) -> list[Tensor]:
    """The queries of the last ``count`` committed tokens of some rows, for each layer ``[R, Hq, count, D]``.

    A forward of these tokens over the cache, which stays as it is: pruners want to know what they look at.
    """
    if not isinstance(source, SlotCache):
        raise TypeError(
            f"the cache is a {type(source).__name__} and its slots are read row by row: make the model without page"
        )
    first = [source._lengths[b] - count for b in rows]
    text = [source._tokens[b, f : f + count] for b, f in zip(rows, first)]
    ids = torch.from_numpy(np.concatenate(text)).to(model.device)
    positions = torch.tensor([f + i for f in first for i in range(count)]).to(model.device)
    found: dict[int, Tensor] = {}
    reader = _Reader(source, [])
    plan = AttentionPlan(list(rows), first, [count] * len(rows), source.slots)
    plan.watch = lambda query: found.__setitem__(reader.seen[-1], query)
    with torch.inference_mode():
        model._path.forward(reader, plan, ids, positions, False)
    R = len(rows)
    return [found[i][0].view(-1, R, count, found[i].shape[-1]).transpose(0, 1) for i in range(len(found))]
