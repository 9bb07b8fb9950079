"""SPIN step by step on a mixed workload: the smallest draft, then selection, decomposition and the pipeline, beside their baselines.

    python recipes/spin_end_to_end.py --json docs/results/spin_end_to_end.json --plots docs/figures

Requests of three domains with ragged prompts decode in one batch. Rows: `configuration, batch, goodput` (decoded tokens a second after
the prefill, median of interleaved repeats), its range, tau, and the seconds of its stages:

- `smallest`: the smallest draft, padded verification, serial; `smallest_packed`: with packed verification;
- `fixed:NAME`: every draft alone, padded; `best_fixed`: the best of them in hindsight; `best_fixed_packed`: the best
  of earlier batches, packed;
- `oracle`: each domain's best draft, padded (from the fixed runs of the same repeats); `selection`: Spin with statistics pooled by what
  a prompt looks like and kept from batch to batch, after `--learn` requests of other texts that are not counted (there one selector tries
  everything, and all begin with what it has learned); `selection_cold`: the same, forgotten after every batch;
  `selection_per_request`: the paper's settings, nothing pooled and nothing kept (both on three workloads only). The three specialists are drafted together (`stacked`); seconds are charged by a
  profile of each draft alone, made before;
- `selection+decomposition`; `selection+decomposition+pipeline`: with a pipeline of `--micro-batches` (drafting in a process of its own, on
  the other core); `spin`: with as many micro-batches, that or one, as were faster in the batches before (the paper finds their number by
  observation too); `best_fixed_auto`, `selection_auto`: on the attention that the library itself would choose (C kernels on a CPU), which
  has nothing to pad; `... 2 threads`: what both cores do without a pipeline. The fixed runs' drafts read their prompts before the clock
  starts, and so do the serial selectors' first choices.

All models' products read bfloat16 copies of their weights (`--no-bf16-weights`: the float32 ones).

One row more for each round window, domain and draft says who was chosen (`configuration = "choice"`).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from _measure import quiet
from _report import write
from _spin_workload import Kind, Workload, workload
from torch import Tensor

import specdec as sd
from specdec import selectors, zoo
from specdec.cost.arms import ArmCosts
from specdec.executors import Pipelined
from specdec.kernels.attention import fit
from specdec.kernels.native import library
from specdec.types import Context, Round

POOL = (
    "pocket-tiny",
    "pocket-code",
    "pocket-prose",
    "pocket-tabular",
    "pocket-vanilla",
)  # the smallest first
WINDOW = 5  # rounds
SLOW = (
    "selection_cold",
    "selection_per_request",
)  # far behind: the first workloads tell as much as all of them
FEW = 3  # workloads for those
LEARNS = (  # what a selector has learned is kept from batch to batch
    "selection",
    "selection+decomposition",
    "selection+decomposition+pipeline",
    "spin",
    "selection_auto",
    "selection+decomposition, 2 threads",
)


@dataclass
class Settings:
    """Every setting of a run."""

    batches: str = "8,16"
    tokens: int = 128
    k: int = 4
    repeats: int = 7
    learn: int = 192
    micro_batches: int = 2
    median: int = 300
    longest: int = 1000
    threads: int = 1
    bf16_weights: bool = library() is not None
    seed: int = 0
    quick: bool = False
    json: str | None = None
    plots: str | None = None


class ByDomain:
    """Always the arm of a request's domain: the oracle's choice."""

    def __init__(self, arm: list[int]):
        self.arm = torch.tensor(arm)

    def init(self, arms: int) -> None:
        return None

    def select(
        self, state: None, context: Context, capacities: Tensor, rng: Any
    ) -> tuple[Tensor, Tensor, None]:
        return self.arm[context.request], torch.ones(context.batch), None

    def update(self, state: None, feedback: Any) -> None:
        return None


class Brief(NamedTuple):
    """What is kept of a round: whole rounds hold logits, and memory would grow with the repeats."""

    number: int
    request: Tensor
    arm: Tensor
    kept: Tensor
    cut: Tensor


@dataclass
class Run:
    """One timed decode: tokens and seconds after the prefill, and what every round did."""

    tokens: int
    seconds: float
    stats: Any
    rounds: list[Brief]
    ids: list[list[int]]
    selector_seconds: float = 0.0

    @property
    def goodput(self) -> float:
        return self.tokens / self.seconds


def decode(decoder: Any, work: Workload, tokens: int, seed: int, selection: Any = None) -> Run:
    """Decode all requests to the same number of new tokens."""
    marks: list[tuple[float, int, int, float]] = []
    rounds: list[Brief] = []

    def mark(round: Round) -> None:
        spent = selection.seconds if selection else 0.0
        marks.append((perf_counter(), round.number, int(round.kept.sum()), spent))
        rounds.append(Brief(round.number, round.context.request, round.arm, round.kept, round.cut))

    if selection is None and decoder.selecting is not None:
        selection = decoder.begin(len(work.rows))
    out = decoder.generate(work.rows, tokens, seed=seed, eos_token_id=(), on_round=mark, selection=selection)
    start, _, _, before = max(mark for mark in marks if mark[1] == 0)
    made = sum(kept for at, _, kept, _ in marks if at > start)
    return Run(made, marks[-1][0] - start, out.stats, rounds, out.ids, marks[-1][3] - before)


class Parts:
    """Models and the decoders made of them."""

    def __init__(self, s: Settings):
        model, tokenizer = zoo.load("pocket-target")
        self.s, self.tokenizer = s, tokenizer
        for threads in (2, s.threads):  # decomposition plans with this machine's timings
            torch.set_num_threads(threads)
            fit(model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim)
        self.targets = {
            name: sd.HFModel(model, tokenizer, attention=name, bf16_weights=s.bf16_weights)
            for name in ("padded", "packed", "decomposed", "auto")
        }
        self.drafts = {
            name: sd.drafts.Model(sd.HFModel(*zoo.load(name), bf16_weights=s.bf16_weights)) for name in POOL
        }
        self.costs = ArmCosts((0.0,) * len(POOL))

    def profile(self, work: Workload) -> None:
        """Seconds of each draft alone, which its rounds are charged from now on: measured ones depend on who else is in the batch."""
        runs = [decode(self.fixed(name), work, self.s.tokens, self.s.seed) for name in POOL]
        draft = tuple(run.stats.seconds["draft"] / run.stats.drafted for run in runs)
        verify = median(
            sum(run.stats.seconds[k] for k in ("target", "verify")) / run.stats.rounds for run in runs
        )
        self.costs = ArmCosts(draft, verify)

    def fixed(self, name: str, attention: str = "padded") -> Any:
        return sd.decoder(self.targets[attention]).draft(self.drafts[name], self.s.k).build()

    def chosen(self, selector: Any, attention: str = "padded", executor: Any = None) -> Any:
        base = sd.decoder(self.targets[attention]).pool(
            self.drafts, selector, self.s.k, costs=self.costs, stacked=True
        )
        return (base if executor is None else base.executor(executor)).build()

    def selector(self, exploration: int = 4, growth: float = 64) -> Any:
        """One whose requests keep the arm of their first matching to the end (growth: their rounds) once enough is known."""
        return selectors.Spin(exploration, growth, Kind(self.tokenizer), warm=300, learn="always")


def repeat(
    parts: Parts,
    work: Workload,
    turn: int,
    learned: dict[str, Any],
    seen: dict[str, list[float]],
    taught: Any,
) -> dict[str, Run]:
    """All configurations once, in an order that turns; ``learned``: what selectors carry from batch to batch, ``taught``: what they begin
    with, ``seen``: past goodput."""
    s, seed = parts.s, parts.s.seed + turn
    pipeline = Pipelined(min(s.micro_batches, len(work.rows)), workers="processes")
    runs = {f"fixed:{name}": decode(parts.fixed(name), work, s.tokens, seed) for name in POOL}
    # As every real choice, these are made from what was seen before; in the first batch from the fixed runs of the batch itself.
    past = seen if turn else {name: [run.goodput] for name, run in runs.items()}
    best = max(POOL, key=lambda name: median(past[f"fixed:{name}"]))
    serial, piped = (median(past.get(f"selection+decomposition{p}", [1.0])) for p in ("", "+pipeline"))
    plans: dict[str, tuple[int, Callable[[], Any]]] = {
        "smallest_packed": (1, lambda: parts.fixed(POOL[0], "packed")),
        "best_fixed_packed": (1, lambda: parts.fixed(best, "packed")),
        "oracle": (1, lambda: parts.chosen(ByDomain(best_by_domain(runs, work)))),
        "selection": (1, lambda: parts.chosen(parts.selector())),
        "selection_cold": (1, lambda: parts.chosen(parts.selector())),
        "selection_per_request": (1, lambda: parts.chosen(selectors.Spin())),
        "selection+decomposition": (1, lambda: parts.chosen(parts.selector(), "decomposed")),
        "selection+decomposition+pipeline": (
            1,
            lambda: parts.chosen(parts.selector(), "decomposed", pipeline),
        ),
        "spin": (
            1,
            lambda: parts.chosen(parts.selector(), "decomposed", pipeline if piped > serial else None),
        ),
        "best_fixed_auto": (1, lambda: parts.fixed(best, "auto")),
        "selection_auto": (1, lambda: parts.chosen(parts.selector(), "auto")),
        "smallest, 2 threads": (2, lambda: parts.fixed(POOL[0])),
        "best_fixed_packed, 2 threads": (2, lambda: parts.fixed(best, "packed")),
        "selection+decomposition, 2 threads": (2, lambda: parts.chosen(parts.selector(), "decomposed")),
    }
    names = [name for name in plans if name not in SLOW or turn <= FEW]
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        threads, make = plans[name]
        decoder = make()
        if name in LEARNS and name not in learned:
            learned[name] = decoder.begin(len(work.rows))
            learned[name].state = taught.state  # a value: nobody writes to it
        torch.set_num_threads(threads)
        runs[name] = decode(decoder, work, s.tokens, seed, learned.get(name))
        torch.set_num_threads(s.threads)
    runs["smallest"] = runs[f"fixed:{POOL[0]}"]
    return runs


def teach(parts: Parts, batch: int) -> Any:
    """A selection that has tried everything on ``--learn`` requests, in batches; on the fastest attention, since costs are the profile's."""
    s, decoder = parts.s, parts.chosen(parts.selector(8, 1), "auto")
    selection = decoder.begin(batch)
    for turn in range(math.ceil(s.learn / batch)):
        work = workload(parts.tokenizer, batch, s.longest, s.seed + 1001 + turn, s.median, half=0)
        decode(decoder, work, s.tokens, s.seed + 1001 + turn, selection)
    return selection


def best_by_domain(runs: dict[str, Run], work: Workload) -> list[int]:
    """``[requests]`` the arm whose fixed run made the most tokens a second for the request's domain."""

    def rate(name: str, domain: str) -> float:
        run, kept, rows = runs[f"fixed:{name}"], 0, 0
        for round in run.rounds:
            if round.number:
                mine = torch.tensor([work.domain[r] == domain for r in round.request.tolist()]) & ~round.cut
                kept += int(round.kept[mine].sum())
                rows += int(mine.sum())
        counted = sum(len(r.kept) for r in run.rounds if r.number)
        return kept / max(rows, 1) / (run.seconds / counted)

    best = {d: max(range(len(POOL)), key=lambda a: rate(POOL[a], d)) for d in set(work.domain)}
    return [best[d] for d in work.domain]


def main(s: Settings) -> list[dict[str, Any]]:
    torch.set_num_threads(s.threads)
    quiet()
    parts = Parts(s)
    rows: list[dict[str, Any]] = []
    for batch in [int(b) for b in s.batches.split(",")]:
        kept: dict[str, list[Run]] = defaultdict(list)
        learned: dict[str, Any] = {}
        seen: dict[str, list[float]] = defaultdict(list)
        parts.profile(workload(parts.tokenizer, batch, s.longest, s.seed + 1000, s.median, half=0))
        taught = teach(parts, batch)
        for turn in range(1 + s.repeats):
            work = workload(parts.tokenizer, batch, s.longest, s.seed + turn, s.median, half=1)
            runs = repeat(parts, work, turn, learned, seen, taught)
            for name, run in runs.items():
                seen[name].append(run.goodput)
            if turn:  # the first warms up
                for name, run in runs.items():
                    kept[name].append(run)
                rows += choices(runs["selection"], work, batch, turn)
        rows += table(kept, batch)
        show(rows, batch)
    if s.json:
        write(s.json, rows, s.seed)
    if s.plots:
        from _spin_end_to_end_plots import draw

        draw(rows, Path(s.plots), POOL, WINDOW)
    return rows


def table(kept: dict[str, list[Run]], batch: int) -> list[dict[str, Any]]:
    """A row a configuration; `best_fixed` is the fixed draft with the best median."""
    middle = {name: median(run.goodput for run in runs) for name, runs in kept.items()}
    fixed = max((n for n in middle if n.startswith("fixed:")), key=lambda n: middle[n])
    out = []
    for name, runs in {**kept, "best_fixed": kept[fixed]}.items():
        speeds = sorted(run.goodput for run in runs)
        rounds = sum(run.stats.rounds for run in runs) / batch
        stages: Counter[str] = sum((run.stats.seconds for run in runs), Counter())
        out.append(
            {
                "configuration": name,
                "batch": batch,
                "goodput": middle.get(name, middle[fixed]),
                "low": speeds[0],
                "high": speeds[-1],
                **{
                    f"ratio_to_{other}": median(
                        run.goodput / base.goodput for run, base in zip(runs, kept[of])
                    )
                    for other, of in (("smallest", "smallest"), ("oracle", "oracle"), ("best_fixed", fixed))
                },
                "tau": median(run.stats.tau for run in runs),
                "selector_share": median(run.selector_seconds / run.seconds for run in runs),
                "cores": 2 if "2 threads" in name or "pipeline" in name or name == "spin" else 1,
                "repeats": len(runs),
                "is": fixed if name == "best_fixed" else None,
                **{
                    f"{stage}_milliseconds": 1e3 * stages[stage] / rounds
                    for stage in ("draft", "target", "verify")
                },
            }
        )
    return out


def choices(run: Run, work: Workload, batch: int, turn: int) -> list[dict[str, Any]]:
    """Share of each arm by domain and window of rounds."""
    counts: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    for round in run.rounds:
        if round.number:
            for request, arm in zip(round.request.tolist(), round.arm.tolist()):
                counts[round.number // WINDOW * WINDOW, work.domain[request]][arm] += 1
    return [
        {
            "configuration": "choice",
            "batch": batch,
            "repeat": turn,
            "round": at,
            "domain": domain,
            "draft": POOL[arm],
            "share": n / sum(arms.values()),
        }
        for (at, domain), arms in sorted(counts.items())
        for arm, n in arms.items()
    ]


def show(rows: list[dict[str, Any]], batch: int) -> None:
    print(
        f"\nbatch {batch:3}                    tokens/s      range        x smallest  x oracle  x fixed   tau   draft  target+verify ms"
    )
    for r in rows:
        if r["configuration"] != "choice" and r["batch"] == batch:
            print(
                f"{r['configuration']:26} {r['goodput']:8.0f}  {r['low']:6.0f}-{r['high']:<6.0f}   {r['ratio_to_smallest']:8.2f}"
                f"  {r['ratio_to_oracle']:9.2f}  {r['ratio_to_best_fixed']:7.2f}  {r['tau']:5.2f}  {r['draft_milliseconds']:6.1f}  {r['target_milliseconds'] + r['verify_milliseconds']:6.1f}"
                + (f"   {r['is']}" if r["is"] else "")
            )


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument("--batches", default=d.batches, help="rows at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=d.tokens, help="new tokens of each request")
    parser.add_argument("--k", type=int, default=d.k, help="drafted tokens a round")
    parser.add_argument(
        "--repeats", type=int, default=d.repeats, help="workloads, each of all configurations"
    )
    parser.add_argument(
        "--learn", type=int, default=d.learn, help="requests from which the selectors learn beforehand"
    )
    parser.add_argument("--micro-batches", type=int, default=d.micro_batches, help="of the pipeline")
    parser.add_argument("--median", type=int, default=d.median, help="tokens of the median prompt")
    parser.add_argument("--longest", type=int, default=d.longest, help="tokens of the longest prompt")
    parser.add_argument("--threads", type=int, default=d.threads, help="of the target's process")
    parser.add_argument(
        "--bf16-weights",
        action=argparse.BooleanOptionalAction,
        default=d.bf16_weights,
        help="products read bfloat16 copies of the weights, in all configurations (default: where there are C kernels)",
    )
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--quick", action="store_true", help="a minute: one repeat, few tokens")
    parser.add_argument("--json")
    parser.add_argument("--plots", help="folder for the figures")
    s = Settings(**vars(parser.parse_args()))
    if s.quick:
        s.batches, s.repeats, s.learn, s.tokens = "3", 1, 3, 8
    return s


if __name__ == "__main__":
    main(settings())
