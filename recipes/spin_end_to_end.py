"""SPIN step by step on a mixed workload: the smallest draft, then selection, decomposition and the pipeline, beside their baselines.

    python recipes/spin_end_to_end.py --json docs/results/spin_end_to_end.json --plots docs/figures

Requests of three domains with ragged prompts are decoded in one batch. Rows: `configuration, batch, goodput` (decoded tokens a second
after the prefill, median of interleaved repeats), its range, tau, and the seconds of its stages:

- `smallest`: the smallest draft, padded verification, serial; `smallest_packed`: with packed verification;
- `fixed:NAME`: every draft alone, padded; `best_fixed`: the best of them in hindsight; `best_fixed_packed`: the best
  of earlier batches, packed;
- `oracle`: each domain's best draft, padded (from the fixed runs of the same repeats); `selection`: Spin with statistics pooled by the
  kind of prompt and kept from batch to batch, after `--learn` uncounted requests of other texts (there one selector explores, and all
  others start from its state); `selection_cold`: the same, reset after every batch; `selection_per_request`: the paper's settings,
  nothing pooled or kept (both on three workloads only). The three specialists draft together (`stacked`); seconds are charged by an
  earlier profile of each draft alone;
- `selection+decomposition`; `selection+decomposition+pipeline`: with a pipeline of `--micro-batches` (drafting in another process, on
  the other core); `spin`: with that number of micro-batches or one, whichever was faster in earlier batches (the paper finds their
  number by observation, too); `best_fixed_auto`, `selection_auto`: with the attention backend that the library chooses (C kernels on a
  CPU), which does not pad; `... 2 threads`: both cores without a pipeline. The fixed runs' drafts, and the first choices of serial
  selectors, read their prompts before the clock starts.

All models' products read bfloat16 copies of their weights where there are C kernels (`--no-bf16-weights`: the float32 weights).

Rows with `configuration = "choice"` give each draft's share by round window and domain.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import checkout  # noqa: F401
import torch

import specdec as sd
from specdec import selectors, zoo
from specdec.cost.arms import ArmCosts
from specdec.data.corpus import DOMAINS
from specdec.executors import Pipelined
from specdec.kernels.attention import fit
from specdec.lab import console, plots
from specdec.lab.arms import Assigned, PoolRun, best_in_hindsight, pool_run
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted
from specdec.lab.workload import Kind, Workload, workload

# The smallest first.
POOL = ("pocket-tiny", "pocket-code", "pocket-prose", "pocket-tabular", "pocket-vanilla")
WINDOW = 5  # rounds
# Much slower configurations, for which the first workloads are enough.
SLOW = ("selection_cold", "selection_per_request")
COLUMNS = (
    *(
        "configuration",
        "is",
        "goodput",
        "low",
        "high",
        "ratio_to_smallest",
        "ratio_to_oracle",
        "ratio_to_best_fixed",
        "tau",
    ),
    *("draft_milliseconds", "target_milliseconds", "verify_milliseconds"),
)
FEW = 3  # workloads for those
LEARNS = (  # the selector's state is kept from batch to batch
    "selection",
    "selection+decomposition",
    "selection+decomposition+pipeline",
    "spin",
    "selection_auto",
    "selection+decomposition, 2 threads",
)


@dataclass(frozen=True)
class Settings(Plotted):
    batches: tuple[int, ...] = option((8, 16), "rows at once")
    tokens: int = option(128, "new tokens of each request")
    k: int = option(4, "drafted tokens per round")
    repeats: int = option(7, "workloads, each run by all configurations")
    learn: int = option(192, "requests that the selectors learn from beforehand")
    micro_batches: int = option(2, "micro-batches of the pipeline")
    median: int = option(300, "tokens of the median prompt")
    longest: int = option(1000, "tokens of the longest prompt")
    threads: int = option(1, "threads of the target's process")
    bf16_weights: bool | None = option(
        None,
        "products read bfloat16 copies of the weights, in all configurations (default: where they are exact)",
    )
    quick: bool = option(False, "a one-minute run: one repeat, few tokens")


class Parts:
    """The models, and decoders made from them."""

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
        """Profile each draft alone; its rounds are charged these seconds, because measured ones depend on the rest of the batch."""
        runs = [pool_run(self.fixed(name), work.rows, self.s.tokens, self.s.seed) for name in POOL]
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
        """A selector whose requests keep the arm of their first matching to the end (by a large growth) once it has enough observations."""
        return selectors.Spin(exploration, growth, Kind(self.tokenizer), warm=300, learn="always")


def repeat(
    parts: Parts,
    work: Workload,
    turn: int,
    learned: dict[str, Any],
    seen: dict[str, list[float]],
    taught: Any,
) -> dict[str, PoolRun]:
    """All configurations once, in a rotating order. ``learned``: the selectors' states between batches, ``taught``: their initial state,
    ``seen``: past goodput."""
    s, seed = parts.s, parts.s.seed + turn
    pipeline = Pipelined(min(s.micro_batches, len(work.rows)), workers="processes")
    runs = {f"fixed:{name}": pool_run(parts.fixed(name), work.rows, s.tokens, seed) for name in POOL}
    alone = list(runs.values())
    # These choices use earlier batches only, as in practice; in the first batch they use its own fixed runs.
    past = seen if turn else {name: [run.goodput] for name, run in runs.items()}
    best = max(POOL, key=lambda name: median(past[f"fixed:{name}"]))
    serial, piped = (median(past.get(f"selection+decomposition{p}", [1.0])) for p in ("", "+pipeline"))
    plans: dict[str, tuple[int, Callable[[], Any]]] = {
        "smallest_packed": (1, lambda: parts.fixed(POOL[0], "packed")),
        "best_fixed_packed": (1, lambda: parts.fixed(best, "packed")),
        "oracle": (1, lambda: parts.chosen(Assigned(best_in_hindsight(alone, work.domain)))),
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
            learned[name].state = taught.state  # states are values, so this can be shared
        torch.set_num_threads(threads)
        runs[name] = pool_run(decoder, work.rows, s.tokens, seed, learned.get(name))
        torch.set_num_threads(s.threads)
    runs["smallest"] = runs[f"fixed:{POOL[0]}"]
    return runs


def teach(parts: Parts, batch: int) -> Any:
    """A selection that has explored on ``--learn`` requests, in batches; on the fastest attention, since costs come from the profile."""
    s, decoder = parts.s, parts.chosen(parts.selector(8, 1), "auto")
    selection = decoder.begin(batch)
    for turn in range(math.ceil(s.learn / batch)):
        work = workload(parts.tokenizer, batch, s.longest, s.seed + 1001 + turn, s.median, half=0)
        pool_run(decoder, work.rows, s.tokens, s.seed + 1001 + turn, selection)
    return selection


def main(s: Settings) -> list[dict[str, Any]]:
    if s.quick:
        s = replace(s, batches=(3,), repeats=1, learn=3, tokens=8)
    s.begin()
    parts = Parts(s)
    rows: list[dict[str, Any]] = []
    for batch in s.batches:
        kept: dict[str, list[PoolRun]] = defaultdict(list)
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
        print(
            f"\nbatch {batch}\n"
            + console.table([r for r in rows if "goodput" in r and r["batch"] == batch], COLUMNS)
        )
    s.save(rows)
    s.draw({"spin_end_to_end": lambda: configurations(rows), "spin_choices": lambda: shares(rows)}, dpi=150)
    return rows


def table(kept: dict[str, list[PoolRun]], batch: int) -> list[dict[str, Any]]:
    """A row per configuration; `best_fixed` is the fixed draft with the best median."""
    middle = {name: median(run.goodput for run in runs) for name, runs in kept.items()}
    fixed = max((n for n in middle if n.startswith("fixed:")), key=lambda n: middle[n])
    out = []
    for name, runs in {**kept, "best_fixed": kept[fixed]}.items():
        speeds = sorted(run.goodput for run in runs)
        rounds = sum(run.stats.rounds for run in runs) / batch
        stages: Counter[str] = sum((run.stats.seconds for run in runs), Counter())
        out.append(
            {
                "configuration": name, "batch": batch, "goodput": middle.get(name, middle[fixed]),
                "low": speeds[0], "high": speeds[-1],
                **{
                    f"ratio_to_{other}": median(
                        run.goodput / base.goodput for run, base in zip(runs, kept[of])
                    )
                    for other, of in (("smallest", "smallest"), ("oracle", "oracle"), ("best_fixed", fixed))
                },
                "tau": median(run.stats.tau for run in runs),
                "selector_share": median(run.selector_seconds / run.seconds for run in runs),
                "cores": 2 if "2 threads" in name or "pipeline" in name or name == "spin" else 1,
                "repeats": len(runs), "is": fixed if name == "best_fixed" else None,
                **{
                    f"{stage}_milliseconds": 1e3 * stages[stage] / rounds
                    for stage in ("draft", "target", "verify")
                },
            }
        )  # fmt: skip
    return out


def choices(run: PoolRun, work: Workload, batch: int, turn: int) -> list[dict[str, Any]]:
    """Share of each arm by domain and window of rounds."""
    return [
        {
            "configuration": "choice", "batch": batch, "repeat": turn, "round": at, "domain": domain,
            "draft": POOL[arm], "share": n / sum(arms.values()),
        }
        for (at, domain), arms in run.choices(work.domain, WINDOW).items()
        for arm, n in arms.items()
    ]  # fmt: skip


# -- figures ----------------------------------------------------------------------------------------------------------------

ORDER = (
    *(
        "smallest, 2 threads",
        "best_fixed_packed, 2 threads",
        "selection+decomposition, 2 threads",
        "smallest",
    ),
    *("smallest_packed", "best_fixed", "best_fixed_packed", "best_fixed_auto", "selection_auto", "oracle"),
    *("selection_per_request", "selection_cold", "selection", "selection+decomposition"),
    *("selection+decomposition+pipeline", "spin"),
)
STEPS = ("smallest", "selection", "selection+decomposition", "spin")


def configurations(rows: list[dict[str, Any]]) -> Any:
    """Goodput by configuration, with the range of the repeats; the steps of SPIN are coloured."""
    batches = sorted({r["batch"] for r in rows})
    drawing, (panels,) = plots.panels(1, len(batches), (9, 4.2), bare=True, layout="tight")
    names = ORDER[::-1]
    for axes, batch in zip(panels, batches):
        found = {r["configuration"]: r for r in rows if r["batch"] == batch}
        values = [found[name]["goodput"] for name in names]
        low = [found[name]["goodput"] - found[name]["low"] for name in names]
        high = [found[name]["high"] - found[name]["goodput"] for name in names]
        colors = ["C0" if name in STEPS else "0.7" for name in names]
        axes.barh(names, values, xerr=[low, high], color=colors, error_kw={"lw": 0.8})
        axes.set_title(f"batch {batch}", fontsize=9)
        axes.set_xlabel("tokens/s", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.label_outer()
    return drawing


def shares(rows: list[dict[str, Any]]) -> Any:
    """The share of each draft by domain, over windows of rounds, at the largest batch."""
    batch = max(r["batch"] for r in rows)
    chosen = [r for r in rows if r["configuration"] == "choice" and r["batch"] == batch]
    drawing, (panels,) = plots.panels(1, len(DOMAINS), (9, 2.8), bare=True, sharey=True, layout="tight")
    for axes, domain in zip(panels, DOMAINS):
        mine = [r for r in chosen if r["domain"] == domain]
        windows = sorted({r["round"] for r in mine})
        total = {w: sum(r["share"] for r in mine if r["round"] == w) or 1.0 for w in windows}
        bottom = [0.0] * len(windows)
        for i, name in enumerate(POOL):
            part = [sum(r["share"] for r in mine if r["round"] == w and r["draft"] == name) for w in windows]
            share = [p / total[w] for p, w in zip(part, windows)]
            label = name.removeprefix("pocket-")
            axes.bar(windows, share, WINDOW * 0.9, bottom, color=f"C{i}", align="edge", label=label)
            bottom = [b + x for b, x in zip(bottom, share)]
        axes.set_title(domain, fontsize=9)
        axes.set_xlabel("round", fontsize=8)
        axes.tick_params(labelsize=8)
    panels[0].set_ylabel("share of rows", fontsize=8)
    panels[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return drawing


if __name__ == "__main__":
    main(parse(Settings, __doc__))
