"""Prompts that are fed once for many decoders: models whose caches begin after a prompt that was fed before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.cache.ring_cache import RingCache
from specdec.types import Context, Fed, Proposal, Scores


@dataclass(frozen=True)
class Prefill:
    """A model's cache after a prompt, and, of a target, what it said there."""

    context: Context
    cache: Any
    scores: Scores | None = None


class PrefilledDraft:
    """Mixed into a model: ``cache`` gives the one that holds the prompts at hand (``at``).

    Everything after the prompt is taken back by the cache's own means, a change of lengths. Rings forget what they have overwritten,
    so of these a copy is given. Valid while no row leaves the batch.
    """

    at: Prefill | None = None
    plain: Any = None  # the model as it was

    def feed(self: Any, context: Context, capacity: int) -> Prefill:
        """Feed the prompts as a draft does: all but their last token."""
        cache = super().cache(context.batch, capacity)  # type: ignore[misc]
        self.prefill(cache, context)
        return Prefill(context, cache)

    def cache(self, batch: int, capacity: int) -> Any:
        at = self.at
        if at is None or at.cache.batch != batch or at.cache.capacity < capacity:
            raise RuntimeError(
                f"nothing is prefilled for {batch} rows of {capacity} tokens: call Group.use() before"
            )
        if not isinstance(at.cache, RingCache):
            return at.cache
        new = super().cache(batch, at.cache.capacity)  # type: ignore[misc]  # in memory that captured steps know, if any
        new.fill(at.cache)
        return new


class PrefilledTarget(PrefilledDraft):
    """Of a target: ``score`` of the prompts gives what was said there before."""

    taps: tuple[int, ...] = ()

    def feed(self: Any, context: Context, capacity: int) -> Prefill:
        """Feed the prompts to their end, and keep the activations of ``taps``."""
        cache = super(PrefilledDraft, self).cache(context.batch, capacity)  # type: ignore[misc]
        return Prefill(context, cache, super().score(cache, context, taps=self.taps))  # type: ignore[misc]

    def score(
        self: Any,
        cache: Any,
        context: Context,
        proposal: Proposal | None = None,
        start: int | None = None,
        rows: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Scores:
        at = self.at
        if at is None or at.scores is None or proposal is not None or context is not at.context:
            return super().score(cache, context, proposal, start, rows, taps)  # type: ignore[misc]
        cache.matched(context)  # takes back what an earlier run has added
        fed = at.scores.fed
        if not taps:
            return Scores(at.scores.logits)
        if fed is None or not set(taps) <= set(fed.layers):
            raise ValueError(
                f"a draft asks for activations of layers {list(taps)}: give them to prefilled(taps=...)"
            )
        return Scores(
            at.scores.logits, Fed({tap: fed.layers[tap] for tap in taps}, fed.row, fed.position, fed.node)
        )


def prefilled(model: Any, taps: Sequence[int] | None = None) -> Any:
    """``model`` as one whose prompts are fed by ``group``; the weights are shared.

    Args:
        taps: of a target: layers whose activations drafts may ask for, which may be none. ``None`` for a draft.
    """
    kind = PrefilledDraft if taps is None else PrefilledTarget
    made: Any = object.__new__(
        type(kind.__name__ + type(model).__name__, (kind, type(model)), {"fast_chain": model.fast_chain})
    )
    vars(made).update(vars(model) | {"plain": model})
    if taps is not None:
        made.taps = tuple(taps)
    return made


@dataclass(frozen=True)
class Group:
    """Prompts that are decoded together: a context, its row seeds, and each model's cache after it."""

    context: Context
    seed: list[int]
    prefills: list[tuple[Any, Prefill]]

    def use(self) -> None:
        """Let the models' next caches hold these prompts."""
        for model, at in self.prefills:
            model.at = at


def group(
    rows: Sequence[Sequence[int]], seed: list[int], capacity: int, target: Any, drafts: Sequence[Any]
) -> Group:
    """Feed prompts to the target and to drafts that keep a cache of their own.

    Args:
        rows: ids of the prompts. seed: of each row. capacity: tokens that a row may come to have. target, drafts: made by ``prefilled``.
    """
    context = Context.of([list(row) for row in rows], capacity=capacity)
    with torch.inference_mode():
        return Group(context, seed, [(model, model.feed(context, capacity)) for model in (target, *drafts)])
