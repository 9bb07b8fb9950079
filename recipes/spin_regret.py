"""Regret of the selectors in seconds, on simulated requests and arms (SPIN, arXiv 2503.15921, theorem 1: O(log T)).

A round of arm j takes known seconds and commits 1 to 6 tokens (truncated geometric, block of 5). Regret after T slots is what the run
took, minus what the oracle would have needed for the same expected tokens: sum of seconds - sum of expected tokens / rate of the best
matching, where a matching's rate is a ratio of sums (all rows' expected tokens over all rows' seconds) and the best one respects the
capacities and is that of the moment where means or requests change. It is given per concurrent request; ``overhead`` is regret over the
oracle's seconds. Intervals are 95 % bootstrap over seeds, of the mean.

Scenarios: stationary, requests alike, for ever; heterogeneous, three types with different best arms and binding capacities;
drifting_slow and drifting_abrupt; churn, requests of 30 to 60 rounds; too_little_exploration, two arms 2 % apart; stationary_theorem,
SPIN alone, wide gaps, capacities that just fit. ``regret_over_log`` is regret / ln T, ``flatness`` its largest over its smallest value
in the last two decades, ``slope`` the exponent of T over the last one (1: linear). Selectors are the library's own objects; only the random
numbers come from a sequential generator, for speed. Rows of scenario ``overhead`` are milliseconds a
call, with keyed numbers. Takes about two hours on a core of its own; ``--workers`` spreads the
selectors over processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _report import write
from _spin_regret_world import (
    ALIKE,
    APART,
    BLOCK,
    CLOSE,
    SCALE,
    TYPES,
    Scenario,
    abrupt,
    checkpoints,
    overhead,
    simulate,
    slow,
    stationary,
)

from specdec.selectors import (
    EXP3,
    UCB1,
    EpsilonGreedy,
    EXP3Spec,
    Fixed,
    Hedge,
    Random,
    Spin,
    Thompson,
    UCBSpec,
)

Row = dict[str, Any]
Make = Callable[[np.ndarray], Any]


@dataclass
class Settings:
    quick: bool = False
    seed: int = 0
    workers: int = 1
    json: str | None = None
    plots: str | None = None


CAPACITIES = (3, 2, 3, 2, 3)  # 13 slots for 12 requests, three of which cannot have their best arm
FITTING = (4, 2, 4, 2, 4)  # every request can have its best arm, and not one more


def always(selector: Any) -> Make:
    return lambda types: selector


def known(make: Callable[[Any], Any]) -> Make:
    """A selector whose statistics are shared by the requests of a type, which the user knows."""
    return lambda types: make(lambda context: types[context.request.numpy()].tolist())


EVERY: dict[str, Make] = {
    "Fixed(2)": always(Fixed(2)),
    "Random": always(Random()),
    "EpsilonGreedy": always(EpsilonGreedy(0.1)),
    "UCB1": always(UCB1(SCALE)),
    "Thompson": always(Thompson(SCALE)),
    "Thompson, spread 0.2": always(Thompson(SCALE, spread=0.2)),
    "EXP3": always(EXP3(0.1, SCALE)),
    "UCBSpec": always(UCBSpec(BLOCK)),
    "EXP3Spec": always(EXP3Spec(BLOCK)),
    "Hedge": always(Hedge(scale=SCALE)),
    "Spin": always(Spin(exploration=10)),
    "Spin, learns always": always(Spin(exploration=10, learn="always")),
}
POOLED: dict[str, Make] = {
    "EpsilonGreedy, pool by type": known(lambda pool: EpsilonGreedy(0.1, pool=pool)),
    "Thompson 0.2, pool by type": known(lambda pool: Thompson(SCALE, spread=0.2, pool=pool)),
    "Spin, pool by type": known(lambda pool: Spin(exploration=10, pool=pool)),
    "Spin, pool by type, warm 50": known(lambda pool: Spin(exploration=10, pool=pool, warm=50)),
    "Spin, prior of all": always(Spin(exploration=10, prior=2.0, learn="always")),
    "Spin, exploration 3": always(Spin(exploration=3)),
    "Spin, exploration 3, prior by type": known(
        lambda pool: Spin(exploration=3, prior=10.0, learn="always", pool=pool)
    ),
}
LITTLE: dict[str, Make] = {
    "Spin, exploration 1": always(Spin(exploration=1)),
    "Spin, exploration 10": always(Spin(exploration=10)),
    "Spin, exploration 100": always(Spin(exploration=100)),
    "EpsilonGreedy": EVERY["EpsilonGreedy"],
    "UCB1": EVERY["UCB1"],
    "Thompson, spread 0.2": EVERY["Thompson, spread 0.2"],
}
THEOREM: dict[str, Make] = {f"Spin, exploration {n}": always(Spin(exploration=n)) for n in (3, 10, 30)}


def plan(quick: bool) -> list[tuple[Scenario, dict[str, Make]]]:
    """Scenarios and who plays them; ``quick`` is a toy size for tests."""
    turn = 50 if quick else 2_500
    many, few = ((200, 2), (200, 2)) if quick else ((100_000, 8), (100_000, 3))
    return [
        (Scenario("stationary", stationary(ALIKE), 2, *many), EVERY),
        (Scenario("heterogeneous", stationary(TYPES), 12, *few, capacities=CAPACITIES), EVERY),
        (Scenario("drifting_slow", slow(2 * turn), 2, *many), EVERY),
        (Scenario("drifting_abrupt", abrupt(ALIKE, turn), 2, *many), EVERY),
        (Scenario("churn", stationary(TYPES), 16, *few, life=(30, 60)), {**EVERY, **POOLED}),
        (Scenario("too_little_exploration", stationary(CLOSE), 2, *many), LITTLE),
        (Scenario("stationary_theorem", stationary(APART), 12, *few, capacities=FITTING), THEOREM),
    ]


def main(s: Settings) -> None:
    draw = None
    if s.plots:
        try:
            from _spin_regret_plots import draw
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "matplotlib":
                raise
            raise SystemExit("--plots needs matplotlib: pip install matplotlib") from None
    rows = overheads(20 if s.quick else 1000)
    games = [(s.quick, at, name, s.seed) for at, (_, who) in enumerate(plan(s.quick)) for name in who]
    with ExitStack() as stack:
        played: Iterable[list[Row]] = map(game, games)
        if s.workers > 1:
            spawn = multiprocessing.get_context("spawn")
            played = stack.enter_context(ProcessPoolExecutor(s.workers, spawn)).map(game, games)
        before = ""
        for one in played:
            rows += one
            last = one[-1]
            if last["scenario"] != before:
                before = last["scenario"]
                print(
                    f"\n{before}: {last['slots']} slots, {last['requests']} requests, {last['seeds']} seeds"
                )
            print(
                f"  {last['selector']:<36} regret {last['regret']:10.1f} [{last['low']:.1f}, {last['high']:.1f}] s"
                f"  overhead {100 * last['overhead']:5.2f} %  flatness {last['flatness']:.2f}  slope {last['slope']:.2f}  ({last['run_seconds']:.0f} s)",
                flush=True,
            )
    if s.json:
        write(s.json, rows, s.seed)
    if draw:
        print("\nplots:", ", ".join(draw(rows, s.plots)))


def overheads(calls: int) -> list[Row]:
    """Milliseconds a call at batch 16 and 5 arms, with room for all and with 20 slots for the 16 rows."""
    print(f"{'ms a call, batch 16, 5 arms':<30}{'select':>8}{'update':>8}{'tight select':>14}")
    rows: list[Row] = []
    for name, make in {**EVERY, "Spin, exploring": always(Spin(exploration=10**6))}.items():
        selector = make(np.zeros(0))
        for capacities, room in (("ample", 16), ("tight", 4)):
            select, update = overhead(selector, 16, room, calls)
            rows.append({"scenario": "overhead", "selector": name, "capacities": capacities, "batch": 16})
            rows[-1] |= {"arms": 5, "select_ms": select, "update_ms": update}
        print(
            f"{name:<30}{rows[-2]['select_ms']:8.3f}{rows[-2]['update_ms']:8.3f}{rows[-1]['select_ms']:14.3f}"
        )
    return rows


def game(one: tuple[bool, int, str, int]) -> list[Row]:
    """``play`` of what can be sent to another process: toy size, number of the scenario, name of the selector, first seed."""
    quick, at, name, seed = one
    torch.set_num_threads(1)
    scenario, who = plan(quick)[at]
    return play(scenario, name, who[name], seed)


def play(scenario: Scenario, name: str, make: Make, seed: int) -> list[Row]:
    """A row for every checkpoint. Seeds are replicas in one batch where nothing couples the rows, else runs of their own."""
    began = time.perf_counter()
    seeds = [1000 * seed + i for i in range(scenario.seeds)]
    coupled = scenario.capacities is not None or scenario.life is not None
    runs = [simulate(scenario, make, one) for one in ([[i] for i in seeds] if coupled else [seeds])]
    regret, ideal = (np.concatenate(part, 1) for part in zip(*runs))
    took = time.perf_counter() - began
    marks = checkpoints(scenario.slots)
    flat = flatness(marks, regret.mean(1))
    earlier = np.interp(np.log(scenario.slots / 10), np.log(marks), regret.mean(1))
    slope = np.log10(max(regret[-1].mean(), 1e-9) / max(earlier, 1e-9))
    return [
        {
            "scenario": scenario.name,
            "selector": name,
            "slots": slots,
            "regret": regret[i].mean(),
            "low": interval(regret[i])[0],
            "high": interval(regret[i])[1],
            "overhead": regret[i].mean() / ideal[i].mean(),
            "regret_over_log": regret[i].mean() / np.log(slots),
            "flatness": flat,
            "slope": slope,
            "requests": scenario.requests,
            "seeds": scenario.seeds,
            "run_seconds": took,
        }
        for i, slots in enumerate(marks)
    ]


def flatness(slots: list[int], regret: np.ndarray) -> float:
    """Largest over smallest regret / ln T of the last two decades: 1 is logarithmic, 56 is linear over 1e3 to 1e5."""
    ratio = [r / np.log(t) for t, r in zip(slots, regret) if t >= slots[-1] / 100]
    return max(ratio) / min(ratio) if min(ratio) > 0 else float("inf")


def interval(values: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean (too narrow for a handful of values)."""
    means = np.random.default_rng(0).choice(values, (draws, len(values))).mean(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="200 slots and 2 seeds, to see that it runs")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="first seed (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=Settings.workers, help="processes (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plots", metavar="DIR", help="write PNGs (needs matplotlib)")
    a = parser.parse_args()
    main(Settings(a.quick, a.seed, a.workers, a.json, a.plots))
