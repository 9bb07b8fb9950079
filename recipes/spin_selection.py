"""Selectors on real traces: what a choice of drafts is worth, and which of it each selector gets, against an exact oracle (SPIN, section 4).

    python recipes/spin_selection.py --json docs/results/spin_selection.json --plots docs/figures
    python recipes/spin_selection.py --report docs/results/spin_selection.json --markdown tables.md

Texts are sampled from the target once (`lab.record`), a trace for each of `--temperatures`. Along them every draft's chances of acceptance are known (`lab.replay`), so that
selectors are replayed instead of decoded: `specdec.lab.selection` and `specdec.lab.selection_runs`. Seconds are those of measured rounds (`lab.arm_times`): drafting,
verification, and the reading of all that a draft has not read when a request changes to it. The prompts of one half of the source
files are for learning (rows `learned`), those of the other half are for all results. `--prompts FILE` takes prompts of your own, with results by category in place of domain. Selectors still tell requests apart by
what their prompts look like.

Rows, by `part`:
- `worth`: best arm of each request by its exact expected seconds (`share:NAME`), and how many times faster than the best fixed arm the
  best arm of every request (`request_oracle`) and of every round (`round_oracle`) is, by batch and domain (the paper's Figs 2 to 4);
- `regret`: each selector's seconds over the oracle's, in percent (`regret`: over the oracle of every round, `over_best_fixed`: over the fixed
  arm that is best in hindsight). Rounds are charged as in a batch of one's own arm; `elapsed_over_best_fixed` charges the batch's own rounds,
  in which every arm in use has its fixed costs and the last rounds have few rows;
- `ratio`: how many times faster SPIN's own selector is than UCB1 and epsilon-greedy (the paper: 1.49);
- `cost`: what is left of the head-room, step by step (`times_faster` than the best fixed draft, `over_plain`): the best arm of each request
  in hindsight; of each kind of request in hindsight; of each kind, learned from the other half; `Spin, by kind, learned`, charged without the
  reading of what a draft has not read; with it; in the batch's own rounds, in which every draft in use has its fixed costs; the same for a selector that
  counts these (`selectors.opening`); the same in batches that are not refilled; and by the seconds of a pool's rounds.
- `times`: the seconds that rounds are charged, each arm alone; `several`: how much longer a pool's rounds are: of one arm, beside the arm alone, and of the best arm of each temperature
  together, beside the sum of their parts; `call`: milliseconds of a selector's own calls at batch 16, with room for all rows in every
  arm, and with room for 20 in all (`tight`).
Intervals are 95 % bootstraps over source files and repeats; with fewer than 5 files there are none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import checkout  # noqa: F401
import numpy as np

import specdec as sd
from specdec import lab, selectors, zoo
from specdec.arm_policy import Arm
from specdec.data.prompts import entries
from specdec.lab import plots
from specdec.lab.arm_times import ARMS, POOL, half_way, load_pool, measured, several
from specdec.lab.console import progress, short_errors, table
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import Entry, by_turns, read
from specdec.lab.recipe import Plotted
from specdec.lab.selection import Requests, RoundTimes, fixed_seconds, ratio, round_oracle, worth
from specdec.lab.selection_costs import costs
from specdec.lab.selection_runs import Follow, SelectorReplay
from specdec.lab.selection_tables import documented
from specdec.lab.simulated import overhead
from specdec.lab.workload import ByDomain, halves
from specdec.selectors.kinds import ByTemperature, Kind, Product

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings(Plotted):
    pool: tuple[str, ...] = option(ARMS, "arms: names in the zoo, ngram, none; NAME/K drafts K tokens")
    temperatures: tuple[float, ...] = option((1.0, 0.0), "every prompt is a request at each of these")
    prompts: str | None = option(
        None,
        "JSON-lines file of prompts, used whole, without split, per_prompt and median (default: pieces of held-out ones)",
        metavar="FILE",
    )
    split: Literal["test", "validation"] = option(
        "test", "packages of the prompts; validation: to choose a pool on"
    )
    batches: tuple[int, ...] = option((1, 4, 16, 64), "rows at a time")
    replayed: int = option(16, "rows at a time in the replays of selectors")
    median: int = option(200, "tokens of the median prompt")
    per_prompt: int = option(1, "prompts cut from one held-out text")
    new_tokens: int = option(96, "tokens of a request")
    k: int = option(4, "drafted tokens per round, of arms without a length")
    capacity: float = option(
        1.5, "rows that an arm may draft for in the paper's setting, times an equal share of the batch"
    )
    lessons: int = option(3, "replays of the requests to learn from")
    repeats: int = option(12, "replays of each selector, with random numbers of their own")
    trace: str | None = option(
        None, "folder of the recorded texts and replays, to use them again (default: none)", metavar="DIR"
    )
    report: str | None = option(None, "show this finished report instead of measuring", metavar="FILE")
    markdown: str | None = option(None, "write the documentation's tables", metavar="FILE")
    quick: bool = option(False, "a one-minute run: four prompts a domain, two repeats")


def main(s: Settings) -> list[Row]:
    s.begin()
    if s.report:
        return shown(s, json.loads(Path(s.report).read_text())["rows"])
    if s.quick:
        small = (POOL[0], f"{POOL[1]}/2", "ngram", "none")
        s = replace(
            s,
            pool=small,
            batches=(1, 4),
            replayed=3,
            median=64,
            new_tokens=12,
            repeats=2,
            temperatures=(1.0, 0.0),
        )
    target, arms = sd.HFModel(*zoo.load("pocket-target")), load_pool(s.pool, s.k)
    with ExitStack() as stack:
        folder = s.trace or stack.enter_context(TemporaryDirectory())
        requests, domains, at = recorded(s, target, arms, Path(folder))
    assert requests.tokens is not None
    some = np.linspace(0, len(at) - 1, min(len(at), max(4, s.replayed))).astype(int)
    prompts = [requests.tokens[i, : requests.prompt[i]].tolist() for i in some]
    sampling = sd.Sampling(tuple(at[i] for i in some))
    texts = half_way(sd.decoder(target).sampling(sampling).build(), prompts, s.new_tokens, s.seed)
    few: Any = {"rounds": 4, "repeats": 1} if s.quick else {}
    few |= {"seed": s.seed, "sampling": sampling}
    progress("measuring the rounds of each arm", stays=True)
    times, pool = (measured(target, arms, texts, **few, pooled=pooled) for pooled in (False, True))
    rows: list[Row] = [
        {"part": "times", "arm": name, "fixed_milliseconds": 1e3 * f, "row_milliseconds": 1e3 * r, "read_milliseconds": 1e3 * read}
        for name, (f, r), read in zip(s.pool, times.draft, times.read)
    ]  # fmt: skip
    rows += [{"part": "times", "arm": "verify", **dict(zip(("fixed", "row", "token"), times.verify))}]
    longest = np.array([arm.length or 0 for arm in arms.values()])
    for a, name in enumerate(s.pool):  # rounds of all rows on one arm
        arm, nothing = np.full(s.replayed, a), np.zeros(s.replayed)
        whole = [sum(map(np.sum, t.round(arm, longest[arm], nothing))) for t in (times, pool)]
        rows.append({"part": "several", "arms": name, "times_longer": whole[1] / whole[0]})
    half = halves(requests.source.tolist(), domains)
    sides = [np.flatnonzero(half == side) for side in (0, 1)]
    learned, tested = (requests.select(side) for side in sides)
    domain = ByDomain(target.tokenizer)
    kinds = [Product((domain, ByTemperature(tuple(at[i] for i in side)))) for side in sides]
    for what, labels in (("domain", domains), ("temperature", [f"{t:g}" for t in at])):
        groups = [labels[i] for i in sides[1]]
        for batch in s.batches:
            found = worth(tested, times, batch, groups)
            rows += [
                {"part": "worth", "by": what, **row}
                for row in found
                if what == "domain" or row["group"] != "all"
            ]
    cold = np.array([at[i] for i in sides[0]])
    spent = fixed_seconds(learned, times, s.replayed)
    best = {t: s.pool[int(spent[:, cold == t].sum(1).argmin())] for t in s.temperatures}
    if len(set(best.values())) > 1:
        used = [best[at[i]] for i in some]
        pool = replace(pool, several=several(target, arms, texts, used, pool, **few))
        rows.append({"part": "several", "arms": " and ".join(best.values()), "times_longer": pool.several})
    found = costs(tested, learned, times, s.replayed, kinds, *spin(kinds), s.repeats, s.lessons, s.seed, pool)
    rows += [{"part": "cost", **row} for row in found]
    rows += regrets(s, tested, learned, times, kinds)
    rows += calls(s)
    s.save(rows)
    return shown(s, rows)


def shown(s: Settings, rows: list[Row]) -> list[Row]:
    """Print the tables, and write the documentation's and the figure where asked."""
    for part in ("worth", "several", "cost", "regret", "ratio", "call"):
        if not (mine := [r for r in rows if r["part"] == part]):
            continue
        print(f"\n{part}\n" + table(mine, [name for name in mine[0] if name != "part"]))
    if s.markdown:
        Path(s.markdown).write_text(documented(rows, Path(s.report or s.json or "spin_selection.json").name))
    s.draw({"spin_selection": lambda: drawn(rows)})
    return rows


def calls(s: Settings) -> Iterator[Row]:
    """Milliseconds of each selector's calls with 5 arms."""
    for name, selector in {**unpooled(s), "Spin, exploring": selectors.Spin(exploration=10**6)}.items():
        n = 20 if s.quick else 1000
        (select, update), (tight, _) = (overhead(selector, 16, room, n) for room in (16, 4))
        row: Row = {"part": "call", "selector": name, "batch": 16, "arms": 5}
        yield row | {"select_ms": select, "update_ms": update, "tight_select_ms": tight}


def recorded(
    s: Settings, target: Any, arms: dict[str, Arm], folder: Path
) -> tuple[Requests, list[str], list[float]]:
    """The requests, their domains (or categories) and temperatures: the user's prompts, or pieces of held-out prompts, as long as those of `lab.workload`, and
    the target's texts."""
    noise, prompts = (
        np.random.default_rng(s.seed),
        [] if s.prompts is None else own_prompts(s, target.tokenizer),
    )
    for entry in entries(s.split)[: 12 if s.quick else None] if s.prompts is None else ():
        ids = target.tokenizer(entry["text"], add_special_tokens=False)["input_ids"]
        for piece in range(s.per_prompt):
            start = piece * len(ids) // s.per_prompt
            length = int(np.clip(np.exp(noise.normal(np.log(s.median), 0.8)), 32, len(ids) // s.per_prompt))
            text = target.tokenizer.decode(ids[start : start + length])
            prompts.append(Entry((text,), entry["domain"], f"{entry['package']}/{entry['path']}"))
    longest: dict[str, int] = {}  # of the arms of one draft: a replay of the longest serves all
    for name, arm in arms.items():
        draft = name.partition("/")[0]
        longest[draft] = max(longest.get(draft, 0), arm.length or 0)
    parts, sources, domains, at = [], [], [], []
    for temperature in s.temperatures:
        place = folder / f"temperature-{temperature:g}"
        sampling = sd.Sampling(temperature)
        trace = lab.record(
            target,
            prompts,
            place,
            s.new_tokens,
            max(longest.values()),
            sampling,
            eos_token_id=(),
            seed=s.seed,
        )
        replays: dict[str, Any] = {}
        for name, arm in arms.items():
            draft = name.partition("/")[0]
            if draft not in replays:
                progress(f"chances of {draft} at temperature {temperature:g}", stays=True)
                made = (
                    None
                    if arm.draft is None
                    else lab.replay(trace, arm.draft, longest[draft], target, name=draft)
                )
                replays[draft] = made
        by_arm = {name: replays[name.partition("/")[0]] for name in arms}
        parts.append(Requests.of(by_arm, {name: arm.length for name, arm in arms.items() if arm.length}))
        used = [text for text in trace.texts if text.rounds]
        sources.append([text.source for text in used])
        domains += [text.category for text in used]
        at += [temperature] * len(used)
    return Requests.join(parts, sources), domains, at


def own_prompts(s: Settings, tokenizer: Any) -> list[Entry]:
    """The prompts of `--prompts`."""
    assert s.prompts is not None
    with short_errors():
        found = read(s.prompts)
        found = by_turns(found)[:12] if s.quick else found
        sources = [entry.source or tuple(entry.ids(tokenizer)) for entry in found]
        sides = halves(sources, [entry.category for entry in found])
        if min((sides == side).sum() for side in (0, 1)) < 2:
            raise ValueError(
                f"{s.prompts} has too few sources: selectors learn on one half of each category's sources and are judged on the other; give at "
                "least 4 sources of one category, or 2 of each of two"
            )
    return found


def spin(kinds: Sequence[Kind]) -> tuple[selectors.Spin, selectors.Spin]:
    """SPIN's algorithm with statistics pooled by the kind of a request: for the half to learn from, and for the other."""
    stays = selectors.Spin(4, 64, kinds[1], warm=30, learn="always")
    return replace(stays, exploration=8, growth=1, warm=None, pool=kinds[0]), stays


def regrets(
    s: Settings, tested: Requests, learned: Requests, times: RoundTimes, kinds: Sequence[Kind]
) -> Iterator[Row]:
    """Rows of every selector, and the ratios."""
    replay = SelectorReplay(tested, times, s.replayed, s.repeats, s.seed)
    capacity = math.ceil(s.capacity * s.replayed / len(s.pool))
    bound = replace(replay, capacities=tuple(s.replayed if k == 0 else capacity for k in tested.lengths))
    school = replace(replay, requests=learned)
    fixed, oracle = fixed_seconds(tested, times, s.replayed), round_oracle(tested, times, s.replayed)
    best = int(fixed.sum(1).argmin())
    alone = replay(selectors.Fixed(best)).elapsed
    runs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, (selector, teacher, how) in chosen(s, best, oracle, tested, kinds, replay, bound).items():
        progress(f"selector {name}")
        start = None if teacher is None else school.taught(teacher, s.lessons)
        played = how(selector, start)
        runs[name] = played.seconds, played.elapsed
        row: Row = {"part": "regret", "selector": name, "batch": s.replayed, "learned": teacher is not None}
        row["seconds"] = played.seconds.mean()
        for what, top, base in (
            ("regret", played.seconds, oracle.seconds),
            ("over_best_fixed", played.seconds, fixed[best]),
            ("elapsed_over_best_fixed", played.elapsed, alone),
        ):
            found = ratio(top, base, tested.source)
            row |= {what + end: x and 100 * (x - 1) for end, x in zip(("", "_low", "_high"), found)}
        yield row
    for mine in ("Spin", "Spin, capacities", "Spin, by kind, learned"):
        for other in ("UCB1", "EpsilonGreedy"):
            for charged, at in (("alone", 0), ("batch", 1)):
                value, low, high = ratio(runs[other][at], runs[mine][at], tested.source)
                place = {"part": "ratio", "selector": mine, "over": other, "charged": charged, "paper": 1.49}
                yield {**place, "times_faster": value, "low": low, "high": high}


def unpooled(s: Settings) -> dict[str, Any]:
    """Name -> a selector with its own settings. All but ``Spin`` see goodput as reward."""
    return {
        "Random": selectors.Random(),
        "EpsilonGreedy": selectors.EpsilonGreedy(0.1),
        "UCB1": selectors.UCB1(),
        "Thompson": selectors.Thompson(spread=0.2),
        "EXP3": selectors.EXP3(),
        "UCBSpec": selectors.UCBSpec(s.k),
        "EXP3Spec": selectors.EXP3Spec(s.k),
        "Hedge": selectors.Hedge(),
        "Spin": selectors.Spin(),
    }


def chosen(
    s: Settings,
    best: int,
    oracle: Any,
    tested: Requests,
    kinds: Sequence[Kind],
    free: SelectorReplay,
    bound: SelectorReplay,
) -> dict[str, tuple[Any, Any, SelectorReplay]]:
    """Name -> a selector, the one that learns for it beforehand, and the setting."""
    plain = {f"Fixed, {tested.names[best]}": selectors.Fixed(best), **unpooled(s)}
    out: dict[str, tuple[Any, Any, SelectorReplay]] = {name: (one, None, free) for name, one in plain.items()}
    out["Spin, capacities"] = (selectors.Spin(), None, bound)
    for name, one in plain.items():
        if "pool" in one.__dataclass_fields__ and name != "Spin":
            taught, pooled = (replace(one, pool=kind) for kind in kinds)
            out |= {
                f"{name}, by kind": (pooled, None, free),
                f"{name}, by kind, learned": (pooled, taught, free),
            }
    taught, stays = spin(kinds)
    out["Spin, by kind, learned"] = (stays, taught, free)
    out["Oracle's plan"] = (Follow(oracle, tested.prompt), None, free)
    return out


def drawn(rows: list[Row]) -> Any:
    """Benefit by batch, shares of best arms by domain, and regret by selector."""
    drawing, (panels,) = plots.panels(1, 3, (13, 4.2), bare=True, layout="tight")
    found = [r for r in rows if r["part"] == "worth" and r["by"] == "domain"]
    for name, label in (("request_oracle", "best of every request"), ("round_oracle", "best of every round")):
        mine = [r for r in found if r["group"] == "all" and r[name + "_low"] is not None]
        panels[0].plot([r["batch"] for r in mine], [r[name] for r in mine], "o-", label=label)
        panels[0].fill_between(
            [r["batch"] for r in mine],
            *([r[name + end] for r in mine] for end in ("_low", "_high")),
            alpha=0.2,
        )
    panels[0].set_xscale("log", base=2)
    panels[0].set_xlabel("batch")
    panels[0].set_ylabel("times faster than the best fixed arm")
    panels[0].legend(frameon=False, fontsize=8)
    first = [r for r in found if r["batch"] == found[0]["batch"]]
    bottom = np.zeros(len(first))
    for name in (field for field in first[0] if field.startswith("share:")):
        share = np.array([r[name] for r in first])
        label = name.removeprefix("share:").removeprefix("pocket-")
        panels[1].bar([r["group"] for r in first], share, bottom=bottom, label=label)
        bottom += share
    panels[1].set_ylabel(f"requests by best arm, batch {found[0]['batch']}")
    panels[1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    mine = [r for r in rows if r["part"] == "regret"][::-1]
    mine = [r for r in mine if r["regret_low"] is not None]
    off = [[r["regret"] - r["regret_low"] for r in mine], [r["regret_high"] - r["regret"] for r in mine]]
    panels[2].barh(
        [r["selector"] for r in mine],
        [r["regret"] for r in mine],
        xerr=off,
        color="0.7",
        error_kw={"lw": 0.8},
    )
    panels[2].set_xlabel("% over the oracle of every round")
    panels[2].tick_params(labelsize=7)
    return drawing


if __name__ == "__main__":
    main(parse(Settings, __doc__))
