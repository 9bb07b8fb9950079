"""Prompts that are equal or begin alike: what they share is fed once, and other rows share its pages, or copy its keys and values in slots. What
earlier calls have read is copied from ``model.prefixes``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache
from specdec.cache.paged import PagedCache
from specdec.cache.prefixes import NOTHING, Lent
from specdec.kernels.device import to_device
from specdec.types import Context, Fed, Scores, common

LEAST = 128  # tokens to save; below that, a second forward costs as much


@contextmanager
def reading(
    model: Any,
    cache: Any,
    context: Context,
    rows: Tensor | None,
    taps: Sequence[int],
    own: bool,
    score: Callable[..., Scores] | None = None,
) -> Iterator[Lent]:
    """A context in which prompts are read. At its beginning, empty rows get what other rows of the call or earlier texts share with them; if it fails, they are empty again.

    Args:
        taps: layers whose activations are wanted of every position; then only equal prompts are shared, and earlier ones have kept them.
        own: whether the model's rows see all of their text; otherwise nothing is shared. score: reads rows of the same call, with ``taps``.
    """
    if not own or type(cache) not in (SlotCache, PagedCache) or context.batch != cache.batch:
        yield NOTHING
        return
    empty, length, read, found = _empty(cache, rows), context.length.tolist(), None, list[int]()
    if model.prefixes is not None:
        found = model.prefixes.known(context, empty, taps)  # before rows of this call are kept
    try:
        if taps and score is not None:
            read = share_read(cache, context, rows, partial(score, cache, context, taps=taps))
        elif not taps:
            share_prompts(model, cache, context, rows)
        lent = NOTHING
        if model.prefixes is not None:
            # The call that read them keeps their blocks.
            done = set() if read is None else set(read.row.tolist())
            unread = [b for b in empty if b not in done and length[b] <= cache.capacity]
            lent = model.prefixes.lend(cache, context, unread, taps) if unread else NOTHING
            found = [0] * len(found) if model.prefixes.stale else found
        yield lent._replace(read=read, found=tuple(found))
    except BaseException:
        for b in empty:
            cache.forget(b)
        raise


def share_prompts(model: Any, cache: Any, context: Context, rows: Tensor | None) -> None:
    """Feed what several empty rows of the cache (of ``rows``; ``None``: all) have in common once; the last token of a prompt is not fed.

    A token's keys and values do not depend on the row, so the rows continue as if they had read it themselves. Nothing is done for equal
    prompts that save less than ``LEAST`` tokens in all, and for prompts that begin alike for less than ``LEAST`` tokens.

    Args:
        model: whose ``prefill`` feeds the rows; ``model.readers`` are its members that read them, if it has any.
        cache: a ``SlotCache`` or a ``PagedCache``.
    """
    empty = _empty(cache, rows)
    if len(empty) < 2:
        return
    words, length = context.tokens.numpy(), context.length.tolist()
    alike: dict[tuple[bytes, int], list[int]] = {}
    starts: dict[tuple[bytes, int], int] = {}
    shared: list[tuple[int, int]] = []  # how many rows share how many tokens
    roots: dict[int, int] = {}  # row -> another row that begins alike
    for b in empty:
        reader = 0 if model.readers is None else model.readers[b]
        group = alike.setdefault((words[b, : length[b] - 1].tobytes(), reader), [])
        group.append(b)
        root = b if length[b] <= LEAST else starts.setdefault((words[b, :LEAST].tobytes(), reader), b)
        if root != b == group[0]:
            end = min(length[b], length[root]) - 1
            roots[b] = root
            shared.append((2, common(words[b, :end], words[root, :end])))
    groups = [group for group in alike.values() if len(group) > 1]
    shared += [(len(group), length[group[0]] - 1) for group in groups]
    if sum((count - 1) * tokens for count, tokens in shared) < LEAST:
        return
    if isinstance(cache, PagedCache):
        cache.expect([length[b] for b in empty], shared)
    first = {roots.get(group[0], group[0]) for group in groups} | set(roots.values())
    model.prefill(cache, context, torch.tensor(sorted(first)))
    for b, root in roots.items():
        cache.take(b, cache, root)  # what differs is rolled back
    if roots and groups:
        model.prefill(cache, context, torch.tensor([group[0] for group in groups]))
    for one, *others in groups:
        for b in others:
            cache.take(b, cache, one)


def share_read(cache: Any, context: Context, rows: Tensor | None, score: Callable[..., Scores]) -> Fed | None:
    """Feed equal prompts of empty rows once, where that saves ``LEAST`` tokens.

    Args:
        score: feeds ``rows``, and returns their activations.
    Returns:
        the activations of all these rows but at their last tokens, which each row feeds again; ``None`` if there are none.
    """
    words, length = context.tokens.numpy(), context.length.tolist()
    alike: dict[bytes, list[int]] = {}
    for b in _empty(cache, rows):
        alike.setdefault(words[b, : length[b]].tobytes(), []).append(b)
    groups = [group for group in alike.values() if len(group) > 1]
    shared = [(len(group), length[group[0]] - 1) for group in groups]
    if sum((count - 1) * tokens for count, tokens in shared) < LEAST:
        return None
    if isinstance(cache, PagedCache):
        cache.expect([length[b] for group in alike.values() for b in group], shared)
    fed = score(rows=torch.tensor([group[0] for group in groups])).fed
    assert fed is not None
    source, row = list[Tensor](), list[Tensor]()
    for group in groups:
        at = ((fed.row == group[0]) & (fed.position < length[group[0]] - 1)).nonzero()[:, 0]
        for b in group:
            source.append(at)
            row.append(torch.full_like(at, b))
            if b != group[0]:
                cache.take(b, cache, group[0])
    at = torch.cat(source)
    layers = {tap: x[to_device(at, x.device)] for tap, x in fed.layers.items()}
    return Fed(layers, torch.cat(row), fed.position[at], fed.node[at])


def _empty(cache: Any, rows: Tensor | None) -> list[int]:
    """The rows of ``rows`` (``None``: all) that hold no token."""
    asked = None if rows is None else set(rows.tolist())
    return [b for b in cache.empty_rows() if asked is None or b in asked]
