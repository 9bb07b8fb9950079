"""The C kernels beside PyTorch's operators, to see their limits: up to how many tokens which is faster, in which dtype, on how many threads.

Rows: `part` = `product` (`[tokens, inputs] x [outputs, inputs]`), `attention` (`queries` tokens of each of `batch` rows over `context` slots) or
`step` (a bare forward of the pocket target); milliseconds of `ours` and of `pytorch`, medians of calls in turn, between which other
memory is read, as in a round. Limits: STEP, FEW and WIDE of specdec/models/native.py, PROMPT of kernels/attention/native.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from _measure import bare_forward, quiet, table
from _report import write

import specdec as sd
from specdec import zoo
from specdec.kernels.attention import AttentionPlan, native, packed
from specdec.kernels.native import library, ops, reason

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Settings:
    tokens: tuple[int, ...] = (1, 5, 16, 80, 256, 512)
    widths: tuple[int, ...] = (256, 2048)
    batches: tuple[int, ...] = (1, 16)
    contexts: tuple[int, ...] = (128, 1024)
    queries: tuple[int, ...] = (1, 5, 64, 256)
    threads: tuple[int, ...] = (1, 2)
    repeats: int = 9
    seed: int = 0
    json: str | None = None


def main(s: Settings) -> None:
    if library() is None:
        raise SystemExit(f"there are no C kernels here: {reason()}")
    quiet()
    torch.manual_seed(s.seed)
    torch.set_num_threads(s.threads[0])
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, dtype in DTYPES.items():
            rows += [product(name, dtype, T, width, s) for width in s.widths for T in s.tokens]
            rows += [
                attend(name, dtype, B, L, q, s)
                for B in s.batches
                for L in s.contexts
                for q in s.queries
                if q < L and B * q <= 512
            ]
    model, tokenizer = zoo.load("pocket-target")
    for name, dtype in DTYPES.items():
        target = sd.HFModel(model.to(dtype), tokenizer)
        for B in s.batches:
            for L in s.contexts:
                for T in s.threads:
                    torch.set_num_threads(T)
                    for q, seconds in zip((1, 5), bare_forward(target, B, L, (1, 5), s.repeats)):
                        rows.append(row("step", name, T, {"ours": seconds}, batch=B, context=L, queries=q))
    print(table(rows, tuple(rows[0])))
    if s.json:
        write(s.json, rows, s.seed)


def product(name: str, dtype: torch.dtype, tokens: int, width: int, s: Settings) -> dict[str, Any]:
    """A product with a square weight, of which there are as many as do not fit a core's own cache."""
    count = max(2, (1 << 23) // (width * width))
    weights = [torch.randn(width, width).to(dtype) for _ in range(count)]
    x = torch.randn(tokens, width).to(dtype)

    def every(multiply: Callable[..., Any]) -> None:
        for w in weights:
            multiply(x, w, None)

    found = clock({"ours": lambda: every(ops.linear), "pytorch": lambda: every(F.linear)}, s.repeats)
    return row(
        "product", name, s.threads[0], {k: v / count for k, v in found.items()}, tokens=tokens, width=width
    )


def attend(
    name: str, dtype: torch.dtype, batch: int, context: int, queries: int, s: Settings
) -> dict[str, Any]:
    """Four heads of 64; the last tokens of every row ask."""
    plan = AttentionPlan(list(range(batch)), [context - queries] * batch, [queries] * batch, context)
    native.always(plan)
    query = torch.randn(1, batch * queries, 4, 64).to(dtype).transpose(1, 2)
    keys, values = torch.randn(2, batch, 4, context, 64).to(dtype).transpose(2, 3).unbind(0)
    ways = {"ours": native, "pytorch": packed}
    found = clock(
        {k: lambda w=way: w.attend(query, keys, values, plan, 0.125) for k, way in ways.items()}, s.repeats
    )
    return row("attention", name, s.threads[0], found, batch=batch, context=context, queries=queries)


def clock(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    other = torch.ones(1 << 21)
    for repeat in range(repeats + 1):
        for name, call in ways.items():
            other.sum()  # what a round does between two calls of a kind
            start = perf_counter()
            call()
            if repeat:  # the first warms up
                times[name].append(perf_counter() - start)
    return {name: median(some) for name, some in times.items()}


def row(part: str, dtype: str, threads: int, seconds: Mapping[str, float], **sizes: int) -> dict[str, Any]:
    ours, theirs = seconds["ours"], seconds.get("pytorch")
    return {
        "part": part,
        "dtype": dtype,
        "threads": threads,
        **{k: sizes.get(k) for k in ("tokens", "width", "batch", "context", "queries")},
        "ours_ms": ours * 1e3,
        "pytorch_ms": None if theirs is None else theirs * 1e3,
        "times_faster": None if theirs is None else theirs / ours,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    for name, what in {
        "tokens": "of a product",
        "widths": "inputs and outputs of a product",
        "batches": "rows",
        "contexts": "slots of a row",
        "queries": "new tokens of a row, for attention",
        "threads": "of steps; the first for everything else",
    }.items():
        given = getattr(d, name)
        shown = " ".join(map(str, given))
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=list(given), help=f"{what} (default: {shown})"
        )
    parser.add_argument("--repeats", type=int, default=d.repeats, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    a = parser.parse_args()
    main(Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in vars(a).items()}))
