"""Many samples of one prompt: it is fed once, and the other rows share its pages, or copy its keys and values where a cache is in slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache
from specdec.cache.paged import PagedCache
from specdec.types import Context

LEAST = 128  # tokens to save; below that, a second forward costs as much


def share_prompts(model: Any, cache: Any, context: Context, rows: Tensor | None) -> None:
    """Feed each prompt that several empty rows of the cache have (of ``rows``; ``None``: all) once, except its last token.

    A prompt's keys and values do not depend on the row, so the rows continue as if they had read it themselves. Nothing is done where that
    saves less than ``LEAST`` tokens.

    Args:
        model: whose ``prefill`` feeds the rows; ``model.readers`` are its members that read them, if it has any.
        cache: other caches than a ``SlotCache`` or a ``PagedCache`` are left alone.
    """
    if type(cache) not in (SlotCache, PagedCache):
        return
    empty = cache.empty_rows()
    if len(empty) < 2:
        return
    asked = None if rows is None else set(rows.tolist())
    words, length = context.tokens.numpy(), context.length.tolist()
    empty = [b for b in empty if asked is None or b in asked]
    alike: dict[tuple[bytes, int], list[int]] = {}
    for b in empty:
        key = words[b, : length[b] - 1].tobytes(), 0 if model.readers is None else model.readers[b]
        alike.setdefault(key, []).append(b)
    groups = [group for group in alike.values() if len(group) > 1]
    if sum((len(group) - 1) * (length[group[0]] - 1) for group in groups) < LEAST:
        return
    if isinstance(cache, PagedCache):
        cache.expect([length[b] for b in empty], [(len(group), length[group[0]] - 1) for group in groups])
    model.prefill(cache, context, torch.tensor([group[0] for group in groups]))
    for first, *others in groups:
        for b in others:
            cache.take(b, cache, first)
