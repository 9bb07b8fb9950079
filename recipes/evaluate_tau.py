"""τ of drafts on held-out text: exact expected rounds on texts sampled from the target, with paired intervals and a live check.

    python recipes/evaluate_tau.py --json tau.json
    python recipes/evaluate_tau.py --drafts mine=path/to/spire,other=path/to/causal-lm

Texts are drawn from the target at temperature 1 after held-out contexts of each length. Along them the probability that a draft's token
is accepted is known exactly (specdec/audit/tau.py), so that nothing but the texts is random. Every --k comes from one pass at the largest:
a shorter block is the beginning of a longer one. Rows are by method, context, k and domain, with acceptance by position; ratios to
`vanilla` are paired, intervals are 95 % bootstraps over source files. --live decodes the same contexts with the real decoder and prints
its τ beside the estimate.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _measure import decode, quiet, table
from _report import write
from _tau import Efficiency, Texts, each_k, rows_of, sample
from transformers import AutoModelForCausalLM

import specdec as sd
from specdec import zoo
from specdec.drafts.spire.model import FILE, SpireModel
from specdec.training.forward import Parallel


@dataclass
class Settings:
    target: str = "pocket-target"
    drafts: str = "vanilla=pocket-vanilla,spire=pocket-spire"
    contexts: tuple[int, ...] = (256, 512, 960)
    k: tuple[int, ...] = (4,)
    window: int = 64
    sinks: int = 1
    new_tokens: int = 64
    per_prompt: int = 2
    prompts: int | None = None
    live: bool = False
    threads: int = 1
    seed: int = 0
    json: str | None = None


def load(name: str, target: Any) -> Any:
    """A ``SpireModel`` or a causal LM from the zoo's name or a folder."""
    folder = Path(name) if Path(name).is_dir() else zoo.FOLDER / name
    if (folder / FILE).exists():
        return SpireModel.from_pretrained(folder, target, dtype=torch.float32)
    if folder.is_dir():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    raise SystemExit(f"no draft {name!r}: give a folder, or one of {', '.join(zoo.names())}")


def main(s: Settings) -> None:
    if not 1 <= min(s.k) <= max(s.k) <= s.window:
        raise SystemExit(
            f"--k {','.join(map(str, s.k))} with --window {s.window}: give block lengths from 1 to the window"
        )
    torch.set_num_threads(s.threads)
    quiet()
    known = zoo.FOLDER / s.target
    target, tokenizer = zoo.load(s.target) if known.is_dir() else _target(s.target)
    drafts: dict[str, tuple[Any, Parallel | None]] = {}
    for entry in s.drafts.split(","):
        method, equals, name = entry.partition("=")
        if not equals:
            raise SystemExit(f"--drafts {entry}: write name=folder, for example mine={entry}")
        draft = load(name, target)
        drafts[method] = (draft, None if isinstance(draft, SpireModel) else Parallel())
        if method == "vanilla":
            drafts["windowed_vanilla"] = (draft, Parallel(s.window, s.sinks))
    depth = target.config.num_hidden_layers
    whole = SpireModel.from_target(target, depth, sinks=s.sinks, window=s.window, feedback=False)
    drafts["magicdec"] = (
        whole,
        None,
    )  # the same function: the target's blocks over its own activations, sparse
    rows: list[dict[str, Any]] = []
    for length in s.contexts:
        layers = range(depth)
        texts = sample(
            target, tokenizer, length, s.new_tokens, max(s.k), layers, s.seed, s.per_prompt, s.prompts
        )
        for at_k, scores in each_k(drafts, texts, s.k):
            rows += rows_of(scores, at_k)
            print(
                table(
                    [r for r in rows if (r["context"], r["k"], r["domain"]) == (length, at_k.k, "all")],
                    COLUMNS,
                ),
                "\n",
            )
            if s.live:
                live(s, target, tokenizer, drafts, at_k, scores, rows)
    if s.json:
        write(s.json, rows, s.seed)


COLUMNS = ["method", "context", "k", "tau", "low", "high", "ratio_to_vanilla", "ratio_low", "ratio_high"]


def _target(folder: str) -> tuple[Any, Any]:
    model = sd.HFModel.from_pretrained(folder, dtype=torch.float32)
    return model.model, model.tokenizer


def live(
    s: Settings,
    target: Any,
    tokenizer: Any,
    drafts: dict[str, Any],
    texts: Texts,
    scores: dict[str, Efficiency],
    rows: list[Any],
) -> None:
    """τ of the real decoder on the same contexts; another sample of texts, so equal in the mean only."""
    wrapped = sd.HFModel(target, tokenizer)
    prompts = texts.tokens[:, : texts.context].tolist()
    for method, (draft, forward) in drafts.items():
        part: Any
        if method == "magicdec":
            part = sd.drafts.MagicDec(window=s.window, sinks=s.sinks)
        elif isinstance(draft, SpireModel):
            part = sd.drafts.Spire(draft, block=max(8, texts.k))
        else:
            if forward is not None and forward.window is not None:
                continue  # one function with vanilla's; decoded in spire_measured.py
            part = sd.drafts.Model(sd.HFModel(draft, tokenizer))
        decoder = sd.decoder(wrapped).draft(part, texts.k).build()
        made = decode(decoder, prompts, 24, s.new_tokens + 1, seed=s.seed + 10_000)
        print(f"live {method}: tau {made.tau:.3f}, estimate {scores[method].tau:.3f}", flush=True)
        rows.append(
            {
                "method": f"live_{method}",
                "context": texts.context,
                "k": texts.k,
                "domain": "all",
                "tau": made.tau,
            }
        )


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    numbers = {"type": lambda text: tuple(int(n) for n in text.split(",")), "metavar": "N,N,..."}
    parser.add_argument(
        "--target", default=d.target, help="a pocket model, a folder or a hub id (default %(default)s)"
    )
    parser.add_argument(
        "--drafts", default=d.drafts, help="name=folder or pocket model, ... (default %(default)s)"
    )
    parser.add_argument(
        "--contexts", default=d.contexts, help="context lengths (default %(default)s)", **numbers
    )
    parser.add_argument("--k", default=d.k, help="proposed tokens a round (default %(default)s)", **numbers)
    parser.add_argument("--window", type=int, default=d.window, help="of windowed vanilla and MagicDec")
    parser.add_argument("--sinks", type=int, default=d.sinks)
    parser.add_argument(
        "--new-tokens", type=int, default=d.new_tokens, help="positions where rounds start, a context"
    )
    parser.add_argument(
        "--per-prompt", type=int, default=d.per_prompt, help="contexts cut from one held-out prompt"
    )
    parser.add_argument("--prompts", type=int, default=d.prompts, help="held-out prompts (default: all)")
    parser.add_argument("--live", action="store_true", help="decode with the real decoder too")
    parser.add_argument("--threads", type=int, default=d.threads)
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--json")
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    main(settings())
