"""Goodput of every draft of the pool on every domain, and the possible gain of a choice by domain.

    python recipes/spin_pool.py --json docs/results/spin_pool.json

Each draft alone decodes the same held-out prompts of each domain (serial, temperature 1). Rows: `draft, domain, tau, goodput` (tokens
a second, medians of interleaved repeats), then `draft = "oracle"`: the best draft of each domain, and its gain over the best fixed
draft on the three domains together, each with the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import checkout  # noqa: F401

import specdec as sd
from specdec import zoo
from specdec.data.corpus import DOMAINS
from specdec.data.prompts import prompts
from specdec.lab.arm_times import POOL
from specdec.lab.clock import shuffled
from specdec.lab.console import table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe


@dataclass(frozen=True)
class Settings(Recipe):
    drafts: tuple[str, ...] = option(POOL, "names in the zoo")
    batch: int = option(16, "rows at a time")
    context: int = option(512, "prompt tokens")
    tokens: int = option(96, "new tokens of each row")
    k: int = option(4, "drafted tokens per round")
    repeats: int = option(5, "timed repeats")


def main(s: Settings) -> list[dict[str, Any]]:
    s.begin()
    target = sd.HFModel(*zoo.load("pocket-target"))
    names = list(s.drafts)
    decoders = {name: sd.decoder(target).draft(sd.HFModel(*zoo.load(name)), s.k).build() for name in names}
    texts = {domain: prompts(domain, s.batch, s.context, target.tokenizer) for domain in DOMAINS}
    runs: dict[tuple[str, str], list[Any]] = {(name, domain): [] for domain in DOMAINS for name in names}
    for repeat in range(s.repeats + 1):  # the first is a warm-up
        for domain in DOMAINS:
            for name, decoder in shuffled(decoders.items(), repeat, domain):
                out = decoder.generate(texts[domain], s.tokens, seed=s.seed + repeat, eos_token_id=())
                if repeat:
                    runs[name, domain].append(out)
    rows = [
        {
            "draft": name,
            "domain": domain,
            "tau": median(x.stats.tau for x in made),
            "goodput": median(x.stats.tokens_per_second for x in made),
            "draft_milliseconds": median(milliseconds(x, "draft") for x in made),
            "verify_milliseconds": median(milliseconds(x, "target", "verify") for x in made),
            "batch": s.batch,
            "context": s.context,
        }
        for (name, domain), made in runs.items()
    ]
    rows += summary(rows, names)
    print(table(rows, ("draft", "domain", "tau", "goodput", "best_fixed", "headroom")))
    s.save(rows)
    return rows


def milliseconds(made: sd.Generation, *stages: str) -> float:
    """Of a round of the batch, in some stages."""
    return (
        1e3 * sum(made.stats.seconds[stage] for stage in stages) / max(one.rounds for one in made.row_stats)
    )


def summary(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Each draft, and the oracle, on all domains with equally many tokens: harmonic means of goodput."""
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
            "draft": "oracle", "domain": "all", "goodput": oracle, "best_fixed": fixed,
            "headroom": oracle / mixed[fixed], **choices,
        },
    ]  # fmt: skip


if __name__ == "__main__":
    main(parse(Settings, __doc__))
