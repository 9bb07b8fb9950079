"""Queries and attention weights of the last tokens of a text, from a forward over a cache that already holds them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache
from specdec.cache.contract import KVStore
from specdec.cache.slots import KVShape
from specdec.kernels.attention import AttentionPlan
from specdec.kernels.attention.reach import Reach
from specdec.models.hf import HFModel
from specdec.pruning.pruner import Pruner, check_kept
from specdec.pruning.slots import gather
from specdec.pruning.weights import attention_weights


class Observed(NamedTuple):
    """The queries ``[R, Hq, Q, D]`` of the last Q tokens in one layer, and how that layer computes attention weights from them."""

    queries: Tensor
    scale: float
    window: Reach
    softcap: float | None
    sink_logits: Tensor | None

    def weights(self, keys: Tensor, length: Tensor) -> Tensor:
        """``[R, Hq, Q, S]``: the weights that the layer's own attention gives to ``keys [R, H, S, D]``."""
        how = self._asdict()
        return attention_weights(how.pop("queries"), keys, length, **how)


@dataclass
class _Reader(KVStore):
    """Stands in for a cache while tokens that it already holds are fed once more: it is read and not written."""

    source: SlotCache

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.layers[layer]


def observe(model: HFModel, source: SlotCache, rows: Sequence[int], count: int) -> list[Observed]:
    """Feed the last ``count`` committed tokens of some rows once more and observe every layer; the cache does not change."""
    first = [source._lengths[b] - count for b in rows]
    text = [source._tokens[b, f : f + count] for b, f in zip(rows, first)]
    ids = torch.from_numpy(np.concatenate(text)).to(model.device)
    positions = torch.tensor([f + i for f in first for i in range(count)]).to(model.device)
    found: list[Observed] = []

    def watch(query: Tensor, *how: Any) -> None:
        found.append(Observed(query[0].unflatten(1, (-1, count)).transpose(0, 1), *how))

    plan = AttentionPlan(list(rows), first, [count] * len(rows), source.slots, watch=watch)
    with torch.inference_mode():
        model._path.forward(_Reader(source), plan, ids, positions, False)
    return found


def check_budget(pruner: Pruner, shape: KVShape, budget: int, count: int) -> None:
    """Raise what ``pruner`` raises for more slots than its ``budget``, tried on zeros of a layer's ``shape`` and on equal weights of ``count`` queries."""
    slots = budget + count + 1
    keys, values = (torch.zeros(2, shape.heads, slots, size) for size in (shape.key_size, shape.value_size))
    weights = torch.full((2, shape.heads, count, slots), 1 / slots) if pruner.needs.attention else None
    copy.deepcopy(pruner)(keys, values, torch.tensor([slots, slots]), budget, attention=weights)


def choices(
    pruner: Pruner,
    model: HFModel,
    source: SlotCache,
    rows: Sequence[int],
    candidates: tuple[Tensor, Tensor],
    budgets: Sequence[int],
    count: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What ``pruner`` chooses from some rows of ``source``, layer by layer; attention weights exist for one layer at a time.

    Args:
        rows: rows with at least ``count`` committed tokens, whose attention weights a pruner gets if it needs any.
        candidates: the positions ``[R, C]`` that it may choose, and their number ``[R]``. budgets: of each layer.
    Yields:
        positions ``[R, H, K]``, -1 for none, and their keys ``[R, H, K, D]`` and values ``[R, H, K, Dv]``.
    Raises:
        ValueError: the pruner did not return slots of these rows within the budget.
    """
    positions, number = candidates
    length = torch.tensor([source._lengths[b] for b in rows])
    observed = observe(model, source, rows, count) if pruner.needs.attention else []
    for layer, held in enumerate(source.layers):
        at, which = (t.to(held[0].device) for t in (torch.tensor(rows)[:, None], positions))
        keys, values = (t[at, which].transpose(1, 2) for t in held)
        attention = None
        if pruner.needs.attention:
            whole = held[0][at[:, 0], : int(length.max())].transpose(1, 2)
            weights = observed[layer].weights(whole, length)
            attention = weights.gather(3, which[:, None, None].expand(*weights.shape[:3], -1))
        kept = pruner(keys, values, number, budgets[layer], attention=attention)
        check_kept(pruner, kept, keys, number, budgets[layer])
        chosen = which[:, None].expand(keys.shape[:3]).gather(2, kept.clamp(min=0))
        yield chosen.masked_fill(kept < 0, -1), gather(keys, kept), gather(values, kept)
