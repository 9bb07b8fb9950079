"""Is a selector's regret logarithmic, and what does drift cost? What recorded requests are too short for (SPIN, arXiv 2503.15921, theorem 1).

A round of arm j takes known seconds and commits 1 to 6 tokens (truncated geometric, block of 5). Regret after T slots is the run's
seconds minus those that the oracle needs for the same expected tokens: sum of seconds - sum of expected tokens / rate of the best
matching, where a matching's rate is a ratio of sums (all rows' expected tokens over all rows' seconds) and the best one respects the
capacities; it changes with means. Regret is per concurrent request; ``overhead`` is regret over the oracle's seconds.
low and high are the 95 % bootstrap interval of the mean over seeds.

Scenarios, of requests that never end: stationary, identical requests; drifting; too_little_exploration, two arms 2 % apart;
stationary_theorem, SPIN alone, wide gaps, capacities that just fit. ``regret_over_log`` is regret / ln T, ``flatness`` its largest over its
smallest value in the last two decades, ``slope`` the exponent of T over the last one (1: linear). Selectors are the library's; only the
random numbers come from a sequential generator, for speed. It takes about five minutes on one core, and nothing is timed. Requests that
come and go, pooled statistics and costs of switching are in spin_selection.py, on recorded texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401
import numpy as np

from specdec.lab import plots
from specdec.lab.bootstrap import mean_interval
from specdec.lab.console import table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted
from specdec.lab.simulated import (
    ALIKE,
    APART,
    BLOCK,
    CLOSE,
    SCALE,
    Scenario,
    abrupt,
    checkpoints,
    simulate,
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
FITTING = (4, 2, 4, 2, 4)  # exactly enough room for every request's best arm
SHOWN = ("selector", "slots", "regret", "low", "high", "overhead", "flatness", "slope")


@dataclass(frozen=True)
class Settings(Plotted):
    quick: bool = option(False, "200 slots and 2 seeds, as a smoke test")
    seed: int = option(0, "first seed (default: 0)")


EVERY: dict[str, Any] = {
    "Fixed(2)": Fixed(2), "Random": Random(), "EpsilonGreedy": EpsilonGreedy(0.1),
    "UCB1": UCB1(SCALE), "Thompson": Thompson(SCALE),
    "Thompson, spread 0.2": Thompson(SCALE, spread=0.2), "EXP3": EXP3(0.1, SCALE),
    "UCBSpec": UCBSpec(BLOCK), "EXP3Spec": EXP3Spec(BLOCK),
    "Hedge": Hedge(scale=SCALE), "Spin": Spin(exploration=10),
    "Spin, learns always": Spin(exploration=10, learn="always"),
}  # fmt: skip
LITTLE: dict[str, Any] = {
    "Spin, exploration 1": Spin(exploration=1),
    "Spin, exploration 10": Spin(exploration=10),
    "Spin, exploration 100": Spin(exploration=100),
    "EpsilonGreedy": EVERY["EpsilonGreedy"],
    "UCB1": EVERY["UCB1"],
    "Thompson, spread 0.2": EVERY["Thompson, spread 0.2"],
}
THEOREM: dict[str, Any] = {f"Spin, exploration {n}": Spin(exploration=n) for n in (3, 10, 30)}


def plan(quick: bool) -> list[tuple[Scenario, dict[str, Any]]]:
    """Scenarios and their selectors; ``quick`` is a toy size for tests."""
    slots, seeds, turn = (200, 2, 50) if quick else (30_000, 8, 2_500)
    return [
        (Scenario("stationary", stationary(ALIKE), 2, slots, seeds), EVERY),
        (Scenario("drifting", abrupt(ALIKE, turn), 2, slots, seeds), EVERY),
        (Scenario("too_little_exploration", stationary(CLOSE), 2, slots, seeds), LITTLE),
        (Scenario("stationary_theorem", stationary(APART), 12, slots, seeds, FITTING), THEOREM),
    ]


def main(s: Settings) -> None:
    s.begin()
    rows: list[Row] = []
    for scenario, who in plan(s.quick):
        for name, selector in who.items():
            rows += play(scenario, name, selector, s.seed)
        last = [r for r in rows if r["scenario"] == scenario.name and r["slots"] == scenario.slots]
        print(f"\n{scenario.name}\n" + table(last, SHOWN), flush=True)
    s.save(rows)
    s.draw({"spin_regret": lambda: curves(rows), "spin_regret_theorem": lambda: theorem(rows)})


def play(scenario: Scenario, name: str, selector: Any, seed: int) -> list[Row]:
    """A row for every checkpoint. Seeds are replicas in one batch if rows are independent, else separate runs."""
    seeds = [1000 * seed + i for i in range(scenario.seeds)]
    runs = [
        simulate(scenario, selector, one)
        for one in ([[i] for i in seeds] if scenario.capacities else [seeds])
    ]
    regret, ideal = (np.concatenate(part, 1) for part in zip(*runs))
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
            "requests": scenario.requests, "seeds": scenario.seeds,
        }
        for i, slots in enumerate(marks)
    ]  # fmt: skip


def flatness(slots: list[int], regret: np.ndarray) -> float:
    """Largest over smallest regret / ln T of the last two decades: 1 is logarithmic, 55 is linear over 300 to 30,000."""
    ratio = [r / np.log(t) for t, r in zip(slots, regret) if t >= slots[-1] / 100]
    return max(ratio) / min(ratio) if min(ratio) > 0 else float("inf")


# -- figures ----------------------------------------------------------------------------------------------------------------

TITLES = {
    "stationary": "stationary, requests alike",
    "drifting": "means change every 2,500 rounds",
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
    """Regret of every selector over slots."""
    drawing, panels = plots.panels(1, 2, (11, 4.8), bare=True, layout="constrained")
    for axes, scenario in zip(panels.flat, ("stationary", "drifting")):
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


if __name__ == "__main__":
    main(parse(Settings, __doc__))
