"""Steady decoding for measurements: prompts are fed once for all methods, and no row leaves the batch before the clock stops.

A batch whose rows end one after another measures its stragglers too; a server fills their places. Here every row goes on until the
batch as a whole has produced its tokens, as in the throughput models that the figures are compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import specdec as sd
from specdec.cache.ring import Ring
from specdec.rng import Philox, seeds
from specdec.stats import Record, Stats
from specdec.stop_rules import StopRules
from specdec.types import Context, Fed, Proposal, Scores


@dataclass
class Prefilled:
    """A model's cache after a prompt, and what it said there."""

    context: Context
    cache: Any
    scores: Scores | None = None


class Kept:
    """Mixed into a model: ``cache`` gives the one that holds the prompts at hand.

    Everything after the prompt is taken back by the cache's own means, a change of lengths. Rings forget what they have overwritten,
    so of these a copy is given. Valid while no row leaves the batch.
    """

    at: Prefilled | None = None

    def open(self: Any, context: Context, capacity: int, scored: bool) -> Prefilled:
        """PackedBatch the prompts. ``scored``: to their end, as a target does, with activations; else as a draft does."""
        cache = super().cache(context.batch, capacity)  # type: ignore[misc]
        if not scored:
            self.prefill(cache, context)
            return Prefilled(context, cache)
        return Prefilled(context, cache, super().score(cache, context, taps=self.taps))  # type: ignore[misc]

    def cache(self, batch: int, capacity: int) -> Any:
        at = self.at
        if at is None or at.cache.batch != batch or at.cache.capacity < capacity:
            raise RuntimeError(f"nothing is prefilled for {batch} rows of {capacity} tokens")
        if not isinstance(at.cache, Ring):
            return at.cache
        new = super().cache(batch, at.cache.capacity)  # type: ignore[misc]  # in memory that captured steps know, where there is some
        for mine, theirs in zip(new._blocks, at.cache._blocks):
            mine.copy_(theirs)
        for name in ("_tokens", "_lengths", "_fed", "_high"):
            setattr(new, name, copy.deepcopy(getattr(at.cache, name)))
        return new


class KeptTarget(Kept):
    """``score`` of the prompts gives what was said there before."""

    taps: tuple[int, ...] = ()

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
        assert fed is not None
        assert set(taps) <= set(fed.layers)
        layers = {tap: fed.layers[tap] for tap in taps}
        return Scores(at.scores.logits, Fed(layers, fed.row, fed.position, fed.node) if taps else None)


def kept(model: Any, taps: Sequence[int] | None = None) -> Any:
    """``model`` with the behaviour of ``Kept``; the weights are shared. ``taps``: of a target, activations that drafts may ask for."""
    kind = Kept if taps is None else KeptTarget
    made = object.__new__(type(kind.__name__ + type(model).__name__, (kind, type(model)), {}))
    vars(made).update(vars(model))
    if taps is not None:
        made.taps = tuple(taps)
    return made


@dataclass
class Run:
    """One timed run of a method over all groups of prompts."""

    tokens: int
    seconds: float
    rounds: int
    stats: Stats
    captured: bool = False  # a shape was captured while the clock ran

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def round_seconds(self) -> float:
        return self.seconds / self.rounds

    def stage(self, name: str) -> float:
        """Seconds a round in one stage."""
        return self.stats.seconds[name] / self.rounds


@dataclass
class Measured:
    """Repeats of one method at one k and grid point. Every repeat draws the same numbers, so that only times differ."""

    method: str
    k: int
    runs: list[Run]

    @property
    def speed(self) -> float:
        return median(run.speed for run in self.runs)

    @property
    def round_seconds(self) -> float:
        return median(run.round_seconds for run in self.runs)

    @property
    def tau(self) -> float:
        """Tokens a round and row."""
        return self.runs[0].stats.tau

    def stage(self, name: str) -> float:
        return median(run.stage(name) for run in self.runs)


@dataclass
class Group:
    """Prompts that are decoded together: a context, its row seeds, and each model's cache after it."""

    context: Context
    seed: list[int]
    prefilled: list[tuple[Any, Prefilled]]

    def use(self) -> None:
        for model, at in self.prefilled:
            model.at = at


def group(
    rows: Sequence[Sequence[int]], seed: list[int], capacity: int, target: Any, drafts: Sequence[Any]
) -> Group:
    """PackedBatch prompts to the target and to drafts that keep a cache of their own."""
    context = Context.of([list(row) for row in rows], capacity=capacity)
    with torch.inference_mode():
        prefilled = [(target, target.open(context, capacity, True))]
        prefilled += [(draft, draft.open(context, capacity, False)) for draft in drafts]
    return Group(context, seed, prefilled)


def steady(
    decoder: sd.Decoder,
    groups: Sequence[Group],
    new_tokens: int,
    clock: Callable[[bool], None] = lambda runs: None,
) -> Run:
    """Decode each group until it has ``new_tokens`` more tokens a row on average; the clock starts after the prefill round.

    Args:
        clock: is told when the clock starts (``True``) and stops.
    """
    tokens = rounds = 0
    seconds, records = 0.0, []
    for some in groups:
        some.use()
        context, B = some.context, some.context.batch
        room = context.tokens.shape[1] - decoder.length
        limits = StopRules(max_length=torch.full((B,), room))
        left, start = B * new_tokens, 0.0
        with torch.inference_mode():
            for round in decoder.executor.run(decoder, context, Philox(seeds(some.seed, B)), limits):
                if round.number == 0:
                    sync()
                    clock(True)
                    start = perf_counter()
                    continue
                records.append(Record.of(round))
                rounds += 1
                made = sum(records[-1].kept)
                tokens, left = tokens + made, left - made
                if left <= 0:
                    break
        sync()
        seconds += perf_counter() - start
        clock(False)
    return Run(tokens, seconds, rounds, Stats.of(records))


def capacity(context: int, new_tokens: int, k: int) -> int:
    """Tokens that a row may come to have, nodes included: a round gives every row a token at least, so there are so many at most."""
    return context + 2 + new_tokens * (k + 1) + k


def sync() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def clocked(steps: Sequence[Any], repeats: int) -> list[float]:
    """Median seconds of each of ``steps`` (functions), called in turn; two turns before warm up."""
    times: list[list[float]] = [[] for _ in steps]
    with torch.inference_mode():
        for r in range(repeats + 2):
            for i, step in enumerate(steps):
                sync()
                start = perf_counter()
                step()
                sync()
                if r > 1:
                    times[i].append(perf_counter() - start)
    return [median(t) for t in times]
