"""Trains a pool of small drafts for the pocket target: four sizes from 0.14 M to 0.9 M parameters, equal data.

    python recipes/train_pool.py --site SITE_PACKAGES --work runs/pocket

The two larger begin with blocks of pocket-vanilla. The two smallest begin with new weights, and have a first stage for the same number of
tokens: the hard loss on as many sequences as pocket-vanilla saw, drawn as train_pocket.py draws them. Each is then distilled from the target
(MixedLoss) on the same tokens of all three domains. The same command continues an interrupted run; finished drafts are exported into specdec/zoo
with a model card. --drafts also takes the members of the former pool (pocket-tiny and a specialist per domain), whose cards have their commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import zoo
from specdec.data.corpus import DOMAINS
from specdec.lab.fitting import OnCorpus, Trains, export, told
from specdec.lab.options import option, parse
from specdec.lab.report import meta
from specdec.lab.states import First, sequences, stream_states
from specdec.lab.streams import Streams
from specdec.pruning.layers import keep_layers
from specdec.training.losses import HardLoss, MixedLoss
from specdec.training.muon import arithmetic
from specdec.training.sources import order
from specdec.training.train import Settings as Training
from specdec.training.train import Trained, train

MIXTURE = (0.4, 0.3, 0.3)
# Of pocket-vanilla's training.
VANILLA_STEPS, VANILLA_BATCH = 2115, 4


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
EQUAL = f"""{", ".join(POOL)} have equal tokens. The second stage has the same sequences in the same order for all, with the same
settings. In the first, the two smallest have as many sequences as pocket-vanilla, of the same corpus, mixture and length, in the same batches and with
the same peak learning rates. They need not be the same sequences, since the limit of tokens with which the shards of pocket-vanilla were made is
not known; and its schedule followed the clock, where theirs follows the steps."""
HISTORY = """**History.** A first pool of five sizes (0.14 to 2.06 M parameters, all with new weights) had one pass over the distilled tokens. Decoding with any
of its drafts was slower than plain decoding in replays on prompts of the validation packages. On those prompts the sizes, starts and tokens
of this pool were chosen, and it was frozen before the test prompts were decoded with it. Until then pocket-140k and pocket-360k had only the
distilled tokens. Afterwards they were trained again, from new weights, with the hard-loss tokens of the others first. Their three passes of
distillation became one run, as the others' are; before they had been one pass, and two more after it. Nothing else in the pool was changed, and
nothing was chosen on test prompts."""
FORMER = {
    "pocket-code": Member(shares=(1, 0, 0)),
    # Tables are part of code, and the corpus has few.
    "pocket-tiny": Member(64, 2, 2, 160),
}
MEMBERS = POOL | FORMER


@dataclass(frozen=True)
class Settings(Trains, OnCorpus):
    drafts: tuple[str, ...] = option(tuple(POOL), "drafts to train, in order")
    zoo: str = option(str(zoo.FOLDER), "folder to export to (default: the package's)")
    tokens: float = option(3.0, "millions of training tokens for each")
    epochs: float = option(3.0, "passes over the tokens")
    muon_lr: float = option(0.02, "peak learning rate of the matrices")
    adam_lr: float = option(0.006, "peak learning rate of other weights")
    warmup: float = option(0.02, "share of the steps in which the learning rate rises")
    first_steps: int = option(VANILLA_STEPS, "steps of the first stage, of pool members with new weights")
    vanilla_work: str = option("", "work folder with the shards of the first stage, if not --work")
    attention: str = option("block", '"block": matmuls by query block, faster on CPU; "sdpa": PyTorch\'s')


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
    streams = replace(s.streams, seed=s.seed)
    return stream_states(target, tokenizer, streams, (), 1024 * count, split, member.shares, label)


def has_first_stage(name: str) -> bool:
    """Whether a draft is trained with the hard loss before it is distilled: those of the pool that do not begin with blocks of pocket-vanilla."""
    return name in POOL and POOL[name].hidden > 0


def first_stage(s: Settings, tokenizer: Any) -> tuple[Tensor, Training]:
    """The first sequences ``[N, L + 1]`` that train_pocket.py draws, as many as pocket-vanilla saw, and the settings of its training."""
    count = VANILLA_BATCH * s.first_steps
    streams = replace(s.streams, work=s.vanilla_work or s.work)
    seen = torch.cat(list(sequences(tokenizer, streams, "train", count)))
    training = replace(
        s.training(s.first_steps), batch=VANILLA_BATCH, decay=0.7, validate_every=max(1, s.first_steps // 5)
    )
    # train() permutes its data; permuted the other way before, they are in the order of train_pocket.py.
    return seen[np.argsort(order(count, count, s.seed, 0))], training


def fit(s: Settings, name: str, target: Any, tokenizer: Any) -> tuple[Any, list[Trained]]:
    """Train one draft; each stage has a checkpoint in the work folder and a report."""
    member, count = MEMBERS[name], max(1, round(s.tokens * 1e6) // 1024)
    draft = started(member, s)
    draft.set_attn_implementation(s.attention)
    validation = states(s, target, tokenizer, member, "validation", s.validation)

    def stage(file: str, data: Any, loss: Any, training: Training) -> Trained:
        return train(
            draft, target, data, loss=loss, settings=training, validation=validation,
            checkpoint=Path(s.work) / f"{file}.pt",
            on_validation=lambda row: print(told(row, name), flush=True),
        )  # fmt: skip

    reports = []
    if has_first_stage(name):
        seen, training = first_stage(s, tokenizer)
        reports.append(stage(f"{name}-first", seen, HardLoss(), training))
    data = states(s, target, tokenizer, member, "train", count)
    reports.append(
        stage(f"{name}-second" if reports else name, data, MixedLoss(), s.training(s.steps(count)))
    )
    return draft, reports


def card(s: Settings, name: str, draft: Any, reports: list[Trained]) -> str:
    """The model card, in Markdown."""
    c, made = draft.config, meta(s.seed)
    total = sum(p.numel() for p in draft.parameters())
    more = f" --first-steps {s.first_steps}" if s.first_steps != VANILLA_STEPS else ""
    more += " --vanilla-work FOLDER" if s.vanilla_work and has_first_stage(name) else ""
    lines = [
        f"# {name}",
        "",
        f"A draft for pocket-target: Llama architecture, layers: {c.num_hidden_layers}, hidden size: {c.hidden_size}, heads: "
        f"{c.num_attention_heads}, intermediate size: {c.intermediate_size},",
        f"tied embeddings, vocabulary {c.vocab_size}, {total:,} parameters. Stored in bf16; `specdec.zoo.load` loads it in float32.",
        "",
        *stages(s, name, reports),
        "",
        f"Pocket corpus, length 1024, on a shared CPU core (minutes are wall time). Muon (lr {s.muon_lr}) for the blocks' matrices, AdamW (lr {s.adam_lr}) for the rest,",
        f"{arithmetic(reports[-1].settings.precision)}, seed {s.seed}. torch {made['versions']['torch']}.",
    ]
    if name in POOL:
        lines += ["", EQUAL, "", HISTORY]
    lines += [
        "",
        "```",
        f"python recipes/train_pool.py --site SITE_PACKAGES --drafts {name} --tokens {s.tokens:g} --epochs {s.epochs:g}{more}",
        "```",
        "",
        f"**Validation** ({s.validation} sequences of its own domains from held-out packages; acceptance at temperature 1, τ at k = 4 along the text; "
        "losses are those of the stage):",
        "",
        "| stage | M tokens | loss | validation loss | acceptance | τ |",
        "|---|---|---|---|---|---|",
    ]
    for label, report in zip(("hard loss", "distilled")[-len(reports) :], reports):
        for row in report.curve:
            lines.append(
                f"| {label} | {row['tokens'] / 1e6:.2f} | {row['loss']:.3f} | {row['validation_loss']:.3f} | {row['acceptance']:.3f} | {row['tau']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def stages(s: Settings, name: str, reports: list[Trained]) -> list[str]:
    """The card's lines on what the draft was trained on."""
    member, last = MEMBERS[name], reports[-1]
    blocks = ", ".join(map(str, kept(member, zoo.load(member.start)[0])))
    start = "new weights" if member.hidden else f"{member.start}'s embedding and blocks (from 0): {blocks}"
    distilled = (
        f"distilled from pocket-target with MixedLoss(0.5) on {last.tokens / 1e6:.2f} M tokens ({said(member.shares)}), "
        f"{s.epochs:g} passes, batch {s.batch}, in {last.seconds / 60:.0f} minutes"
    )
    if name not in POOL:
        return [f"**Training.** Begun from {start}; {distilled}."]
    hard = VANILLA_BATCH * (s.first_steps if has_first_stage(name) else VANILLA_STEPS) * 1024
    which = f"{hard / 1e6:.2f} M tokens ({said(Streams().mixture)}), batch {VANILLA_BATCH}"
    if has_first_stage(name):
        first = f"on {which}, as many as pocket-vanilla saw, in {reports[0].seconds / 60:.0f} minutes"
    else:
        first = f"as a part of pocket-vanilla, on {which}"
    return [
        f"**Training.** Begun from {start}. {(hard + last.tokens) / 1e6:.2f} M tokens in two stages:",
        "",
        f"1. trained with the hard loss (the text's next token) {first};",
        f"2. {distilled}.",
    ]


def said(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%} {domain}" for share, domain in zip(shares, DOMAINS) if share)


def main(s: Settings) -> None:
    unknown = [name for name in s.drafts if name not in MEMBERS]
    if unknown:
        raise SystemExit(f"--drafts {unknown[0]}: there are {', '.join(MEMBERS)}")
    s.begin()
    target, tokenizer = zoo.load("pocket-target")
    rows = []
    for name in s.drafts:
        draft, reports = fit(s, name, target, tokenizer)
        export(draft, Path(s.zoo) / name, tokenizer, card(s, name, draft, reports))
        for stage, report in enumerate(reports, 1):
            rows += [
                {"draft": name, "stage": stage, **row, "seconds": report.seconds} for row in report.curve
            ]
            print(
                f"{name}: {report.tokens / 1e6:.1f} M tokens in {report.seconds / 60:.0f} minutes", flush=True
            )
    s.save(rows)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
