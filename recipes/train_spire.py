"""Trains a SPIRe draft for a target, with a flag for every ablation of the paper; one command, resumable.

    python recipes/train_spire.py --site SITE_PACKAGES --out runs/pocket-spire        # the pocket draft, from the corpus
    python recipes/train_spire.py --target FOLDER_OR_HUB_ID --dataset NAME --out DIR  # your own target and text

By default: the target's last two blocks, one sink and a window of 64, feedback memory, k = 4 passes, MixedLoss(0.5). The target's
states are cached as final hidden states and the inputs of the copied blocks (bf16, in the work folder); the same command continues
an interrupted run. Devices and data parallelism: `accelerate launch recipes/train_spire.py …`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _data import states, text_states
from _measure import quiet
from _report import write
from _variants import Variant, last_blocks
from accelerate import PartialState

import specdec as sd
from specdec import zoo
from specdec.drafts.spire import SpireModel
from specdec.training.forward import KPass, Parallel
from specdec.training.losses import HardLoss, MixedLoss
from specdec.training.train import Settings as Training
from specdec.training.train import train


@dataclass
class Settings:
    target: str = "pocket-target"
    out: str = "runs/pocket-spire"
    dataset: str = ""
    column: str = "text"
    length: int = 1024
    work: str = "runs/pocket"
    site: str = ""
    layers: int = 2
    sinks: int = 1
    window: int = 64
    feedback: bool = True
    activations: bool = True
    random_init: bool = False
    loss: str = "mixed"
    weight: float = 0.5
    k: int = 4
    tokens: float = 7.484
    epochs: float = 2.0
    batch: int = 2
    muon_lr: float = 0.03
    adam_lr: float = 0.009
    warmup: float = 0.03
    decay: float = 0.8
    compile: bool = True
    validation: int = 32
    threads: int = 1
    seed: int = 0
    json: str | None = None


def variant(s: Settings) -> Variant:
    """The draft, its forward and its loss that the flags describe."""
    window = s.window or None
    losses = {"mixed": MixedLoss(s.weight), "distillation": MixedLoss(1.0), "hard": HardLoss()}
    if s.loss not in losses:
        raise SystemExit(f"--loss {s.loss}: there are {', '.join(losses)}")
    if not s.activations:  # the target's last blocks as a model of their own
        if s.feedback:
            raise SystemExit(
                "--no-activations needs --no-feedback: without the target's activations there is nothing to feed back"
            )
        return Variant(
            lambda target: last_blocks(target, s.layers), Parallel(window, s.sinks), losses[s.loss]
        )

    def make(target: Any) -> SpireModel:
        return SpireModel.from_target(
            target, s.layers, sinks=s.sinks, window=window, feedback=s.feedback, random=s.random_init
        )

    return Variant(make, KPass(s.k), losses[s.loss])


def main(s: Settings) -> None:
    torch.set_num_threads(s.threads)
    quiet()
    target, tokenizer = load(s.target)
    chosen = variant(s)
    torch.manual_seed(s.seed)
    draft = chosen.make(target)
    if isinstance(draft, SpireModel):
        draft.tokenizer = tokenizer
    layers = tuple(chosen.forward.layers(draft))
    tokens, held_tokens = round(s.tokens * 1e6), s.validation * s.length
    if s.dataset:
        data = text_states(
            target, tokenizer, s.work, s.dataset, s.column, s.length, layers, tokens, skip=s.validation
        )
        held = text_states(target, tokenizer, s.work, s.dataset, s.column, s.length, layers, held_tokens)
    else:
        data = states(target, tokenizer, s.work, s.site, layers, tokens)
        held = states(target, tokenizer, s.work, s.site, layers, held_tokens, "validation")
    steps = max(1, int(len(data) * s.epochs / s.batch))
    training = Training(
        steps,
        s.batch,
        s.muon_lr,
        s.adam_lr,
        warmup=s.warmup,
        decay=s.decay,
        compile=s.compile,
        seed=s.seed,
        validate_every=max(1, steps // 20),
    )
    folder = Path(s.out)
    folder.mkdir(parents=True, exist_ok=True)

    def tell(row: dict[str, float]) -> None:
        print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)

    report = train(
        draft,
        target,
        data,
        loss=chosen.loss,
        forward=chosen.forward,
        settings=training,
        validation=held,
        checkpoint=folder.with_name(folder.name + ".pt"),
        on_validation=tell,
    )
    if not PartialState().is_main_process:
        return
    for stale in ("spire.json", "memory.safetensors"):  # of another draft that was here
        (folder / stale).unlink(missing_ok=True)
    draft.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seen = {
        "tokens": report.tokens,
        "seconds": report.seconds,
        "tokens_per_second": report.tokens / max(report.seconds, 1e-9),
    }
    print(f"{folder}: {report.tokens / 1e6:.1f} M tokens in {report.seconds / 60:.0f} minutes")
    if s.json:
        write(s.json, [{**row, **seen} for row in report.curve], s.seed)


def load(name: str) -> tuple[Any, Any]:
    """A pocket model, or any causal LM from a folder or the hub, in float32."""
    if name in zoo.names():
        return zoo.load(name)
    model = sd.HFModel.from_pretrained(name, dtype=torch.float32)
    return model.model, model.tokenizer


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d, flag = Settings(), argparse.BooleanOptionalAction
    parser.add_argument(
        "--target", default=d.target, help="a pocket model, a folder or a hub id (default %(default)s)"
    )
    parser.add_argument("--out", default=d.out, help="folder of the trained draft (default %(default)s)")
    parser.add_argument(
        "--dataset",
        default=d.dataset,
        help="a data set of the hub, or a folder or .txt file; default: the corpus",
    )
    parser.add_argument("--column", default=d.column, help="its column of text (default %(default)s)")
    parser.add_argument(
        "--length", type=int, default=d.length, help="tokens of a sequence; the corpus has 1024"
    )
    parser.add_argument(
        "--work", default=d.work, help="folder of shards and cached states (default %(default)s)"
    )
    parser.add_argument(
        "--site", default=d.site, help="more site-packages folders for the corpus, separated by commas"
    )
    parser.add_argument(
        "--layers", type=int, default=d.layers, help="last blocks to copy (default %(default)s)"
    )
    parser.add_argument("--sinks", type=int, default=d.sinks)
    parser.add_argument("--window", type=int, default=d.window, help="0: unlimited (ablation: no sparse KV)")
    parser.add_argument(
        "--feedback", action=flag, default=d.feedback, help="feedback memory (ablation: --no-feedback)"
    )
    parser.add_argument(
        "--activations", action=flag, default=d.activations, help="the target's activations (ablation)"
    )
    parser.add_argument("--random-init", action=flag, default=d.random_init, help="new weights (ablation)")
    parser.add_argument("--loss", default=d.loss, help="mixed, distillation or hard (default %(default)s)")
    parser.add_argument("--weight", type=float, default=d.weight, help="MixedLoss's share of distillation")
    parser.add_argument("--k", type=int, default=d.k, help="passes, and positions of a block")
    parser.add_argument("--tokens", type=float, default=d.tokens, help="millions of tokens of text")
    parser.add_argument("--epochs", type=float, default=d.epochs, help="times over them")
    parser.add_argument("--batch", type=int, default=d.batch, help="sequences of a step")
    parser.add_argument("--muon-lr", type=float, default=d.muon_lr)
    parser.add_argument("--adam-lr", type=float, default=d.adam_lr)
    parser.add_argument("--warmup", type=float, default=d.warmup)
    parser.add_argument("--decay", type=float, default=d.decay)
    parser.add_argument("--compile", action=flag, default=d.compile, help="torch.compile of the loss")
    parser.add_argument("--validation", type=int, default=d.validation, help="sequences of validation text")
    parser.add_argument("--threads", type=int, default=d.threads)
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--json")
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    main(settings())
