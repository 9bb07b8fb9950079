"""SPIN end to end on a mixed workload, with every configuration on the same cores and the same attention as what it is compared with.

    python recipes/spin_end_to_end.py --json docs/results/spin_end_to_end.json --plots docs/figures

Requests of three domains and of several temperatures, with ragged prompts, are decoded in one batch. Prompts of validation packages are for learning and for the
seconds that rounds are charged; the workloads are made of prompts of test packages. Rows: `configuration, batch, cores, attention, goodput`
(tokens a second after the prefill, tokens of all workloads over their seconds), its ratios to `plain`, `smallest` and `best_fixed` of
the same batch, cores and attention (`ratio_to_`, and `call_to_` by the seconds of whole calls, with the prefill: a pipeline's drafts read the
prompts after it), tau, the share of rounds of each `arms`, milliseconds of a round by stage, and `rounds:` and `milliseconds:` of a round by how many rows are
left. Intervals (`_low`, `_high`) are 95 %
bootstraps over workloads; with fewer than 5 workloads there are none.

- `plain`: no draft. `smallest`: the smallest draft for all rows. `fixed:NAME`: a draft for all rows. All are tried at `auto/1`; those with at least 0.8 of
  the fastest one's goodput run at every place. `best_fixed`: the fastest of them at the place, over all workloads. It is chosen by the runs that it is reported
  with, which flatters it, and its interval does not include the choice.
- `selection`: the paper's selector: statistics of a request's own, a random draft for 5 rounds, then a maximum-weight matching within
  the drafts' capacities for 2^k rounds. With padded attention; `selection+packed`, `selection+decomposed`, `selection+auto` with others.
- `spin`: the paper's selector, and a pipeline of `--micro-batches` (drafting in another process, on the other core).
- `pooled`: the same algorithm with statistics pooled by the kind of prompt and the temperature, learned on `--learn` other requests and kept from then on;
  it has all arms (n-gram, SPIRe and no speculation where they are given). Its matching counts what every draft in use costs the batch's rounds
  (`selectors.opening`), which the paper, with a device for each draft, need not.
- `planned`: `sd.auto`: the drafts of `pooled`, or none, chosen for all rows together by seconds of whole rounds of several batches, and by chances of
  acceptance for each temperature. Both are measured at the same place on validation prompts beforehand. (`pooled` is charged seconds and learns at `auto/1`.)

Attention is padded, packed, decomposed, or `auto`, the library's choice (C kernels on a CPU), which does not pad. A place `auto/2` has
two cores: two threads, or a pipeline of two processes with one each. All products read bfloat16 copies of the weights
(`--no-bf16-weights`: the float32 weights). Drafts of one shape draft together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import checkout  # noqa: F401
import torch

import specdec as sd
from specdec import selectors, zoo
from specdec.cost.arms import weights
from specdec.executors import Pipelined
from specdec.kernels.attention import fit
from specdec.lab import console, plots
from specdec.lab.arm_times import ARMS, POOL, charges, half_way, load_pool, measured
from specdec.lab.arms import PoolRun, goodput, pool_run
from specdec.lab.clock import shuffled
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted
from specdec.lab.workload import ByDomain, Workload, temperatures, workload
from specdec.selectors.kinds import ByTemperature, Product
from specdec.selectors.opening import Opening

COLUMNS = ("configuration", "is", "attention", "cores", "goodput", "goodput_low", "goodput_high", "ratio_to_plain",
           "ratio_to_best_fixed", "ratio_to_best_fixed_low", "ratio_to_best_fixed_high", "tau")  # fmt: skip
COLORS = {
    "plain": "0.75",
    "smallest": "0.75",
    "best_fixed": "0.55",
    "spin": "C1",
    "pooled": "C0",
    "planned": "C3",
}
Runs = dict[tuple[str, str], list[PoolRun]]


class Place(NamedTuple):
    """Where a configuration runs."""

    attention: str
    cores: int


@dataclass(frozen=True)
class Settings(Plotted):
    pool: tuple[str, ...] = option(ARMS, "arms: names in the zoo, ngram, none; NAME/K drafts K tokens")
    temperatures: tuple[float, ...] = option((1.0, 0.0), "of the requests, in turn")
    split: Literal["test", "validation"] = option(
        "test", "packages of the workloads' prompts; validation: to choose a pool on"
    )
    batches: tuple[int, ...] = option((16,), "rows at once")
    places: tuple[str, ...] = option(
        ("padded/1", "packed/1", "auto/1", "decomposed/2", "auto/2"), "attention/cores"
    )
    tokens: int = option(128, "new tokens of each request")
    k: int = option(4, "drafted tokens per round, of arms without a length")
    repeats: int = option(6, "workloads, each run by all configurations")
    learn: int = option(192, "requests that the pooled selector learns from beforehand")
    capacity: float = option(1.5, "rows that a draft of `spin` takes, times an equal share of the batch")
    calibrate: int = option(2, "runs of each draft that the planned selector measures beforehand")
    micro_batches: int = option(2, "micro-batches of the pipeline")
    median: int = option(300, "tokens of the median prompt")
    longest: int = option(1000, "tokens of the longest prompt")
    bf16_weights: bool | None = option(
        None,
        "products read bfloat16 copies of the weights, in all configurations (default: where they are exact)",
    )
    quick: bool = option(False, "a one-minute run: one workload, few tokens")


class Parts:
    """The models, and decoders made from them for one batch size."""

    def __init__(self, s: Settings):
        model, tokenizer = zoo.load("pocket-target")
        self.s, self.tokenizer = s, tokenizer
        for threads in (2, 1):  # decomposition plans with this machine's timings
            torch.set_num_threads(threads)
            fit(model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim)
        self.targets = {
            name: sd.HFModel(model, tokenizer, attention=name, bf16_weights=s.bf16_weights)
            for name in {*(place.attention for place in self.places), "auto"}
        }
        self.arms = load_pool(s.pool, s.k, s.bf16_weights)
        self.models = {
            n: arm for n, arm in self.arms.items() if isinstance(arm.draft, sd.drafts.Model)
        }  # the paper's pool
        if not self.models or not all(word.endswith(("/1", "/2")) for word in s.places):
            raise SystemExit(
                "give --pool with at least one model, and --places such as auto/1 or decomposed/2"
            )
        longest = max(arm.length or 0 for arm in self.arms.values())
        if s.tokens < longest + 2:
            raise SystemExit(f"--tokens is {s.tokens}: arms of {longest} tokens need at least {longest + 2}")
        self.smallest = min(self.models, key=lambda name: weights(self.models[name].draft.model))
        self.costs: dict[tuple[str, ...], Any] = {}
        self.opening: Opening | None = None

    @property
    def places(self) -> list[Place]:
        return [Place(name, int(cores)) for name, _, cores in (word.partition("/") for word in self.s.places)]

    def profile(self, batch: int) -> None:
        """Measure rounds of the pool in which all rows use one arm, half way through texts: its rounds are charged these seconds, because a round's own
        depend on the rest of the batch. Rounds of fewer rows say what an arm in use costs."""
        s, target = self.s, self.targets["auto"]
        work, few = self.workload(batch, 1000, "validation"), (3, 1) if s.quick else (16, 9)
        sampling = self.sampling(batch)
        texts = half_way(self.plain(batch, "auto").build(), work.rows, s.tokens, s.seed)
        for pool in (self.models, self.arms):
            found = charges(target, pool, texts, *few, seed=s.seed, sampling=sampling, pooled=True)
            self.costs[tuple(pool)] = found
        if batch == 1:  # no row shares a round with another
            return
        times = measured(target, self.arms, texts, *few[:1], 1 if s.quick else 3, s.seed, sampling, True)
        self.opening = times.opening([arm.length or 0 for arm in self.arms.values()], batch)

    def sampling(self, batch: int) -> sd.Sampling:
        return sd.Sampling(temperatures(self.s.temperatures, batch))

    def workload(self, batch: int, turn: int, split: str | None = None) -> Workload:
        s = self.s
        return workload(self.tokenizer, batch, s.longest, s.seed + turn, s.median, split or s.split)

    def plain(self, batch: int, attention: str) -> Any:
        return sd.decoder(self.targets[attention]).sampling(self.sampling(batch))

    def fixed(self, name: str, batch: int, attention: str) -> Any:
        arm = self.arms[name]
        return self.plain(batch, attention).draft(arm.draft, arm.length).build()

    def chosen(self, arms: dict[str, Any], selector: Any, batch: int, attention: str, **more: Any) -> Any:
        """A decoder whose selector has some of the arms, with their measured costs."""
        costs = self.costs[tuple(arms)]
        return self.plain(batch, attention).pool(arms, selector, costs=costs, stacked=True, **more)

    def paper(self, requests: int, attention: str, batch: int | None = None) -> Any:
        """The paper's selector: its drafts only, and no more of ``batch`` rows (default: of all requests) on one than its capacity."""
        room = math.ceil(self.s.capacity * (batch or requests) / len(self.models))
        capacities = dict.fromkeys(self.models, room)
        return self.chosen(self.models, selectors.Spin(), requests, attention, capacities=capacities)

    def pooled(
        self, batch: int, attention: str, exploration: int = 4, growth: float = 64, warm: int = 30
    ) -> Any:
        at = ByTemperature(temperatures(self.s.temperatures, batch))
        kind = Product((ByDomain(self.tokenizer), at))
        selector = selectors.Spin(exploration, growth, kind, warm=warm, learn="always", opening=self.opening)
        return self.chosen(self.arms, selector, batch, attention).build()

    def planned(self, place: Place, batch: int, requests: int | None = None) -> Any:
        """``sd.auto`` on validation prompts at a place, for rounds of up to ``batch`` rows of so many ``requests`` (default: one batch)."""
        s, arms = self.s, {name: arm for name, arm in self.arms.items() if arm.draft is not None}
        torch.set_num_threads(place.cores)
        made = sd.auto(
            self.plain(requests or batch, place.attention),
            {name: arm.draft for name, arm in arms.items()},
            self.workload(3 * batch, 1000, "validation").rows,
            {name: arm.length or 0 for name, arm in arms.items()},
            sorted({1, max(1, batch // 4), batch}),
            s.tokens,
            s.calibrate,
            seed=s.seed,
            refilled=requests is not None,
        )
        torch.set_num_threads(1)
        return made.decoder

    def taught(self, batch: int) -> Any:
        """What the pooled selector has learned from validation prompts, in batches; on the fastest attention."""
        s, decoder = self.s, self.pooled(batch, "auto", 8, 1, 300)
        selection = decoder.begin(batch)
        for turn in range(math.ceil(s.learn / batch)):
            work = self.workload(batch, 1001 + turn, "validation")
            pool_run(decoder, work.rows, s.tokens, s.seed + turn, selection)
        return selection

    def plans(self, place: Place, fixed: list[str], batch: int, planned: Any) -> dict[str, Callable[[], Any]]:
        """Configuration -> its decoder."""
        at = place.attention
        plans = {
            "plain": lambda: self.plain(batch, at).build(),
            "smallest": lambda: self.fixed(self.smallest, batch, at),
            **{f"fixed:{name}": partial(self.fixed, name, batch, at) for name in fixed},
            "selection" if at == "padded" else f"selection+{at}": lambda: self.paper(batch, at).build(),
            "pooled": lambda: self.pooled(batch, at),
            "planned": lambda: planned,
        }
        if place.cores == 2:
            pipeline = Pipelined(min(self.s.micro_batches, batch), workers="processes")
            plans["spin"] = lambda: self.paper(batch, at).executor(pipeline).build()
        return plans


def main(s: Settings) -> list[dict[str, Any]]:
    if s.quick:
        s = replace(
            s,
            batches=(3,),
            repeats=1,
            learn=3,
            tokens=16,
            calibrate=1,
            pool=(POOL[0], f"{POOL[1]}/2", "ngram", "none"),
        )
        s = replace(s, places=("padded/1", "packed/1", "auto/2"))
    s.begin()
    parts, rows = Parts(s), []
    drafts = [name for name, arm in parts.arms.items() if arm.draft is not None]
    for batch in s.batches:
        parts.profile(batch)
        taught, runs = parts.taught(batch), defaultdict(list)
        works = [parts.workload(batch, turn) for turn in range(s.repeats + 1)]
        for turn, work in enumerate(works):  # the first warms up
            for name in drafts:
                run = pool_run(parts.fixed(name, batch, "auto"), work.rows, s.tokens, s.seed + turn)
                runs[f"fixed:{name}", "auto/1"] += [run] if turn else []
        alone = {name: goodput(runs[f"fixed:{name}", "auto/1"])[0] for name in drafts}
        fixed = [name for name in drafts if alone[name] >= 0.8 * max(alone.values())]
        for name in fixed if Place("auto", 1) in parts.places else ():
            runs.pop((f"fixed:{name}", "auto/1"))  # they run again, among the others
        before = list(rows)
        for turn in compare(parts, works, fixed, taught, runs):  # the first warms up
            console.progress(f"batch {batch}: {turn} of {s.repeats} workloads", stays=True)
            if turn:
                some = {key: made[:turn] for key, made in runs.items()}
                rows = before + table(some, batch, hindsight(parts, fixed, some))
                s.save(rows)
        print(f"\nbatch {batch}\n" + console.table([r for r in rows if r["batch"] == batch], COLUMNS))
    s.draw({"spin_end_to_end": lambda: drawn(rows)}, dpi=150)
    return rows


def hindsight(parts: Parts, fixed: list[str], runs: Runs) -> dict[str, str]:
    """The draft that is best at each place; its runs are those of `best_fixed`."""
    best = {}
    for place in (f"{place.attention}/{place.cores}" for place in parts.places):
        speed = {name: goodput(runs[f"fixed:{name}", place])[0] for name in fixed}
        best[place] = max(fixed, key=speed.__getitem__)
        runs["best_fixed", place] = runs[f"fixed:{best[place]}", place]
    return best


def compare(parts: Parts, works: list[Workload], fixed: list[str], taught: Any, runs: Runs) -> Iterator[int]:
    """Add the runs of all configurations at all places; yields the number of each when it is done."""
    s, batch = parts.s, len(works[0].rows)
    planned, kept = dict[Place, Any](), dict[tuple[str, Place], Any]()
    for place in parts.places:
        planned[place] = parts.planned(place, batch)
        kept["planned", place] = planned[place].begin(batch)
        kept["pooled", place] = parts.pooled(batch, place.attention).begin(batch)
        kept["pooled", place].state = taught.state  # states are values, so this can be shared
        for name in parts.plans(place, fixed, batch, planned[place]):
            runs[name, f"{place.attention}/{place.cores}"] += []  # rows have this order
    for turn, work in enumerate(works):
        plans = [  # those of a place one after another, because they are compared
            (p, *plan)
            for p in shuffled(parts.places, turn)
            for plan in shuffled(parts.plans(p, fixed, batch, planned[p]).items(), turn, p)
        ]
        for place, name, make in plans:
            console.progress(f"workload {turn} of {s.repeats}: {name}, {place.attention}/{place.cores}")
            decoder = make()
            torch.set_num_threads(1 if name == "spin" else place.cores)
            names = decoder.selecting.names if decoder.selecting is not None else (name,)
            run = pool_run(decoder, work.rows, s.tokens, s.seed + turn, kept.get((name, place)))
            torch.set_num_threads(1)
            run = replace(run, arms=Counter({names[a]: n for a, n in run.arms.items()}))
            runs[name, f"{place.attention}/{place.cores}"] += [run] if turn else []
        yield turn


def table(runs: Runs, batch: int, best: dict[str, str]) -> list[dict[str, Any]]:
    """A row per configuration and place; ``best``: the best fixed draft of each place."""
    out, places = [], list(dict.fromkeys(place for _, place in runs))
    first = ("plain", "smallest", "best_fixed")
    order = sorted(runs, key=lambda at: (places.index(at[1]), *(at[0] != name for name in first)))
    for name, place in order:
        mine = runs[name, place]
        attention, _, cores = place.partition("/")
        row: dict[str, Any] = {
            "configuration": name,
            "batch": batch,
            "cores": int(cores),
            "attention": attention,
        }
        row["is"] = best[place] if name == "best_fixed" else None
        row |= zip(("goodput", "goodput_low", "goodput_high"), goodput(mine))
        for other in ("plain", "smallest", "best_fixed"):
            for what, of in (("ratio", list), ("call", calls)):
                found: Any = (None, None, None)
                if (other, place) in runs:
                    found = goodput(of(mine), of(runs[other, place]))
                row |= zip((f"{what}_to_{other}{end}" for end in ("", "_low", "_high")), found)
        stages: Counter[str] = sum((run.stats.seconds for run in mine), Counter())
        rounds = sum(run.rounds for run in mine)
        row |= {
            f"{stage}_milliseconds": 1e3 * stages[stage] / rounds for stage in ("draft", "target", "verify")
        }
        row |= {"tau": median(run.stats.tau for run in mine), "workloads": len(mine)}
        row["selector_share"] = median(run.selector_seconds / run.seconds for run in mine)
        row |= by_rows(mine, batch)
        arms: Counter[Any] = sum((run.arms for run in mine), Counter())
        row["arms"] = {str(arm): n / arms.total() for arm, n in arms.items()}
        out.append(row)
    return out


def by_rows(runs: list[PoolRun], batch: int) -> dict[str, float]:
    """Rounds of a workload, and milliseconds of each, by how many rows are left: in quarters of the batch."""
    found: dict[str, float] = {}
    for quarter in range(4 if batch >= 4 else 0):
        low, high = 1 + quarter * batch // 4, (quarter + 1) * batch // 4
        some = [seconds for run in runs for rows, seconds in run.timed if low <= rows <= high]
        if some:
            found[f"rounds:{low}-{high}"] = len(some) / len(runs)
            found[f"milliseconds:{low}-{high}"] = 1e3 * sum(some) / len(some)
    return found


def calls(runs: list[PoolRun]) -> list[PoolRun]:
    """Runs whose seconds are those of the whole call."""
    return [replace(run, seconds=run.call) for run in runs]


def drawn(rows: list[dict[str, Any]]) -> Any:
    """Goodput by configuration, a panel for each batch and place."""
    rows = [r for r in rows if not r["configuration"].startswith("fixed:")]
    batches = sorted({r["batch"] for r in rows})
    places = list(dict.fromkeys((r["attention"], r["cores"]) for r in rows))
    size = (2.6 * len(places), 2.4 * len(batches))
    drawing, grid = plots.panels(len(batches), len(places), size, bare=True, sharex="row", layout="tight")
    for line, batch in zip(grid, batches):
        for axes, place in zip(line, places):
            mine = [r for r in rows if r["batch"] == batch and (r["attention"], r["cores"]) == place][::-1]
            ends = [(r["goodput_low"] or r["goodput"], r["goodput_high"] or r["goodput"]) for r in mine]
            off = [
                [r["goodput"] - low for r, (low, _) in zip(mine, ends)],
                [high - r["goodput"] for r, (_, high) in zip(mine, ends)],
            ]
            colors = [COLORS.get(r["configuration"], "C2") for r in mine]
            names = [r["configuration"] for r in mine]
            axes.barh(names, [r["goodput"] for r in mine], xerr=off, color=colors, error_kw={"lw": 0.8})
            axes.set_title(f"batch {batch}, {place[0]}, {place[1]} core{'s' * (place[1] > 1)}", fontsize=8)
            axes.tick_params(labelsize=7)
        line[0].set_xlabel("tokens/s", fontsize=8)
    return drawing


if __name__ == "__main__":
    main(parse(Settings, __doc__))
