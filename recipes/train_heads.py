"""Trains draft heads for the pocket target on the same tokens: EAGLE-3, MTP, Medusa, DFlash and DSpark.

    python recipes/train_heads.py --site SITE_PACKAGES --work runs/pocket

The text is the mixture that pocket-target and pocket-spire were trained on. The target's activations are recorded once for all drafts, in
bf16 in the work folder, about 3.6 GB a million tokens. Every head but pocket-pard2 begins with new weights and uses the target's embedding and output matrix. The
same command continues an interrupted run; finished drafts are exported into specdec/zoo with a model card. --drafts also takes
pocket-jetspec, pocket-dflash2, pocket-domino, pocket-lilicorr and pocket-xpress, more heads of the DFlash kind, and pocket-spire-equal and
pocket-vanilla-equal, a SPIRe draft and a small language model, all trained on the same tokens; and pocket-pard, pocket-pard2 and pocket-vanilla-adapted, which
begin with the weights of pocket-vanilla, two to draft in parallel and one as it did. For a target and text of your own, and for P-EAGLE, there is recipes/train_head.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401

from specdec import zoo
from specdec.drafts.heads import HeadModel, Pard2
from specdec.lab.fitting import OnCorpus, Trains, export, main_process, told
from specdec.lab.head_card import curve
from specdec.lab.head_kinds import KINDS
from specdec.lab.options import option, parse
from specdec.lab.report import meta
from specdec.lab.states import First, stream_states
from specdec.lab.streams import Streams
from specdec.lab.variants import started, variants
from specdec.training.forward import Blocks, Parallel
from specdec.training.losses import ByDepth, CATLoss, HardLoss, MixedLoss
from specdec.training.muon import arithmetic
from specdec.training.parallel_blocks import ParallelBlocks, with_mask_token
from specdec.training.train import Trained, train


@dataclass(frozen=True)
class Member:
    """A head to train.

    Attributes:
        kind: its kind, of ``KINDS``. k: tokens of a block. anchors: blocks of a sequence. settings: of ``from_target``.
    """

    kind: str
    k: int
    anchors: int
    settings: Mapping[str, Any] = field(default_factory=dict)


HEADS = {
    "pocket-eagle3": Member("eagle3", 5, 256, KINDS["eagle3"].settings),
    "pocket-mtp": Member("mtp", 5, 256, {"config": {"intermediate_size": 976}}),
    "pocket-medusa": Member("medusa", 5, 256, {"blocks": 4, "own_head": False}),
    "pocket-dflash": Member("dflash", 7, 192, {"blocks": 2, "block_size": 8}),
    "pocket-dspark": Member("dspark", 7, 192, {"blocks": 2, "block_size": 7, "rank": 64}),
}
MORE = {
    "pocket-dflash2": Member("dflash2", 7, 192, {"blocks": 2, "block_size": 8, "rank": 64}),
    "pocket-domino": Member("domino", 7, 192, {"blocks": 2, "block_size": 7, "rank": 64, "state": 128}),
    "pocket-lilicorr": Member(
        "lilicorr", 7, 192, {"blocks": 2, "block_size": 8, "inner": 96, "heads": 4, "factors": 32}
    ),
    "pocket-xpress": Member("xpress", 7, 192, {"blocks": 2, "block_size": 8, "rank": 64}),
    "pocket-jetspec": Member("jetspec", 7, 192, {"blocks": 2, "block_size": 8, "causal": True}),
}
"""Heads that the package does not contain."""
OTHERS = {"pocket-spire-equal": "spire", "pocket-vanilla-equal": "distilled_vanilla"}
ADAPTED = {
    "pocket-pard": ParallelBlocks(6, 256),
    "pocket-pard2": Blocks(6, 256),
    "pocket-vanilla-adapted": Parallel(),
}
"""Drafts that begin with the weights of pocket-vanilla, two for parallel drafting and their control, by the forward that trains them."""
LAYERS = (2, 3, 4, 5, 6, 7)  # what heads read by default of a target of 8 blocks, and SPIRe's two


@dataclass(frozen=True)
class Settings(Trains, OnCorpus):
    drafts: tuple[str, ...] = option(tuple(HEADS), "drafts to train, in order")
    zoo: str = option(str(zoo.FOLDER), "folder to export to (default: the package's)")
    loss: str = option("mixed", '"mixed": MixedLoss(0.5) for all; "own": that of each head\'s authors')
    anchors: int = option(0, "blocks of a sequence of 1024 tokens (0: by the table in this file)")
    suffix: str = option("", "of the folders' names, such as seed1 for pocket-eagle3-seed1")


def named(s: Settings, name: str) -> str:
    """The name of a draft's folder and checkpoint."""
    return f"{name}-{s.suffix}" if s.suffix else name


def chosen(s: Settings, name: str, target: Any) -> tuple[Any, Any, Any]:
    """The untrained draft, its forward and its loss."""
    if name in OTHERS:
        variant = variants()[OTHERS[name]]
        return started(variant, target, s.seed), variant.forward, variant.loss
    if name in ADAPTED:
        draft = zoo.load("pocket-vanilla")[0]
        mixed: Any = MixedLoss(0.5) if name == "pocket-vanilla-adapted" else ByDepth(MixedLoss(0.5), 0.8)
        own = CATLoss() if name == "pocket-pard2" else HardLoss()
        loss = own if s.loss == "own" else mixed
        if name == "pocket-pard":
            with_mask_token(draft)
        elif name == "pocket-pard2":
            draft = Pard2.from_model(draft, target, ("final", 5, 2))
        forward = ADAPTED[name]
        return (
            draft,
            replace(forward, anchors=s.anchors) if s.anchors and isinstance(forward, Blocks) else forward,
            loss,
        )
    member = (HEADS | MORE)[name]
    kind = KINDS[member.kind]
    head = kind.head.from_target(target, seed=s.seed, **member.settings)
    lacking = [tap for tap in head.taps if tap != "final" and tap not in LAYERS]
    if lacking:
        raise SystemExit(f"--drafts {name}: it reads layer {lacking[0]}, which LAYERS in this file lacks")
    blocks = kind.forward(s.loss, head, min(member.k, head.longest or member.k), s.anchors or member.anchors)
    return head, blocks, kind.loss(s.loss, head)


def states(s: Settings, target: Any, tokenizer: Any, split: str, tokens: int) -> First:
    """The target's states on the corpus, recorded unless they are there."""
    return stream_states(target, tokenizer, s.streams, LAYERS, tokens, split)


def fit(s: Settings, name: str, target: Any, tokenizer: Any) -> tuple[Any, Trained]:
    """Train one draft; its checkpoint is in the work folder."""
    draft, forward, loss = chosen(s, name, target)
    held = states(s, target, tokenizer, "validation", 1024 * s.validation)
    data = states(s, target, tokenizer, "train", round(s.tokens * 1e6))
    report = train(
        draft, target, data, loss=loss, forward=forward, settings=s.training(s.steps(len(data))),
        validation=held, checkpoint=Path(s.work) / f"{named(s, name)}-{s.loss}-{s.seed}.pt",
        on_validation=lambda row: print(told(row, name), flush=True),
    )  # fmt: skip
    return draft, report


def size(draft: Any) -> int:
    """Its parameters; a head's are without the target's embedding and output matrix, which it uses."""
    return sum(p.numel() for p in draft.parameters())


def card(s: Settings, name: str, draft: Any, report: Trained) -> str:
    """The model card, in Markdown."""
    made, mixture = meta(s.seed), Streams().mixture
    shares = ", ".join(
        f"{share:.0%} {domain}" for share, domain in zip(mixture, ("code", "prose", "tabular"))
    )
    _, forward, loss = chosen(s, name, zoo.load("pocket-target")[0])
    if isinstance(draft, HeadModel):
        beside = (
            ""
            if draft.lm_head is not None
            else " beside the target's embedding and output matrix, which it uses"
        )
        what = (
            f"A draft head for pocket-target: `{type(draft).__name__}`, taps {list(draft.taps)}, {size(draft):,} parameters{beside}. "
            f'Settings: `{draft.settings}`. Stored in bf16; `drafts.Head("{name}")` decodes with it.'
        )
    else:
        kind = (
            f"the control `{OTHERS[name]}` to the heads of this recipe"
            if name in OTHERS
            else "it began as pocket-vanilla"
        )
        what = f"A draft for pocket-target, {size(draft):,} parameters: {kind}. Stored in bf16."
    options = "".join(
        f" --{option} {value:g}" if isinstance(value, float) else f" --{option} {value}"
        for option, value, usual in (
            *(
                ("loss", s.loss, "mixed"),
                ("anchors", s.anchors, 0),
                ("seed", s.seed, 0),
                ("suffix", s.suffix, ""),
            ),
        )
        if value != usual
    )
    lines = [
        f"# {named(s, name)}",
        "",
        what,
        "",
        f"**Training.** {report.tokens / 1e6:.2f} M tokens of the pocket corpus ({shares}), length 1024, in {report.seconds / 60:.0f} minutes on one",
        f"shared CPU core ({made['processor']}). Forward `{forward}`, loss `{loss}`. Muon (lr {s.muon_lr:g}) for the matrices, AdamW (lr "
        f"{s.adam_lr:g}) for the rest, {arithmetic(report.settings.precision)},",
        f"batch {s.batch}, seed {s.seed}. torch {made['versions']['torch']}. The recipe trains {', '.join((*HEADS, *MORE, *OTHERS, *ADAPTED))}",
        "with the same tokens in the same order.",
        "",
        "```",
        f"python recipes/train_heads.py --site SITE_PACKAGES --drafts {name} --tokens {s.tokens:g} --epochs {s.epochs:g}{options}",
        "```",
        "",
        f"**Validation** ({s.validation} sequences from held-out packages; acceptance at temperature 1 and by depth, given that the tokens before are the",
        "text's; τ over blocks along the text):",
        "",
        *curve(report.curve),
    ]
    return "\n".join(lines) + "\n"


def main(s: Settings) -> None:
    known = {**HEADS, **MORE, **OTHERS, **ADAPTED}
    unknown = [name for name in s.drafts if name not in known]
    if unknown:
        raise SystemExit(f"--drafts {unknown[0]}: there are {', '.join(known)}")
    if s.loss not in ("mixed", "own"):
        raise SystemExit(f"--loss {s.loss}: there are mixed and own")
    s.begin()
    target, tokenizer = zoo.load("pocket-target")
    rows = []
    for name in s.drafts:
        draft, report = fit(s, name, target, tokenizer)
        speed = report.tokens / max(report.seconds, 1e-9)
        seen = {"parameters": size(draft), "seconds": report.seconds, "tokens_per_second": speed}
        rows += [{"draft": name, **seen, **row} for row in report.curve]
        if main_process():
            draft.tokenizer = None  # the package's models share one
            export(draft, Path(s.zoo) / named(s, name), tokenizer, card(s, name, draft, report))
        print(
            f"{name}: {report.tokens / 1e6:.2f} M tokens in {report.seconds / 60:.1f} minutes, {speed:.0f} tokens/s",
            flush=True,
        )
    s.save(rows)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
