"""Trains a SPIRe draft for a target, with a flag for every ablation of the paper; one command, resumable.

    python recipes/train_spire.py --site SITE_PACKAGES --out runs/pocket-spire        # the pocket draft, from the corpus
    python recipes/train_spire.py --target FOLDER_OR_HUB_ID --dataset NAME --out DIR  # your own target and text

By default: the target's last two blocks, one sink and a window of 64, feedback memory, k = 4 passes, MixedLoss(0.5). The target's
states are cached as final hidden states and the inputs of the copied blocks (bf16, in the work folder); the same command continues
an interrupted run. Devices and data parallelism: `accelerate launch recipes/train_spire.py …`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from specdec.drafts.spire import SpireModel
from specdec.lab.loading import load
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe
from specdec.lab.report import write
from specdec.lab.states import stream_states, text_states
from specdec.lab.streams import Streams
from specdec.lab.variants import Variant, last_blocks
from specdec.masks.text import parse as parse_mask
from specdec.training.forward import KPass, Parallel
from specdec.training.losses import HardLoss, MixedLoss
from specdec.training.train import Settings as Training
from specdec.training.train import train


@dataclass(frozen=True)
class Settings(Recipe):
    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    out: str = option("runs/pocket-spire", "folder of the trained draft")
    dataset: str = option("", "a data set of the hub, or a folder or .txt file; default: the corpus")
    column: str = option("text", "its column of text")
    length: int = option(1024, "tokens of a sequence; the corpus has 1024")
    work: str = option("runs/pocket", "folder of shards and cached states")
    site: str = option("", "more site-packages folders for the corpus, separated by commas")
    layers: int = option(2, "last blocks to copy")
    sinks: int = option(1, "first positions that are always seen")
    window: int = option(64, "0: unlimited (ablation: no sparse KV)")
    mask: str = option("", 'another mask instead, such as "Causal() & (Sinks(1) | Window(32) | Strided(8))"')
    feedback: bool = option(True, "feedback memory (ablation: --no-feedback)")
    activations: bool = option(True, "the target's activations (ablation)")
    random_init: bool = option(False, "new weights (ablation)")
    loss: str = option("mixed", "mixed, distillation or hard")
    weight: float = option(0.5, "MixedLoss's share of distillation")
    k: int = option(4, "passes, and positions of a block")
    tokens: float = option(7.484, "millions of tokens of text")
    epochs: float = option(2.0, "times over them")
    batch: int = option(2, "sequences of a step")
    muon_lr: float = option(0.03)
    adam_lr: float = option(0.009)
    warmup: float = option(0.03, "share of the steps")
    decay: float = option(0.8, "likewise")
    compile: bool = option(True, "torch.compile of the loss")
    validation: int = option(32, "sequences of validation text")


def variant(s: Settings) -> Variant:
    """The draft, its forward and its loss that the flags describe."""
    window = s.window or None
    sees: dict[str, Any] = {"sinks": s.sinks, "window": window}
    if s.mask:
        if (s.sinks, s.window) != (1, 64):
            raise SystemExit("--mask says all that a draft sees: leave --sinks and --window out")
        try:
            sees = {"mask": parse_mask(s.mask)}
        except ValueError as error:
            raise SystemExit(f"--mask: {error}") from error
    losses = {"mixed": MixedLoss(s.weight), "distillation": MixedLoss(1.0), "hard": HardLoss()}
    if s.loss not in losses:
        raise SystemExit(f"--loss {s.loss}: there are {', '.join(losses)}")
    if not s.activations:  # the target's last blocks as a model of their own
        if s.feedback:
            raise SystemExit(
                "--no-activations needs --no-feedback: without the target's activations there is nothing to feed back"
            )
        return Variant(lambda target: last_blocks(target, s.layers), Parallel(**sees), losses[s.loss])

    def make(target: Any) -> SpireModel:
        return SpireModel.from_target(target, s.layers, **sees, feedback=s.feedback, random=s.random_init)

    return Variant(make, KPass(s.k), losses[s.loss])


def main(s: Settings) -> None:
    s.begin()
    target, tokenizer = load(s.target, torch.float32)
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
        streams = Streams(work=s.work, site=s.site)
        data = stream_states(target, tokenizer, streams, layers, tokens)
        held = stream_states(target, tokenizer, streams, layers, held_tokens, "validation")
    steps = max(1, int(len(data) * s.epochs / s.batch))
    training = Training(
        steps, s.batch, s.muon_lr, s.adam_lr, warmup=s.warmup, decay=s.decay, compile=s.compile, seed=s.seed,
        validate_every=max(1, steps // 20),
    )  # fmt: skip
    folder = Path(s.out)
    folder.mkdir(parents=True, exist_ok=True)

    def tell(row: dict[str, float]) -> None:
        print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)

    report = train(
        draft, target, data, loss=chosen.loss, forward=chosen.forward, settings=training, validation=held,
        checkpoint=folder.with_name(folder.name + ".pt"), on_validation=tell,
    )  # fmt: skip
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


if __name__ == "__main__":
    main(parse(Settings, __doc__))
