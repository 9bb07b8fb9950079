"""Verifiers compared on the pocket pair: tokens a round and tokens a second, on chains, trees and several chains.

    python recipes/verifiers.py --json verifiers.json

Held-out prompts are decoded with every verifier, by the same draft with the same nodes, so that only the verifier differs. Rows: `drafting,
temperature, verifier, nodes, tau, low, high, ratio, ratio_low, ratio_high, verify_ms, tokens_per_second`: tokens a round over the first
verifier's of the same drafting, with 95 % intervals by bootstrap over prompts, and milliseconds of sampling and verification a round of the batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

import checkout  # noqa: F401
import numpy as np

import specdec as sd
from specdec import zoo
from specdec.drafts.siblings import Distinct, TopAndOne
from specdec.lab.bootstrap import Clusters, figures
from specdec.lab.console import progress, table
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import pieces, shipped
from specdec.lab.recipe import Recipe


@dataclass(frozen=True)
class Settings(Recipe):
    draft: str = option("pocket-vanilla", "the pocket model that drafts")
    temperatures: tuple[float, ...] = option((0.7, 1.0), "of the target and the draft")
    context: int = option(96, "tokens of each prompt")
    per_prompt: int = option(2, "prompts cut from one text")
    count: int | None = option(None, "use the first texts only", metavar="N")
    new_tokens: int = option(48, "tokens decoded after the first")
    repeats: int = option(4, "runs with other seeds, the verifiers in turn")
    batch: int = option(24, "prompts at a time")


def ways(small: sd.HFModel) -> dict[str, tuple[Any, int, tuple[Any, ...]]]:
    """Drafting -> the draft, its longest path, and the verifiers that take it."""
    tree, traversal = sd.drafts.Tree, sd.Traversal()
    at_once = (sd.Rejection(), traversal, sd.KSeq(), sd.OptimalTransport())
    one_by_one = (sd.Rejection(), traversal)
    top_and_one = tree(small, (3, 2, 1), siblings=TopAndOne())
    return {
        "chain of 4": (sd.drafts.Model(small), 4, (sd.Rejection(), sd.BlockVerification(), traversal)),
        "chain of 8": (sd.drafts.Model(small), 8, (sd.Rejection(), sd.BlockVerification(), traversal)),
        "4 candidates": (tree(small, (4,)), 1, at_once),
        "tree (3, 2, 1)": (tree(small, (3, 2, 1)), 3, at_once),
        "4 chains of 3": (tree(small, (4, 1, 1)), 3, at_once),
        "tree (3, 2, 1), distinct": (tree(small, (3, 2, 1), siblings=Distinct()), 3, one_by_one),
        "tree (3, 2, 1), the most probable and a drawn one": (top_and_one, 3, one_by_one),
    }


def main(s: Settings) -> None:
    s.begin()
    target, small = sd.HFModel(*zoo.load("pocket-target")), sd.HFModel(*zoo.load(s.draft))
    entries = pieces(shipped()[: s.count], target.tokenizer, s.context, s.per_prompt)
    prompts = [list(entry.given) for entry in entries]
    clusters = Clusters([entry.source for entry in entries], seed=s.seed)
    rows: list[dict[str, Any]] = []
    for temperature in s.temperatures:
        for drafting, (draft, length, verifiers) in ways(small).items():
            base = sd.decoder(target).draft(draft, length).sampling(temperature=temperature)
            decoders = {v.info.name: base.verifier(v).build() for v in verifiers}
            rounds = {name: np.zeros(len(prompts)) for name in decoders}
            stats, calls = {name: sd.Stats() for name in decoders}, Counter[str]()
            for decoder in decoders.values():  # to warm up
                decoder.generate(prompts[: s.batch], length + 1, seed=s.seed, eos_token_id=())
            for turn, (repeat, start) in enumerate(
                product(range(s.repeats), range(0, len(prompts), s.batch))
            ):
                some = prompts[start : start + s.batch]
                seeds = [1_000_003 * (repeat + 1) + s.seed + start + i for i in range(len(some))]
                at = turn % len(decoders)  # another verifier at each turn
                for name in [*decoders][at:] + [*decoders][:at]:
                    progress(f"{drafting}, {name}, run {repeat + 1} of {s.repeats}")
                    out = decoders[name].generate(some, s.new_tokens + 1, seed=seeds, eos_token_id=())
                    mine = [one.rounds for one in out.row_stats]
                    rounds[name][start : start + len(some)] += mine
                    stats[name] += out.stats
                    calls[name] += max(mine)
            progress()
            tokens = np.full(len(prompts), float(s.repeats * s.new_tokens))
            first = np.stack([tokens, next(iter(rounds.values()))])
            for name, mine in rounds.items():
                made = stats[name]
                found = figures(np.stack([tokens, mine]), first, clusters)
                rows.append({
                    "drafting": drafting, "temperature": temperature, "verifier": name, "nodes": base.build().draft.info.nodes(length),
                    "tau": found["tau"], "low": found["tau_low"], "high": found["tau_high"], "ratio": found["ratio"],
                    "ratio_low": found["ratio_low"], "ratio_high": found["ratio_high"], "verify_ms": 1000 * made.seconds["verify"] / calls[name],
                    "tokens_per_second": made.tokens_per_second, "prompts": len(prompts), "batch": s.batch,
                })  # fmt: skip
            print(table(rows[-len(decoders) :], COLUMNS.split()), "\n", flush=True)
    s.save(rows)


COLUMNS = "drafting verifier temperature tau ratio ratio_low ratio_high verify_ms tokens_per_second"


if __name__ == "__main__":
    main(parse(Settings, __doc__))
