"""Trains a small causal LM of your own to draft in parallel (PARD), for a target and on text of your own; one command, resumable.

    python recipes/train_parallel.py --target FOLDER_OR_HUB_ID --start SMALL_MODEL --dataset TEXT --output my-draft

The small model has the target's tokenizer; it is copied. Its mask token is --mask-token, or the one that its config names (pard_token), or the tokenizer's mask
token, or an id that it does not use or reserves, or its unknown or padding token; if there is none, its vocabulary grows. The text is a file (.txt, .jsonl, .json, .csv, .parquet), a folder or a data set of the hub, as for train_head.py. The
target runs in every step. Tau on held-out sequences is printed as it trains. The same command continues an interrupted run, from OUTPUT.pt. OUTPUT gets the model in bf16, the
tokenizer and a model card; .draft("OUTPUT", length=8) drafts with it in parallel (length: at most --k). For a draft that also reads the target's activations (PARD-2): train_head.py --head pard2.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from accelerate import PartialState

import specdec as sd
from specdec.configs import parallel_token
from specdec.lab.console import short_errors
from specdec.lab.fitting import export, main_process, say, told
from specdec.lab.head_card import curve
from specdec.lab.head_kinds import anchors, mask_token_of, named_token
from specdec.lab.loading import load, share_ids
from specdec.lab.options import option, parse
from specdec.lab.own_text import OnOwnText
from specdec.lab.report import meta
from specdec.training.losses import ByDepth, HardLoss, MixedLoss
from specdec.training.muon import quick
from specdec.training.parallel_blocks import ParallelBlocks, with_mask_token
from specdec.training.train import train


@dataclass(frozen=True)
class Settings(OnOwnText):
    target: str = option("", "a pocket model, a folder or a hub id")
    start: str = option("", "the small model to begin with, likewise")
    output: str = option("", "folder of the trained draft")
    muon_lr: float = option(0.01, "peak learning rate of the matrices")
    adam_lr: float = option(0.003, "peak learning rate of other weights")
    mask_token: str = option("", "id or token of the mask token (default: see above)")
    k: int = option(8, "tokens of a block")
    anchors: int = option(0, "blocks of a sequence in a step (default: 256, or fewer for a large vocabulary)")
    loss: str = option(
        "mixed", "mixed: MixedLoss(0.5), weighted by depth; own: the authors', cross-entropy with the text"
    )


def check(s: Settings) -> None:
    """Refuse settings that need no model to be wrong."""
    for name in ("target", "start", "dataset", "output"):
        if not getattr(s, name):
            raise SystemExit(f"--{name} is missing: give --target, --start, --dataset and --output")
    for name in ("length", "batch", "validation", "validations", "tokens", "epochs", "k"):
        if not getattr(s, name) > 0:
            raise SystemExit(f"--{name} {getattr(s, name)}: give a number above 0")
    if s.length <= s.k:
        raise SystemExit(f"--length {s.length}: give more than the {s.k} tokens of a block")
    if s.loss not in ("mixed", "own"):
        raise SystemExit(f"--loss {s.loss}: there are mixed and own")
    folder = Path(s.output)
    if folder.exists() and not checkpoint(s).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(
            f"--output {folder}: it has files, and there is no {checkpoint(s)} to continue from: give a new folder"
        )


def checkpoint(s: Settings) -> Path:
    """The file of the interrupted training."""
    return Path(s.output).with_name(Path(s.output).name + ".pt")


def made(s: Settings) -> tuple[Any, Any, Any]:
    """The target, its tokenizer, and the small model with a mask token."""
    device = PartialState().device if torch.cuda.is_available() else torch.device("cpu")
    target, tokenizer = load(s.target, quick(device), device)
    draft, own = load(s.start, torch.float32, device)
    if tokenizer is None:
        raise SystemExit(f"--target {s.target}: it has no tokenizer: save one into its folder")
    if not share_ids(own, tokenizer):
        raise SystemExit(
            f"--start {s.start}: it has another tokenizer than the target: give a model with the target's"
        )
    token: int | None = None
    if s.mask_token:
        token = named_token(s.mask_token, tokenizer)
        if token is None:
            raise SystemExit(
                f"--mask-token {s.mask_token}: the tokenizer has no such token: give one that it has, or an id"
            )
    elif parallel_token(draft.config) is None:
        token = mask_token_of(tokenizer, draft)
    with_mask_token(draft, token)
    sd.decoder((target, tokenizer)).draft(
        (draft, tokenizer), length=s.k
    ).build()  # whether it can draft shows before it is trained
    say(f"mask token {parallel_token(draft.config)}, of {len(draft.get_input_embeddings().weight)} ids")
    return target.requires_grad_(False), tokenizer, draft


def card(s: Settings, draft: Any, loss: Any, report: Any) -> str:
    """The model card, in Markdown."""
    words = [f"--{f.name.replace('_', '-')} {shlex.quote(str(getattr(s, f.name)))}" for f in fields(s)
             if getattr(s, f.name) != f.default and f.name not in ("json", "threads") and not isinstance(f.default, bool)]  # fmt: skip
    lines = [
        f"# {Path(s.output).name}",
        "",
        f"A parallel draft (PARD, arXiv 2504.18583) for `{s.target}`, made from `{s.start}`: one forward over the text and mask tokens (id "
        f"{parallel_token(draft.config)}, `pard_token` in the config) drafts up to {s.k} tokens.",
        "",
        "```python",
        f'decoder = sd.decoder("{s.target}").draft("{Path(s.output).name}", length={s.k}).build()',
        "```",
        "",
        f"**Training.** {report.tokens / 1e6:.3g} M tokens of `{s.dataset}`, length {s.length}, in {report.seconds / 60:.3g} minutes on {meta(s.seed)['machine']}. Loss `{loss}`.",
        "",
        "```bash",
        f"python recipes/train_parallel.py {' '.join(words)}",
        "```",
        "",
        f"**Validation** ({s.validation} held-out sequences; acceptance at temperature 1 and by depth, given that the tokens before are the text's; τ over blocks along the text):",
        "",
        *curve(report.curve),
    ]
    return "\n".join(lines) + "\n"


def main(s: Settings) -> None:
    check(s)
    s.begin()
    with short_errors():
        target, tokenizer, draft = made(s)
        data, held = s.texts(tokenizer)
        vocabulary = len(draft.get_input_embeddings().weight)
        forward = ParallelBlocks(s.k, s.anchors or anchors(vocabulary, s.k, s.batch))
        loss = HardLoss() if s.loss == "own" else ByDepth(MixedLoss(0.5), 0.8)
        Path(s.output).parent.mkdir(parents=True, exist_ok=True)
        report = train(
            draft, target, data, loss=loss, forward=forward, settings=s.training(s.steps(len(data))), validation=held,
            checkpoint=checkpoint(s), on_validation=lambda row: say(told(row)),
        )  # fmt: skip
    if not main_process():
        return
    export(draft, Path(s.output), tokenizer, card(s, draft, loss, report))
    last = report.curve[-1]
    print(
        f"{s.output}: tau {last['tau']:.2f} after {report.tokens / 1e6:.3g} M tokens in {report.seconds / 60:.3g} minutes"
    )
    s.save(report.curve)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
