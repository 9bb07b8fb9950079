"""Trains the pool of small drafts for the pocket target: one that knows everything a little, and three that know one domain well.

    python recipes/train_pool.py --site SITE_PACKAGES --work runs/pocket

Each is distilled from the target (MixedLoss) on text of its domains. The specialists begin as two blocks of
another draft. The same command continues an interrupted run; finished drafts are exported into specdec/zoo with a model card.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import train_pocket
from _data import held
from _measure import quiet
from _report import meta, write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import zoo
from specdec.data.corpus import DOMAINS
from specdec.models.fingerprint import fingerprint
from specdec.pruning.layers import keep_layers
from specdec.training.losses import MixedLoss
from specdec.training.states import States
from specdec.training.train import Settings as Training
from specdec.training.train import Trained, train

MIXTURE = (0.4, 0.3, 0.3)


@dataclass(frozen=True)
class Member:
    """A draft of the pool: its shares of code, prose and tabular text; ``hidden`` 0 begins as the first and last block of ``start``."""

    shares: tuple[float, float, float]
    hidden: int = 0
    layers: int = 2
    heads: int = 2
    intermediate: int = 0
    start: str = "pocket-vanilla"


POOL = {
    "pocket-code": Member((1, 0, 0)),
    "pocket-prose": Member((0, 1, 0), start="pocket-code"),
    "pocket-tabular": Member(
        (0.3, 0, 0.7), start="pocket-code"
    ),  # tables are written in code, and the corpus has few
    "pocket-tiny": Member(MIXTURE, 64, 2, 2, 160),
}


@dataclass
class Settings:
    """Every setting of a run."""

    drafts: str = ",".join(POOL)
    work: str = "runs/pocket"
    site: str = ""
    zoo: str = str(zoo.FOLDER)
    tokens: float = 3.0
    epochs: float = 1.0
    batch: int = 2
    muon_lr: float = 0.02
    adam_lr: float = 0.006
    compile: bool = True
    validation: int = 16
    threads: int = 1
    seed: int = 0
    json: str | None = None


def started(member: Member, s: Settings) -> Any:
    """The untrained draft, in float32."""
    vanilla, _ = zoo.load(member.start, s.zoo if (Path(s.zoo) / member.start).is_dir() else zoo.FOLDER)
    torch.manual_seed(s.seed)
    if not member.hidden:
        return keep_layers(vanilla, [0, vanilla.config.num_hidden_layers - 1])
    config = vanilla.config.to_dict() | {
        "hidden_size": member.hidden,
        "num_hidden_layers": member.layers,
        "num_attention_heads": member.heads,
        "num_key_value_heads": member.heads,
        "intermediate_size": member.intermediate,
        "head_dim": member.hidden // member.heads,
    }
    return LlamaForCausalLM(LlamaConfig.from_dict(config))


def states(s: Settings, target: Any, member: Member, split: str, count: int) -> States:
    """The target's final hidden states of ``count`` sequences of the member's domains, made where they are not there yet."""
    name = "-".join(f"{share:g}" for share in member.shares)
    folder = Path(s.work) / f"states-pool-{split}-{fingerprint(target)}-{name}"
    if held(folder, target) < count:
        low = copy.deepcopy(target).eval()
        for p in low.parameters():
            p.data = p.data.to(torch.bfloat16)
        low.set_attn_implementation("block")
        States.write(folder, low, sequences(s, member, split, count), (), count)
    return States(folder, target)


def sequences(s: Settings, member: Member, split: str, count: int) -> Iterator[Tensor]:
    """``count`` sequences of 1025 ids of the member's domains."""
    settings = train_pocket.Settings(work=s.work, site=s.site, seed=s.seed)
    train_pocket.make_streams(settings)
    streams = [train_pocket.stream(settings, split, domain) for domain in DOMAINS]
    batches = train_pocket.Batches(streams, member.shares, settings.length, s.seed)
    for start in range(0, count, 4):
        yield batches.take(min(4, count - start))


def fit(s: Settings, name: str, target: Any) -> tuple[Any, Trained]:
    """Train one draft; its checkpoint is in the work folder."""
    member, count = POOL[name], max(1, round(s.tokens * 1e6) // 1024)
    draft = started(member, s)
    data, validation = (
        states(s, target, member, "train", count),
        states(s, target, member, "validation", s.validation),
    )
    steps = max(1, round(count * s.epochs / s.batch))
    training = Training(
        steps,
        s.batch,
        s.muon_lr,
        s.adam_lr,
        warmup=0.02,
        decay=0.8,
        compile=s.compile,
        seed=s.seed,
        validate_every=max(1, steps // 10),
    )

    def tell(row: dict[str, float]) -> None:
        print(name, json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)

    report = train(
        draft,
        target,
        data,
        loss=MixedLoss(),
        settings=training,
        validation=validation,
        checkpoint=Path(s.work) / f"{name}.pt",
        on_validation=tell,
    )
    return draft, report


def export(s: Settings, name: str, draft: Any, tokenizer: Any, report: Trained) -> None:
    """The draft in bf16, its tokenizer and its card."""
    folder = Path(s.zoo) / name
    folder.mkdir(parents=True, exist_ok=True)
    for p in draft.parameters():
        p.data = p.data.to(torch.bfloat16)
    draft.config.dtype = torch.bfloat16
    draft.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "README.md").write_text(card(s, name, draft, report))


def card(s: Settings, name: str, draft: Any, report: Trained) -> str:
    """The model card, in Markdown."""
    member, c = POOL[name], draft.config
    total = sum(p.numel() for p in draft.parameters())
    start = "new weights" if member.hidden else f"the first and the last block of {member.start}"
    shares = ", ".join(f"{share:.0%} {domain}" for share, domain in zip(member.shares, DOMAINS) if share)
    made = meta(s.seed)
    lines = [
        f"# {name}",
        "",
        f"A draft for pocket-target: Llama architecture, {c.num_hidden_layers} layers, hidden size {c.hidden_size}, "
        f"{c.num_attention_heads} heads, intermediate size {c.intermediate_size},",
        f"tied embeddings, vocabulary {c.vocab_size}, {total:,} parameters. Stored in bf16; `specdec.zoo.load` loads it in float32.",
        "",
        f"**Training.** Begun from {start}; distilled from pocket-target with MixedLoss(0.5) on {report.tokens / 1e6:.2f} M tokens "
        f"({shares})",
        f"of the pocket corpus, length 1024, in {report.seconds / 60:.0f} minutes on one core. Muon (lr {s.muon_lr}) for the blocks' "
        f"matrices, AdamW (lr {s.adam_lr}) for",
        f"the rest, bf16 with float32 master weights, batch {s.batch}, seed {s.seed}. torch {made['versions']['torch']}.",
        "",
        "```",
        f"python recipes/train_pool.py --site SITE_PACKAGES --drafts {name} --tokens {s.tokens:g} --epochs {s.epochs:g}",
        "```",
        "",
        f"**Validation** ({s.validation} sequences of its own domains from held-out packages; acceptance at temperature 1, τ at k = 4 along the text):",
        "",
        "| M tokens | loss | validation loss | acceptance | τ |",
        "|---|---|---|---|---|",
    ]
    for row in report.curve:
        lines.append(
            f"| {row['tokens'] / 1e6:.2f} | {row['loss']:.3f} | {row['validation_loss']:.3f} | {row['acceptance']:.3f} | {row['tau']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(s: Settings) -> None:
    unknown = [name for name in s.drafts.split(",") if name not in POOL]
    if unknown:
        raise SystemExit(f"--drafts {unknown[0]}: there are {', '.join(POOL)}")
    torch.set_num_threads(s.threads)
    quiet()
    target, tokenizer = zoo.load("pocket-target")
    rows = []
    for name in s.drafts.split(","):
        draft, report = fit(s, name, target)
        export(s, name, draft, tokenizer, report)
        rows += [{"draft": name, **row, "seconds": report.seconds} for row in report.curve]
        print(f"{name}: {report.tokens / 1e6:.1f} M tokens in {report.seconds / 60:.0f} minutes", flush=True)
    if s.json:
        write(s.json, rows, s.seed)


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument("--drafts", default=d.drafts, help="which, in order (default %(default)s)")
    parser.add_argument(
        "--work", default=d.work, help="folder of shards and cached states (default %(default)s)"
    )
    parser.add_argument("--site", default=d.site, help="more site-packages folders, separated by commas")
    parser.add_argument("--zoo", default=d.zoo, help="folder to export to")
    parser.add_argument("--tokens", type=float, default=d.tokens, help="millions of tokens of text for each")
    parser.add_argument("--epochs", type=float, default=d.epochs, help="times over them")
    parser.add_argument("--batch", type=int, default=d.batch, help="sequences of a step")
    parser.add_argument("--muon-lr", type=float, default=d.muon_lr)
    parser.add_argument("--adam-lr", type=float, default=d.adam_lr)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=d.compile,
        help="torch.compile of the loss",
    )
    parser.add_argument("--validation", type=int, default=d.validation, help="sequences of validation text")
    parser.add_argument("--threads", type=int, default=d.threads)
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--json")
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    main(settings())
