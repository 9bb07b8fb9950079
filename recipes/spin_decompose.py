"""Batch verification by request decomposition (SPIN) against padding and packing: time and memory of verify passes, measured.

Verify passes of k + 1 tokens a row over rows of different lengths: `equal`, `lognormal`, `bimodal`, `one_long`, in shuffled order and
with as many tokens in all. The three methods take turns within one run and figures are medians. A pass is the whole of
``HFModel.score``, choice of fragments and masks included; `attention_milliseconds` is that of all layers' attention alone, the same
included, and `equal_fragments_attention_milliseconds` what it would be with rows cut every 512 slots, as in the paper. `peak_bytes` is what the pass allocates beyond what lives already, at its peak, from the profiler's memory events. Keys
and values are random: what they are does not change how long it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells when it starts and stops

import torch
from _measure import quiet
from _report import write

import specdec as sd
from specdec import zoo
from specdec.kernels.attention import AttentionPlan, Fragments, attention, decompose, fit

METHODS = ("padded", "packed", "decomposed")
DISTRIBUTIONS = ("equal", "lognormal", "bimodal", "one_long")
FRAGMENT = 512  # slots of the paper's fragments, of one length
LONGEST = 1990  # the pocket target has 2048 positions

Row = dict[str, Any]


@dataclass
class Settings:
    target: str = "pocket-target"
    batches: tuple[int, ...] = (8, 16, 32, 64)
    mean: int = 400
    k: int = 4
    repeats: int = 9
    threads: int = 1
    seed: int = 0
    json: str | None = None
    plots: str | None = None


def main(s: Settings) -> None:
    quiet()
    torch.set_num_threads(s.threads)
    draw = None
    if s.plots:
        from _spin_plots import draw
    raw, tokenizer = zoo.load(s.target)
    models = {method: sd.HFModel(raw, tokenizer, attention=method) for method in METHODS}
    config = raw.config
    shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    start = perf_counter()
    cost = fit(*shape)
    print(f"calls fitted in {perf_counter() - start:.1f} s: {cost}")
    rows: list[Row] = []
    for batch in s.batches:
        cache = models["padded"].cache(batch, LONGEST + 2 * s.k + 2)
        with torch.inference_mode():
            for keys, values in cache.layers:
                keys.normal_()
                values.normal_()
        for name in DISTRIBUTIONS:
            cells = measure(s, models, cache, lengths(name, batch, s.mean, s.seed), shape, cost)
            rows += [{"lengths": name, "batch": batch, **cell} for cell in cells]
            report(rows[-len(METHODS) :])
        del cache
    if s.json:
        write(s.json, rows, s.seed)
    if draw:
        print("\nplots:", ", ".join(draw(rows, s.plots)))


def lengths(name: str, batch: int, mean: int, seed: int) -> list[int]:
    """Tokens of each row, ``mean`` on average, at most ``LONGEST``."""
    rng = random.Random(f"{name} {batch} {seed}")
    if name == "equal":
        return [mean] * batch
    if name == "one_long":
        made = [float(LONGEST)] + [(mean * batch - LONGEST) / (batch - 1)] * (batch - 1)
    elif name == "bimodal":
        long = max(1, round(batch / 6))
        made = [rng.uniform(0.85, 1.0) * LONGEST for _ in range(long)]
        rest = (mean * batch - sum(made)) / (batch - long)
        made += [rest * rng.uniform(0.8, 1.2) for _ in range(batch - long)]
    else:
        made = [rng.lognormvariate(0.0, 1.0) for _ in range(batch)]
        for _ in range(50):  # cut at the longest, and what that takes off goes to the others
            scale = mean * batch / sum(made)
            made = [min(n * scale, LONGEST) for n in made]
    rng.shuffle(made)
    return [max(8, round(n)) for n in made]


def measure(
    s: Settings,
    models: dict[str, sd.HFModel],
    cache: Any,
    length: list[int],
    shape: tuple[int, int, int],
    cost: Any,
) -> list[Row]:
    """The three methods on one batch, in turns."""
    batch, heads, size = len(length), shape[0], shape[2]
    draw = torch.Generator().manual_seed(s.seed)
    vocab = models["padded"].vocab_size
    text = torch.randint(0, vocab, (batch, max(length)), generator=draw)
    context = sd.Context.of([text[b, :n].tolist() for b, n in enumerate(length)])
    nodes = torch.randint(0, vocab, (batch, s.k), generator=draw)
    proposal = sd.Proposal.chain(nodes, torch.full((batch,), s.k))
    tokens = context.tokens.numpy()
    for b, n in enumerate(length):
        cache.remember(b, tokens[b], 0, n - 1, 0)
    query = torch.randn(1, batch * (s.k + 1), heads, size, generator=draw).transpose(1, 2)

    def alone(method: str, fragment: int | None = None) -> None:
        first = [n - 1 for n in length]
        plan = AttentionPlan(range(batch), first, [s.k + 1] * batch, cache.slots, fragment=fragment)
        with torch.inference_mode():
            for keys, values in cache.layers:
                attention(query, keys, values, plan, backend=method)

    passes = {m: lambda m=m: models[m].score(cache, context, proposal) for m in METHODS}
    logits = {m: run().logits for m, run in passes.items()}
    worst = max(float((logits[m] - logits["padded"]).abs().max()) for m in METHODS)
    if not worst < 1e-2:
        raise SystemExit(f"methods differ by {worst:.1e} in their logits: this is a bug")
    peak = {m: peak_bytes(run) for m, run in passes.items()}
    whole: dict[str, list[float]] = {m: [] for m in METHODS}
    part: dict[str, list[float]] = {m: [] for m in METHODS}
    equal: list[float] = []
    for turn in range(s.repeats):
        for m in METHODS[turn % 3 :] + METHODS[: turn % 3]:  # nobody is always first
            whole[m].append(seconds(passes[m]))
            part[m].append(seconds(lambda m=m: alone(m)))
        equal.append(seconds(lambda: alone("decomposed", FRAGMENT)))
    chosen = decompose([n + s.k for n in length], s.k + 1, cost)
    layers = len(cache.layers)
    predicted = {"padded": chosen.padded, "packed": chosen.packed, "decomposed": chosen.seconds}
    return [
        {
            "method": m,
            "milliseconds": 1e3 * median(whole[m]),
            "attention_milliseconds": 1e3 * median(part[m]),
            "predicted_attention_milliseconds": 1e3 * layers * predicted[m],
            "peak_bytes": peak[m],
            "ratio_to_padded": median(a / b for a, b in zip(whole[m], whole["padded"])),
            "ratio_to_packed": median(a / b for a, b in zip(whole[m], whole["packed"])),
            "attention_ratio_to_padded": median(a / b for a, b in zip(part[m], part["padded"])),
            "attention_ratio_to_packed": median(a / b for a, b in zip(part[m], part["packed"])),
            "tokens": sum(length),
            "longest": max(length),
            **(described(chosen) if m == "decomposed" else {}),
            **({"equal_fragments_attention_milliseconds": 1e3 * median(equal)} if m == "decomposed" else {}),
        }
        for m in METHODS
    ]


def described(plan: Fragments) -> Row:
    blocks = list(plan.walk())
    return {
        "calls": plan.calls,
        "cut": plan.cut,
        "padding": plan.slots() / sum(plan.lengths) - 1,
        "plan": " ".join(f"{b.r0}-{b.r1 - 1}:{b.low}-{b.high}" for b in blocks),
    }


def seconds(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that is allocated at a time while ``run`` runs, beyond what lives already."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        kept = run()
    del kept
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    taken = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    now = most = 0
    for _, size in taken:
        now += size
        most = max(most, now)
    return most


def report(cells: list[Row]) -> None:
    """A line for each method."""
    for c in cells:
        print(
            f"{c['lengths']:>10} batch {c['batch']:>3} {c['method']:>10}  {c['milliseconds']:8.1f} ms  attention "
            f"{c['attention_milliseconds']:8.1f} (predicted {c['predicted_attention_milliseconds']:7.1f})  "
            f"{c['peak_bytes'] / 2**20:6.1f} MiB  {c['ratio_to_padded']:.2f} of padded  {c['ratio_to_packed']:.2f} of packed"
            + (
                f"  {c['calls']} calls{', cut' if c['cut'] else ''}; cut every {FRAGMENT} slots attention "
                f"{c['equal_fragments_attention_milliseconds']:.1f}"
                if "calls" in c
                else ""
            ),
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument("--batches", type=int, nargs="+", default=list(d.batches), help="default: 8 16 32 64")
    parser.add_argument("--mean", type=int, default=d.mean, help="tokens a row (default: %(default)s)")
    parser.add_argument("--k", type=int, default=d.k, help="proposed tokens a row (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=d.repeats, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=d.threads, help="torch threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--quick", action="store_true", help="batch 8 only, 3 repeats")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plots", metavar="DIR", help="write spin_decompose.png")
    a = parser.parse_args()
    batches, repeats = (tuple(a.batches), a.repeats) if not a.quick else ((8,), 3)
    if a.k < 1 or a.mean < 300 or a.mean > 1000 or min(batches) < 8 or repeats < 1:
        raise SystemExit(
            "give --k of at least 1, --mean of 300 to 1000, --batches of at least 8, --repeats of at least 1"
        )
    main(Settings(d.target, batches, a.mean, a.k, repeats, a.threads, a.seed, a.json, a.plots))
