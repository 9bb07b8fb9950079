"""The reference distribution: a target's continuations, enumerated over plain prefixes without any decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.protocols import LanguageModel
from specdec.sampling import Sampling
from specdec.types import Context

Ids = tuple[int, ...]
Distribution = dict[Ids, float]
Logits = Callable[[list[list[int]]], Tensor]


class Plain(NamedTuple):
    """``distribution``: continuation (truncated at a stop) -> probability. ``after``: continuation so far -> distribution of the next token ``[V]``."""

    prompt: list[int]
    distribution: Distribution
    after: dict[Ids, np.ndarray]


def enumerate_plain(
    model: LanguageModel,
    sampling: Sampling,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Sequence[int] = (),
    criteria: Sequence[Callable[..., Any]] = (),
    logits: Logits | None = None,
) -> Plain:
    """Every continuation of ``prompt`` with its exact probability.

    Args:
        logits: ``prefixes -> [R, V]``; by default ``model.score`` with a fresh cache for every step.
    """
    prompt = list(prompt)
    alive: Distribution = {(): 1.0}
    done: Distribution = {}
    after: dict[Ids, np.ndarray] = {}
    for step in range(1, max_new_tokens + 1):
        prefixes = [prompt + list(ids) for ids in alive]
        context = Context.of(prefixes, capacity=len(prompt) + step)
        context = replace(context, prompt_length=torch.full_like(context.length, len(prompt)))
        if logits is None:
            cache = model.cache(len(prefixes), len(prompt) + step)
            raw = model.score(cache, context).logits
        else:
            raw = logits(prefixes)[:, None]
        distributions = sampling(raw, context)[:, 0].double().cpu().numpy()
        grown: Distribution = {}
        for (ids, mass), distribution in zip(alive.items(), distributions):
            after[ids] = distribution
            for token in np.flatnonzero(distribution).tolist():
                to = (*ids, token)
                ends = token in eos or step == max_new_tokens
                ends = ends or any(
                    bool(torch.as_tensor(stop(torch.tensor([[*prompt, *to]]), None)).all())
                    for stop in criteria
                )
                (done if ends else grown)[to] = mass * float(distribution[token])
        alive = grown
        if not alive:
            break
    return Plain(prompt, done, after)


def total_variation(distribution: Distribution, target: Distribution) -> float:
    """Half the sum of the absolute differences, plus half of the mass that either lacks to 1: an upper bound of the distance."""
    apart = sum(
        abs(distribution.get(ids, 0.0) - target.get(ids, 0.0)) for ids in distribution.keys() | target.keys()
    )
    return 0.5 * (apart + abs(1 - sum(distribution.values())) + abs(1 - sum(target.values())))


class Numbered:
    """Numbers the distinct next-token distributions of some enumerations, so that equal distributions share a key."""

    def __init__(self, plain: Sequence[Plain]):
        self.distributions: list[np.ndarray] = []
        self.of: list[dict[Ids, int]] = []
        for one in plain:
            numbers = {}
            for ids, distribution in one.after.items():
                known = self(distribution) if self.distributions else np.array(-1)
                if known < 0:
                    self.distributions.append(distribution)
                numbers[ids] = int(known) if known >= 0 else len(self.distributions) - 1
            self.of.append(numbers)

    def __call__(self, probs: np.ndarray) -> np.ndarray:
        """``[..., V] -> [...]`` the number of each distribution, -1 for one that is not among them (to 1e-9)."""
        near = np.abs(probs[..., None, :] - np.stack(self.distributions)).max(-1) < 1e-9
        return np.where(near.any(-1), near.argmax(-1), -1)
