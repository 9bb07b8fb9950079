"""Goodput of every draft of the pool on every domain, and what a choice by domain is worth.

    python recipes/spin_pool.py --json docs/results/spin_pool.json

Each draft decodes the same held-out prompts of each domain alone (serial, temperature 1). Rows: `draft, domain, tau, goodput` (tokens
a second, medians of interleaved repeats), then `draft = "oracle"`: the best draft of each domain, and its head-room over the best
fixed draft on the three domains together, each with the same number of tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from _measure import quiet
from _report import write

import specdec as sd
from specdec import zoo
from specdec.data.corpus import DOMAINS
from specdec.data.prompts import prompts

POOL = ("pocket-tiny", "pocket-code", "pocket-prose", "pocket-tabular", "pocket-vanilla")


@dataclass
class Settings:
    """Every setting of a run."""

    drafts: str = ",".join(POOL)
    batch: int = 16
    context: int = 512
    tokens: int = 96
    k: int = 4
    repeats: int = 5
    threads: int = 1
    seed: int = 0
    json: str | None = None


def main(s: Settings) -> list[dict[str, Any]]:
    torch.set_num_threads(s.threads)
    quiet()
    target = sd.HFModel(*zoo.load("pocket-target"))
    names = s.drafts.split(",")
    decoders = {name: sd.decoder(target).draft(sd.HFModel(*zoo.load(name)), s.k).build() for name in names}
    texts = {domain: prompts(domain, s.batch, s.context, target.tokenizer) for domain in DOMAINS}
    runs: dict[tuple[str, str], list[Any]] = {}
    for repeat in range(s.repeats + 1):  # the first is a warm-up
        for domain in DOMAINS:
            for name, decoder in decoders.items():
                out = decoder.generate(texts[domain], s.tokens, seed=s.seed + repeat, eos_token_id=())
                if repeat:
                    runs.setdefault((name, domain), []).append(out.stats)
    rows = [
        {
            "draft": name,
            "domain": domain,
            "tau": median(x.tau for x in stats),
            "goodput": median(x.tokens_per_second for x in stats),
            "draft_milliseconds": 1e3 * median(x.seconds["draft"] / x.rounds * s.batch for x in stats),
            "verify_milliseconds": 1e3
            * median((x.seconds["target"] + x.seconds["verify"]) / x.rounds * s.batch for x in stats),
            "batch": s.batch,
            "context": s.context,
        }
        for (name, domain), stats in runs.items()
    ]
    rows += summary(rows, names)
    show(rows, names)
    if s.json:
        write(s.json, rows, s.seed)
    return rows


def summary(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Each draft, and the oracle, on all domains with as many tokens each: harmonic means of goodput."""
    goodput = {(r["draft"], r["domain"]): r["goodput"] for r in rows}
    mixed = {name: len(DOMAINS) / sum(1 / goodput[name, d] for d in DOMAINS) for name in names}
    best = {d: max(names, key=lambda name: goodput[name, d]) for d in DOMAINS}
    oracle = len(DOMAINS) / sum(1 / goodput[best[d], d] for d in DOMAINS)
    fixed = max(mixed, key=lambda name: mixed[name])
    out = [{"draft": name, "domain": "all", "goodput": value} for name, value in mixed.items()]
    choices = {f"best_{d}": name for d, name in best.items()}
    return [
        *out,
        {
            "draft": "oracle",
            "domain": "all",
            "goodput": oracle,
            "best_fixed": fixed,
            "headroom": oracle / mixed[fixed],
            **choices,
        },
    ]


def show(rows: list[dict[str, Any]], names: list[str]) -> None:
    """The table: tokens a second (and tau)."""
    cells = {(r["draft"], r["domain"]): r for r in rows}
    print(f"{'draft':16}" + "".join(f"{d:>18}" for d in (*DOMAINS, "all")))
    for name in names:
        line = "".join(f"{cells[name, d]['goodput']:11.0f} ({cells[name, d]['tau']:.2f})" for d in DOMAINS)
        print(f"{name:16}{line}{cells[name, 'all']['goodput']:18.0f}")
    last = rows[-1]
    print(f"{'oracle':16}{'':54}{last['goodput']:18.0f}   {last['headroom']:.2f} x {last['best_fixed']}")


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument("--drafts", default=d.drafts, help="names in the zoo (default %(default)s)")
    parser.add_argument("--batch", type=int, default=d.batch)
    parser.add_argument("--context", type=int, default=d.context, help="prompt tokens (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=d.tokens, help="new tokens of each row")
    parser.add_argument("--k", type=int, default=d.k, help="drafted tokens a round")
    parser.add_argument("--repeats", type=int, default=d.repeats)
    parser.add_argument("--threads", type=int, default=d.threads)
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--json")
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    main(settings())
