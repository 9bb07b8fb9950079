"""Where a round's time goes: exclusive seconds of named functions while a decoder runs, the rest being Python between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

from _steady import Group, steady, sync

import specdec as sd
from specdec.cache.ring_cache import RingCache
from specdec.drafts.magicdec.view import ViewCache
from specdec.drafts.spire import draft as spire
from specdec.drafts.spire import steps as spire_steps
from specdec.forward import packed
from specdec.models.hf import HFModel
from specdec.rng import Philox
from specdec.sampling import Sampling
from specdec.stats import Record
from specdec.types import Context
from specdec.verifiers import Rejection

# Innermost wins: a forward inside the draft's step counts as the forward. Names that appear twice are summed.
PLACES: tuple[tuple[Any, str, str], ...] = (
    (packed.Packed, "forward", "forward"),
    (spire_steps.SpireSteps, "__call__", "forward"),
    (spire_steps.SpireSteps, "__init__", "SPIRe: masks, slots"),
    (Sampling, "__call__", "laws (softmax)"),
    (Philox, "categorical", "draws"),
    (Philox, "accept", "draws"),
    (Rejection, "__call__", "verifier"),
    (HFModel, "_plan", "feed: what to run"),
    (HFModel, "_feed", "feed: what to run"),
    (HFModel, "_remember", "memo"),
    (RingCache, "place", "ring: slots, masks"),
    (ViewCache, "place", "ring: slots, masks"),
    (ViewCache, "catch_up", "view: copy of the target's KV"),
    (spire.Spire, "observe", "SPIRe: refresh"),
    (Context, "append", "commit, context"),
    (Record, "of", "record"),
)


class Stages:
    """Exclusive seconds by (stage, name); the stage is the draft's side or the target's."""

    def __init__(self) -> None:
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.side, self.on = "rest", False
        self._inner: list[float] = []

    def wrap(self, function: Callable[..., Any], name: str, side: str | None = None) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self.side = self.side, side or self.side
            self._inner.append(0.0)
            sync()
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                sync()
                spent = perf_counter() - start
                own, key = spent - self._inner.pop(), (self.side, name)
                if self.on:
                    self.seconds[key] += own
                    self.calls[key] += 1
                if self._inner:
                    self._inner[-1] += spent
                self.side = before

        return timed

    def clock(self, runs: bool) -> None:
        """Count from now on, or not."""
        self.on = runs

    @contextmanager
    def watching(self, places: Sequence[tuple[Any, str, str]], draft: Any) -> Iterator[None]:
        """While the body runs, the named functions are timed."""
        with ExitStack() as stack:
            every = [(*place, None) for place in places]
            every += [(type(draft), "propose", "other Python", "draft")]
            for owner, name, shown, side in every:
                had, function = name in vars(owner), getattr(owner, name)
                kind = vars(owner).get(name)
                made: Any = self.wrap(function, shown, side)
                setattr(owner, name, staticmethod(made) if isinstance(kind, staticmethod) else made)
                if had:
                    stack.callback(setattr, owner, name, kind)
                else:
                    stack.callback(delattr, owner, name)
            yield


def profile(method: str, decoder: sd.Decoder, groups: Sequence[Group], new_tokens: int) -> None:
    """Print the parts of a round, in milliseconds; a plain run before and after says what timing itself costs."""
    steady(decoder, groups, new_tokens)
    plain = steady(decoder, groups, new_tokens)
    stages = Stages()
    with stages.watching(PLACES, decoder.draft):
        run = steady(decoder, groups, new_tokens, stages.clock)
    rounds = run.rounds
    whole, known = run.seconds / rounds, sum(stages.seconds.values()) / rounds
    print(
        f"\n{method}, k = {decoder.length if method != 'plain' else 0}: {plain.round_seconds * 1e3:.2f} ms a round, "
        f"{whole * 1e3:.2f} when watched; tau {plain.stats.tau:.2f}, {plain.speed:.0f} tokens/s"
    )
    for (side, name), seconds in sorted(stages.seconds.items(), key=lambda kv: (kv[0][0], -kv[1])):
        calls = stages.calls[side, name] / rounds
        print(
            f"  {side:<6} {name:<30} {seconds / rounds * 1e3:8.3f} ms  {calls:5.1f} calls  {seconds / rounds / whole:6.1%}"
        )
    print(
        f"  {'rest':<6} {'not seen (executor)':<30} {(whole - known) * 1e3:8.3f} ms               {1 - known / whole:6.1%}"
    )
