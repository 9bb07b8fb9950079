"""Batch verification by request decomposition (SPIN) against padding and packing: measured time and memory of verification passes.

The passes have k + 1 tokens per row, and rows of different lengths: `equal`, `lognormal`, `bimodal`, `one_long`, in shuffled order and
with the same number of tokens. The three methods alternate within one run; figures are medians. A pass is the whole of
``HFModel.score``, including the choice of fragments and masks; `attention_milliseconds` is all layers' attention alone, including
the same, and `equal_fragments_attention_milliseconds` the same with rows cut every 512 slots, as in the paper. `peak_bytes` is the
peak of memory that the pass allocates, from the profiler's memory events. Keys and values are random, which does not affect times.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler's messages

import checkout  # noqa: F401
import torch

import specdec as sd
from specdec import zoo
from specdec.kernels.attention import AttentionPlan, Fragments, attention, decompose, fit
from specdec.lab import plots
from specdec.lab.clock import seconds, shuffled
from specdec.lab.console import table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted
from specdec.lab.workload import DISTRIBUTIONS, lengths

COLUMNS = (
    *(
        "lengths",
        "method",
        "batch",
        "milliseconds",
        "attention_milliseconds",
        "predicted_attention_milliseconds",
    ),
    *(
        "peak_bytes",
        "ratio_to_padded",
        "ratio_to_packed",
        "calls",
        "cut",
        "equal_fragments_attention_milliseconds",
    ),
)
METHODS = ("padded", "packed", "decomposed")
FRAGMENT = 512  # slots of the paper's equal fragments
LONGEST = 1990  # the pocket target has 2048 positions

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings(Plotted):
    target: str = option("pocket-target", "name in the zoo")
    batches: tuple[int, ...] = option((8, 16, 32, 64), "rows at a time")
    mean: int = option(400, "mean tokens per row")
    k: int = option(4, "proposed tokens per row")
    repeats: int = option(9, "timed turns")
    quick: bool = option(False, "batch 8 only, 3 repeats")


def main(s: Settings) -> None:
    s.begin()
    if s.quick:
        s = replace(s, batches=(8,), repeats=3)
    if s.k < 1 or s.mean < 300 or s.mean > 1000 or min(s.batches) < 8 or s.repeats < 1:
        raise SystemExit(
            "give --k of at least 1, --mean of 300 to 1000, --batches of at least 8, --repeats of at least 1"
        )
    raw, tokenizer = zoo.load(s.target)
    models = {method: sd.HFModel(raw, tokenizer, attention=method) for method in METHODS}
    config = raw.config
    shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    cost = fit(*shape)
    print(f"cost of calls, fitted: {cost}")
    rows: list[Row] = []
    for batch in s.batches:
        cache = models["padded"].cache(batch, LONGEST + 2 * s.k + 2)
        with torch.inference_mode():
            for keys, values in cache.layers:
                keys.normal_()
                values.normal_()
        for name in DISTRIBUTIONS:
            length = lengths(name, batch, s.mean, s.seed, LONGEST)
            place = {"lengths": name, "batch": batch}
            cells = [{**place, **cell} for cell in measure(s, models, cache, length, shape, cost)]
            rows += cells
            print(table(cells, COLUMNS), "\n", flush=True)
        del cache
    s.save(rows)
    s.draw({"spin_decompose": lambda: draw(rows)})


def measure(
    s: Settings,
    models: dict[str, sd.HFModel],
    cache: Any,
    length: list[int],
    shape: tuple[int, int, int],
    cost: Any,
) -> list[Row]:
    """The three methods on one batch, alternating."""
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
        for m in shuffled(METHODS, turn):
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


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak bytes allocated by ``run``."""
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


STYLES = {"padded": ("#b0413e", "o"), "packed": ("#4f6d7a", "s"), "decomposed": ("#2a9d5c", "^")}
LINES = (
    ("milliseconds", "whole pass, ms", 1.0),
    ("attention_milliseconds", "attention alone, ms", 1.0),
    ("peak_bytes", "allocated at the peak, MiB", 2.0**20),
)


def draw(rows: list[Row]) -> Any:
    """Time and memory of a verification pass over batches, a column for each distribution."""
    from matplotlib.ticker import ScalarFormatter

    names = list(dict.fromkeys(r["lengths"] for r in rows))
    drawing, panels = plots.panels(
        len(LINES), len(names), (2.9 * len(names), 2.5 * len(LINES)), sharex=True, sharey="row"
    )
    for (column, label, unit), line in zip(LINES, panels):
        for name, panel in zip(names, line):
            for method, (colour, marker) in STYLES.items():
                some = [r for r in rows if r["lengths"] == name and r["method"] == method]
                panel.plot(
                    [r["batch"] for r in some],
                    [r[column] / unit for r in some],
                    color=colour,
                    marker=marker,
                    markersize=5,
                    label=method,
                )
            panel.set_xscale("log", base=2)
            if column != "peak_bytes":
                panel.set_yscale("log", base=2)
                panel.yaxis.set_major_formatter(ScalarFormatter())
            panel.grid(alpha=0.3)
        line[0].set_ylabel(label)
        if column == "peak_bytes":
            line[0].set_ylim(bottom=0)  # after drawing all, because it fixes the top as well
    batches = sorted({r["batch"] for r in rows})
    for name, top, bottom in zip(names, panels[0], panels[-1]):
        top.set_title(name.replace("_", " "))
        bottom.set_xlabel("batch")
        bottom.set_xticks(batches, [str(b) for b in batches])
    panels[0][0].legend(frameon=False)
    drawing.suptitle("A verification pass over rows of different lengths: padded, packed, decomposed")
    drawing.tight_layout()
    return drawing


if __name__ == "__main__":
    main(parse(Settings, __doc__))
