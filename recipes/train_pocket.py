"""Trains the pocket models that ship with the package, from the Python source of this installation.

    pip install --no-deps -r specdec/data/packages.txt      # the text; once, in any environment
    python recipes/train_pocket.py --site path/to/site-packages

The stages are corpus, BPE tokenizer, token shards, training (the draft first, which is an eighth of the work), test bits per byte
beside `xz -9`, and export into specdec/zoo with a model card. Every stage's result is kept in the work folder and training resumes
from its last checkpoint, so the same command continues after an interruption. It runs on a CPU core or a GPU. On a CPU, keeping
huge pages (glibc) makes it a quarter faster:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 python recipes/…
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec import zoo
from specdec.data.corpus import DOMAINS, MANIFEST, corpus
from specdec.data.prompts import FILES, choose
from specdec.lab.bits import bits_per_byte, xz_bits_per_byte
from specdec.lab.options import option, parse
from specdec.lab.pretraining import Pretraining, Sizes
from specdec.lab.recipe import Reported
from specdec.training.muon import arithmetic, quick

# The drafts' bodies have exactly an eighth of the target's parameters. pocket-words is for a tokenizer of its own:
# --vocabulary 2048 --tokenizer-kind words
SHAPES = {
    "pocket-vanilla": Sizes(128, 4, 4, 320),
    "pocket-target": Sizes(256, 8, 4, 640),
    "pocket-words": Sizes(128, 4, 4, 320),
}


@dataclass(frozen=True)
class Settings(Pretraining, Reported):
    models: tuple[str, ...] = option(
        ("pocket-vanilla", "pocket-target"), 'models to train, in order; "" for none'
    )
    minutes: tuple[float, ...] = option(
        (27.0, 80.0), "wall time of each model's training; the schedule follows the clock (default: 27,80)"
    )
    snapshot_minutes: float = option(20.0, "export an early target after this long; 0: never")
    zoo: str = option(str(zoo.FOLDER), "folder to export to (default: the package's)")
    evaluate: bool = option(True, "compute test bits per byte at the end")
    publish: bool = option(
        False, "also write the corpus's manifest and the held-out prompts into the package"
    )


def evaluate(s: Settings, name: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, dict[str, float]]:
    """Test bits per byte of the exported model (bf16 weights, float32 arithmetic) by domain and overall."""
    model = LlamaForCausalLM.from_pretrained(Path(s.zoo) / name, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    texts = s.documents("test")
    texts["all"] = [text for domain in DOMAINS for text in texts[domain]]
    table = {}
    for domain, documents in texts.items():
        table[domain] = {
            "bytes": sum(len(text.encode()) for text in documents),
            "bits_per_byte": bits_per_byte(model, tokenizer, documents),
            "xz_bits_per_byte": xz_bits_per_byte(documents),
        }
    return table


def export(s: Settings, name: str, model, tokenizer, info: dict, test: dict) -> None:
    """Writes the model in bf16, its tokenizer and its card to the zoo."""
    folder = Path(s.zoo) / name
    folder.mkdir(parents=True, exist_ok=True)
    copy = s.model(SHAPES[name])
    copy.load_state_dict({key: value.float().cpu() for key, value in model.state_dict().items()})
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable for its owner only
    (folder / "README.md").write_text(card(s, name, copy, info, test))


def card(s: Settings, name: str, model, info: dict, test: dict) -> str:
    """The model card, in Markdown."""
    hidden, layers, heads, intermediate, _ = SHAPES[name]
    total = sum(value.numel() for value in model.parameters())
    body = total - model.get_input_embeddings().weight.numel()
    gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if gpu else "2 CPU cores, one of them training"
    own = [
        "Its tokenizer is its own, and not that of the other pocket models: BPE of words with byte fallback, as SentencePiece",
        "has it (specdec.data.tokens.train_words).",
    ]
    own = own if s.tokenizer_kind == "words" else []
    lines = [
        f"# {name}",
        "",
        f"A Llama-architecture language model of Python source: {layers} layers, hidden size {hidden}, {heads} heads,",
        f"intermediate size {intermediate}, tied embeddings, vocabulary {s.vocabulary}, {total:,} parameters ({body:,} outside",
        f"the embedding), trained at length {s.length}, 2048 positions. Stored in bf16; `specdec.zoo.load` loads it in",
        "float32. It exists to try speculative decoding on: do not expect it to write programs.",
        *own,
        "",
        "**Data.** Python source of the standard library and of the packages in specdec/data/packages.txt (BSD, MIT,",
        "Apache, PSF and the like; none under the GPL or MPL), as code, prose (docstrings and comments) and tabular",
        f"(large literal collections), mixed {' / '.join(map(str, s.mixture))}. Whole packages are held out and near-duplicates",
        "removed; specdec/data/manifest.json has the versions, splits and hashes. A held-out file serves one domain only.",
        "",
        f"**Training.** {info['step']:,} steps of {s.batch * s.length:,} tokens, {info['tokens'] / 1e6:.1f} M tokens in "
        f"{info['minutes']:.0f} minutes on {machine}. Muon (lr {s.muon_lr}) for the",
        f"body matrices, AdamW (lr {s.adam_lr}) for embedding and norms, {arithmetic(quick('cuda' if gpu else 'cpu'))}, seed {s.seed}.",
        "",
        "```",
        f"python recipes/train_pocket.py --site SITE_PACKAGES --models {name}{command_options(s, info)}",
        "```",
        "",
    ]
    if test:
        lines += [
            "**Test bits per byte** (held-out packages, sliding window of 1024 tokens at stride 512) beside `xz -9` on the",
            "same concatenated text:",
            "",
            "| domain | bytes | bits per byte | xz -9 | ratio |",
            "|---|---|---|---|---|",
        ]
        for domain, row in test.items():
            ours, theirs = row["bits_per_byte"], row["xz_bits_per_byte"]
            lines.append(f"| {domain} | {row['bytes']:,} | {ours:.3f} | {theirs:.3f} | {ours / theirs:.2f} |")
    else:
        lines.append("**Not evaluated: an early snapshot, or a model whose evaluation still runs.**")
    lines += [
        "",
        f"**Loss curve** (nats per token; validation: {2 * s.micro_batch} sequences a domain from held-out packages):",
        "",
        "| minutes | M tokens | train | code | prose | tabular |",
        "|---|---|---|---|---|---|",
    ]
    for row in info["curve"]:
        losses = " | ".join(f"{row[key]:.3f}" for key in ("train", *DOMAINS))
        lines.append(f"| {row['minutes']:.1f} | {row['tokens'] / 1e6:.2f} | {losses} |")
    return "\n".join(lines) + "\n"


def command_options(s: Settings, info: dict) -> str:
    """The settings that differ from their defaults, as options, without the folders."""
    options = f" --minutes {info['budget']:g}"
    for field in fields(Settings):
        value = getattr(s, field.name)
        own = ("models", "minutes", "work", "zoo", "site", "json", "evaluate", "publish")
        if field.name in own or value == field.default:
            continue
        flag = field.name.replace("_", "-")
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
        options += f" --{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f" --{flag} {shown}"
    return options


def publish(s: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the corpus's manifest and the prompts of its held-out packages into specdec/data."""
    held_out = {split: corpus(None, split, s.sites, s.work) for split in FILES}
    newest = max(Path(s.work).glob("corpus-*/manifest.json"), key=lambda path: path.stat().st_mtime)
    manifest = json.loads(newest.read_text())
    licences = {entry["package"]: entry["licence"] for entry in manifest["packages"]}
    MANIFEST.write_text(json.dumps(manifest, indent=0) + "\n")
    for split, rows in held_out.items():
        chosen = choose(rows, licences, tokenizer)
        FILES[split].write_text(json.dumps({"prompts": chosen}, indent=1, ensure_ascii=False) + "\n")


def status(s: Settings, text: str) -> None:
    """Write a line of progress."""
    line = f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {text}"
    tqdm.write(line)
    with open(Path(s.work) / "STATUS.txt", "a") as file:
        file.write(line + "\n")


def main(s: Settings) -> None:
    minutes = s.minutes if s.models else ()
    if len(minutes) != len(s.models):
        raise SystemExit(
            f"--minutes {','.join(map(str, minutes))}: give as many numbers as --models {','.join(s.models)}"
        )
    s.begin()
    Path(s.work).mkdir(parents=True, exist_ok=True)
    tokenizer = s.make()
    status(s, "tokenizer and shards ready")
    if s.publish:
        publish(s, tokenizer)
    rows = []
    for name, some in zip(s.models, minutes, strict=True):

        def early(model: Any, info: dict[str, Any], name: str = name) -> None:
            export(s, name, model, tokenizer, info, {})
            status(s, f"{name}: early snapshot exported ({info['minutes']:.0f} minutes)")

        snapshot = (s.snapshot_minutes, early) if s.snapshot_minutes and name.endswith("target") else None
        model, info = s.train(name, SHAPES[name], some, snapshot)
        export(s, name, model, tokenizer, info, {})
        status(s, f"{name}: trained and exported")
        test = evaluate(s, name, tokenizer) if s.evaluate else {}
        export(s, name, model, tokenizer, info, test)
        counts = {"tokens": info["tokens"], "steps": info["step"], "minutes": info["minutes"]}
        speed = info["tokens"] / info["minutes"] / 60
        for domain, row in test.items() or [(None, {})]:
            rows.append({"model": name, "domain": domain, **row, **counts, "tokens_per_second": speed})
        status(s, f"{name}: evaluated {json.dumps(test)}")
    s.save(rows, s.seed)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
