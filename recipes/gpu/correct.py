"""Stage a of the GPU suite: every attention backend and the kernels of verification against float64, on fresh random inputs.

Free memory is filled with NaN before each call, and slots that a query must not see hold NaN (or, for backends that read them with
weight 0, large values). ``max_error`` is the largest ``|out - reference| / |reference|`` of a head of a query, ``relative_error``
that of the whole output. For verification ``max_error`` is the largest distance of a random number from the interval of the decision
that was made; for keyed random numbers it is the share that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from recipes.gpu import pointwise
from recipes.gpu.cases import LARGE, LLAMA_8B, TOY, Heads, Problem, intervals, poisoned, ring, slots
from recipes.gpu.stage import Part, Stage
from specdec.kernels.attention import BACKENDS, AttentionPlan, available
from specdec.kernels.attention.choice import why_not
from specdec.lab.errors import LIMITS, decision_error, relative, worst
from specdec.rng import ACCEPT, Key, Philox, seeds

OTHER_HEADS = (Heads(8, 8, 64), Heads(8, 1, 80), Heads(16, 2, 256))


def run(stage: Stage) -> None:
    stage.parts(
        {
            "attention": Part(0.65, attend),
            "verification": Part(0.15, verify),
            "between products": Part(0.1, pointwise.correct),
            "keyed": Part(0.1, keyed),
        }
    )


# -- attention --------------------------------------------------------------------------------------------------------------


def problems(stage: Stage, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """Cases of a layer's attention: name and constructor."""
    heads, n = (TOY, 30) if stage.toy else (LLAMA_8B, 2000)
    first, counts, eight = [n + 7, 3, n // 2], [6, 1, 4], [8, 8, 8]
    w = n // 4

    def make(*args: Any, **settings: Any) -> Callable[[], Problem]:
        return lambda: slots(stage, heads, dtype, *args, **settings)

    yield "decode", make(first, [1, 1, 1])
    yield "ragged verify", make(first, counts)
    yield "rows that begin here", make([0, n, 0], [1, 2, 5])
    yield "tree", make(first, eight, branching=True)
    yield "window", make(first, counts, window=w)
    yield "tree in a window", make(first, eight, branching=True, window=w)
    yield "fixed chunks", make(first, counts, fragment=64 if stage.toy else 256)
    yield "soft cap", make(first, counts, softcap=2.0)
    yield "sink logits", make(first, counts, sinks=True)
    yield "sink logits, window", make(first, counts, sinks=True, window=w)
    yield "pages", make(first, counts, page=16 if stage.toy else 256)
    yield "tree over pages", make(first, eight, branching=True, page=16 if stage.toy else 256)
    yield "first positions beside a window", make(first, counts, window=w, initial=4)
    yield "tree, first positions beside a window", make(first, eight, branching=True, window=w, initial=4)
    yield "tree of 70 nodes", make([n, 3], [71, 71], branching=True, parents=LARGE)
    yield "tree of 70 nodes in a window", make([n, 3], [71, 71], branching=True, parents=LARGE, window=w)
    yield "intervals", lambda: intervals(stage, heads, dtype, first, counts, w)
    for some in OTHER_HEADS:
        said = f"heads {some.query}, {some.kv} of {some.size}"
        yield f"ragged verify, {said}", lambda some=some: slots(stage, some, dtype, first, counts)  # type: ignore[misc]
    yield "prompt", make([0], [33 if stage.toy else 1024])
    yield "ring: sinks and window", lambda: ring(stage, heads, dtype, [2 * n, 5, n], [1, 1, 1], 4, w)
    yield "ring: by a mask", lambda: ring(stage, heads, dtype, [2 * n, 5, n], [1, 1, 1], 4, w, masked=True)
    yield "ring: verify", lambda: ring(stage, heads, dtype, [2 * n, 5, n], counts, 4, w)
    yield "decode, eight bits", make(first, [1, 1, 1], kv=torch.float8_e4m3fn)
    pages = 16 if stage.toy else 256
    yield "tree over pages, eight bits", make(first, eight, branching=True, page=pages, kv=torch.float8_e5m2)


def attend(stage: Stage) -> None:
    types = (torch.bfloat16, torch.float32) if stage.toy else (torch.bfloat16, torch.float32, torch.float16)
    for dtype in types:
        short = str(dtype).removeprefix("torch.")
        backends = available(stage.device, dtype)
        for backend in BACKENDS:
            if backend not in backends and stage.share[0] == 0:
                stage.skip(f"{backend}, {short}", f"cannot: {unavailable(stage, backend, dtype)}")
        for name, make in problems(stage, dtype):
            full = f"{name}, {short}"
            if not stage.mine() or stage.late(full):
                continue
            with stage.case(full):
                problem = make()
                rows = range(len(problem.plan.counts))
                _, exact = problem.exact(rows)
                for backend in backends:
                    with stage.case(f"{full}: {backend}"):
                        one_backend(stage, f"{full}: {backend}", backend, problem, exact)


def unavailable(stage: Stage, backend: str, dtype: torch.dtype) -> str | None:
    """Why a backend cannot serve any call here."""
    query = torch.zeros(1, 1, 1, 64, dtype=dtype, device=stage.device)
    return why_not(backend, query, query, query, AttentionPlan([0], [0], [1], 1))


def one_backend(stage: Stage, case: str, backend: str, problem: Problem, exact: Tensor) -> None:
    why = why_not(backend, *problem.settings())
    if why is not None:
        stage.skip(case, f"cannot: {why}")
        return
    given = poisoned(problem, backend)
    nan_memory(stage, exact.numel())
    out = given.run(backend)
    limit = LIMITS[problem.query.dtype]
    stage.row(
        case, error=worst(out, exact), limit=limit, backend=backend, relative_error=relative(out, exact)
    )


def nan_memory(stage: Stage, numbers: int) -> None:
    """Fill memory with NaN and free it, so that values that a kernel allocates and does not write show up."""
    sizes = [numbers * k for k in (1, 2, 4, 8)]
    held = [torch.full((n,), float("nan"), device=stage.device) for n in sizes]
    stage.sync()
    del held


# -- verification -----------------------------------------------------------------------------------------------------------


def verify(stage: Stage) -> None:
    from specdec.kernels import rejection

    B, N, V = (3, 2, 97) if stage.toy else (16, 5, 128_256)
    for kind in ("point masses", "probabilities", "logits"):
        for temperature in (0.0, 0.7) if stage.toy else (0.0, 0.7, 1.0):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"rejection, {kind}, temperature {temperature:g}, {str(dtype).removeprefix('torch.')}"
                if not stage.mine() or stage.late(name):
                    continue
                with stage.case(name):
                    logits, draft, tokens, size, accept, bonus = draws(stage, B, N, V, kind, dtype)
                    given = (logits, tokens, size, accept, bonus, draft)
                    nan_memory(stage, B * (N + 1) * 64)
                    made = rejection.verify(
                        *given, draft_logits=kind == "logits", temperature=temperature, backend="triton"
                    )
                    worst = decision_error(made, given, kind, temperature)
                    stage.row(name, error=worst, limit=1e-5)


def draws(
    stage: Stage, B: int, N: int, V: int, kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Logits of a target and a similar draft, and the other arguments of verification."""
    logits = stage.normal(B, N + 1, V) * 3
    theirs = logits[:, :N] + stage.normal(B, N, V)
    tokens = torch.multinomial(theirs.softmax(-1).view(-1, V), 1, generator=stage.draw).view(B, N)
    draft = None if kind == "point masses" else theirs if kind == "logits" else theirs.softmax(-1)
    size = torch.arange(B, device=stage.device) % (N + 1)  # rows of every length
    accept, bonus = (
        torch.rand(*shape, dtype=torch.float64, device=stage.device, generator=stage.draw)
        for shape in ((B, N), (B,))
    )
    low = logits.to(dtype)
    return low, None if draft is None else draft.to(dtype), tokens, size, accept, bonus


# -- keyed numbers ------------------------------------------------------------------------------------------------------------


def keyed(stage: Stage) -> None:
    from specdec.kernels import philox

    if not stage.mine():
        return
    rows, V = (3, 97) if stage.toy else (64, 128_256)
    seed = seeds(stage.seed, rows)
    with stage.case("keyed numbers"):
        key = Key(torch.arange(rows)[:, None] * 13, torch.arange(6), 0, ACCEPT)
        made = philox.uniforms(seed, key, stage.device).cpu()
        differ = float((made != Philox(seed).uniform(key)).double().mean())
        stage.row("keyed numbers: bits that differ from the CPU's", error=differ, limit=0.0)
    with stage.case("race"):
        probs = (stage.normal(rows, V) * 3).softmax(-1)
        position = torch.arange(rows) * 7
        won = philox.race(probs, seed, position).cpu()
        differ = float((won != Philox(seed).race(probs.cpu(), position)).double().mean())
        stage.row("race: winners that differ from the CPU's", error=differ, limit=0.0)
