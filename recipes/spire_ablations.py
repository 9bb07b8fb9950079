"""SPIRe's figure 5 at pocket scale, with the controls that the paper lacks: every draft trained on the same tokens, τ on held-out text.

    python recipes/train_pocket.py --site SITE_PACKAGES --models ""      # corpus and shards, once
    python recipes/spire_ablations.py --json ablations.json

Each row changes one thing of SPIRe (`_variants.py`). Rows are trained with several seeds (initialisation and order of the data); a
row's τ is tokens over rounds of all its seeds, its interval the bootstrap over source files. Finished trainings' scores are kept in
the work folder: the same command continues after an interruption, and a larger --seeds adds to what is there.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from _data import states
from _measure import quiet, table
from _report import write
from _tau import Efficiency, rows_of, sample, score
from _variants import started, variants

from specdec import zoo
from specdec.drafts.spire import SpireModel
from specdec.models.fingerprint import fingerprint
from specdec.training.train import Settings as Training
from specdec.training.train import hash_of, train


@dataclass
class Settings:
    target: str = "pocket-target"
    work: str = "runs/pocket"
    site: str = ""
    methods: str = ""
    tokens: float = 1.0
    seeds: int = 1
    first_seed: int = 0
    batch: int = 2
    muon_lr: float = 0.02
    adam_lr: float = 0.006
    context: int = 512
    per_prompt: int = 2
    prompts: int | None = None
    new_tokens: int = 64
    k: int = 4
    threads: int = 1
    save: str | None = None
    json: str | None = None


def main(s: Settings) -> None:
    torch.set_num_threads(s.threads)
    quiet()
    target, tokenizer = zoo.load(s.target)
    rows_wanted = variants(k=s.k)
    names = s.methods.split(",") if s.methods else list(rows_wanted)
    unknown = [name for name in names if name not in rows_wanted]
    if unknown:
        raise SystemExit(f"no method {unknown[0]!r}: there are {', '.join(rows_wanted)}")
    layers = SpireModel.from_target(target).layers
    data = states(target, tokenizer, s.work, s.site, layers, round(s.tokens * 1e6))
    texts = sample(target, tokenizer, s.context, s.new_tokens, s.k, layers, 0, s.per_prompt, s.prompts)
    scores: dict[str, list[Efficiency]] = {name: [] for name in names}
    for seed in range(s.first_seed, s.first_seed + s.seeds):
        for name in names:
            scores[name].append(trained(s, name, seed, target, data, texts))
            print(f"{name} seed {seed}: tau {scores[name][-1].tau:.3f}", flush=True)
    whole = SpireModel.from_target(target, target.config.num_hidden_layers, feedback=False)
    deep = sample(target, tokenizer, s.context, s.new_tokens, s.k, whole.layers, 0, s.per_prompt, s.prompts)
    means = {name: Efficiency(*(torch.stack(t).mean(0) for t in zip(*each))) for name, each in scores.items()}
    means["magicdec"] = score(whole, deep)  # nothing to train: original positions, refreshed every round
    rows = []
    for row in rows_of(means, texts, domains=False):
        each = [e.tau for e in scores.get(row["method"], [])]
        paper = rows_wanted[row["method"]].paper if row["method"] in rows_wanted else 3.891
        spread = stdev(each) if len(each) > 1 else None
        rows.append(
            {
                **row,
                "seeds": len(each),
                "by_seed": each,
                "seed_sd": spread,
                "tokens": data_tokens(s),
                "paper_tau": paper,
            }
        )
    print(table(rows, ["method", "tau", "low", "high", "ratio_to_vanilla", "seeds", "seed_sd", "paper_tau"]))
    if s.json:
        write(s.json, rows, s.first_seed)


def data_tokens(s: Settings) -> int:
    return round(s.tokens * 1e6) // 1024 // s.batch * s.batch * 1024


def trained(s: Settings, name: str, seed: int, target: Any, data: Any, texts: Any) -> Efficiency:
    """τ of one training; its scores are kept in the work folder."""
    variant = variants(k=s.k)[name]
    steps = round(s.tokens * 1e6) // 1024 // s.batch
    which = hash_of(
        (s.k, s.adam_lr, s.new_tokens, fingerprint(target), texts.tokens.sum(0).tolist(), len(texts.tokens))
    )
    key = f"{name}-{seed}-{steps}x{s.batch}-{s.muon_lr:g}-{s.context}-{which}"
    path = Path(s.work) / "ablations" / f"{key}.pt"
    kept = Path(s.save) / f"{name}-{seed}" if s.save else None
    if path.exists() and (kept is None or kept.exists()):
        return Efficiency(*torch.load(path))
    draft = started(variant, target, seed)
    training = Training(steps, s.batch, s.muon_lr, s.adam_lr, warmup=0.05, decay=0.8, compile=True, seed=seed)
    train(draft, target, data, loss=variant.loss, forward=variant.forward, settings=training)
    if kept is not None:
        draft.save_pretrained(kept)
    made = score(draft, texts, variant.forward if not isinstance(draft, SpireModel) else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tuple(made), path)
    return made


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument("--target", default=d.target, help="a pocket model (default %(default)s)")
    parser.add_argument(
        "--work", default=d.work, help="folder of shards, states and results (default %(default)s)"
    )
    parser.add_argument(
        "--site", default=d.site, help="more site-packages folders for the corpus, separated by commas"
    )
    parser.add_argument("--methods", default=d.methods, help="rows, separated by commas (default: all)")
    parser.add_argument(
        "--tokens", type=float, default=d.tokens, help="training tokens of each row, in millions"
    )
    parser.add_argument("--seeds", type=int, default=d.seeds, help="trainings of each row")
    parser.add_argument("--first-seed", type=int, default=d.first_seed)
    parser.add_argument("--batch", type=int, default=d.batch, help="sequences of a step")
    parser.add_argument("--muon-lr", type=float, default=d.muon_lr)
    parser.add_argument("--adam-lr", type=float, default=d.adam_lr)
    parser.add_argument("--context", type=int, default=d.context, help="tokens before the sampled text")
    parser.add_argument(
        "--per-prompt", type=int, default=d.per_prompt, help="contexts cut from one held-out document"
    )
    parser.add_argument("--prompts", type=int, default=d.prompts, help="held-out prompts (default: all)")
    parser.add_argument("--new-tokens", type=int, default=d.new_tokens)
    parser.add_argument("--k", type=int, default=d.k, help="proposed tokens a round")
    parser.add_argument("--threads", type=int, default=d.threads)
    parser.add_argument("--save", metavar="DIR", help="keep the trained drafts too, as DIR/METHOD-SEED")
    parser.add_argument("--json")
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    main(settings())
