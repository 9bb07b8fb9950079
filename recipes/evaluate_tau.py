"""τ of drafts at several context lengths: exact expected rounds on texts sampled from the target, with paired intervals and a live check.

    python recipes/evaluate_tau.py --json tau.json
    python recipes/evaluate_tau.py --drafts mine=path/to/spire,other=path/to/causal-lm --prompts prompts.jsonl

Contexts of each length are cut from the held-out prompts (or from --prompts, as in compare.py). The target continues them once, and drafts
are replayed on its texts (docs/lab.md), so only the texts are random. Every --k comes from one replay at the largest: a shorter block is
the beginning of a longer one. --pruners adds MagicDec with entries that each pruner chooses once, after the context, and MagicDec
without a pruner but with a window larger by the budget. Rows are by method, context, k and domain, with acceptance by position; ratios to
`vanilla` (or the first draft) are paired, intervals are 95 % bootstraps over sources. --live decodes the same contexts with the real
decoder and prints its τ beside the estimate.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

import checkout  # noqa: F401

import specdec as sd
from specdec import lab, pruning
from specdec.lab.console import short_errors, table
from specdec.lab.on_texts import OnTexts
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import entries_from, pieces
from specdec.lab.runs import decode


@dataclass(frozen=True)
class Settings(OnTexts):
    drafts: tuple[str, ...] = option(
        ("vanilla=pocket-vanilla", "spire=pocket-spire"),
        "NAME=DRAFT, as for compare.py; MagicDec and a windowed vanilla are always added",
        metavar="NAME=DRAFT",
    )
    contexts: tuple[int, ...] = option((256, 512, 960), "context lengths", metavar="N")
    k: tuple[int, ...] = option((4,), "proposed tokens per round", metavar="N")
    new_tokens: int = option(64, "positions per context at which rounds start")
    per_prompt: int = option(2, "contexts cut from one prompt")
    pruners: tuple[str, ...] = option(
        (), "also evaluate MagicDec with these KV pruners, such as H2O,TOVA", metavar="NAME"
    )
    budget: int = option(64, "entries per head that a pruner chooses")
    live: bool = option(False, "also decode with the real decoder")


COLUMNS = ["method", "context", "k", "tau", "low", "high", "ratio_to_vanilla", "ratio_low", "ratio_high"]


def main(s: Settings) -> None:
    if not 1 <= min(s.k) <= max(s.k) <= s.window:
        raise SystemExit(
            f"--k {','.join(map(str, s.k))} with --window {s.window}: give block lengths from 1 to the window"
        )
    s.begin()
    windowed = [
        f"windowed_{spec.replace('=', '=windowed:')}" for spec in s.drafts if spec.startswith("vanilla=")
    ]
    specs = [*s.drafts, *windowed, "magicdec"]
    with short_errors():
        target = s.loaded()
        parts = s.parts(target, specs) | pruned(s)
        entries = entries_from(s.prompts)[: s.count]
    rows: list[dict[str, Any]] = []
    for length in s.contexts:
        with short_errors():
            some = pieces(entries, target.tokenizer, length, s.per_prompt)
        with short_errors(), tempfile.TemporaryDirectory() as folder:
            trace = lab.record(target, some, folder, s.new_tokens, max(s.k), eos_token_id=(), seed=s.seed)
            replays = {name: lab.replay(trace, part, max(s.k), target) for name, part in parts.items()}
            found = lab.compare(replays, s.k, "vanilla" if "vanilla" in parts else None)
            here = [named(row, length) for row in found.rows]
            print(table([row for row in here if row["domain"] == "all"], COLUMNS), "\n")
            rows += here
            if s.live:
                rows += live(s, target, parts, replays, trace, length)
    s.save(rows)


def named(row: dict[str, Any], length: int) -> dict[str, Any]:
    """A row of ``lab.compare`` with the names of this recipe's reports."""
    names = {"category": "domain", "tau_low": "low", "tau_high": "high", "ratio": "ratio_to_vanilla"}
    return {"context": length} | {names.get(name, name): value for name, value in row.items()}


def pruned(s: Settings) -> dict[str, sd.drafts.MagicDec]:
    """MagicDec with each pruner at the budget, and with the budget added to its window."""
    known = {n: part for n, part in vars(pruning).items() if isinstance(part, type) and n in s.pruners}
    missing = set(s.pruners) - set(known)
    if missing:
        raise SystemExit(f"no pruner {min(missing)!r}: give names of classes of specdec.pruning, such as H2O")
    magicdec = sd.drafts.MagicDec(s.window, s.sinks, refresh=None)
    made = {"magicdec_wider": replace(magicdec, window=s.window + s.budget)} if s.pruners else {}
    return made | {
        f"magicdec_{name}": replace(magicdec, pruner=known[name](), budget=s.budget) for name in s.pruners
    }


def live(
    s: Settings, target: Any, parts: dict[str, Any], replays: dict[str, Any], trace: Any, length: int
) -> list[dict[str, Any]]:
    """τ of the real decoder on the same contexts; its texts are another sample, so τ agrees in the mean only."""
    prompts, k, rows = [text.ids[:length] for text in trace.texts], max(s.k), []
    for name, part in parts.items():
        decoder = sd.decoder(target).draft(part, k).build()
        made = decode(decoder, prompts, 24, s.new_tokens + 1, seed=s.seed + 10_000)
        print(f"live {name}: tau {made.tau:.3f}, replayed {replays[name].tau:.3f}", flush=True)
        rows.append({"method": f"live_{name}", "context": length, "k": k, "domain": "all", "tau": made.tau})
    return rows


if __name__ == "__main__":
    main(parse(Settings, __doc__))
