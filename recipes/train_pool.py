"""Trains a pool of small drafts for the pocket target: four sizes from 0.14 M to 0.9 M parameters, equal data.

    python recipes/train_pool.py --site SITE_PACKAGES --work runs/pocket

Each is distilled from the target (MixedLoss) on the same tokens of all three domains. The two smallest begin with new weights, the others with
blocks of pocket-vanilla. The same command continues an interrupted run; finished drafts are exported into specdec/zoo with a model card. --drafts also takes the members of the former
pool (pocket-tiny and a specialist per domain), whose cards have their commands.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import zoo
from specdec.data.corpus import DOMAINS
from specdec.lab.loading import in_dtype
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe
from specdec.lab.report import meta
from specdec.lab.states import First, stream_states
from specdec.lab.streams import Streams
from specdec.pruning.layers import keep_layers
from specdec.training.losses import MixedLoss
from specdec.training.train import Settings as Training
from specdec.training.train import Trained, train

MIXTURE = (0.4, 0.3, 0.3)


@dataclass(frozen=True)
class Member:
    """A draft: ``hidden`` 0 begins with ``layers`` evenly spaced blocks of ``start``; ``shares`` are of code, prose and tabular text."""

    hidden: int = 0
    layers: int = 2
    heads: int = 2
    intermediate: int = 0
    shares: tuple[float, float, float] = MIXTURE
    start: str = "pocket-vanilla"


POOL = {
    "pocket-140k": Member(32, 1, 1, 80),
    "pocket-360k": Member(64, 2, 2, 160),
    "pocket-700k": Member(layers=1),
    "pocket-900k": Member(layers=2),
}
HISTORY = """**History.** A first pool of five sizes (0.14 to 2.06 M parameters, all with new weights) had one pass over these tokens. Decoding with any of
its drafts was slower than plain decoding in replays on prompts of the validation packages. On those prompts the sizes, starts and tokens
of this pool were chosen, and it was frozen before the test prompts were decoded with it."""
FORMER = {
    "pocket-code": Member(shares=(1, 0, 0)),
    # Tables are part of code, and the corpus has few.
    "pocket-tiny": Member(64, 2, 2, 160),
}
MEMBERS = POOL | FORMER


@dataclass(frozen=True)
class Settings(Recipe):
    drafts: tuple[str, ...] = option(tuple(POOL), "drafts to train, in order")
    work: str = option("runs/pocket", "folder for shards and cached states")
    site: str = option("", "more site-packages folders, separated by commas")
    zoo: str = option(str(zoo.FOLDER), "folder to export to (default: the package's)")
    tokens: float = option(3.0, "millions of training tokens for each")
    epochs: float = option(3.0, "passes over the tokens")
    batch: int = option(2, "sequences per step")
    muon_lr: float = option(0.02)
    adam_lr: float = option(0.006)
    attention: str = option("block", '"block": matmuls by query block, faster on CPU; "sdpa": PyTorch\'s')
    compile: bool = option(True, "torch.compile of the loss")
    validation: int = option(16, "number of validation sequences")


def kept(member: Member, vanilla: Any) -> list[int]:
    """The blocks of ``vanilla`` with which a draft begins: the first, the last, and evenly spaced ones between."""
    last = vanilla.config.num_hidden_layers - 1
    return [round(last * i / max(member.layers - 1, 1)) for i in range(member.layers)]


def started(member: Member, s: Settings) -> Any:
    """The untrained draft, in float32."""
    vanilla, _ = zoo.load(member.start, s.zoo if (Path(s.zoo) / member.start).is_dir() else zoo.FOLDER)
    torch.manual_seed(s.seed)
    if not member.hidden:
        return keep_layers(vanilla, kept(member, vanilla))
    config = vanilla.config.to_dict() | {
        "hidden_size": member.hidden,
        "num_hidden_layers": member.layers,
        "num_attention_heads": member.heads,
        "num_key_value_heads": member.heads,
        "intermediate_size": member.intermediate,
        "head_dim": member.hidden // member.heads,
    }
    return LlamaForCausalLM(LlamaConfig.from_dict(config))


def states(s: Settings, target: Any, tokenizer: Any, member: Member, split: str, count: int) -> First:
    """The target's final hidden states on ``count`` sequences of the member's domains, computed unless cached."""
    label = f"pool-{'-'.join(f'{share:g}' for share in member.shares)}-"
    streams = Streams(work=s.work, site=s.site, seed=s.seed)
    return stream_states(target, tokenizer, streams, (), 1024 * count, split, member.shares, label)


def fit(s: Settings, name: str, target: Any, tokenizer: Any) -> tuple[Any, Trained]:
    """Train one draft; its checkpoint is in the work folder."""
    member, count = MEMBERS[name], max(1, round(s.tokens * 1e6) // 1024)
    draft = started(member, s)
    draft.set_attn_implementation(s.attention)
    data = states(s, target, tokenizer, member, "train", count)
    validation = states(s, target, tokenizer, member, "validation", s.validation)
    steps = max(1, round(count * s.epochs / s.batch))
    training = Training(
        steps, s.batch, s.muon_lr, s.adam_lr, warmup=0.02, decay=0.8, compile=s.compile, seed=s.seed,
        validate_every=max(1, steps // 10),
    )  # fmt: skip

    def tell(row: dict[str, float]) -> None:
        print(name, json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)

    report = train(
        draft, target, data, loss=MixedLoss(), settings=training, validation=validation,
        checkpoint=Path(s.work) / f"{name}.pt", on_validation=tell,
    )  # fmt: skip
    return draft, report


def export(s: Settings, name: str, draft: Any, tokenizer: Any, report: Trained) -> None:
    """Write the draft in bf16, its tokenizer and its model card."""
    folder = Path(s.zoo) / name
    folder.mkdir(parents=True, exist_ok=True)
    in_dtype(draft, torch.bfloat16)
    draft.config.dtype = torch.bfloat16
    draft.save_pretrained(folder)
    if zoo.tokenizer_folder(folder) is None:  # the package's models share one
        tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "README.md").write_text(card(s, name, draft, report))


def card(s: Settings, name: str, draft: Any, report: Trained) -> str:
    """The model card, in Markdown."""
    member, c = MEMBERS[name], draft.config
    total = sum(p.numel() for p in draft.parameters())
    blocks = ", ".join(map(str, kept(member, zoo.load(member.start)[0])))
    start = "new weights" if member.hidden else f"{member.start}'s embedding and blocks (from 0): {blocks}"
    shares = ", ".join(f"{share:.0%} {domain}" for share, domain in zip(member.shares, DOMAINS) if share)
    made = meta(s.seed)
    lines = [
        f"# {name}",
        "",
        f"A draft for pocket-target: Llama architecture, layers: {c.num_hidden_layers}, hidden size: {c.hidden_size}, heads: "
        f"{c.num_attention_heads}, intermediate size: {c.intermediate_size},",
        f"tied embeddings, vocabulary {c.vocab_size}, {total:,} parameters. Stored in bf16; `specdec.zoo.load` loads it in float32.",
        "",
        f"**Training.** Begun from {start}; distilled from pocket-target with MixedLoss(0.5) on {report.tokens / 1e6:.2f} M tokens "
        f"({shares})",
        f"of the pocket corpus, length 1024, in {report.seconds / 60:.0f} minutes on a shared CPU core. Muon (lr {s.muon_lr}) for the blocks' "
        f"matrices, AdamW (lr {s.adam_lr}) for",
        f"the rest, bf16 with float32 master weights, batch {s.batch}, seed {s.seed}. torch {made['versions']['torch']}.",
    ]
    if name in POOL:
        lines += [
            f"The recipe trains {', '.join(POOL)} with the same settings on the same tokens in the same order. Those that begin with blocks of "
            "pocket-vanilla have",
            "the tokens that it was trained on (its card says how many) in addition.",
            "",
            HISTORY,
        ]
    lines += [
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
    unknown = [name for name in s.drafts if name not in MEMBERS]
    if unknown:
        raise SystemExit(f"--drafts {unknown[0]}: there are {', '.join(MEMBERS)}")
    s.begin()
    target, tokenizer = zoo.load("pocket-target")
    rows = []
    for name in s.drafts:
        draft, report = fit(s, name, target, tokenizer)
        export(s, name, draft, tokenizer, report)
        rows += [{"draft": name, **row, "seconds": report.seconds} for row in report.curve]
        print(f"{name}: {report.tokens / 1e6:.1f} M tokens in {report.seconds / 60:.0f} minutes", flush=True)
    s.save(rows)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
