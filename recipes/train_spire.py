"""Trains a SPIRe draft for a target, with a flag for every ablation of the paper; one command, resumable.

    python recipes/train_spire.py --site SITE_PACKAGES --output runs/pocket-spire        # the pocket draft, from the corpus
    python recipes/train_spire.py --target FOLDER_OR_HUB_ID --dataset NAME --output DIR  # your own target and text

The defaults are the target's last two blocks, one sink and a window of 64, feedback memory, k = 4 passes, and MixedLoss(0.5). The
target's final hidden states and the inputs of the copied blocks are cached (bf16, in the work folder); the same command continues
an interrupted run. The target runs in float32, on the GPU if there is one. For several devices, use `accelerate launch recipes/train_spire.py …`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from accelerate import PartialState

from specdec.drafts.spire import SpireModel
from specdec.lab.console import short_errors
from specdec.lab.fitting import OnCorpus, Trains, main_process, told
from specdec.lab.loading import load
from specdec.lab.options import option, parse
from specdec.lab.states import stream_states, text_states
from specdec.lab.variants import Variant, last_blocks
from specdec.masks.text import parse as parse_mask
from specdec.training.forward import KPass, Parallel
from specdec.training.losses import HardLoss, MixedLoss
from specdec.training.train import train


@dataclass(frozen=True)
class Settings(Trains, OnCorpus):
    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    output: str = option("runs/pocket-spire", "folder of the trained draft", metavar="FOLDER")
    dataset: str = option("", "a data set of the hub, or a folder or .txt file; default: the corpus")
    column: str = option("text", "the data set's text column")
    length: int = option(1024, "tokens per sequence; the corpus has 1024")
    layers: int = option(2, "number of the target's last blocks to copy")
    sinks: int = option(1, "first positions that are always seen")
    window: int = option(64, "window size; 0: unlimited (ablation: no sparse KV)")
    mask: str = option("", 'another mask instead, such as "Causal() & (Sinks(1) | Window(32) | Strided(8))"')
    feedback: bool = option(True, "use feedback memory (ablation: --no-feedback)")
    activations: bool = option(True, "use the target's activations (ablation: --no-activations)")
    random_init: bool = option(False, "initialise randomly (ablation)")
    loss: str = option("mixed", "training loss: mixed, distillation or hard")
    weight: float = option(0.5, "MixedLoss's share of distillation")
    k: int = option(4, "passes, and positions of a block")
    tokens: float = option(7.484, "millions of training tokens, each seen --epochs times")
    epochs: float = option(2.0, "passes over the tokens")
    validation: int = option(32, "number of validation sequences")
    validations: int = option(20, "how often to validate")


def variant(s: Settings) -> Variant:
    """The draft, forward and loss selected by the flags."""
    window = s.window or None
    sees: dict[str, Any] = {"sinks": s.sinks, "window": window}
    if s.mask:
        if (s.sinks, s.window) != (1, 64):
            raise SystemExit("--mask replaces --sinks and --window: leave them out")
        try:
            sees = {"mask": parse_mask(s.mask)}
        except ValueError as error:
            raise SystemExit(f"--mask: {error}") from error
    losses = {"mixed": MixedLoss(s.weight), "distillation": MixedLoss(1.0), "hard": HardLoss()}
    if s.loss not in losses:
        raise SystemExit(f"--loss {s.loss}: there are {', '.join(losses)}")
    if not s.activations:  # the target's last blocks as an ordinary model
        if s.feedback:
            raise SystemExit(
                "--no-activations needs --no-feedback: the feedback memory is made from the target's activations"
            )
        return Variant(lambda target: last_blocks(target, s.layers), Parallel(**sees), losses[s.loss])

    def make(target: Any) -> SpireModel:
        return SpireModel.from_target(target, s.layers, **sees, feedback=s.feedback, random=s.random_init)

    return Variant(make, KPass(s.k), losses[s.loss])


def main(s: Settings) -> None:
    s.begin()
    # accelerate looks for processes when its state is first made: without a GPU the training does that
    device = PartialState().device if torch.cuda.is_available() else torch.device("cpu")
    with short_errors():
        target, tokenizer = load(s.target, torch.float32, device)
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
        data = stream_states(target, tokenizer, s.streams, layers, tokens)
        held = stream_states(target, tokenizer, s.streams, layers, held_tokens, "validation")
    steps = max(1, int(len(data) * s.epochs / s.batch))
    folder = Path(s.output)
    folder.mkdir(parents=True, exist_ok=True)
    report = train(
        draft, target, data, loss=chosen.loss, forward=chosen.forward, settings=s.training(steps),
        validation=held, checkpoint=folder.with_name(folder.name + ".pt"),
        on_validation=lambda row: print(told(row), flush=True),
    )  # fmt: skip
    if not main_process():
        return
    for stale in ("spire.json", "memory.safetensors"):  # left by another draft in this folder
        (folder / stale).unlink(missing_ok=True)
    draft.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seen = {
        "tokens": report.tokens,
        "seconds": report.seconds,
        "tokens_per_second": report.tokens / max(report.seconds, 1e-9),
    }
    tau = report.curve[-1]["tau"]
    print(
        f"{folder}: tau {tau:.2f} after {report.tokens / 1e6:.3g} M tokens in {report.seconds / 60:.3g} minutes"
    )
    s.save({**row, **seen} for row in report.curve)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
