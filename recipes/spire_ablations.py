"""SPIRe's figure 5 at pocket scale, with the controls that the paper lacks: every draft trained on the same tokens, τ on held-out text.

    python recipes/train_pocket.py --site SITE_PACKAGES --models ""      # corpus and shards, once
    python recipes/spire_ablations.py --json ablations.json

Each row changes one thing of SPIRe (`specdec.lab.variants`). Rows are trained with several seeds (initialisation and order of the data); a
row's τ is tokens over rounds of all its seeds, its interval the bootstrap over source files. Scores of finished trainings are kept in
the work folder: the same command continues after an interruption, and a larger --seeds adds trainings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

import checkout  # noqa: F401
import torch

from specdec import zoo
from specdec.audit.tau import Efficiency
from specdec.drafts.spire import SpireModel
from specdec.lab.console import quiet, table
from specdec.lab.options import option, parse
from specdec.lab.paired import rows_of
from specdec.lab.report import write
from specdec.lab.states import stream_states
from specdec.lab.streams import Streams
from specdec.lab.tau import sample, score
from specdec.lab.variants import started, variants
from specdec.models.fingerprint import fingerprint
from specdec.training.checkpoints import hash_of
from specdec.training.train import Settings as Training
from specdec.training.train import train


@dataclass(frozen=True)
class Settings:
    target: str = option("pocket-target", "a pocket model")
    work: str = option("runs/pocket", "folder of shards, states and results")
    site: str = option("", "more site-packages folders for the corpus, separated by commas")
    methods: tuple[str, ...] = option((), "rows (default: all)")
    tokens: float = option(1.0, "training tokens of each row, in millions")
    seeds: int = option(1, "seeds, and so trainings, of each row")
    first_seed: int = option(0)
    batch: int = option(2, "sequences of a step")
    muon_lr: float = option(0.02)
    adam_lr: float = option(0.006)
    context: int = option(512, "tokens before the sampled text")
    per_prompt: int = option(2, "contexts cut from one held-out document")
    prompts: int | None = option(None, "held-out prompts (default: all)")
    new_tokens: int = option(64, "positions per context at which rounds start")
    k: int = option(4, "proposed tokens per round")
    threads: int = option(1, "torch threads")
    save: str | None = option(None, "also save the trained drafts, as DIR/METHOD-SEED", metavar="DIR")
    json: str | None = option(None, "write the rows as JSON", metavar="FILE")

    @property
    def steps(self) -> int:
        """Optimiser steps of a training."""
        return round(self.tokens * 1e6) // 1024 // self.batch


def main(s: Settings) -> None:
    torch.set_num_threads(s.threads)
    quiet()
    target, tokenizer = zoo.load(s.target)
    rows_wanted = variants(k=s.k)
    names = list(s.methods or rows_wanted)
    unknown = [name for name in names if name not in rows_wanted]
    if unknown:
        raise SystemExit(f"no method {unknown[0]!r}: there are {', '.join(rows_wanted)}")
    layers = SpireModel.from_target(target).layers
    streams = Streams(work=s.work, site=s.site)
    data = stream_states(target, tokenizer, streams, layers, round(s.tokens * 1e6))
    texts = sample(target, tokenizer, s.context, s.new_tokens, s.k, layers, 0, s.per_prompt, s.prompts)
    scores: dict[str, list[Efficiency]] = {name: [] for name in names}
    for seed in range(s.first_seed, s.first_seed + s.seeds):
        for name in names:
            scores[name].append(trained(s, name, seed, target, data, texts))
            print(f"{name} seed {seed}: tau {scores[name][-1].tau:.3f}", flush=True)
    whole = SpireModel.from_target(target, target.config.num_hidden_layers, feedback=False)
    deep = sample(target, tokenizer, s.context, s.new_tokens, s.k, whole.layers, 0, s.per_prompt, s.prompts)
    means = {name: Efficiency(*(torch.stack(t).mean(0) for t in zip(*each))) for name, each in scores.items()}
    means["magicdec"] = score(whole, deep)  # untrained: original positions, refreshed every round
    rows = []
    for row in rows_of(means, texts, domains=False):
        each = [e.tau for e in scores.get(row["method"], [])]
        paper = rows_wanted[row["method"]].paper if row["method"] in rows_wanted else 3.891
        spread = stdev(each) if len(each) > 1 else None
        more = {"seeds": len(each), "by_seed": each, "seed_sd": spread, "tokens": s.steps * s.batch * 1024}
        rows.append({**row, **more, "paper_tau": paper})
    print(table(rows, ["method", "tau", "low", "high", "ratio_to_vanilla", "seeds", "seed_sd", "paper_tau"]))
    if s.json:
        write(s.json, rows, s.first_seed)


def trained(s: Settings, name: str, seed: int, target: Any, data: Any, texts: Any) -> Efficiency:
    """τ of one training; its scores are kept in the work folder."""
    variant = variants(k=s.k)[name]
    which = hash_of(
        (s.k, s.adam_lr, s.new_tokens, fingerprint(target), texts.tokens.sum(0).tolist(), len(texts.tokens))
    )
    key = f"{name}-{seed}-{s.steps}x{s.batch}-{s.muon_lr:g}-{s.context}-{which}"
    path = Path(s.work) / "ablations" / f"{key}.pt"
    kept = Path(s.save) / f"{name}-{seed}" if s.save else None
    if path.exists() and (kept is None or kept.exists()):
        return Efficiency(*torch.load(path))
    draft = started(variant, target, seed)
    training = Training(
        s.steps, s.batch, s.muon_lr, s.adam_lr, warmup=0.05, decay=0.8, compile=True, seed=seed
    )
    train(draft, target, data, loss=variant.loss, forward=variant.forward, settings=training)
    if kept is not None:
        draft.save_pretrained(kept)
    made = score(draft, texts, variant.forward if not isinstance(draft, SpireModel) else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tuple(made), path)
    return made


if __name__ == "__main__":
    main(parse(Settings, __doc__))
