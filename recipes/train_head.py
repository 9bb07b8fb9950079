"""Trains a draft head for a target of your own, on text of your own; one command, resumable.

    python recipes/train_head.py --head eagle3 --target FOLDER_OR_HUB_ID --dataset TEXT --output my-head

Heads are eagle3, peagle (P-EAGLE), mtp, medusa, dflash, dflash2 and dspark; the target is any causal LM that heads support. The text is a file (.txt,
.jsonl, .json, .csv, .parquet), a folder or a data set of the hub. --column names the column of the texts, or of lists of chat messages, which the
tokenizer's chat template makes into text. The first sequences are held out: tau on them is printed for the new head, as it trains, and at the end.

The target computes its activations in every step. --record stores them on disk first, which pays for several epochs or heads. The same
command continues an interrupted run, from OUTPUT.pt. OUTPUT gets the head in bf16, the tokenizer and a model card; drafts.Head("OUTPUT") decodes
with it. For several devices, use `accelerate launch recipes/train_head.py ...`.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import checkout  # noqa: F401
import torch
from accelerate import PartialState
from torch import Tensor

import specdec as sd
from specdec.configs import setting
from specdec.drafts.heads import HeadModel
from specdec.lab.console import short_errors
from specdec.lab.documents import documents, packed
from specdec.lab.head_card import curve
from specdec.lab.head_kinds import KINDS, anchors
from specdec.lab.loading import in_dtype, load
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe
from specdec.lab.report import meta
from specdec.lab.states import sequence_states, unrecorded
from specdec.training.forward import Blocks
from specdec.training.muon import arithmetic, quick
from specdec.training.sources import source_of
from specdec.training.train import Settings as Training
from specdec.training.train import Trained, train
from specdec.training.validation import Judge
from specdec.training.weights import lowered


@dataclass(frozen=True)
class Settings(Recipe):
    head: Literal["eagle3", "peagle", "mtp", "medusa", "dflash", "dflash2", "dspark"] = option(
        "eagle3", "the kind of head"
    )
    target: str = option("", "a pocket model, a folder or a hub id")
    dataset: str = option("", "a file, a folder, or a data set of the hub")
    column: str = option("text", "the data set's column of texts, or of lists of chat messages")
    output: str = option("", "folder of the trained head")
    length: int = option(1024, "tokens of a sequence")
    tokens: float = option(5.0, "millions of training tokens, as far as the text has them")
    epochs: float = option(1.0, "passes over the tokens")
    layers: tuple[str, ...] = option(
        (), "the target's layers to read, from 0, the embedding, or final (default: by the target's depth)"
    )
    k: int = option(0, "tokens of a block (default: 5; 7 for dflash, dflash2 and dspark)")
    blocks: int = option(0, "transformer or residual blocks of the head (default: by the kind)")
    anchors: int = option(0, "blocks of a sequence in a step (default: 256, or fewer for a large vocabulary)")
    loss: Literal["mixed", "own"] = option("mixed", "mixed: MixedLoss(0.5); own: that of the head's authors")
    batch: int = option(2, "sequences per step")
    muon_lr: float = option(0.02, "peak learning rate of the matrices")
    adam_lr: float = option(0.006, "peak learning rate of other weights")
    warmup: float = option(0.03, "share of the steps in which the learning rate rises")
    decay: float = option(0.8, "share of the steps, at the end, in which it falls to zero")
    compile: bool = option(True, "torch.compile of the loss")
    validation: int = option(16, "number of held-out sequences")
    validations: int = option(10, "how often to validate")
    record: bool = option(False, "store the target's activations on disk before training")
    work: str = option("runs/heads", "folder for what --record stores")


def taps(s: Settings) -> list[Any] | None:
    """The layers of ``--layers``."""
    wrong = [layer for layer in s.layers if layer != "final" and not layer.isdecimal()]
    if wrong:
        raise SystemExit(f"--layers {wrong[0]}: give numbers from 0, or final")
    return [layer if layer == "final" else int(layer) for layer in s.layers] or None


def check(s: Settings) -> None:
    """Refuse settings that need no model to be wrong."""
    for name in ("target", "dataset", "output"):
        if not getattr(s, name):
            raise SystemExit(f"--{name} is missing: give --target, --dataset and --output")
    for name in ("length", "batch", "validation", "validations", "tokens", "epochs"):
        if not getattr(s, name) > 0:
            raise SystemExit(f"--{name} {getattr(s, name)}: give a number above 0")
    for name in ("k", "blocks", "anchors"):
        if getattr(s, name) < 0:
            raise SystemExit(f"--{name} {getattr(s, name)}: give at least 1, or 0 for the default")
    folder = Path(s.output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        begun = folder.is_dir() and [file.name for file in folder.iterdir()] == [
            "README.md"
        ]  # ``export`` was ended
        if not (folder / "head.json").exists() and not (begun and checkpoint(s).exists()):
            raise SystemExit(f"--output {folder}: it has other files than a head's: give a new folder")
        if not checkpoint(s).exists():
            raise SystemExit(
                f"--output {folder}: it has a head, and there is no {checkpoint(s)} to continue from: give a new folder"
            )


def checkpoint(s: Settings) -> Path:
    """The file of the interrupted training."""
    return Path(s.output).with_name(Path(s.output).name + ".pt")


def made(s: Settings) -> tuple[Any, Any, HeadModel, Blocks]:
    """The target, its tokenizer, the untrained head and its forward."""
    chosen = taps(s)
    # accelerate looks for processes when its state is first made: without a GPU the training does that
    device = PartialState().device if torch.cuda.is_available() else torch.device("cpu")
    target, tokenizer = load(s.target, quick(device), device)
    if tokenizer is None:
        raise SystemExit(f"--target {s.target}: it has no tokenizer: save one into its folder")
    longest = setting(target.config.get_text_config(), "max_position_embeddings")
    if longest is not None and s.length > longest:
        raise SystemExit(f"--length {s.length}: the target takes at most {longest} tokens")
    last = target.config.get_text_config().num_hidden_layers
    outside = [layer for layer in chosen or () if layer != "final" and layer > last]
    if outside:
        raise SystemExit(f"--layers {outside[0]}: the target has 0 (the embedding) to {last}, and final")
    target = target.requires_grad_(False)
    kind = KINDS[s.head]
    head = kind.new(target, s.k, s.blocks, chosen, s.seed).float()
    k = s.k or kind.k
    if s.length <= k:
        raise SystemExit(f"--length {s.length}: give more than the {k} tokens of a block")
    # Whether it can decode shows before it is trained.
    sd.decoder((target, tokenizer)).draft(sd.drafts.Head(head), k).build()
    return (
        target,
        tokenizer,
        head,
        Blocks(k, s.anchors or anchors(head.outputs, k, s.batch)),
    )


def texts(s: Settings, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Sequences ``[N, length + 1]`` for training, and those that are held out."""
    wanted = s.validation + max(1, round(s.tokens * 1e6 / s.length))
    found = [*packed(tokenizer, documents(s.dataset, s.column), s.length, wanted)]
    if len(found) <= s.validation:
        raise SystemExit(
            f"--dataset {s.dataset}: its text has {len(found)} sequences of {s.length} tokens, and --validation {s.validation} of them are held "
            "out: give more text, or a smaller --length or --validation"
        )
    if len(found) < wanted:
        has = (len(found) - s.validation) * s.length / 1e6
        print(f"the text has {has:.3g} M training tokens, fewer than --tokens {s.tokens:g}", flush=True)
    every = torch.cat(found)
    return every[s.validation :], every[: s.validation]


def recorded(s: Settings, target: Any, data: Tensor, held: Tensor, layers: tuple[int, ...]) -> list[Any]:
    """The target's activations on the training and the held-out sequences, stored in the work folder."""
    width = target.config.get_text_config().hidden_size
    new = sum(unrecorded(target, part, s.work, layers) for part in (data, held))
    size = new * s.length * (len(layers) + 1) * width * 2
    Path(s.work).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(s.work).free
    print(f"activations of the target: {size / 1e9:.3g} GB to be stored in {s.work}", flush=True)
    if size > free:
        raise SystemExit(
            f"--record: {s.work} has {free / 1e9:.3g} GB free: give another --work, fewer --tokens, or --no-record"
        )
    return [sequence_states(target, part, s.work, layers) for part in (data, held)]


def fit(s: Settings) -> tuple[HeadModel, Any, Trained]:
    """Train the head; the curve begins with the untrained one."""
    target, tokenizer, head, forward = made(s)
    data, held = texts(s, tokenizer)
    layers = forward.layers(head)
    both = recorded(s, target, data, held, layers) if s.record else [data, held]
    sources = [source_of(part, target, layers) for part in both]
    loss = KINDS[s.head].loss(s.loss, head)
    steps = max(1, round(len(data) * s.epochs / s.batch))
    training = Training(
        steps, s.batch, s.muon_lr, s.adam_lr, warmup=s.warmup, decay=s.decay, compile=s.compile, seed=s.seed,
        validate_every=max(1, steps // s.validations),
    )  # fmt: skip
    ends, head.ends = head.ends, lowered(head.of_target, head.device, head.dtype)
    judge = Judge(head, loss, head.of_target.logits)
    before = judge.validate(head, sources[1], forward, s.batch, head.device, head.dtype)
    head.ends = ends
    main = PartialState(cpu=not torch.cuda.is_available()).is_main_process

    def tell(row: dict[str, float]) -> None:
        if main:
            print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)

    first = {"step": 0.0, "tokens": 0.0, **before}
    tell(first)
    Path(s.output).parent.mkdir(parents=True, exist_ok=True)
    report = train(
        head, target, both[0], loss=loss, forward=forward, settings=training, validation=both[1],
        checkpoint=checkpoint(s), on_validation=tell,
    )  # fmt: skip
    report.curve.insert(0, first)
    return head, tokenizer, report


def export(s: Settings, head: HeadModel, tokenizer: Any, report: Trained) -> None:
    """Write the head in bf16, the tokenizer and the model card."""
    folder = Path(s.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(card(s, head, report), encoding="utf-8")
    head.tokenizer = tokenizer
    in_dtype(head, torch.bfloat16).save_pretrained(folder)


def card(s: Settings, head: HeadModel, report: Trained) -> str:
    """The model card, in Markdown."""
    about, name = meta(s.seed), type(head).__name__
    size = sum(p.numel() for p in head.parameters())
    forward = Blocks(s.k or KINDS[s.head].k)
    lines = [
        "---",
        "library_name: specdec",
        "tags:",
        "- speculative-decoding",
        f"- {name.lower()}",
        "---",
        "",
        f"# {Path(s.output).name}",
        "",
        f"A draft head for `{s.target}`: `{name}`, taps {list(head.taps)}, {size:,} parameters beside the target's embedding and output matrix, which it",
        f"uses. Settings: `{head.settings}`. It was made for the target with the fingerprint `{head.target}`. Stored in bf16.",
        "",
        "```python",
        "import specdec as sd",
        "",
        f'decoder = sd.decoder("{s.target}").draft(sd.drafts.Head("{Path(s.output).name}"), length={forward.k}).build()',
        "```",
        "",
        "The output has exactly the target's distribution, whatever the head proposes.",
        "",
        f"**Training.** {report.tokens / 1e6:.3g} M tokens of `{s.dataset}`, length {s.length}, in {report.seconds / 60:.3g} minutes on {about['machine']}.",
        f"Loss `{KINDS[s.head].loss(s.loss, head)}`, blocks of {forward.k} tokens. Muon (lr {s.muon_lr:g}) for the matrices, AdamW (lr {s.adam_lr:g}) for the rest, "
        f"{arithmetic(report.settings.precision)}, batch {s.batch}, seed {s.seed}. torch {about['versions']['torch']}.",
        "",
        "```bash",
        f"python recipes/train_head.py {command(s)}",
        "```",
        "",
        f"**Validation** ({s.validation} held-out sequences; acceptance at temperature 1 and by depth, given that the tokens before are the text's; τ over blocks",
        "along the text; the first row is the untrained head):",
        "",
        *curve(report.curve),
    ]
    return "\n".join(lines) + "\n"


def command(s: Settings) -> str:
    """The options that differ from their defaults, and the kind of the head."""
    words = ["--head", s.head]
    for one in dataclasses.fields(s):
        value, name = getattr(s, one.name), "--" + one.name.replace("_", "-")
        if value == one.default or one.name in ("head", "json", "threads", "work"):
            continue
        if isinstance(value, bool):
            words.append(name if value else name.replace("--", "--no-", 1))
        else:
            words += [name, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join(words)


def main(s: Settings) -> None:
    check(s)
    s.begin()
    with short_errors():
        head, tokenizer, report = fit(s)
    if not PartialState().is_main_process:
        return
    export(s, head, tokenizer, report)
    size = sum(p.numel() for p in head.parameters())
    speed = report.tokens / max(report.seconds, 1e-9)
    first, last = report.curve[0], report.curve[-1]
    print(
        f"{s.output}: tau {first['tau']:.2f} before, {last['tau']:.2f} after {report.tokens / 1e6:.3g} M tokens in {report.seconds / 60:.3g} minutes"
    )
    seen = {"parameters": size, "seconds": report.seconds, "tokens_per_second": speed}
    s.save([{"head": s.head, **seen, **row} for row in report.curve])


if __name__ == "__main__":
    main(parse(Settings, __doc__))
