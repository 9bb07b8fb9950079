"""A simulation for selectors: requests, arms, tokens and seconds, and an oracle that knows the goodputs (SPIN, arXiv 2503.15921)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec.capabilities import SelectorInfo
from specdec.rng import Philox, seeds
from specdec.selectors.matching import assign
from specdec.types import Context, Feedback

BLOCK = 5  # drafted tokens a round
SECONDS = np.array([0.8, 0.9, 1.0, 1.2, 1.5])  # of a round, by arm; the unit is arm 2's round
SCALE = (BLOCK + 1) / SECONDS.min()  # an upper bound of a round's tokens a second
# Goodput [types, arms]. ALIKE: the last arm has the most tokens a round, arm 1 the most a second; CLOSE: two arms 2 % apart;
# APART: three types of requests, wide gaps.
ALIKE = np.array([[2.4, 3.0, 2.7, 2.1, 2.2]])
CLOSE = np.array([[2.94, 3.0, 2.0, 2.0, 2.0]])
APART = np.array([[3.0, 1.6, 1.6, 1.2, 1.0], [1.4, 1.6, 3.0, 1.6, 1.4], [1.3, 1.4, 1.6, 1.6, 3.0]])


@dataclass(frozen=True)
class Scenario:
    """A setting of the simulation.

    Attributes:
        goodput: ``goodput(slot) [types, arms]``, tokens a second. requests: rows at a time. slots: rounds. seeds: number of runs.
        capacities: rows of each arm; ``None``: unlimited.
    """

    name: str
    goodput: Callable[[int], np.ndarray]
    requests: int
    slots: int
    seeds: int
    capacities: tuple[int, ...] | None = None


class Numbers:
    """The ``Rng`` of a simulated run, on one sequential generator, because keyed numbers are slower."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator

    def categorical(self, probs: torch.Tensor, key: Any) -> torch.Tensor:
        cdf = probs.numpy().cumsum(-1)
        u = self.generator.random((len(cdf), 1)) * cdf[:, -1:]
        return torch.from_numpy((cdf <= u).sum(-1))

    def select(self, rows: torch.Tensor) -> Numbers:
        return self


def acceptance(mean: np.ndarray) -> np.ndarray:
    """The acceptance rate a of a draft with ``mean`` tokens a round: ``(1 - a^(BLOCK + 1)) / (1 - a) = mean``, by bisection."""
    low, high = np.zeros_like(mean), np.ones_like(mean)
    for _ in range(50):
        a = (low + high) / 2
        more = sum(a**i for i in range(BLOCK + 1)) < mean
        low, high = np.where(more, a, low), np.where(more, high, a)
    return (low + high) / 2


def oracle(goodput: np.ndarray, capacities: tuple[int, ...] | None) -> float:
    """Tokens a second, as a ratio of sums, of the best matching of rows with ``goodput [B, arms]``.

    The matching with the largest ``sum of tokens / sum of seconds`` is found by Dinkelbach's iteration: maximise ``sum (tokens - rate *
    seconds)``, take the matching's own rate, repeat.
    """
    B = len(goodput)
    room = np.array(capacities or [B] * len(SECONDS))
    rate, rows = 0.0, np.arange(B)
    while True:
        arm = assign(goodput * SECONDS - rate * SECONDS, room)
        better = (goodput * SECONDS)[rows, arm].sum() / SECONDS[arm].sum()
        if better <= rate + 1e-12:
            return rate
        rate = better


def checkpoints(slots: int) -> list[int]:
    """About ten slots a decade, the last one included."""
    return sorted({*np.geomspace(10, slots, int(10 * np.log10(slots / 10)) + 1).astype(int).tolist(), slots})


def simulate(scenario: Scenario, selector: Any, numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Regret and the oracle's seconds, both ``[checkpoints, seeds]`` and per concurrent request.

    Args:
        numbers: seeds. Several seeds run as independent replicas in one selector state.
    """
    noise = np.random.default_rng(numbers)
    R, B = len(numbers), len(numbers) * scenario.requests
    kinds = len(scenario.goodput(0))
    kind = np.tile(np.arange(scenario.requests) * kinds // scenario.requests, R)
    request, length, start = np.arange(B), np.ones(B, dtype=np.int64), np.ones(B, dtype=np.int64)
    room = torch.tensor(scenario.capacities or [B] * len(SECONDS))
    state, rng, blank = selector.init(len(SECONDS)), Numbers(noise), torch.zeros(B, 1, dtype=torch.long)
    table, accept, rate = None, np.zeros(0), 0.0
    lost, ideal = np.zeros(R), np.zeros(R)
    marks, regret, seconds = checkpoints(scenario.slots), list[np.ndarray](), list[np.ndarray]()
    for t in range(scenario.slots):
        now = scenario.goodput(t)
        if table is not now:
            table, tokens_mean = now, now * SECONDS
            accept = np.log(acceptance(tokens_mean))
            rate = oracle(table[kind[: scenario.requests]], scenario.capacities)
        context = Context(blank, *(torch.from_numpy(x) for x in (length, start, request)))
        arm_tensor, _, state = selector.select(state, context, room, rng)
        arm = arm_tensor.numpy()
        spent, due = SECONDS[arm], tokens_mean[kind, arm] / rate
        lost += (spent - due).reshape(R, -1).mean(1)
        ideal += due.reshape(R, -1).mean(1)
        if SelectorInfo.of(selector).full_information:
            each = drawn(noise.random((B, len(SECONDS))), accept[kind])
            tokens, reward = each[np.arange(B), arm], each / SECONDS
        else:
            tokens = drawn(noise.random(B), accept[kind, arm])
            reward = tokens / spent
        made, took, paid = (torch.from_numpy(x) for x in (tokens, spent, reward))
        state = selector.update(state, Feedback(context.request, arm_tensor, made, made, took, paid))
        length = length + tokens.astype(np.int64)
        if t + 1 == marks[len(regret)]:
            regret.append(lost.copy())
            seconds.append(ideal.copy())
    return np.array(regret), np.array(seconds)


def overhead(selector: Any, batch: int, room: int, calls: int) -> tuple[float, float]:
    """Median milliseconds of a select and of an update with the library's keyed generator, ``room`` rows per arm."""
    arms, noise = len(SECONDS), np.random.default_rng(0)
    state, rng = selector.init(arms), Philox(seeds(0, batch))
    capacities, times = torch.full((arms,), room), np.zeros((calls, 2))
    request, blank = torch.arange(batch), torch.zeros(batch, 1, dtype=torch.long)
    for t in range(calls):
        context = Context(blank, torch.full((batch,), t + 1), torch.ones(batch, dtype=torch.long), request)
        began = time.perf_counter()
        arm, _, state = selector.select(state, context, capacities, rng)
        times[t, 0] = time.perf_counter() - began
        tokens = torch.from_numpy(noise.integers(1, BLOCK + 2, batch))
        reward = torch.from_numpy(
            noise.random((batch, arms) if SelectorInfo.of(selector).full_information else batch)
        )
        feedback = Feedback(request, arm, tokens, tokens, torch.from_numpy(SECONDS)[arm], reward)
        began = time.perf_counter()
        state = selector.update(state, feedback)
        times[t, 1] = time.perf_counter() - began
    return tuple(1000 * np.median(times, 0))  # type: ignore[return-value]


def drawn(u: np.ndarray, log_accept: np.ndarray) -> np.ndarray:
    """Tokens of a round: one more than the accepted tokens of a block, each accepted with the same probability after the last."""
    return 1.0 + np.minimum(BLOCK, np.floor(np.log(np.maximum(u, 1e-300)) / log_accept))


def stationary(table: np.ndarray) -> Callable[[int], np.ndarray]:
    """The same goodputs in every slot."""
    return lambda slot: table


def abrupt(table: np.ndarray, every: int) -> Callable[[int], np.ndarray]:
    """The arms' goodputs rotate by two places every ``every`` slots."""
    tables = [np.roll(table, 2 * i, axis=1) for i in range(table.shape[1])]
    tables = [np.maximum(x, 1.02 / SECONDS) for x in tables]
    return lambda slot: tables[slot // every % len(tables)]
