"""Selectors on real traces: what a choice of drafts is worth, and which of it each selector gets, against an exact oracle (SPIN, section 4).

    python recipes/spin_selection.py --json docs/results/spin_selection.json --plots docs/figures

Texts are sampled from the target once. Along them every draft's chances of acceptance are known, so that selectors are replayed instead of
decoded: `specdec.lab.selection` and `specdec.lab.selection_runs`. Seconds are those of measured rounds (`lab.arm_times`): drafting,
verification, and the reading of all that a draft has not read when a request changes to it. The prompts of one half of the source
files are for learning (rows `learned`), those of the other half are for all results.

Rows, by `part`:
- `worth`: best arm of each request by its exact expected seconds (`share:NAME`), and how many times faster than the best fixed arm the
  best arm of every request (`request_oracle`) and of every round (`round_oracle`) is, by batch and domain (the paper's Figs 2 to 4);
- `regret`: each selector's seconds over the oracle's, in percent (`regret`: over the oracle of every round, `over_best_fixed`: over the fixed
  arm that is best in hindsight). Rounds are charged as in a batch of one's own arm; `elapsed_over_best_fixed` charges the batch's own rounds,
  in which every arm in use has its fixed costs and the last rounds have few rows;
- `ratio`: how many times faster SPIN's own selector is than UCB1 and epsilon-greedy (the paper: 1.49).
Intervals are 95 % bootstraps over source files and repeats. `times` rows have the seconds that rounds are charged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch

import specdec as sd
from specdec import selectors, zoo
from specdec.lab import plots
from specdec.lab.arm_times import POOL, load_pool, measured
from specdec.lab.console import progress, table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted
from specdec.lab.selection import Requests, RoundTimes, fixed_seconds, ratio, round_oracle, worth
from specdec.lab.selection_runs import Follow, SelectorReplay
from specdec.lab.tau import accept_chances, sample
from specdec.lab.workload import Kind

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings(Plotted):
    pool: tuple[str, ...] = option(
        (*POOL, "pocket-spire", "ngram", "none"), "arms: names in the zoo, ngram, none"
    )
    batches: tuple[int, ...] = option((1, 4, 16, 64), "rows at a time")
    replayed: int = option(16, "rows at a time in the replays of selectors")
    context: int = option(256, "tokens of a prompt")
    per_prompt: int = option(2, "prompts cut from one held-out text")
    new_tokens: int = option(96, "tokens of a request")
    k: int = option(4, "drafted tokens per round")
    capacity: float = option(0.25, "share of the batch that an arm may draft for in the paper's setting")
    repeats: int = option(40, "replays of each selector, with random numbers of their own")
    quick: bool = option(False, "a one-minute run: four prompts a domain, two repeats")


def main(s: Settings) -> list[Row]:
    s.begin()
    if s.quick:
        small = (POOL[0], POOL[1], "ngram", "none")
        s = replace(
            s, pool=small, batches=(1, 4), replayed=3, context=64, per_prompt=1, new_tokens=12, repeats=2
        )
    requests, domains = recorded(s)
    target = sd.HFModel(*zoo.load("pocket-target"))
    prompts = [row.tolist() for row in requests.tokens[: s.replayed]] if requests.tokens is not None else []
    times = measured(target, load_pool(s.pool), s.k, prompts, *((4, 1) if s.quick else ()), seed=s.seed)
    rows: list[Row] = [
        {"part": "times", "arm": name, "fixed_milliseconds": 1e3 * f, "row_milliseconds": 1e3 * r, "read_milliseconds": 1e3 * read}
        for name, (f, r), read in zip(s.pool, times.draft, times.read)
    ]  # fmt: skip
    rows += [{"part": "times", "arm": "verify", **dict(zip(("fixed", "row", "token"), times.verify))}]
    test = np.flatnonzero(requests.source % 2 == 1)
    groups = [domains[c] for c in test]
    tested, learned = requests.select(test), requests.select(np.flatnonzero(requests.source % 2 == 0))
    for batch in s.batches:
        rows += [{"part": "worth", **row} for row in worth(tested, times, batch, groups)]
    rows += regrets(s, tested, learned, times, Kind(target.tokenizer))
    for part in ("worth", "regret", "ratio"):
        mine = [r for r in rows if r["part"] == part]
        print(f"\n{part}\n" + table(mine, [name for name in mine[0] if name != "part"]))
    s.save(rows)
    s.draw({"spin_selection": lambda: drawn(s, rows)})
    return rows


def recorded(s: Settings) -> tuple[Requests, list[str]]:
    """The requests and their domains: prompts of equal length, and the target's continuations."""
    model, tokenizer = zoo.load("pocket-target")
    arms = load_pool(s.pool)
    layers = sorted({layer for name in s.pool if "spire" in name for layer in arms[name].model.layers})
    count = 12 if s.quick else None
    texts = sample(model, tokenizer, s.context, s.new_tokens, s.k, layers, s.seed, s.per_prompt, count)
    accept = torch.zeros(len(s.pool), len(texts.tokens), s.new_tokens, s.k, dtype=torch.float64)
    size = torch.full(accept.shape[:3], s.k)
    for a, (name, draft) in enumerate(arms.items()):
        progress(f"chances of {name}")
        if name == "ngram":
            accept[a], size[a] = looked_up(draft, texts, s)
        elif draft is not None:
            accept[a] = accept_chances(draft.model if "spire" in name else draft.model.model, texts)
    lengths = tuple(0 if draft is None else s.k for draft in arms.values())
    prompt, tokens = np.full(len(texts.tokens), s.context), texts.tokens[:, : s.context]
    return Requests(
        accept, lengths, prompt, texts.prompt, tuple(arms), size=size, tokens=tokens
    ), texts.domain


def looked_up(draft: Any, texts: Any, s: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """``[C, n, k]`` whether an n-gram proposes the text's tokens, and how many it proposes ``[C, n]``."""
    made = torch.zeros(len(texts.tokens), s.new_tokens, s.k)
    size = torch.zeros(made.shape[:2], dtype=torch.long)
    for c, ids in enumerate(texts.tokens.numpy()):
        for start in range(s.new_tokens):
            at = s.context + 1 + start
            found = draft.lookup(ids[:at], s.k)
            size[c, start] = len(found)
            made[c, start, : len(found)] = torch.from_numpy(found == ids[at : at + len(found)])
    return made, size


def regrets(s: Settings, tested: Requests, learned: Requests, times: RoundTimes, kind: Kind) -> Iterator[Row]:
    """Rows of every selector, and the ratios."""
    replay = SelectorReplay(tested, times, s.replayed, s.repeats, s.seed)
    capacity = max(1, round(s.capacity * s.replayed))
    bound = replace(replay, capacities=tuple(s.replayed if k == 0 else capacity for k in tested.lengths))
    school = replace(replay, requests=learned, repeats=1)
    fixed, oracle = fixed_seconds(tested, times, s.replayed), round_oracle(tested, times, s.replayed)
    best = int(fixed.sum(1).argmin())
    alone = replay(selectors.Fixed(best)).elapsed
    runs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, (selector, teacher, how) in chosen(s, best, oracle, tested, kind, replay, bound).items():
        progress(f"selector {name}")
        start = None if teacher is None else school(teacher).last
        played = how(selector, start)
        runs[name] = played.seconds, played.elapsed
        row: Row = {"part": "regret", "selector": name, "batch": s.replayed, "learned": teacher is not None}
        row["seconds"] = played.seconds.mean()
        for what, top, base in (
            ("regret", played.seconds, oracle.seconds),
            ("over_best_fixed", played.seconds, fixed[best]),
            ("elapsed_over_best_fixed", played.elapsed, alone),
        ):
            row |= {
                what + end: 100 * (x - 1)
                for end, x in zip(("", "_low", "_high"), ratio(top, base, tested.source))
            }
        yield row
    for mine in ("Spin", "Spin, capacities", "Spin, by kind, learned"):
        for other in ("UCB1", "EpsilonGreedy"):
            for charged, at in (("alone", 0), ("batch", 1)):
                value, low, high = ratio(runs[other][at], runs[mine][at], tested.source)
                place = {"part": "ratio", "selector": mine, "over": other, "charged": charged, "paper": 1.49}
                yield {**place, "times_faster": value, "low": low, "high": high}


def chosen(
    s: Settings,
    best: int,
    oracle: Any,
    tested: Requests,
    kind: Kind,
    free: SelectorReplay,
    bound: SelectorReplay,
) -> dict[str, tuple[Any, Any, SelectorReplay]]:
    """Name -> a selector, the one that learns for it beforehand, and the setting. All but `Spin`'s settings see goodput as reward."""
    plain = {
        f"Fixed, {tested.names[best]}": selectors.Fixed(best),
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
    out: dict[str, tuple[Any, Any, SelectorReplay]] = {name: (one, None, free) for name, one in plain.items()}
    out["Spin, capacities"] = (selectors.Spin(), None, bound)
    for name, one in plain.items():
        if "pool" in one.__dataclass_fields__ and name != "Spin":
            pooled = replace(one, pool=kind)
            out |= {
                f"{name}, by kind": (pooled, None, free),
                f"{name}, by kind, learned": (pooled, pooled, free),
            }
    stays = selectors.Spin(4, 64, kind, warm=100, learn="always")
    out["Spin, by kind, learned"] = (stays, replace(stays, exploration=8, growth=1, warm=None), free)
    out["Oracle's plan"] = (Follow(oracle, tested.prompt), None, free)
    return out


def drawn(s: Settings, rows: list[Row]) -> Any:
    """Benefit by batch, shares of best arms by domain, and regret by selector."""
    drawing, (panels,) = plots.panels(1, 3, (13, 4.2), bare=True, layout="tight")
    found = [r for r in rows if r["part"] == "worth"]
    for name, label in (("request_oracle", "best of every request"), ("round_oracle", "best of every round")):
        mine = [r for r in found if r["group"] == "all"]
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
    last = [r for r in found if r["batch"] == s.batches[-1]]
    bottom = np.zeros(len(last))
    for name in s.pool:
        share = np.array([r[f"share:{name}"] for r in last])
        panels[1].bar([r["group"] for r in last], share, bottom=bottom, label=name.removeprefix("pocket-"))
        bottom += share
    panels[1].set_ylabel(f"requests by best arm, batch {s.batches[-1]}")
    panels[1].legend(frameon=False, fontsize=7)
    mine = [r for r in rows if r["part"] == "regret"][::-1]
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
