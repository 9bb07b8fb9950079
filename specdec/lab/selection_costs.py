"""What is left of a pool's head-room, and which cost takes the rest: from the best arm of every request to a selector's batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from typing import Any

import numpy as np
import torch

from specdec.lab.selection import Requests, RoundTimes, fixed_seconds, ratio
from specdec.lab.selection_runs import SelectorReplay
from specdec.selectors import Fixed
from specdec.types import Context

Key = Callable[[Context], Sequence[Any]]


def costs(
    tested: Requests,
    learned: Requests,
    times: RoundTimes,
    batch: int,
    kinds: Sequence[Key],
    taught: Any,
    selector: Any,
    repeats: int = 20,
    lessons: int = 3,
    seed: int = 0,
    pool: RoundTimes | None = None,
) -> list[dict[str, Any]]:
    """How many times faster than the best fixed draft each step towards a selector in a batch is, with intervals over sources and repeats.

    Each step has one cost more, but one, which is a remedy: the best arm of each request in hindsight; the best arm of each kind of
    request in hindsight; the best arm that each kind has among other requests; a selector that learned from those, whose rounds are charged as
    in a batch of their own arm and without reading; the same with reading; the seconds of the batch's own rounds, which are compared with those of the best fixed
    draft in such a batch; the same for a selector that counts what an arm in use costs (``selectors.opening``), the remedy; the same in batches that are not
    refilled; and the same by the seconds of a pool's rounds, where the best fixed draft is used alone.

    Args:
        tested, learned: requests without a common source. kinds: the key of a request, for ``learned`` and for ``tested``. taught, selector:
            ``selectors.Spin``: what learns from ``learned``, and what goes on with ``tested``. lessons: how often ``learned`` are replayed for that. times: seconds of
            rounds in which an arm is used alone. pool: those of a pool of all arms; ``None``: the last step is left out.
    """
    fixed = fixed_seconds(tested, times, batch)
    drafts = [a for a, k in enumerate(tested.lengths) if k]
    plain = [a for a, k in enumerate(tested.lengths) if not k]
    best = min(drafts, key=lambda a: fixed[a].sum())
    by_kind = [np.array(_keys(part, kind)) for part, kind in zip((learned, tested), kinds)]
    before = fixed_seconds(learned, times, batch)
    hindsight, other = np.zeros(len(tested.prompt)), np.zeros(len(tested.prompt))
    for kind in set(by_kind[1]):
        mine, theirs = by_kind[1] == kind, by_kind[0] == kind
        hindsight[mine] = fixed[fixed[:, mine].sum(1).argmin(), mine]
        known = before[:, theirs] if theirs.any() else before
        other[mine] = fixed[known.sum(1).argmin(), mine]
    unread = changed(times, read=(0.0,) * len(times.read))
    replay = SelectorReplay(tested, times, batch, repeats, seed)
    start = changed(replay, requests=learned).taught(taught, lessons)
    played = replay(selector, start)
    without = changed(replay, times=unread)(selector, start).seconds
    free = fixed_seconds(tested, unread, batch)
    steps: list[tuple[str, Any, np.ndarray, int]] = [
        ("best arm of each request", fixed, fixed.min(0), best),
        ("best arm of each kind", fixed, hindsight, best),
        ("best arm of each kind, learned", fixed, other, best),
        ("selector, without reading", free, without, best),
        ("selector", fixed, played.seconds, best),
    ]
    emptied = changed(replay, refilled=False)
    counting = changed(selector, opening=times.opening(tested.lengths, batch))
    batches = [
        ("selector, in its batches", replay, played.elapsed),
        ("counting drafts in use", replay, replay(counting, start).elapsed),
        ("in batches that are not refilled", emptied, emptied(counting, start).elapsed),
    ]
    if pool is not None:
        whole = changed(emptied, times=pool)
        selecting = changed(counting, opening=pool.opening(tested.lengths, batch))
        knowing = changed(whole, requests=learned, refilled=True).taught(taught, lessons)
        batches.append(("in the rounds of a pool", emptied, whole(selecting, knowing).elapsed))
    for step, how, elapsed in batches:
        alone = {arm: how(Fixed(arm)).elapsed for arm in (*drafts, *plain[:1])}
        steps.append((step, alone, elapsed, min(drafts, key=lambda arm: alone[arm].sum())))
    out = []
    for step, base, seconds, best in steps:
        row = {"batch": batch, "step": step, "best_fixed": tested.names[best]}
        row |= zip(("times_faster", "low", "high"), ratio(base[best], seconds, tested.source))
        if plain:
            row |= zip(
                ("over_plain", "over_plain_low", "over_plain_high"),
                ratio(base[plain[0]], seconds, tested.source),
            )
        out.append(row)
    return out


def _keys(requests: Requests, kind: Key) -> list[str]:
    """Each request's key, as a selector sees it before the first choice."""
    prompt = torch.from_numpy(np.asarray(requests.prompt, dtype=np.int64))
    tokens = torch.zeros(len(prompt), 1, dtype=torch.long) if requests.tokens is None else requests.tokens
    return [repr(key) for key in kind(Context(tokens, prompt + 1, prompt, torch.arange(len(prompt))))]
