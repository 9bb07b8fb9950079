"""τ of drafts on held-out text: exact expected rounds on texts sampled from the target, with paired intervals and a live check.

    python recipes/evaluate_tau.py --json tau.json
    python recipes/evaluate_tau.py --drafts mine=path/to/spire,other=path/to/causal-lm

Texts are sampled from the target at temperature 1 after held-out contexts of each length. Along them the probability that a draft's
token is accepted is known exactly (specdec/audit/tau.py), so only the texts are random. Every --k comes from one pass at the largest:
a shorter block is the beginning of a longer one. --pruners adds MagicDec with entries that each pruner chooses once, after the
context, and MagicDec without a pruner but with a window larger by the budget. Rows are by method, context, k and domain, with
acceptance by position; ratios to `vanilla` are paired, intervals are 95 % bootstraps over source files. --live decodes the same
contexts with the real decoder and prints its τ beside the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401
import torch

import specdec as sd
from specdec import pruning
from specdec.audit.tau import Efficiency
from specdec.drafts.spire import SpireModel
from specdec.lab.console import table
from specdec.lab.loading import load, load_draft
from specdec.lab.options import option, parse
from specdec.lab.paired import rows_of
from specdec.lab.recipe import Recipe
from specdec.lab.runs import decode
from specdec.lab.tau import Texts, each_k, sample
from specdec.training.forward import Parallel


@dataclass(frozen=True)
class Settings(Recipe):
    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    drafts: tuple[str, ...] = option(
        ("vanilla=pocket-vanilla", "spire=pocket-spire"), "name=folder or pocket model", metavar="NAME=DRAFT"
    )
    contexts: tuple[int, ...] = option((256, 512, 960), "context lengths", metavar="N")
    k: tuple[int, ...] = option((4,), "proposed tokens per round", metavar="N")
    window: int = option(64, "window of windowed vanilla and MagicDec")
    sinks: int = option(1, "likewise")
    new_tokens: int = option(64, "positions per context at which rounds start")
    per_prompt: int = option(2, "contexts cut from one held-out prompt")
    prompts: int | None = option(None, "held-out prompts (default: all)")
    pruners: tuple[str, ...] = option(
        (), "also evaluate MagicDec with these KV pruners, such as H2O,TOVA", metavar="NAME"
    )
    budget: int = option(64, "entries per head that a pruner chooses")
    live: bool = option(False, "also decode with the real decoder")


def main(s: Settings) -> None:
    if not 1 <= min(s.k) <= max(s.k) <= s.window:
        raise SystemExit(
            f"--k {','.join(map(str, s.k))} with --window {s.window}: give block lengths from 1 to the window"
        )
    s.begin()
    target, tokenizer = load(s.target, torch.float32)
    drafts: dict[str, tuple[Any, Any]] = {}
    for entry in s.drafts:
        method, equals, name = entry.partition("=")
        if not equals:
            raise SystemExit(f"--drafts {entry}: write name=folder, for example mine={entry}")
        draft = load_draft(name, target)
        drafts[method] = (draft, None if isinstance(draft, SpireModel) else Parallel())
        if method == "vanilla":
            drafts["windowed_vanilla"] = (draft, Parallel(s.window, s.sinks))
    depth = target.config.num_hidden_layers
    whole = SpireModel.from_target(target, depth, sinks=s.sinks, window=s.window, feedback=False)
    drafts["magicdec"] = (
        whole,
        None,
    )  # all of the target's blocks over its own activations, sparse: the same function as MagicDec
    if s.pruners:
        model = sd.HFModel(target, tokenizer)
        for method, draft in pruned(s).items():
            drafts[method] = (draft, model)
    rows: list[dict[str, Any]] = []
    for length in s.contexts:
        layers = range(depth)
        texts = sample(
            target, tokenizer, length, s.new_tokens, max(s.k), layers, s.seed, s.per_prompt, s.prompts
        )
        for at_k, scores in each_k(drafts, texts, s.k):
            rows += rows_of(scores, at_k)
            some = [r for r in rows if (r["context"], r["k"], r["domain"]) == (length, at_k.k, "all")]
            print(table(some, COLUMNS), "\n")
            if s.live:
                live(s, target, tokenizer, drafts, at_k, scores, rows)
    s.save(rows)


COLUMNS = ["method", "context", "k", "tau", "low", "high", "ratio_to_vanilla", "ratio_low", "ratio_high"]


def pruned(s: Settings) -> dict[str, sd.drafts.MagicDec]:
    """MagicDec with each pruner at the budget, and with the budget added to its window."""
    known = {n: part for n, part in vars(pruning).items() if isinstance(part, type) and n in s.pruners}
    missing = set(s.pruners) - set(known)
    if missing:
        raise SystemExit(f"no pruner {min(missing)!r}: give names of classes of specdec.pruning, such as H2O")
    made = {"magicdec_wider": sd.drafts.MagicDec(s.window + s.budget, s.sinks)}
    for name in s.pruners:
        made[f"magicdec_{name}"] = sd.drafts.MagicDec(
            s.window, s.sinks, pruner=known[name](), budget=s.budget
        )
    return made


def live(
    s: Settings,
    target: Any,
    tokenizer: Any,
    drafts: dict[str, Any],
    texts: Texts,
    scores: dict[str, Efficiency],
    rows: list[Any],
) -> None:
    """τ of the real decoder on the same contexts; its texts are another sample, so τ agrees in the mean only."""
    wrapped = sd.HFModel(target, tokenizer)
    prompts = texts.tokens[:, : texts.context].tolist()
    for method, (draft, forward) in drafts.items():
        part: Any
        if method == "magicdec":
            part = sd.drafts.MagicDec(window=s.window, sinks=s.sinks)
        elif isinstance(draft, sd.drafts.MagicDec):
            part = draft
        elif isinstance(draft, SpireModel):
            part = sd.drafts.Spire(draft, block=max(8, texts.k))
        else:
            if forward is not None and forward.window is not None:
                continue  # not decoded here: spire_measured.py does
            part = sd.drafts.Model(sd.HFModel(draft, tokenizer))
        decoder = sd.decoder(wrapped).draft(part, texts.k).build()
        made = decode(decoder, prompts, 24, s.new_tokens + 1, seed=s.seed + 10_000)
        print(f"live {method}: tau {made.tau:.3f}, estimate {scores[method].tau:.3f}", flush=True)
        place = {"context": texts.context, "k": texts.k, "domain": "all"}
        rows.append({"method": f"live_{method}", **place, "tau": made.tau})


if __name__ == "__main__":
    main(parse(Settings, __doc__))
