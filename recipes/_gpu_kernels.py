"""Stage b of the GPU suite: kernels of the Llama-3-8B shape beside the time that their bytes take to be copied.

One layer of attention at batch 64 and a context of 8192, by every backend that serves it; the Triton kernel in a list of
configurations; what lies between products; the merge of chunks; verification; the race of keyed numbers. Errors are those of the worst head of a query, of two
rows, against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import _gpu_pointwise
import torch
from _gpu_cases import LLAMA_8B, TINY, Problem, ring, slots
from _gpu_correct import decision_error, draws
from _gpu_lab import LIMITS, Lab, Part, worst

from specdec.kernels.attention import available, merge
from specdec.kernels.attention.choice import why_not
from specdec.rng import Philox, seeds

SETS = 2**28  # bytes that a call's inputs have in all its sets together: several times a GPU's last cache
SINKS, WINDOW = 4, 512

# Of the Triton kernel: slots of a tile, warps, stages of its pipeline, programs for each multiprocessor up to which rows are cut.
# ``None`` is what the backend takes by itself.
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


def run(lab: Lab) -> None:
    _ = lab.rates
    lab.parts(
        {
            "attention": Part(0.4, attend),
            "Triton configurations": Part(0.25, variants),
            "between products": Part(0.1, _gpu_pointwise.timed),
            "merge": Part(0.05, merges),
            "rejection": Part(0.1, rejections),
            "race": Part(0.1, races),
        }
    )


# -- attention --------------------------------------------------------------------------------------------------------------


def problems(lab: Lab) -> Iterator[tuple[str, str | None, Callable[[], Problem]]]:
    """Name, the bar that it belongs to, and how to make it."""
    heads, batch, n = (TINY, 2, 60) if lab.toy else (LLAMA_8B, 64, 8192)
    sinks, window = (2, 16) if lab.toy else (SINKS, WINDOW)
    dtype = torch.bfloat16
    host = torch.Generator().manual_seed(lab.seed)
    spread = torch.randint(n // 2, n + n // 2, (batch,), generator=host).tolist()
    far = [n + 5 * b for b in range(batch)]

    def make(first: list[int], count: int, **settings: Any) -> Callable[[], Problem]:
        return lambda: slots(lab, heads, dtype, first, [count] * batch, **settings)

    yield f"decode {batch} x {n}", None, make([n - 1] * batch, 1)
    yield f"verify 6, {batch} x {n}", "verify", make([n - 6] * batch, 6)
    yield f"verify 6, {batch} rows of {n // 2} to {n + n // 2}", "verify", make(spread, 6)
    yield (
        f"sinks + window decode, {sinks} + {window}, {batch} rows",
        "sinks_window",
        lambda: ring(lab, heads, dtype, far, [1] * batch, sinks, window),
    )
    yield f"tree of 8, {batch} x {n}", None, make([n - 8] * batch, 8, branching=True)
    yield (
        f"verify 6, pages of {16 if lab.toy else 256}, {batch} x {n}",
        None,
        make([n - 6] * batch, 6, page=16 if lab.toy else 256),
    )
    yield (
        f"sinks + window verify 6, {sinks} + {window}, {batch} rows",
        None,
        lambda: ring(lab, heads, dtype, far, [6] * batch, sinks, window),
    )
    yield f"window decode, {window}, {batch} x {n}", None, make([n - 1] * batch, 1, window=window)


def attend(lab: Lab) -> None:
    for name, bar, make in problems(lab):
        if lab.late(name) or not lab.room(name, 3 * 2**33):
            continue
        with lab.case(name):
            problem = make()
            sets = several(lab, problem)
            exact = problem.exact(checked(problem))
            for backend in sorted(available(lab.device, torch.bfloat16), key=lambda b: b != "triton"):
                case = f"{name}: {backend}"
                if backend == "reference" and not lab.toy:
                    continue  # dense and row by row: it is what others are compared with
                if lab.late(case):
                    continue
                mine = bar if backend == "triton" else None
                with lab.case(case, mine):
                    why = why_not(backend, *problem.settings())
                    if why is not None:
                        lab.skip(case, f"cannot: {why}")
                        continue
                    timed(lab, case, backend, sets, exact, mine)
            del problem, sets, exact
            lab.empty()


def several(lab: Lab, problem: Problem) -> list[Problem]:
    """A problem and others like it, so many that none is in a cache when its turn comes again."""
    count = 1 if lab.toy else max(1, min(16, -(-SETS // problem.bytes)))
    return [problem, *(problem.again(lab) for _ in range(count - 1))]


def checked(problem: Problem) -> list[int]:
    """The first and the last row."""
    return [0, len(problem.plan.counts) - 1]


def timed(
    lab: Lab, case: str, backend: str, sets: list[Problem], exact: Any, bar: str | None, **more: Any
) -> float:
    at, answer = exact
    error = worst(sets[0].run(backend)[:, at], answer)
    runs = [lambda p=p: p.run(backend) for p in sets]
    first = sets[0]
    more |= {"backend": backend} | ({"bar": bar} if bar else {})
    return lab.timed(
        case, runs, first.bytes, first.flops, error, limit=LIMITS[torch.bfloat16], **more
    ).seconds


# -- configurations -------------------------------------------------------------------------------------------------------------


@contextmanager
def configured(variant: tuple[int, int, int, int] | None) -> Iterator[None]:
    """The Triton backend with other tiles; how queries are tiled stays its own."""
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


def variants(lab: Lab) -> None:
    """Which tiles are best for decoding, verification, trees and rings."""
    if "triton" not in available(lab.device, torch.bfloat16):
        lab.skip("Triton configurations", "not run: Triton cannot be used here")
        return
    wanted = ("decode", "verify 6", "tree", "sinks + window decode")[: 1 if lab.toy else 4]
    for name, _, make in [next(p for p in problems(lab) if p[0].startswith(start)) for start in wanted]:
        if lab.late(name) or not lab.room(name, 3 * 2**33):
            continue
        with lab.case(name):
            problem = make()
            sets = several(lab, problem)
            exact = problem.exact(checked(problem))
            best: dict[str, float] = {}
            for variant in VARIANTS[:2] if lab.toy else VARIANTS:
                said = "own" if variant is None else "tile {} warps {} stages {} waves {}".format(*variant)
                case = f"{name}: triton, {said}"
                if lab.late(case):
                    break
                with lab.case(case), configured(variant):  # too large for the chip: a row that says so
                    best[said] = timed(lab, case, "triton", sets, exact, None, variant=said)
            if best:
                first = min(best, key=lambda said: best[said])
                lab.row(f"{name}: best Triton configuration", best[first], note=first)


# -- the others ---------------------------------------------------------------------------------------------------------------


def merges(lab: Lab) -> None:
    """The parts of 64 rows, 32 heads and 6 queries from 8 chunks each."""
    rows, chunks, queries, size = (2, 3, 4, 32) if lab.toy else (64, 8, 192, 128)
    count = 1 if lab.toy else 4
    sets = [
        (lab.normal(rows, chunks, queries, size), lab.normal(rows, chunks, queries)) for _ in range(count)
    ]
    exact = merge(*(t.double() for t in sets[0]))[0]
    bytes = 4 * rows * queries * (chunks + 1) * (size + 1)
    from specdec.kernels.attention import triton_backend

    for name, function in {"triton": triton_backend.merge, "reference": merge}.items():
        case = f"merge of {chunks} chunks, {rows * queries} queries: {name}"
        if lab.late(case):
            continue
        with lab.case(case):
            error = worst(function(*sets[0])[0], exact)
            runs = [lambda s=s, f=function: f(*s) for s in sets]
            lab.timed(case, runs, bytes, error=error, limit=LIMITS[torch.float32], backend=name)


def rejections(lab: Lab) -> None:
    """[64, 6, 128256]: all logits are read once, and the draft's row at the cut."""
    from specdec.kernels import rejection

    B, N, V = (2, 5, 97) if lab.toy else (64, 5, 128_256)
    for kind in ("point masses", "probabilities"):
        for dtype in (torch.bfloat16, torch.float32):
            short = str(dtype).removeprefix("torch.")
            name = f"rejection [{B}, {N + 1}, {V}], {kind}, {short}"
            if lab.late(name):
                continue
            with lab.case(name):
                sets = [draws(lab, B, N, V, kind, dtype) for _ in range(1 if lab.toy else 3)]
                for s in sets:
                    s[3].fill_(N)  # all rows are full
                given = [
                    (lo, tokens, size, accept, bonus, draft)
                    for lo, draft, tokens, size, accept, bonus in sets
                ]
                bytes = dtype.itemsize * B * V * (N + 1 + (kind != "point masses"))
                for backend in rejection.BACKENDS:
                    case = f"{name}: {backend}"
                    if lab.late(case):
                        continue
                    bar = {"bar": "rejection"} if backend == "triton" else {}
                    with lab.case(case, **bar):
                        made = rejection.verify(*given[0], backend=backend)
                        error = decision_error(made, given[0], kind, 1.0, rows=8)
                        more: dict[str, Any] = {"backend": backend, "limit": 1e-5, "error": error}
                        runs = [lambda g=g, b=backend: rejection.verify(*g, backend=b) for g in given]
                        with unchecked():
                            lab.timed(case, runs, bytes, graph=backend == "triton", **more, **bar)
                        if backend == "triton":
                            lab.timed(
                                f"{case}, with its check of the logits", runs, bytes, graph=False, **more
                            )


@contextmanager
def unchecked() -> Iterator[None]:
    """Verification without the check that its logits are a distribution, for which the host waits: the device's part alone."""
    from specdec.kernels.rejection import fused, reference

    kept = fused.check, reference.check
    fused.check = reference.check = lambda good: None  # type: ignore[assignment]
    try:
        yield
    finally:
        fused.check, reference.check = kept


def races(lab: Lab) -> None:
    """A keyed exponential race over the vocabulary: for 64 rows and for a verify pass of them."""
    from specdec.kernels import philox

    V = 97 if lab.toy else 128_256
    for rows in (3,) if lab.toy else (64, 384):
        case = f"race [{rows}, {V}]: triton"
        if lab.late(case):
            continue
        with lab.case(case):
            seed, position = seeds(lab.seed, rows).to(lab.device), torch.arange(rows, device=lab.device)
            sets = [(lab.normal(rows, V) * 3).softmax(-1) for _ in range(1 if lab.toy else 4)]
            few = slice(0, 4)
            expected = Philox(seed[few].cpu()).race(sets[0][few].cpu(), position[few].cpu())
            made = philox.race(sets[0], seed, position)[few].cpu()
            error = float((made != expected).double().mean())
            runs = [lambda p=p, s=seed, at=position: philox.race(p, s, at) for p in sets]
            lab.timed(case, runs, 4 * rows * V, error=error, limit=0.0)
