"""Trains the pocket models that ship with the package, from the Python source of this installation.

    pip install --no-deps -r specdec/data/packages.txt      # the text; once, in any environment
    python recipes/train_pocket.py --site path/to/site-packages

Corpus, BPE tokenizer, token shards, training (draft first: it takes an eighth of the work), test bits per byte beside
`xz -9`, export into specdec/zoo with a model card. Every stage is kept in the work folder and training resumes from
its last checkpoint, so that the same command continues after an interruption. Runs on a CPU core or on a GPU. On a CPU,
huge pages that are kept (glibc) make it a quarter faster:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 python recipes/…
"""

import argparse
import datetime
import json
import lzma
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.data.corpus import DOMAINS, MANIFEST, corpus
from specdec.data.prompts import FILE as PROMPTS
from specdec.data.prompts import choose
from specdec.data.tokens import Batches, encode, train_tokenizer, write, write_stream

ZOO = Path(__file__).resolve().parents[1] / "specdec" / "zoo"
# hidden, layers, heads, intermediate; the draft's body has exactly an eighth of the target's parameters
SHAPES: dict[str, tuple[int, ...]] = {
    "pocket-vanilla": (128, 4, 4, 320),
    "pocket-target": (256, 8, 4, 640),
}


@dataclass
class Settings:
    """Every setting of a run; the field's comment is its help."""

    models: str = "pocket-vanilla,pocket-target"  # which to train, in order
    minutes: str = "27,80"  # wall time of each model's training; the schedule follows the clock
    snapshot_minutes: float = 20.0  # export an early target after this long; 0: never
    work: str = "runs/pocket"  # folder of corpus, shards and checkpoints
    zoo: str = str(ZOO)  # folder to export to
    site: str = ""  # more site-packages folders, separated by commas
    vocabulary: int = 4096  # tokens of the BPE tokenizer
    tokenizer_megabytes: float = 24.0  # text that the tokenizer learns from
    token_limit: int = 32_000_000  # training tokens to prepare, shared among the domains like the mixture
    mixture: str = "0.7,0.2,0.1"  # shares of code, prose, tabular among the training sequences
    length: int = 1024  # tokens of a training sequence
    micro_batch: int = 4  # sequences in one forward
    batch: int = 4  # sequences in one optimiser step
    muon_lr: float = 0.02  # body matrices
    adam_lr: float = 0.006  # embedding and norms
    weight_decay: float = 0.02  # times the learning rate, body matrices only
    warmup: float = 0.02  # share of the time to rise
    decay: float = 0.7  # share of the time to fall linearly to zero
    attention: str = "block"  # "block": matmuls by query block, faster on CPU; "sdpa": PyTorch's
    compile: bool = True  # torch.compile
    threads: int = 1  # CPU threads
    checkpoint_minutes: float = 4.0  # time between checkpoints
    evaluate: bool = True  # test bits per byte at the end
    publish: bool = False  # also write the corpus's manifest and the held-out prompts into the package
    seed: int = 0  # of initialisation and of the order of the data
    json: str = ""  # file for {"meta": …, "rows": […]}


def settings() -> Settings:
    """Reads the command line; the help of a field is the comment beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = Path(__file__).read_text().split("\n")
    for field in fields(Settings):
        line = next(line for line in source if line.strip().startswith(f"{field.name}: "))
        text = f"{line.partition('  # ')[2]} (default: {field.default!r})".strip().replace("%", "%%")
        kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        parser.add_argument("--" + field.name.replace("_", "-"), default=field.default, help=text, **kind)
    return Settings(**vars(parser.parse_args()))


def shares(s: Settings) -> list[float]:
    return [float(share) for share in s.mixture.split(",")]


def stream(s: Settings, split: str, domain: str) -> Path:
    return Path(s.work) / "shards" / f"{split}-{domain}.npy"


def load_documents(s: Settings, split: str) -> dict[str, list[str]]:
    """The texts of a split by domain, shuffled (training) or in the corpus's order (held out)."""
    data = corpus(None, split, [site for site in s.site.split(",") if site], s.work)
    texts: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    for row in data:
        texts[row["domain"]].append(row["text"])
    if split == "train":
        for domain in DOMAINS:
            np.random.default_rng(s.seed).shuffle(texts[domain])
    return texts


def make_tokenizer(s: Settings, texts: dict[str, list[str]]) -> PreTrainedTokenizerFast:
    """The tokenizer kept in the work folder, or a new one, learnt from text in the mixture's proportions."""
    folder = Path(s.work) / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        sample = []
        for domain, share in zip(DOMAINS, shares(s), strict=True):
            room = share * s.tokenizer_megabytes * 1e6
            for text in texts[domain]:
                sample.append(text)
                room -= len(text)
                if room < 0:
                    break
        train_tokenizer(sample, s.vocabulary).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_streams(s: Settings) -> PreTrainedTokenizerFast:
    """Writes the tokenizer and one stream of tokens per split and domain, where they are not there yet."""
    tokenizer = None
    for split in ("train", "validation"):
        if all(stream(s, split, domain).exists() for domain in DOMAINS):
            continue
        texts = load_documents(s, split)
        tokenizer = tokenizer or make_tokenizer(s, texts)
        stream(s, split, "").parent.mkdir(parents=True, exist_ok=True)
        for domain, share in zip(DOMAINS, shares(s), strict=True):
            write_stream(stream(s, split, domain), tokenizer, texts[domain], share * s.token_limit)
    return tokenizer or make_tokenizer(s, {})


def batches_of(s: Settings, split: str) -> Batches:
    return Batches([stream(s, split, domain) for domain in DOMAINS], shares(s), s.length, s.seed)


def block_attention(
    module, query, key, value, attention_mask, scaling, block: int = 256, **_
) -> tuple[Tensor, None]:
    """Causal attention for training, one block of queries at a time against the keys that it may see.

    PyTorch's CPU flash attention has a slow backward in bf16; plain matmuls of blocks run on the matrix units.
    """
    query, key = query * scaling, key.transpose(2, 3)
    hidden = torch.full((block, block), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    outputs = []
    for start in range(0, query.shape[2], block):
        stop = min(start + block, query.shape[2])
        weights = query[:, :, start:stop] @ key[..., :stop]
        weights = weights + F.pad(hidden[: stop - start, : stop - start], (start, 0))
        outputs.append(weights.softmax(-1) @ value[:, :, :stop])
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register("block", block_attention)


def new_model(s: Settings, name: str) -> LlamaForCausalLM:
    hidden, layers, heads, intermediate, *size = SHAPES[name]  # a head's size, where it is not hidden / heads
    config = LlamaConfig(
        vocab_size=s.vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=size[0] if size else hidden // heads,
        intermediate_size=intermediate,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation=s.attention,
    )
    torch.manual_seed(s.seed)
    return LlamaForCausalLM(config)


def rate(s: Settings, progress: float) -> float:
    """Learning-rate factor at a share of the training time: up, level, then linearly to zero."""
    return max(0.0, min(1.0, progress / s.warmup, (1 - progress) / s.decay))


def train(
    s: Settings, name: str, minutes: float, tokenizer: PreTrainedTokenizerFast
) -> tuple[LlamaForCausalLM, dict]:
    """Trains until the time is up; float32 weights are kept beside the bf16 ones that the matmuls use."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = Path(s.work) / f"{name}.pt"
    model = new_model(s, name).to(device)
    master = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    body = [value for key, value in master.items() if value.ndim == 2 and "embed" not in key]
    rest = [value for key, value in master.items() if value.ndim != 2 or "embed" in key]
    muon = torch.optim.Muon(body, lr=s.muon_lr, momentum=0.95, weight_decay=s.weight_decay)
    adam = torch.optim.AdamW(rest, lr=s.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
    model.to(torch.bfloat16)
    batches, step, elapsed, curve = batches_of(s, "train"), 0, 0.0, []
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=False)
        for key, value in state["master"].items():
            master[key].data.copy_(value)
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        batches.cursor, curve = state["cursor"], state["curve"]
        step, elapsed = state["step"], state["elapsed"]
    pairs = [(value, master[key]) for key, value in model.named_parameters()]

    def refresh() -> None:
        with torch.no_grad():
            torch._foreach_copy_([low for low, _ in pairs], [high for _, high in pairs])

    def loss_of(tokens: Tensor) -> Tensor:
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        logits = F.linear(hidden, model.lm_head.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def save() -> None:
        optimisers = {"muon": muon.state_dict(), "adam": adam.state_dict()}
        progress = {"cursor": batches.cursor, "step": step, "elapsed": elapsed, "curve": curve}
        write(path, lambda file: torch.save({"master": master, **optimisers, **progress}, file))

    def validate() -> Iterator[tuple[str, float]]:
        held = batches_of(s, "validation")
        with torch.no_grad():
            for domain, label in enumerate(DOMAINS):
                each = [held.read(domain, i) for i in range(2 * s.micro_batch)]
                parts = torch.stack(each).to(device).split(s.micro_batch)
                yield label, sum(float(loss_of(part)) for part in parts) / len(parts)

    def summary() -> dict:
        tokens = step * s.batch * s.length
        return {"step": step, "tokens": tokens, "minutes": elapsed / 60, "budget": minutes, "curve": curve}

    refresh()
    compiled = torch.compile(loss_of) if s.compile else loss_of
    budget, before = 60 * minutes, elapsed
    start = saved = time.monotonic()
    snapshot = s.snapshot_minutes * 60 if name.endswith("target") else 0
    running, marks, recent = [], len(curve), math.nan
    bar = tqdm(total=round(budget), initial=round(elapsed), desc=name, unit="s", mininterval=20)
    while elapsed < budget:
        factor = rate(s, elapsed / budget)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = s.muon_lr * factor, s.adam_lr * factor
        parts = batches.take(s.batch).to(device).split(s.micro_batch)
        losses = []
        for part in parts:
            loss = compiled(part)
            (loss / len(parts)).backward()
            losses.append(loss.detach())
            for low, high in pairs:  # accumulated in float32
                high.grad = low.grad.float() if high.grad is None else high.grad.add_(low.grad)
                low.grad = None
        torch.nn.utils.clip_grad_norm_(master.values(), 1.0)
        muon.step()
        adam.step()
        for high in master.values():
            high.grad = None
        refresh()
        step += 1
        running.append(torch.stack(losses).mean())
        previous, elapsed = elapsed, before + time.monotonic() - start
        bar.update(min(round(budget), round(elapsed)) - bar.n)
        if step % 10 == 0:
            running = running[-50:]
            recent = float(torch.stack(running).mean())
            bar.set_postfix(step=step, loss=f"{recent:.3f}", tokens=f"{step * s.batch * s.length / 1e6:.1f}M")
            if not math.isfinite(recent):
                raise FloatingPointError(
                    f"{name}: the loss is not finite at step {step}; lower the learning rates"
                )
        if elapsed >= budget * (marks + 1) / 20:
            marks += 1
            validation = dict(validate())
            tokens = step * s.batch * s.length
            curve.append(
                {"minutes": elapsed / 60, "step": step, "tokens": tokens, "train": recent, **validation}
            )
            tqdm.write(json.dumps(curve[-1]))
        if time.monotonic() - saved > 60 * s.checkpoint_minutes:
            save()
            saved = time.monotonic()
        if previous < snapshot <= elapsed:
            export(s, name, model, tokenizer, summary(), {})
            status(s, f"{name}: early snapshot exported ({elapsed / 60:.0f} minutes)")
    save()
    return model, summary()


@torch.no_grad()
def bits_per_byte(model, tokenizer: PreTrainedTokenizerFast, texts: list[str], window: int = 1024) -> float:
    """Bits per UTF-8 byte of the concatenated texts: windows of `window` tokens at a stride of half of it, so that
    every token but the first half window's has at least window / 2 tokens before it."""
    device = next(model.parameters()).device
    stream = torch.tensor([tokenizer.eos_token_id] + [i for ids in encode(tokenizer, texts) for i in ids])
    nats, half = 0.0, window // 2
    starts = list(range(0, max(1, len(stream) - 1 - half), half))
    for start in tqdm(starts, desc="bits per byte", mininterval=20):
        tokens = stream[start : start + window + 1].to(device)
        skip = half if start else 0
        hidden = model.model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0, skip:]
        logits = F.linear(hidden, model.lm_head.weight).float()
        nats += float(F.cross_entropy(logits, tokens[1 + skip :], reduction="sum"))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def xz_bits_per_byte(texts: list[str]) -> float:
    """What `xz -9` makes of the same concatenated texts, in bits per byte."""
    data = "".join(texts).encode()
    return 8 * len(lzma.compress(data, preset=9)) / len(data)


def evaluate(s: Settings, name: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, dict[str, float]]:
    """Test bits per byte of the exported model (bf16 weights, float32 arithmetic) by domain and overall."""
    model = LlamaForCausalLM.from_pretrained(Path(s.zoo) / name, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    texts = load_documents(s, "test")
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
    copy = new_model(s, name)
    copy.load_state_dict({key: value.float().cpu() for key, value in model.state_dict().items()})
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner only
    (folder / "README.md").write_text(card(s, name, copy, info, test))


def card(s: Settings, name: str, model, info: dict, test: dict) -> str:
    """The model card, in Markdown."""
    hidden, layers, heads, intermediate, *_ = SHAPES[name]
    total = sum(value.numel() for value in model.parameters())
    body = total - model.get_input_embeddings().weight.numel()
    machine = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "2 CPU cores, one of them training"
    )
    lines = [
        f"# {name}",
        "",
        f"A Llama-architecture language model of Python source: {layers} layers, hidden size {hidden}, {heads} heads,",
        f"intermediate size {intermediate}, tied embeddings, vocabulary {s.vocabulary}, {total:,} parameters ({body:,} outside",
        f"the embedding), trained at length {s.length}, 2048 positions. Stored in bf16; `specdec.zoo.load` loads it in",
        "float32. It exists to try speculative decoding on: do not expect it to write programs.",
        "",
        "**Data.** Python source of the standard library and of the packages in specdec/data/packages.txt (BSD, MIT,",
        "Apache, PSF and the like; none under the GPL or MPL), as code, prose (docstrings and comments) and tabular",
        f"(large literal collections), mixed {s.mixture.replace(',', ' / ')}. Whole packages are held out and near-duplicates",
        "removed; specdec/data/manifest.json has the versions, splits and hashes. A held-out file serves one domain only.",
        "",
        f"**Training.** {info['step']:,} steps of {s.batch * s.length:,} tokens, {info['tokens'] / 1e6:.1f} M tokens in "
        f"{info['minutes']:.0f} minutes on {machine}. Muon (lr {s.muon_lr}) for the",
        f"body matrices, AdamW (lr {s.adam_lr}) for embedding and norms, bf16 with float32 master weights, seed {s.seed}.",
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
        if (
            field.name in ("models", "minutes", "work", "zoo", "site", "json", "evaluate", "publish")
            or value == field.default
        ):
            continue
        flag = field.name.replace("_", "-")
        options += f" --{'' if value else 'no-'}{flag}" if field.type is bool else f" --{flag} {value}"
    return options


def publish(s: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes specdec/data/manifest.json and prompts.json: what the corpus is, and prompts from its test packages."""
    test = corpus(None, "test", [site for site in s.site.split(",") if site], s.work)
    newest = max(Path(s.work).glob("corpus-*/manifest.json"), key=lambda path: path.stat().st_mtime)
    manifest = json.loads(newest.read_text())
    licences = {entry["package"]: entry["licence"] for entry in manifest["packages"]}
    chosen = choose(test, licences, tokenizer)
    MANIFEST.write_text(json.dumps(manifest, indent=0) + "\n")
    PROMPTS.write_text(json.dumps({"prompts": chosen}, indent=1, ensure_ascii=False) + "\n")


def status(s: Settings, text: str) -> None:
    """One line for whoever waits for a model."""
    line = f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {text}"
    tqdm.write(line)
    with open(Path(s.work) / "STATUS.txt", "a") as file:
        file.write(line + "\n")


def main() -> None:
    s = settings()
    began = datetime.datetime.now(datetime.UTC)
    torch.set_num_threads(s.threads)
    Path(s.work).mkdir(parents=True, exist_ok=True)
    tokenizer = make_streams(s)
    status(s, "tokenizer and shards ready")
    if s.publish:
        publish(s, tokenizer)
    rows = []
    for name, minutes in zip(s.models.split(","), s.minutes.split(","), strict=True):
        model, info = train(s, name, float(minutes), tokenizer)
        export(s, name, model, tokenizer, info, {})
        status(s, f"{name}: trained and exported")
        test = evaluate(s, name, tokenizer) if s.evaluate else {}
        export(s, name, model, tokenizer, info, test)
        counts = {"tokens": info["tokens"], "steps": info["step"], "minutes": info["minutes"]}
        speed = info["tokens"] / info["minutes"] / 60
        for domain, row in test.items() or [(None, {})]:
            rows.append({"model": name, "domain": domain, **row, **counts, "tokens_per_second": speed})
        status(s, f"{name}: evaluated {json.dumps(test)}")
    meta = {
        "command": "python " + " ".join(sys.argv),
        "date": began.isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{os.cpu_count()} CPU cores",
        "seed": s.seed,
    }
    if s.json:
        Path(s.json).write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
