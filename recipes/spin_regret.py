"""Regret of the selectors in seconds, on simulated requests and arms (SPIN, arXiv 2503.15921, theorem 1: O(log T)).

A round of arm j takes known seconds and commits 1 to 6 tokens (truncated geometric, block of 5). Regret after T slots is the run's
seconds minus those that the oracle needs for the same expected tokens: sum of seconds - sum of expected tokens / rate of the best
matching, where a matching's rate is a ratio of sums (all rows' expected tokens over all rows' seconds) and the best one respects the
capacities; it changes with means and requests. Regret is per concurrent request; ``overhead`` is regret over the oracle's seconds.
low and high are the 95 % bootstrap interval of the mean over seeds, and with fewer than six seeds their range.

Scenarios: stationary, identical requests that never end; heterogeneous, three types with different best arms and binding capacities;
drifting_slow and drifting_abrupt; churn, requests of 30 to 60 rounds; too_little_exploration, two arms 2 % apart; stationary_theorem,
SPIN alone, wide gaps, capacities that just fit. ``regret_over_log`` is regret / ln T, ``flatness`` its largest over its smallest value
in the last two decades, ``slope`` the exponent of T over the last one (1: linear). Selectors are the library's; only the random
numbers come from a sequential generator, for speed. Rows of scenario ``overhead`` are milliseconds per call, with the keyed generator.
It takes about two hours on one core; ``--workers`` spreads the selectors over processes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch

from specdec.lab import plots
from specdec.lab.options import option, parse
from specdec.lab.paired import mean_interval
from specdec.lab.recipe import Plotted
from specdec.lab.simulated import (
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


@dataclass(frozen=True)
class Settings(Plotted):
    quick: bool = option(False, "200 slots and 2 seeds, as a smoke test")
    seed: int = option(0, "first seed (default: 0)")
    workers: int = option(1, "processes")


CAPACITIES = (3, 2, 3, 2, 3)  # 13 slots for 12 requests, three of which cannot have their best arm
FITTING = (4, 2, 4, 2, 4)  # exactly enough room for every request's best arm


def always(selector: Any) -> Make:
    return lambda types: selector


def known(make: Callable[[Any], Any]) -> Make:
    """A selector whose statistics are pooled by the requests' types, which the user knows."""
    return lambda types: make(lambda context: types[context.request.numpy()].tolist())


EVERY: dict[str, Make] = {
    "Fixed(2)": always(Fixed(2)), "Random": always(Random()), "EpsilonGreedy": always(EpsilonGreedy(0.1)),
    "UCB1": always(UCB1(SCALE)), "Thompson": always(Thompson(SCALE)),
    "Thompson, spread 0.2": always(Thompson(SCALE, spread=0.2)), "EXP3": always(EXP3(0.1, SCALE)),
    "UCBSpec": always(UCBSpec(BLOCK)), "EXP3Spec": always(EXP3Spec(BLOCK)),
    "Hedge": always(Hedge(scale=SCALE)), "Spin": always(Spin(exploration=10)),
    "Spin, learns always": always(Spin(exploration=10, learn="always")),
}  # fmt: skip
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
    """Scenarios and their selectors; ``quick`` is a toy size for tests."""
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
    s.begin()
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
    s.save(rows)
    drawings = {"spin_regret": curves, "spin_regret_theorem": theorem, "spin_regret_churn": churn}
    s.draw({name: partial(make, rows) for name, make in drawings.items()})


def overheads(calls: int) -> list[Row]:
    """Milliseconds per call at batch 16 and 5 arms, with unlimited room and with 20 slots for the 16 rows."""
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
    """``play`` with picklable arguments, for other processes: toy size, number of the scenario, name of the selector, first seed."""
    quick, at, name, seed = one
    torch.set_num_threads(1)
    scenario, who = plan(quick)[at]
    return play(scenario, name, who[name], seed)


def play(scenario: Scenario, name: str, make: Make, seed: int) -> list[Row]:
    """A row for every checkpoint. Seeds are replicas in one batch if rows are independent, else separate runs."""
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
            "scenario": scenario.name, "selector": name, "slots": slots, "regret": regret[i].mean(),
            "low": mean_interval(regret[i])[0], "high": mean_interval(regret[i])[1],
            "overhead": regret[i].mean() / ideal[i].mean(),
            "regret_over_log": regret[i].mean() / np.log(slots), "flatness": flat, "slope": slope,
            "requests": scenario.requests, "seeds": scenario.seeds, "run_seconds": took,
        }
        for i, slots in enumerate(marks)
    ]  # fmt: skip


def flatness(slots: list[int], regret: np.ndarray) -> float:
    """Largest over smallest regret / ln T of the last two decades: 1 is logarithmic, 56 is linear over 1e3 to 1e5."""
    ratio = [r / np.log(t) for t, r in zip(slots, regret) if t >= slots[-1] / 100]
    return max(ratio) / min(ratio) if min(ratio) > 0 else float("inf")


# -- figures ----------------------------------------------------------------------------------------------------------------

TITLES = {
    "stationary": "stationary, requests alike",
    "heterogeneous": "three types, binding capacities",
    "drifting_slow": "means drift slowly",
    "drifting_abrupt": "means change abruptly",
    "too_little_exploration": "two arms 2 % apart",
    "stationary_theorem": "wide gaps, capacities that just fit",
}
COLOURS = {
    "Fixed(2)": "#bbbbbb",
    "Random": "#777777",
    "EpsilonGreedy": "#d98b2b",
    "UCB1": "#2a9d8f",
    "Thompson": "#90be6d",
    "Thompson, spread 0.2": "#43702a",
    "EXP3": "#c8a2c8",
    "UCBSpec": "#c44e52",
    "EXP3Spec": "#e79aa0",
    "Hedge": "#8172b2",
    "Spin": "#1f77b4",
    "Spin, learns always": "#0b3d66",
}


def of(rows: list[Row], scenario: str) -> dict[str, list[Row]]:
    """Selector -> its rows of a scenario, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["scenario"] == scenario:
            found.setdefault(row["selector"], []).append(row)
    return found


def lines(axes: Any, some: dict[str, list[Row]], column: str, colours: dict[str, Any]) -> None:
    """A line and an interval for every selector."""
    for name, seen in some.items():
        seen = [r for r in seen if r["slots"] >= 30]
        slots = [r["slots"] for r in seen]
        colour = colours[name]
        axes.plot(slots, [r[column] for r in seen], color=colour, lw=1.8, label=name)
        if column == "regret":
            axes.fill_between(
                slots, [r["low"] for r in seen], [r["high"] for r in seen], color=colour, alpha=0.15, lw=0
            )
    axes.set_xscale("log")
    axes.set_xlabel("slots (rounds of each request)")


def curves(rows: list[Row]) -> Any:
    """Regret of every selector over slots, a panel for each scenario without churn."""
    shown = ("stationary", "heterogeneous", "drifting_slow", "drifting_abrupt")
    drawing, panels = plots.panels(2, 2, (11, 8.4), bare=True, layout="constrained")
    for axes, scenario in zip(panels.flat, shown):
        lines(axes, of(rows, scenario), "regret", COLOURS)
        axes.set_yscale("log")
        axes.set_title(TITLES[scenario], loc="left")
        axes.set_ylabel("regret, seconds a request")
    handles, names = panels[0, 0].get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return drawing


def theorem(rows: list[Row]) -> Any:
    """Regret over ln T: flat where regret is logarithmic."""
    drawing, (panels,) = plots.panels(1, 2, (11, 4.2), bare=True, layout="constrained")
    for axes, scenario in zip(panels, ("stationary_theorem", "too_little_exploration")):
        some = of(rows, scenario)
        palette = [f"C{i}" for i in range(10)]
        lines(axes, some, "regret_over_log", dict(zip(some, palette)))
        axes.set_title(TITLES[scenario], loc="left")
        axes.set_ylabel("regret / ln T, seconds a request")
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=9)
    return drawing


def churn(rows: list[Row]) -> Any:
    """Each selector's overhead over the oracle in the run with arrivals and departures."""
    last = sorted((seen[-1] for seen in of(rows, "churn").values()), key=lambda r: r["overhead"])
    drawing, ((axes,),) = plots.panels(1, 1, (7.5, 0.3 * len(last) + 1), bare=True)
    colours = ["#1f77b4" if r["selector"].startswith("Spin") else "#b5c7d3" for r in last]
    bars = axes.barh([r["selector"] for r in last], [100 * r["overhead"] for r in last], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds beyond the oracle's, %")
    axes.set_title("requests of 30 to 60 rounds, three types", loc="left")
    return drawing


if __name__ == "__main__":
    main(parse(Settings, __doc__))
