"""Trains a draft head for a target of your own, on text of your own; one command, resumable.

    python recipes/train_head.py --head eagle3 --target FOLDER_OR_HUB_ID --dataset TEXT --output my-head

Heads are eagle3, peagle (P-EAGLE), pard2 (PARD-2, with --start a small causal LM to begin with), mtp, medusa, dflash, jetspec (DFlash with a causal block), dflash2, dspark, domino, lilicorr and xpress; the
target is any causal LM that heads support. The text is a file (.txt, .jsonl, .json, .csv, .parquet), a folder or a data set of the hub. --column names the column of the texts, or of lists of chat messages, which the
tokenizer's chat template makes into text; of these the head learns what the assistant wrote. The first sequences are held out (or those of
--validation-dataset): tau on them is printed for the new head, as it trains, and at the end.

The target computes its activations in every step. --record stores them on disk first, which pays for several epochs or heads. The same
command continues an interrupted run, from OUTPUT.pt. OUTPUT gets the head in bf16, the tokenizer and a model card; drafts.Head("OUTPUT") decodes
with it. --export FOLDER also writes it for an engine, vLLM or SGLang (--layout). For several devices, use `accelerate launch recipes/train_head.py ...`.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import checkout  # noqa: F401
import torch
from accelerate import PartialState

import specdec as sd
from specdec.configs import setting
from specdec.drafts.heads import HeadModel, Pard2
from specdec.drafts.heads import export as export_head
from specdec.drafts.heads.formats.export import check_export
from specdec.drafts.heads.load import is_checkpoint
from specdec.lab.console import short_errors
from specdec.lab.fitting import main_process, say, told
from specdec.lab.head_card import curve
from specdec.lab.head_kinds import KINDS, anchors, mask_token_of, named_token
from specdec.lab.loading import in_dtype, load, share_ids
from specdec.lab.options import option, parse
from specdec.lab.own_text import OnOwnText, Part, frequent, split
from specdec.lab.report import meta
from specdec.lab.states import sequence_states, unrecorded
from specdec.training.forward import Blocks, Corrected
from specdec.training.muon import arithmetic, quick
from specdec.training.sources import Masked, source_of
from specdec.training.train import Trained, train
from specdec.training.validation import Judge
from specdec.training.weights import lowered

ENGINES = {
    "speculators": "vLLM, which reads the layout of speculators",
    "specforge": "SGLang, which reads that of SpecForge",
    "z-lab": "SGLang and vLLM, which read that of z-lab",
}
LAYOUTS = {
    "specforge": ("eagle3",),
    "z-lab": ("dflash", "jetspec", "dflash2", "domino", "lilicorr", "xpress"),
}
"""The heads that some layouts have."""


@dataclass(frozen=True)
class Settings(OnOwnText):
    head: Literal[
        "eagle3",
        "peagle",
        "pard2",
        "mtp",
        "medusa",
        "dflash",
        "jetspec",
        "dflash2",
        "dspark",
        "domino",
        "lilicorr",
        "xpress",
    ] = option("eagle3", "the kind of head")
    target: str = option("", "a pocket model, a folder or a hub id")
    output: str = option("", "folder of the trained head")
    start: str = option(
        "", "pard2: a small causal LM with the target's vocabulary, whose weights the head begins with"
    )
    muon_lr: float = option(0.02, "peak learning rate of the matrices")
    adam_lr: float = option(0.006, "peak learning rate of other weights")
    layers: tuple[str, ...] = option(
        (), "the target's layers to read, from 0, the embedding, or final (default: by the target's depth)"
    )
    mask_token: str = option(
        "",
        "id or token of slots without a token, or none for a vector of the head's own (default: one that no text has)",
    )
    vocabulary: int = option(
        0, "the head proposes the most frequent tokens of the text, so many (default: all)"
    )
    k: int = option(0, "tokens of a block (default: 5; 7 for dflash and the heads built on it, 8 for pard2)")
    blocks: int = option(0, "transformer or residual blocks of the head (default: by the kind)")
    anchors: int = option(0, "blocks of a sequence in a step (default: 256, or fewer for a large vocabulary)")
    loss: Literal["mixed", "own"] = option("mixed", "mixed: MixedLoss(0.5); own: that of the head's authors")
    record: bool = option(False, "store the target's activations on disk before training")
    work: str = option("runs/heads", "folder for what --record stores")
    export: str = option("", "also write the head into this folder, for engines")
    layout: Literal["speculators", "specforge", "z-lab"] = option(
        "speculators",
        "of --export: speculators for vLLM, specforge for SGLang (eagle3 without the norms of EAGLE-3.1), or z-lab for both (dflash, jetspec, dflash2, domino, lilicorr and xpress)",
    )


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
    for name in ("k", "blocks", "anchors", "vocabulary"):
        if getattr(s, name) < 0:
            raise SystemExit(f"--{name} {getattr(s, name)}: give at least 1, or 0 for the default")
    if s.start and s.head != "pard2":
        raise SystemExit(
            f"--start {s.start}: {s.head} has no weights of a language model: leave it out, or train pard2"
        )
    if s.start and (s.blocks or s.mask_token):
        raise SystemExit(
            f"--start {s.start}: its blocks and its mask token are the model's: leave --blocks and --mask-token out"
        )
    for name in ("mask_token", "vocabulary"):
        if getattr(s, name) and name not in KINDS[s.head].takes:
            others = ", ".join(other for other, kind in KINDS.items() if name in kind.takes)
            raise SystemExit(
                f"--{name.replace('_', '-')}: {s.head} is trained without one: leave it out, or train {others}"
            )
    has = LAYOUTS.get(s.layout, (s.head,))
    if s.head not in has:
        raise SystemExit(
            f"--layout {s.layout}: it has no {s.head}: leave it out, or train {' or '.join(has)}"
        )
    if s.export:
        if Path(s.export).resolve() == Path(s.output).resolve():
            raise SystemExit(f"--export {s.export}: it is --output, too: give another folder")
        there = Path(s.export)
        names = {file.name for file in there.iterdir()} if there.is_dir() else set()
        mine = (
            names <= {"config.json", "model.safetensors"} and is_checkpoint(there) and checkpoint(s).exists()
        )
        if (there.exists() and not there.is_dir()) or (names and not mine):
            raise SystemExit(f"--export {there}: it has something else than this head: give a new folder")
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


def mask_token(s: Settings, target: Any, tokenizer: Any) -> int | None:
    """The id of ``--mask-token``; ``None``: the head has a vector of its own, or no such slots."""
    if "mask_token" not in KINDS[s.head].takes or s.mask_token == "none":
        return None
    if not s.mask_token:
        return mask_token_of(tokenizer, target)
    token = named_token(s.mask_token, tokenizer)
    if token is None or token >= target.config.get_text_config().vocab_size:
        raise SystemExit(
            f"--mask-token {s.mask_token}: the target has no such token: give one that it has, or its id"
        )
    return token


def new(s: Settings, target: Any, tokenizer: Any, vocabulary: Any = None) -> HeadModel:
    """The untrained head."""
    kind = KINDS[s.head]
    if s.start:
        small, own = load(s.start)
        if not share_ids(own, tokenizer):
            raise SystemExit(
                f"--start {s.start}: it has another tokenizer than the target: give a model with the target's"
            )
        return Pard2.from_model(small, target, taps(s), depth=s.k or kind.k).float()
    token = mask_token(s, target, tokenizer)
    if s.layout == "specforge":
        kind = dataclasses.replace(kind, settings={"own_head": False})
    return kind.new(target, s.k, s.blocks, taps(s), s.seed, token, vocabulary).float()


def exported(s: Settings, target: Any, head: HeadModel) -> str:
    """Whether engines can have the head, which shows before it is trained."""
    try:
        check_export(head, target, verifier=s.target, layout=s.layout)
    except (TypeError, ValueError) as error:
        if s.export:
            raise SystemExit(f"--export: {error}") from None
        lacking = (
            not (s.mask_token or s.start)
            and "mask_token" in head.settings
            and head.settings["mask_token"] is None
        )
        more = (
            " (the tokenizer has no token to spare: give one that texts do not have, --mask-token)"
            if lacking
            else ""
        )
        return f"the head cannot be exported for {ENGINES[s.layout]}: {error}{more}"
    return f"the head can be exported for {ENGINES[s.layout]} (--export FOLDER, or heads.export)"


def made(s: Settings) -> tuple[Any, Any, HeadModel, Blocks]:
    """The target, its tokenizer, the untrained head and its forward."""
    chosen = taps(s)
    # accelerate looks for processes when its state is first made: without a GPU ``main_process`` does that
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
    size = target.config.get_text_config().vocab_size
    if s.vocabulary >= size:
        raise SystemExit(
            f"--vocabulary {s.vocabulary}: give fewer than the target's {size} tokens, or 0 for all"
        )
    # The tokens are counted when the text is read.
    head = new(s, target, tokenizer, range(s.vocabulary) if s.vocabulary else None)
    k = s.k or KINDS[s.head].k
    if s.length <= k:
        raise SystemExit(f"--length {s.length}: give more than the {k} tokens of a block")
    # Whether it can decode shows before it is trained.
    sd.decoder((target, tokenizer)).draft(sd.drafts.Head(head), k).build()
    say(exported(s, target, head))
    forward = KINDS[s.head].forward(s.loss, head, k, 1)
    passes = 2 + forward.rounds if isinstance(forward, Corrected) else 1
    count = s.anchors or anchors(head.vocab_size, k, s.batch, passes=passes)
    return target, tokenizer, head, dataclasses.replace(forward, anchors=count)


def recorded(s: Settings, target: Any, data: Part, held: Part, layers: tuple[int, ...]) -> list[Any]:
    """The target's activations on the training and the held-out sequences, stored in the work folder."""
    parts = [split(part) for part in (data, held)]
    width = target.config.get_text_config().hidden_size
    missing = sum(unrecorded(target, ids, s.work, layers) for ids, _ in parts)
    size = missing * s.length * (len(layers) + 1) * width * 2
    Path(s.work).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(s.work).free
    print(f"activations of the target: {size / 1e9:.3g} GB to be stored in {s.work}", flush=True)
    if size > free:
        raise SystemExit(
            f"--record: {s.work} has {free / 1e9:.3g} GB free: give another --work, fewer --tokens, or --no-record"
        )
    both = [(sequence_states(target, ids, s.work, layers), learnt) for ids, learnt in parts]
    return [states if learnt is None else Masked(states, learnt) for states, learnt in both]


def fit(s: Settings) -> tuple[HeadModel, Any, Any, Trained]:
    """Train the head; the curve begins with the untrained one."""
    target, tokenizer, head, forward = made(s)
    data, held = s.texts(tokenizer)
    if s.vocabulary:
        head = new(s, target, tokenizer, frequent(data, tokenizer, head.vocab_size, s.vocabulary))
    layers = forward.layers(head)
    both = recorded(s, target, data, held, layers) if s.record else [data, held]
    sources = [source_of(part, target, layers) for part in both]
    loss = KINDS[s.head].loss(s.loss, head)
    training = s.training(s.steps(len(data)))
    ends, head.ends = head.ends, lowered(head.of_target, head.device, head.dtype)
    judge = Judge(head, loss, head.of_target.logits)
    before = judge.validate(head, sources[1], forward, s.batch, head.device, head.dtype)
    head.ends = ends

    first = {"step": 0.0, "tokens": 0.0, **before}
    say(told(first))
    Path(s.output).parent.mkdir(parents=True, exist_ok=True)
    report = train(
        head, target, both[0], loss=loss, forward=forward, settings=training, validation=both[1],
        checkpoint=checkpoint(s), on_validation=lambda row: say(told(row)),
    )  # fmt: skip
    report.curve.insert(0, first)
    return head, target, tokenizer, report


def export(s: Settings, head: HeadModel, target: Any, tokenizer: Any, report: Trained) -> None:
    """Write the head in bf16, the tokenizer and the model card."""
    folder = Path(s.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(card(s, head, report), encoding="utf-8")
    head.tokenizer = tokenizer
    in_dtype(head, torch.bfloat16).save_pretrained(folder)
    if s.export:
        export_head(head, s.export, target, verifier=s.target, length=s.k or KINDS[s.head].k, layout=s.layout)


def card(s: Settings, head: HeadModel, report: Trained) -> str:
    """The model card, in Markdown."""
    about, name = meta(s.seed), type(head).__name__
    size = sum(p.numel() for p in head.parameters())
    forward = Blocks(s.k or KINDS[s.head].k)
    held = (
        f"at most {s.validation} sequences of `{s.validation_dataset}`"
        if s.validation_dataset
        else f"{s.validation} held-out sequences"
    )
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
        f"A draft head for `{s.target}`: `{name}`, taps {list(head.taps)}, {size:,} parameters"
        + (
            "."
            if head.embed_tokens is not None and head.lm_head is not None
            else " beside the target's embedding and output matrix, which it uses."
        ),
        f"Settings: `{head.settings}`. It was made for the target with the fingerprint `{head.target}`. Stored in bf16.",
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
        f"**Validation** ({held}; acceptance at temperature 1 and by depth, given that the tokens before are the text's; τ over blocks",
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
        head, target, tokenizer, report = fit(s)
    if not main_process():
        return
    export(s, head, target, tokenizer, report)
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
