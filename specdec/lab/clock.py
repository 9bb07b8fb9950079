"""Seconds of single calls or of alternating ones, and forwards of a model to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from specdec.types import Context, Proposal

Call = Callable[[], Any]
Case = TypeVar("Case")


def sync() -> None:
    """Wait for the CUDA device if one is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def middle(values: ArrayLike) -> Any:
    """The mean along the last dimension, less a tenth of the values at each end (at least one, of three values or more).

    Where a machine alternates between fast and slow, a median of few repeats is one or the other; this mean is between. One outlier is dropped.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = ordered.shape[-1]
    ends = max(round(0.1 * n), int(n >= 3))
    return ordered[..., ends : n - ends].mean(-1)


def shuffled(cases: Iterable[Case], turn: int, *place: object) -> list[Case]:
    """Cases in random order: another one in every second turn, and its reverse in the turns between.

    If the order were always the same, each case would find in the processor's caches what the same other case had left there.

    Args:
        place: what else is measured with the same turns; it has orders of its own.
    """
    made = list(cases)
    Random(repr((turn // 2, *place))).shuffle(made)
    return made[::-1] if turn % 2 else made


def seconds(call: Call) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    sync()
    start = perf_counter()
    call()
    sync()
    return perf_counter() - start


def in_turn(
    calls: Sequence[Call],
    repeats: int,
    warmups: int = 2,
    before: Callable[[int], Any] = lambda number: None,
    take: Callable[[list[float]], Any] = median,
) -> list[Any]:
    """Median seconds of each call, or what ``take`` makes of its repeats. Calls alternate, so that a slow minute of the machine affects all of them.

    Args:
        repeats: timed passes over all calls. warmups: untimed passes before them. before: called with the index of the next call.
    """
    times: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode():
        for _ in range(warmups + repeats):
            for number, call in enumerate(calls):
                before(number)
                times[number].append(seconds(call))
    return [take(some[warmups:]) for some in times]


def bare_steps(model: Any, batch: int, context: int, tokens: Sequence[int]) -> list[Call]:
    """Forwards that feed ``tokens[i]`` tokens to each of ``batch`` rows after ``context`` tokens.

    Only the packed forward of the model runs, without sampling and bookkeeping: ``HFModel.bare_step``.
    """
    with torch.inference_mode():
        widest = max(tokens)
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.vocab_size, (batch, context + widest), generator=draw)
        text = Context.of(ids[:, : context + 1].tolist(), capacity=context + widest)
        cache = model.cache(batch, context + 2 * widest)
        model.prefill(cache, text)
        steps = []
        for n in tokens:
            size = torch.full((batch,), n - 1, dtype=torch.long)
            nodes = Proposal.chain(ids[:, context + 1 : context + n], size) if n > 1 else None
            steps.append(model.bare_step(cache, text, nodes))
    return steps


class Forwards(NamedTuple):
    """Seconds of bare forwards: one token of the target, k forwards of a draft, k + 1 tokens of the target."""

    plain: float
    draft: float
    verify: float


def bare_round(
    target: Any, draft: Any, batch: int, context: int, k: int, turns: int = 7
) -> Callable[[], Forwards]:
    """A call that times forwards in the order of rounds, so that each model finds the processor's cache as the other left it.

    A turn is k forwards of the draft, one of the target over k + 1 tokens, and two of the target over one token; the second is timed, since
    in plain decoding a step follows one of its own kind. Run the call between the rounds that it is compared with. The fastest of the turns
    counts, which a slow moment of the machine does not change.
    """
    plain, verify = bare_steps(target, batch, context, (1, k + 1))
    (step,) = bare_steps(draft, batch, context, (1,))

    def drafting() -> None:
        for _ in range(k):
            step()

    # The first plain step of a turn follows the last one of the turn before.
    return lambda: Forwards(*in_turn([plain, drafting, verify, plain], turns, warmups=1, take=min)[:3])
