"""Stage b of the GPU suite: kernels at the Llama-3-8B shape beside the time of copying their bytes.

One layer of attention at batch 64 and a context of 8192, by every backend that serves it; the Triton kernel on keys and values of eight
bits, and in a list of configurations; the operators between products; the merge of chunks; verification; the keyed race. Errors are
those of the worst head of a query, of two rows, against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recipes.gpu import pointwise
from recipes.gpu.cases import LLAMA_8B, TINY, Problem, ring, slots
from recipes.gpu.correct import draws
from recipes.gpu.stage import Part, Stage
from specdec.kernels.attention import available, merge
from specdec.kernels.attention.choice import why_not
from specdec.lab.errors import LIMITS, decision_error, worst
from specdec.rng import Philox, seeds

SETS = 2**28  # total bytes of a call's input sets: several times a GPU's last-level cache
SINKS, WINDOW = 4, 512

# Configurations of the Triton kernel: slots of a tile, warps, pipeline stages, programs per multiprocessor that chunks are chosen for.
# ``None`` is the backend's own choice.
VARIANTS: tuple[tuple[int, int, int, int] | None, ...] = (
    None,
    (32, 4, 3, 2),
    (64, 4, 2, 2),
    (64, 4, 3, 2),
    (64, 4, 3, 4),
    (64, 8, 3, 2),
    (128, 4, 2, 2),
    (128, 4, 3, 2),
    (128, 8, 2, 2),
    (128, 8, 3, 4),
)


def run(stage: Stage) -> None:
    _ = stage.rates
    stage.parts(
        {
            "bars": Part(0.25, lambda stage: attend(stage, True)),
            "rejection": Part(0.15, rejections),
            "attention": Part(0.2, lambda stage: attend(stage, False)),
            "eight bits": Part(0.1, eight_bits),
            "Triton configurations": Part(0.2, variants),
            "between products": Part(0.1, pointwise.timed),
            "merge": Part(0.05, merges),
            "race": Part(0.05, races),
        }
    )


# -- attention --------------------------------------------------------------------------------------------------------------


def problems(stage: Stage) -> Iterator[tuple[str, str | None, Callable[[], Problem]]]:
    """Cases: name, bar, and constructor."""
    heads, batch, n = (TINY, 2, 60) if stage.toy else (LLAMA_8B, 64, 8192)
    sinks, window = (2, 16) if stage.toy else (SINKS, WINDOW)
    dtype = torch.bfloat16
    host = torch.Generator().manual_seed(stage.seed)
    spread = torch.randint(n // 2, n + n // 2, (batch,), generator=host).tolist()
    far = [n + 5 * b for b in range(batch)]

    def make(first: list[int], count: int, **settings: Any) -> Callable[[], Problem]:
        return lambda: slots(stage, heads, dtype, first, [count] * batch, **settings)

    yield f"decode {batch} x {n}", None, make([n - 1] * batch, 1)
    yield f"verify 6, {batch} x {n}", "verify", make([n - 6] * batch, 6)
    yield f"verify 6, {batch} rows of {n // 2} to {n + n // 2}", "verify", make(spread, 6)
    yield (
        f"sinks + window decode, {sinks} + {window}, {batch} rows",
        "sinks_window",
        lambda: ring(stage, heads, dtype, far, [1] * batch, sinks, window),
    )
    yield f"tree of 8, {batch} x {n}", None, make([n - 8] * batch, 8, branching=True)
    yield (
        f"verify 6, pages of {16 if stage.toy else 256}, {batch} x {n}",
        None,
        make([n - 6] * batch, 6, page=16 if stage.toy else 256),
    )
    yield (
        f"sinks + window verify 6, {sinks} + {window}, {batch} rows",
        None,
        lambda: ring(stage, heads, dtype, far, [6] * batch, sinks, window),
    )
    yield f"window decode, {window}, {batch} x {n}", None, make([n - 1] * batch, 1, window=window)


def attend(stage: Stage, bars: bool) -> None:
    """The Triton kernel on the problems that have a bar; or the rest, which other backends serve, too."""
    for name, bar, make in problems(stage):
        if bars and bar is None:
            continue
        if stage.late(name) or not stage.room(name, 3 * 2**33):
            continue
        with stage.case(name):
            problem = make()
            sets = several(stage, problem)
            exact = problem.exact(checked(problem))
            for backend in sorted(available(stage.device, torch.bfloat16), key=lambda b: b != "triton"):
                case = f"{name}: {backend}"
                if bar is not None and bars != (backend == "triton"):
                    continue
                if backend == "reference" and not stage.toy:
                    continue  # the reference itself, dense and row by row
                if stage.late(case):
                    continue
                mine = bar if backend == "triton" else None
                with stage.case(case, mine):
                    why = why_not(backend, *problem.settings())
                    if why is not None:
                        stage.skip(case, f"cannot: {why}")
                        continue
                    timed(stage, case, backend, sets, exact, mine)
            del problem, sets, exact
            stage.empty()


def several(stage: Stage, problem: Problem) -> list[Problem]:
    """A problem and copies with other tensors, enough that none stays in a cache until it is used again."""
    count = 1 if stage.toy else max(1, min(16, -(-SETS // problem.bytes)))
    return [problem, *(problem.again(stage) for _ in range(count - 1))]


def checked(problem: Problem) -> list[int]:
    """The first and the last row."""
    return [0, len(problem.plan.counts) - 1]


def timed(
    stage: Stage, case: str, backend: str, sets: list[Problem], exact: Any, bar: str | None, **more: Any
) -> float:
    at, answer = exact
    error = worst(sets[0].run(backend)[:, at], answer)
    runs = [lambda p=p: p.run(backend) for p in sets]
    first = sets[0]
    more |= {"backend": backend} | ({"bar": bar} if bar else {})
    return stage.timed(
        case, runs, first.bytes, first.flops, error, limit=LIMITS[torch.bfloat16], **more
    ).seconds


def eight_bits(stage: Stage) -> None:
    """The Triton kernel on long contexts, with keys and values of eight bits and with the queries' sixteen beside them."""
    heads, batch, n = (TINY, 2, 60) if stage.toy else (LLAMA_8B, 16, 32_768)
    for what, count in (("decode", 1), ("verify 6", 6)):
        for kv in (None, torch.float8_e4m3fn):
            dtype = str(kv or torch.bfloat16).removeprefix("torch.")
            case = f"{what}, {batch} x {n}, keys and values in {dtype}: triton"
            if stage.late(case) or not stage.room(case, 2**33):
                continue
            with stage.case(case):
                problem = slots(stage, heads, torch.bfloat16, [n - count] * batch, [count] * batch, kv=kv)
                reason = why_not("triton", *problem.settings())
                if reason is not None:
                    stage.skip(case, f"cannot: {reason}")
                    continue
                exact = problem.exact(checked(problem))
                timed(stage, case, "triton", several(stage, problem), exact, None, kv=dtype)
                del problem, exact
                stage.empty()


# -- configurations -------------------------------------------------------------------------------------------------------------


@contextmanager
def configured(variant: tuple[int, int, int, int] | None) -> Iterator[None]:
    """The Triton backend with other slot tiles; query tiles do not change."""
    from specdec.kernels.attention import triton_backend as backend

    own, waves = backend.config, backend.WAVES
    if variant is not None:
        tile, warps, stages, backend.WAVES = variant

        def config(*args: Any, **settings: Any) -> Any:
            return own(*args, **settings)._replace(slots=tile, warps=warps, stages=stages)

        backend.config = config  # type: ignore[assignment]
    try:
        yield
    finally:
        backend.config, backend.WAVES = own, waves


def variants(stage: Stage) -> None:
    """Which tiles are best for decoding, verification, trees and rings."""
    if "triton" not in available(stage.device, torch.bfloat16):
        stage.skip("Triton configurations", "not run: Triton cannot be used here")
        return
    wanted = ("decode", "verify 6", "tree", "sinks + window decode")[: 1 if stage.toy else 4]
    for name, _, make in [next(p for p in problems(stage) if p[0].startswith(start)) for start in wanted]:
        if stage.late(name) or not stage.room(name, 3 * 2**33):
            continue
        with stage.case(name):
            problem = make()
            sets = several(stage, problem)
            exact = problem.exact(checked(problem))
            best: dict[str, float] = {}
            for variant in VARIANTS[:2] if stage.toy else VARIANTS:
                said = "own" if variant is None else "tile {} warps {} stages {} waves {}".format(*variant)
                case = f"{name}: triton, {said}"
                if stage.late(case):
                    break
                with (
                    stage.case(case),
                    configured(variant),
                ):  # a configuration too large for the chip gives an error row
                    best[said] = timed(stage, case, "triton", sets, exact, None, variant=said)
            if best:
                first = min(best, key=lambda said: best[said])
                stage.row(f"{name}: best Triton configuration", best[first], note=first)


# -- the others ---------------------------------------------------------------------------------------------------------------


def merges(stage: Stage) -> None:
    """The parts of 64 rows, 32 heads and 6 queries from 8 chunks each."""
    rows, chunks, queries, size = (2, 3, 4, 32) if stage.toy else (64, 8, 192, 128)
    count = 1 if stage.toy else 4
    sets = [
        (stage.normal(rows, chunks, queries, size), stage.normal(rows, chunks, queries)) for _ in range(count)
    ]
    exact = merge(*(t.double() for t in sets[0]))[0]
    bytes = 4 * rows * queries * (chunks + 1) * (size + 1)
    from specdec.kernels.attention import triton_backend

    for name, function in {"triton": triton_backend.merge, "reference": merge}.items():
        case = f"merge of {chunks} chunks, {rows * queries} queries: {name}"
        if stage.late(case):
            continue
        with stage.case(case):
            error = worst(function(*sets[0])[0], exact)
            runs = [lambda s=s, f=function: f(*s) for s in sets]
            stage.timed(case, runs, bytes, error=error, limit=LIMITS[torch.float32], backend=name)


def rejections(stage: Stage) -> None:
    """[64, 6, 128256]: all logits are read once, and the draft's row at the first rejection."""
    from specdec.kernels import rejection

    B, N, V = (2, 5, 97) if stage.toy else (64, 5, 128_256)
    for kind in ("point masses", "probabilities"):
        for dtype in (torch.bfloat16, torch.float32):
            short = str(dtype).removeprefix("torch.")
            name = f"rejection [{B}, {N + 1}, {V}], {kind}, {short}"
            if stage.late(name):
                continue
            with stage.case(name):
                sets = [draws(stage, B, N, V, kind, dtype) for _ in range(1 if stage.toy else 3)]
                for s in sets:
                    s[3].fill_(N)  # all rows are full
                given = [
                    (lo, tokens, size, accept, bonus, draft)
                    for lo, draft, tokens, size, accept, bonus in sets
                ]
                bytes = dtype.itemsize * B * V * (N + 1 + (kind != "point masses"))
                for backend in sorted(rejection.BACKENDS, reverse=True):  # that of the bar first
                    case = f"{name}: {backend}"
                    if stage.late(case):
                        continue
                    bar = {"bar": "rejection"} if backend == "triton" else {}
                    with stage.case(case, **bar):
                        made = rejection.verify(*given[0], backend=backend)
                        error = decision_error(made, given[0], kind, 1.0, rows=8)
                        more: dict[str, Any] = {"backend": backend, "limit": 1e-5, "error": error}
                        runs = [lambda g=g, b=backend: rejection.decisions(*g, backend=b) for g in given]
                        stage.timed(case, runs, bytes, graph=backend == "triton", **more, **bar)
                        if backend == "triton":
                            runs = [lambda g=g: rejection.verify(*g, backend="triton") for g in given]
                            stage.timed(
                                f"{case}, with its check of the logits", runs, bytes, graph=False, **more
                            )


def races(stage: Stage) -> None:
    """A keyed exponential race over the vocabulary, for 64 rows and for a verification pass of them."""
    from specdec.kernels import philox

    V = 97 if stage.toy else 128_256
    for rows in (3,) if stage.toy else (64, 384):
        case = f"race [{rows}, {V}]: triton"
        if stage.late(case):
            continue
        with stage.case(case):
            seed, position = seeds(stage.seed, rows).to(stage.device), torch.arange(rows, device=stage.device)
            sets = [(stage.normal(rows, V) * 3).softmax(-1) for _ in range(1 if stage.toy else 4)]
            few = slice(0, 4)
            expected = Philox(seed[few].cpu()).race(sets[0][few].cpu(), position[few].cpu())
            made = philox.race(sets[0], seed, position)[few].cpu()
            error = float((made != expected).double().mean())
            runs = [lambda p=p, s=seed, at=position: philox.race(p, s, at) for p in sets]
            stage.timed(case, runs, 4 * rows * V, error=error, limit=0.0)
