"""Feeds prompts once for many decoders: models whose new caches already hold a prompt."""

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
    """A model's cache after a prompt and, for a target, its scores of the prompt."""

    context: Context
    cache: Any
    scores: Scores | None = None


class PrefilledDraft:
    """Mixed into a model: ``cache`` returns the one that holds the current prompts (``at``).

    Tokens after the prompt are rolled back by changing lengths. A ring loses overwritten entries, so a copy of it is returned.
    Valid while no row leaves the batch. ``executors.Ahead`` runs it: its rounds write behind the prompts only, and the token index, which does
    not hear of them, ends with the prompts.
    """

    at: Prefill | None = None
    original: Any = None
    made: type | None = None  # the class that ``prefilled`` made

    @property
    def plain(self) -> Any:
        """As ``HFModel.plain``: the original model; but a class that derives from the prefilled one may override more than caches."""
        return self.original if type(self) is self.made else self

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
        new = super().cache(batch, at.cache.capacity)  # type: ignore[misc]  # reuses the memory of captured steps, if any
        new.fill(at.cache)
        return new


class PrefilledTarget(PrefilledDraft):
    """The target's version: ``score`` of the prompts returns the stored scores."""

    taps: tuple[int, ...] = ()

    def feed(self: Any, context: Context, capacity: int) -> Prefill:
        """Feed the whole prompts, and store the activations of ``taps``."""
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
        cache.matched(context)  # rolls back the tokens of an earlier run
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
    """A copy of ``model`` whose prompts are fed by ``group``; the weights are shared.

    Args:
        taps: for a target, the (possibly empty) layers whose activations drafts may request. ``None`` for a draft.
    """
    kind = PrefilledDraft if taps is None else PrefilledTarget
    own = type(kind.__name__ + type(model).__name__, (kind, type(model)), {"fast_chain": model.fast_chain})
    made: Any = object.__new__(own)
    vars(made).update(vars(model) | {"original": model, "made": own})
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
        """Make the models' next caches hold these prompts."""
        for model, at in self.prefills:
            model.at = at


def group(
    rows: Sequence[Sequence[int]], seed: list[int], capacity: int, target: Any, drafts: Sequence[Any]
) -> Group:
    """Feed prompts to the target and to drafts with a cache.

    Args:
        rows: ids of the prompts. seed: of each row. capacity: the most tokens of a row. target, drafts: made by ``prefilled``.
    """
    context = Context.of([list(row) for row in rows], capacity=capacity)
    with torch.inference_mode():
        return Group(context, seed, [(model, model.feed(context, capacity)) for model in (target, *drafts)])
