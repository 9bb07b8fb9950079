"""The C kernels beside PyTorch's operators, by tokens, dtype and threads, to find the limits up to which they are faster.

Rows: `part` = `product` (`[tokens, inputs] x [outputs, inputs]`), `attention` (`queries` tokens of each of `batch` rows over `context`
slots) or `step` (a bare forward of the pocket target); milliseconds of `ours` and of `pytorch`, medians of alternating calls, between
which other memory is read, as in a round. PyTorch's step runs in a process with SPECDEC_NATIVE=0, alternating with this one. `host_ms`
is the time of a step whose C call does nothing.
Limits: STEP, FEW and WIDE of specdec/forward/llama_c.py, PROMPT of kernels/attention/native.py.

`product, threads` and `attention, threads` justify the kernels' choice of one thread for small work: `ours` is on several threads
whatever the `work`, beside `one_thread`. Limits: PRODUCT_ALONE and ATTENTION_ALONE of kernels/native/calls.h, in the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

import checkout  # noqa: F401
import torch
import torch.nn.functional as F

import specdec as sd
from specdec import zoo
from specdec.kernels.attention import AttentionPlan, native, packed
from specdec.kernels.native import library, ops, reason
from specdec.kernels.native import step as native_step
from specdec.kernels.native.build import compiler
from specdec.kernels.native.narrow import Narrow
from specdec.lab.clock import bare_steps, in_turn, seconds
from specdec.lab.console import quiet, table
from specdec.lab.options import option, parse
from specdec.lab.processes import Call, apart
from specdec.lab.recipe import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COPIES = "float32, bf16_weights"  # float32 models whose products read bfloat16 copies of their weights
STEP = (1, 5)  # tokens per row of a step
# Sizes of attention, and the number of calls over different keys in the comparison of threads.
HEADS, SIZE, LAYERS = 4, 64, 8
NARROW = 256  # inputs and outputs of a product in that comparison


@dataclass(frozen=True)
class Settings(Recipe):
    tokens: tuple[int, ...] = option((1, 5, 16, 80, 256, 512), "tokens of a product")
    widths: tuple[int, ...] = option((256, 2048), "inputs and outputs of a product")
    batches: tuple[int, ...] = option((1, 16), "rows")
    contexts: tuple[int, ...] = option((128, 1024), "slots of a row")
    queries: tuple[int, ...] = option((1, 5, 64, 256), "new tokens of a row, for attention")
    threads: tuple[int, ...] = option(
        (1, 2), "threads of steps; other parts use the first number, the comparison of threads the largest"
    )
    work: tuple[int, ...] = option(
        tuple(range(14, 22)), "sizes in the comparison of one thread with several, as powers of 2"
    )
    repeats: int = option(9, "timed turns")


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
            if dtype == torch.float32:
                rows += [product(COPIES, dtype, T, width, s) for width in s.widths for T in s.tokens]
            rows += [
                attend(name, dtype, B, L, q, s)
                for B in s.batches
                for L in s.contexts
                for q in s.queries
                if q < L and B * q <= 512
            ]
    with apart(SPECDEC_NATIVE="0") as plain:
        for name in DTYPES:
            for B in s.batches:
                for L in s.contexts:
                    for T in s.threads:
                        rows += steps(plain, name, B, L, T, s.repeats)
    always = f"{compiler()} -DPRODUCT_ALONE=0 -DATTENTION_ALONE=0"  # several threads for any work
    if max(s.threads) > 1:
        with apart(CC=always) as kernels:
            for name in DTYPES:
                for part in (narrow, layers):
                    for n in s.work:
                        rows += kernels(part, name, 1 << n, max(s.threads), s.repeats, s.seed)
    print(table(rows, tuple(rows[0])))
    s.save(rows)


def product(name: str, dtype: torch.dtype, tokens: int, width: int, s: Settings) -> dict[str, Any]:
    """A product with a square weight; there are enough weights to exceed a core's cache."""
    count = max(2, (1 << 23) // (width * width))
    weights = [torch.randn(width, width).bfloat16().to(dtype) for _ in range(count)]
    x = torch.randn(tokens, width).to(dtype)
    read, multiply = weights, ops.linear
    if name == COPIES:
        copies, multiply = Narrow(weights), ops.unchecked_linear
        read = [copies[w] for w in weights]

    def every(multiply: Callable[..., Any], weights: list[torch.Tensor]) -> None:
        for w in weights:
            multiply(x, w, None)

    ways = {"ours": lambda: every(multiply, read), "pytorch": lambda: every(F.linear, weights)}
    found = clock(ways, s.repeats)
    return row(
        "product", name, s.threads[0], {k: v / count for k, v in found.items()}, tokens=tokens, width=width
    )


def attend(
    name: str, dtype: torch.dtype, batch: int, context: int, queries: int, s: Settings
) -> dict[str, Any]:
    """Attention of the last tokens of every row, with four heads of 64."""
    plan = AttentionPlan(list(range(batch)), [context - queries] * batch, [queries] * batch, context)
    native.always(plan)
    query = torch.randn(1, batch * queries, 4, 64).to(dtype).transpose(1, 2)
    keys, values = torch.randn(2, batch, 4, context, 64).to(dtype).transpose(2, 3).unbind(0)
    ways = {"ours": native, "pytorch": packed}
    found = clock(
        {k: lambda w=way: w.attend(query, keys, values, plan, 0.125) for k, way in ways.items()}, s.repeats
    )
    return row("attention", name, s.threads[0], found, batch=batch, context=context, queries=queries)


# -- steps ------------------------------------------------------------------------------------------------------------------


def steps(
    plain: Call, name: str, batch: int, context: int, threads: int, repeats: int
) -> list[dict[str, Any]]:
    """Alternating steps of this process, with the C kernels, and of one without them."""
    ways: dict[str, Call] = {"ours": lambda f, *given: f(*given), "pytorch": plain}
    if [call(hold, name, batch, context, threads) for call in ways.values()] != [True, False]:
        raise RuntimeError("the C kernels must be available in this process, and not in the other")
    times: dict[str, list[list[float]]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, call in ways.items():
            seconds = call(turn)
            if repeat:  # the first warms up
                times[way].append(seconds)
    found = {way: [median(some) for some in zip(*each)] for way, each in times.items()}
    found["host"] = [median(some) for some in zip(*(hosts() for _ in range(repeats)))]
    return [
        row(
            "step",
            name,
            threads,
            {w: t[i] for w, t in found.items()},
            batch=batch,
            context=context,
            queries=q,
        )
        for i, q in enumerate(STEP)
    ]


_held: list[Callable[[], Any]] = []


@lru_cache(maxsize=1)
def target(name: str) -> sd.HFModel:
    quiet()
    model, tokenizer = zoo.load("pocket-target")
    return sd.HFModel(model.to(DTYPES[name]), tokenizer, bf16_weights=False)


def hold(name: str, batch: int, context: int, threads: int) -> bool:
    """Prepare steps in this process; returns whether it has the C kernels."""
    torch.set_num_threads(threads)
    _held[:] = bare_steps(target(name), batch, context, STEP)
    return library() is not None


def turn() -> list[float]:
    """Seconds of each prepared step, after an untimed one that refills the processor's cache."""
    with torch.inference_mode():
        _held[0]()
        return [seconds(step) for step in _held]


def hosts() -> list[float]:
    """As ``turn``, without the C call: Python and small tensors only."""
    with native_step.without_c():
        return turn()


# -- threads ------------------------------------------------------------------------------------------------------------------


def narrow(name: str, work: int, threads: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """A product of ``work`` multiplications on one thread and on several, overriding the kernels' choice."""
    torch.manual_seed(seed)
    tokens = max(1, work // NARROW**2)
    outputs = work // tokens // NARROW
    weights = [torch.randn(outputs, NARROW).to(DTYPES[name]) for _ in range((1 << 23) // (outputs * NARROW))]
    x = torch.randn(tokens, NARROW).to(DTYPES[name])

    def every() -> None:
        for w in weights:
            ops.linear(x, w, None)

    found = {n: s / len(weights) for n, s in on(every, (1, threads), repeats).items()}
    return [compared("product, threads", name, threads, found, tokens=tokens, width=NARROW, work=work)]


def layers(name: str, work: int, threads: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """As ``narrow``, for attention of one and of five tokens of a row that reads ``work`` values of keys."""
    torch.manual_seed(seed)
    context, rows = work // (HEADS * SIZE), []
    for q in STEP:
        plan = AttentionPlan([0], [context - q], [q], context)
        native.always(plan)
        query = torch.randn(1, q, HEADS, SIZE).to(DTYPES[name]).transpose(1, 2)
        pairs = [
            torch.randn(2, 1, HEADS, context, SIZE).to(DTYPES[name]).transpose(2, 3) for _ in range(LAYERS)
        ]

        def every(query: Any = query, pairs: Any = pairs, plan: Any = plan) -> None:
            for keys, values in pairs:
                native.attend(query, keys, values, plan, 0.125)

        found = {n: s / LAYERS for n, s in on(every, (1, threads), repeats).items()}
        rows.append(
            compared(
                "attention, threads", name, threads, found, batch=1, context=context, queries=q, work=work
            )
        )
    return rows


def on(call: Callable[[], Any], threads: tuple[int, ...], repeats: int) -> dict[int, float]:
    """Median seconds of a call on each number of threads, alternating."""
    with torch.inference_mode():
        found = clock({str(n): call for n in threads}, repeats, lambda n: torch.set_num_threads(int(n)))
    return {int(n): s for n, s in found.items()}


def compared(part: str, name: str, threads: int, found: Mapping[int, float], **sizes: int) -> dict[str, Any]:
    return row(part, name, threads, {"ours": found[threads], "one_thread": found[1]}, **sizes)


# -- clocks and rows --------------------------------------------------------------------------------------------------------


def clock(
    ways: Mapping[str, Callable[[], Any]], repeats: int, before: Callable[[str], None] = lambda name: None
) -> dict[str, float]:
    """Median seconds of alternating calls. ``before``: called with the index of the next call."""
    names, other = list(ways), torch.ones(1 << 21)

    def between(number: int) -> None:
        before(names[number])
        other.sum()  # what a round does between two calls of a kind

    return dict(zip(names, in_turn(list(ways.values()), repeats, 1, between)))


def row(part: str, dtype: str, threads: int, seconds: Mapping[str, float], **sizes: int) -> dict[str, Any]:
    ours, theirs, one, host = seconds["ours"], *map(seconds.get, ("pytorch", "one_thread", "host"))
    return {
        "part": part,
        "dtype": dtype,
        "threads": threads,
        **{k: sizes.get(k) for k in ("tokens", "width", "batch", "context", "queries", "work")},
        "ours_ms": ours * 1e3,
        "pytorch_ms": None if theirs is None else theirs * 1e3,
        "times_faster": None if theirs is None else theirs / ours,
        "one_thread_ms": None if one is None else one * 1e3,
        "over_one_thread": None if one is None else one / ours,
        "host_ms": None if host is None else host * 1e3,
    }


if __name__ == "__main__":
    main(parse(Settings, __doc__))
