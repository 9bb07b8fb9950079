"""SPIRe's figure 5 at pocket scale, with the controls that the paper lacks: every draft trained on the same tokens, τ on held-out text.

    python recipes/spire_ablations.py --site SITE_PACKAGES --json ablations.json
    python recipes/spire_ablations.py --merge part1.json part2.json --json ablations.json

Each row changes one thing of SPIRe (`specdec.lab.variants`). Rows are trained with several seeds (initialisation and order of the data); a
row's τ is tokens over rounds of all its seeds, its interval the bootstrap over source files. Rows `lead` have SPIRe's τ over every other
draft's with as many training tokens: does it last? The work folder keeps the scores of finished trainings and a checkpoint of an unfinished
one: the same command continues after an interruption, and a larger --seeds adds trainings. The scores are also in the report (rows
`training`), so that parts with other --methods, --tokens or --first-seed, made at other times, can be merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch

from specdec import zoo
from specdec.audit.tau import Efficiency
from specdec.drafts.spire import SpireModel
from specdec.lab.console import table
from specdec.lab.fitting import OnCorpus
from specdec.lab.options import option, parse
from specdec.lab.report import write
from specdec.lab.states import stream_states
from specdec.lab.tau import sample, score
from specdec.lab.trainings import together, training
from specdec.lab.variants import Variant, started, variants
from specdec.models.fingerprint import fingerprint
from specdec.training.checkpoints import hash_of
from specdec.training.train import Settings as Training
from specdec.training.train import train

Row = dict[str, Any]
ORIGIN = ("command", "commit", "dirty", "date", "processor")


@dataclass(frozen=True)
class Settings(OnCorpus):
    target: str = option("pocket-target", "a pocket model")
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
    save: str | None = option(None, "also save the trained drafts, as DIR/METHOD-SEED", metavar="DIR")
    merge: tuple[str, ...] = option((), "train nothing: put these reports together", metavar="FILE")

    @property
    def steps(self) -> int:
        """Optimiser steps of a training."""
        return round(self.tokens * 1e6) // 1024 // self.batch


def main(s: Settings) -> None:
    s.begin()
    wanted = variants(k=s.k)
    if s.merge:
        parts = [json.loads(Path(file).read_text()) for file in s.merge]
        rows = once(row for p in parts for row in p["rows"] if row["part"] == "training")
        return shown(s, wanted, rows, once(row for p in parts for row in origins(p)))
    target, tokenizer = zoo.load(s.target)
    names = list(s.methods or wanted)
    unknown = [name for name in names if name not in wanted]
    if unknown:
        raise SystemExit(f"no method {unknown[0]!r}: there are {', '.join(wanted)}")
    layers = SpireModel.from_target(target).layers
    data = stream_states(target, tokenizer, s.streams, layers, round(s.tokens * 1e6))
    texts = sample(target, tokenizer, s.context, s.new_tokens, s.k, layers, 0, s.per_prompt, s.prompts)
    about: Row = {"tokens": s.steps * s.batch * 1024, "context": s.context, "k": s.k}
    about["texts"] = hash_of((fingerprint(target), texts.tokens.tolist()))
    about["data"] = hash_of(data.take([0, len(data) - 1]).tokens.tolist())
    rows = []
    for seed in range(s.first_seed, s.first_seed + s.seeds):
        for name in names:
            made = trained(s, name, seed, target, data, texts, about["data"])
            rows.append(training(made, texts.prompt, method=name, seed=seed, **about))
            print(f"{name} seed {seed}: tau {made.tau:.3f}", flush=True)
    whole = SpireModel.from_target(target, target.config.num_hidden_layers, feedback=False)
    deep = sample(target, tokenizer, s.context, s.new_tokens, s.k, whole.layers, 0, s.per_prompt, s.prompts)
    untrained = score(whole, deep)  # original positions, refreshed every round
    rows.append(training(untrained, texts.prompt, method="magicdec", seed=None, **about))
    return shown(s, wanted, rows)


def once(rows: Iterable[Row]) -> list[Row]:
    """The rows without repetitions; of one training with two scores both stay, for ``together`` to refuse."""
    return list({json.dumps(row, sort_keys=True): row for row in rows}.values())


def origins(report: Row) -> list[Row]:
    """Rows ``merged`` of a report: which run measured it, or those that it was merged from."""
    own = {"part": "merged", **{name: report["meta"][name] for name in ORIGIN}}
    return [row for row in report["rows"] if row["part"] == "merged"] or [own]


def shown(s: Settings, wanted: dict[str, Variant], rows: list[Row], merged: Sequence[Row] = ()) -> None:
    """Print what the trainings say together, and write it."""
    found = together(rows)
    for row in found:
        if row["part"] == "tau":
            row["paper_tau"] = wanted[row["method"]].paper if row["method"] in wanted else 3.891
    columns = ["tokens", "method", "tau", "low", "high", "ratio_to_vanilla", "seeds", "seed_sd", "paper_tau"]
    print(table([r for r in found if r["part"] == "tau"], columns))
    leads = [r for r in found if r["part"] == "lead"]
    if leads:
        print("\n" + table(leads, ["tokens", "method", "over", "ratio", "ratio_low", "ratio_high"]))
    if s.json:
        write(s.json, [*found, *rows, *merged], s.first_seed)


def trained(s: Settings, name: str, seed: int, target: Any, data: Any, texts: Any, label: str) -> Efficiency:
    """τ of one training; its scores are kept in the work folder. ``label`` names the data."""
    variant = variants(k=s.k)[name]
    which = hash_of(
        (s.k, s.adam_lr, s.new_tokens, fingerprint(target), texts.tokens.sum(0).tolist(), len(texts.tokens))
    )
    key = f"{name}-{seed}-{s.steps}x{s.batch}-{s.muon_lr:g}-{s.context}-{which}-{label}"
    path = Path(s.work) / "ablations" / f"{key}.pt"
    kept = Path(s.save) / f"{name}-{seed}" if s.save else None
    if path.exists() and (kept is None or kept.exists()):
        return Efficiency(*torch.load(path))
    draft = started(variant, target, seed)
    how = Training(s.steps, s.batch, s.muon_lr, s.adam_lr, warmup=0.05, decay=0.8, compile=True, seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    train(
        draft, target, data, loss=variant.loss, forward=variant.forward, settings=how, checkpoint=unfinished
    )
    if kept is not None:
        draft.save_pretrained(kept)
    made = score(draft, texts, variant.forward if not isinstance(draft, SpireModel) else None)
    torch.save(tuple(made), path)
    unfinished.unlink(missing_ok=True)
    return made


if __name__ == "__main__":
    main(parse(Settings, __doc__))
