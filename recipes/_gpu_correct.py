"""Stage a of the GPU suite: every attention backend and the kernels of verification against float64, on fresh random inputs.

Memory that an output may be put into is filled with NaN before each call, and slots that a query must not see hold NaN (or, for
backends that read them with weight 0, large numbers). ``max_error`` is the largest ``|out - reference| / |reference|`` of a head of a
query, ``relative_error`` that of the whole output. Of verification ``max_error`` is the largest distance of a random number from the
interval whose decision was taken; of keyed numbers the share that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import _gpu_pointwise
import torch
from _gpu_cases import LARGE, LLAMA_8B, TOY, Heads, Problem, intervals, poisoned, ring, slots
from _gpu_lab import LIMITS, Lab, Part, relative, worst
from torch import Tensor

from specdec.kernels.attention import BACKENDS, AttentionPlan, available
from specdec.kernels.attention.choice import why_not
from specdec.rng import ACCEPT, Key, Philox, seeds

OTHER_HEADS = (Heads(8, 8, 64), Heads(8, 1, 80), Heads(16, 2, 256))


def run(lab: Lab) -> None:
    lab.parts(
        {
            "attention": Part(0.65, attend),
            "verification": Part(0.15, verify),
            "between products": Part(0.1, _gpu_pointwise.correct),
            "keyed": Part(0.1, keyed),
        }
    )


# -- attention --------------------------------------------------------------------------------------------------------------


def problems(lab: Lab, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """What a layer may be asked: name and how to make it."""
    heads, n = (TOY, 30) if lab.toy else (LLAMA_8B, 2000)
    first, counts, eight = [n + 7, 3, n // 2], [6, 1, 4], [8, 8, 8]
    w = n // 4

    def make(*args: Any, **settings: Any) -> Callable[[], Problem]:
        return lambda: slots(lab, heads, dtype, *args, **settings)

    yield "decode", make(first, [1, 1, 1])
    yield "ragged verify", make(first, counts)
    yield "rows that begin here", make([0, n, 0], [1, 2, 5])
    yield "tree", make(first, eight, branching=True)
    yield "window", make(first, counts, window=w)
    yield "tree in a window", make(first, eight, branching=True, window=w)
    yield "fixed chunks", make(first, counts, fragment=64 if lab.toy else 256)
    yield "soft cap", make(first, counts, softcap=2.0)
    yield "sink logits", make(first, counts, sinks=True)
    yield "sink logits, window", make(first, counts, sinks=True, window=w)
    yield "pages", make(first, counts, page=16 if lab.toy else 256)
    yield "tree over pages", make(first, eight, branching=True, page=16 if lab.toy else 256)
    yield "first positions beside a window", make(first, counts, window=w, initial=4)
    yield "tree, first positions beside a window", make(first, eight, branching=True, window=w, initial=4)
    yield "tree of 70 nodes", make([n, 3], [71, 71], branching=True, parents=LARGE)
    yield "tree of 70 nodes in a window", make([n, 3], [71, 71], branching=True, parents=LARGE, window=w)
    yield "intervals", lambda: intervals(lab, heads, dtype, first, counts, w)
    for some in OTHER_HEADS:
        said = f"heads {some.query}, {some.kv} of {some.size}"
        yield f"ragged verify, {said}", lambda some=some: slots(lab, some, dtype, first, counts)  # type: ignore[misc]
    yield "prompt", make([0], [33 if lab.toy else 1024])
    yield "ring: sinks and window", lambda: ring(lab, heads, dtype, [2 * n, 5, n], [1, 1, 1], 4, w)
    yield "ring: verify", lambda: ring(lab, heads, dtype, [2 * n, 5, n], counts, 4, w)


def attend(lab: Lab) -> None:
    types = (torch.bfloat16, torch.float32) if lab.toy else (torch.bfloat16, torch.float32, torch.float16)
    for dtype in types:
        short = str(dtype).removeprefix("torch.")
        backends = available(lab.device, dtype)
        for backend in BACKENDS:
            if backend not in backends:
                lab.skip(f"{backend}, {short}", f"cannot: {unavailable(lab, backend, dtype)}")
        for name, make in problems(lab, dtype):
            full = f"{name}, {short}"
            if lab.late(full):
                continue
            with lab.case(full):
                problem = make()
                rows = range(len(problem.plan.counts))
                _, exact = problem.exact(rows)
                for backend in backends:
                    with lab.case(f"{full}: {backend}"):
                        one_backend(lab, f"{full}: {backend}", backend, problem, exact)


def unavailable(lab: Lab, backend: str, dtype: torch.dtype) -> str | None:
    """Why a backend cannot serve any call here."""
    query = torch.zeros(1, 1, 1, 64, dtype=dtype, device=lab.device)
    return why_not(backend, query, query, query, AttentionPlan([0], [0], [1], 1))


def one_backend(lab: Lab, case: str, backend: str, problem: Problem, exact: Tensor) -> None:
    why = why_not(backend, *problem.settings())
    if why is not None:
        lab.skip(case, f"cannot: {why}")
        return
    given = poisoned(problem, backend)
    nan_memory(lab, exact.numel())
    out = given.run(backend)
    limit = LIMITS[problem.query.dtype]
    lab.row(case, error=worst(out, exact), limit=limit, backend=backend, relative_error=relative(out, exact))


def nan_memory(lab: Lab, numbers: int) -> None:
    """NaN into memory that is then given back: what a kernel allocates next, and does not write, shows."""
    sizes = [numbers * k for k in (1, 2, 4, 8)]
    held = [torch.full((n,), float("nan"), device=lab.device) for n in sizes]
    lab.sync()
    del held


# -- verification -----------------------------------------------------------------------------------------------------------


def verify(lab: Lab) -> None:
    from specdec.kernels import rejection

    B, N, V = (3, 2, 97) if lab.toy else (16, 5, 128_256)
    for kind in ("point masses", "probabilities", "logits"):
        for temperature in (0.0, 0.7) if lab.toy else (0.0, 0.7, 1.0):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"rejection, {kind}, temperature {temperature:g}, {str(dtype).removeprefix('torch.')}"
                if lab.late(name):
                    continue
                with lab.case(name):
                    logits, draft, tokens, size, accept, bonus = draws(lab, B, N, V, kind, dtype)
                    given = (logits, tokens, size, accept, bonus, draft)
                    nan_memory(lab, B * (N + 1) * 64)
                    made = rejection.verify(
                        *given, draft_logits=kind == "logits", temperature=temperature, backend="triton"
                    )
                    worst = decision_error(made, given, kind, temperature)
                    lab.row(name, error=worst, limit=1e-5)


def draws(
    lab: Lab, B: int, N: int, V: int, kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Logits of a target and a draft that resembles it, and what verification needs besides."""
    logits = lab.normal(B, N + 1, V) * 3
    theirs = logits[:, :N] + lab.normal(B, N, V)
    tokens = torch.multinomial(theirs.softmax(-1).view(-1, V), 1, generator=lab.draw).view(B, N)
    draft = None if kind == "point masses" else theirs if kind == "logits" else theirs.softmax(-1)
    size = torch.arange(B, device=lab.device) % (N + 1)  # rows of every length
    accept, bonus = (
        torch.rand(*shape, dtype=torch.float64, device=lab.device, generator=lab.draw)
        for shape in ((B, N), (B,))
    )
    low = logits.to(dtype)
    return low, None if draft is None else draft.to(dtype), tokens, size, accept, bonus


def decision_error(
    made: Any, given: tuple[Any, ...], kind: str, temperature: float, rows: int | None = None
) -> float:
    """How far a number lies outside the interval, in float64, of the decision that was taken; infinite for a wrong greedy one.

    Args:
        given: as for ``rejection.verify``; the draft comes last. rows: how many of them are looked at, from the first on; all.
    """
    logits, tokens, size, accept, bonus, draft = (None if t is None else t[:rows].cpu() for t in given)
    x = logits.double() / (temperature or 1.0)
    accepted, token = made.accepted.cpu(), made.token.cpu()
    p = x.softmax(-1)
    worst = 0.0
    for b in range(len(tokens)):
        n, N = int(accepted[b]), int(size[b])
        if temperature == 0:
            best = logits[b].double().argmax(-1)
            expected = 0
            while expected < N and best[expected] == tokens[b, expected]:
                expected += 1
            worst = max(worst, 0.0 if (n, int(token[b])) == (expected, int(best[n])) else float("inf"))
            continue
        q = None
        if draft is not None:
            q = draft[b].double()
            q = (q / temperature).softmax(-1) if kind == "logits" else q
        if not 0 <= n <= N or not 0 <= int(token[b]) < x.shape[-1]:
            return float("inf")
        for i in range(min(n + 1, N)):  # accepted nodes, and the one that was not
            t = int(tokens[b, i])
            ratio = float(p[b, i, t] / (1.0 if q is None else q[i, t]))
            over = float(accept[b, i]) - min(ratio, 1.0)
            worst = max(worst, over if i < n else -over)
        weights = p[b, n].clone()
        if n < N:
            if q is None:
                weights[tokens[b, n]] = 0
            else:
                weights = (weights - q[n]).clamp(min=0)
            weights = weights if float(weights.sum()) > 0 else p[b, n]
        ends = weights.cumsum(0) / weights.sum()
        t, u = int(token[b]), float(bonus[b] if bonus.dim() == 1 else bonus[b, n])
        worst = max(worst, u - float(ends[t]), (float(ends[t - 1]) if t else 0.0) - u)
        if float(weights[t]) == 0:
            return float("inf")
    return worst


# -- keyed numbers ------------------------------------------------------------------------------------------------------------


def keyed(lab: Lab) -> None:
    from specdec.kernels import philox

    rows, V = (3, 97) if lab.toy else (64, 128_256)
    seed = seeds(lab.seed, rows)
    with lab.case("keyed numbers"):
        key = Key(torch.arange(rows)[:, None] * 13, torch.arange(6), 0, ACCEPT)
        made = philox.uniforms(seed, key, lab.device).cpu()
        differ = float((made != Philox(seed).uniform(key)).double().mean())
        lab.row("keyed numbers: bits that differ from the CPU's", error=differ, limit=0.0)
    with lab.case("race"):
        probs = (lab.normal(rows, V) * 3).softmax(-1)
        position = torch.arange(rows) * 7
        won = philox.race(probs, seed, position).cpu()
        differ = float((won != Philox(seed).race(probs.cpu(), position)).double().mean())
        lab.row("race: winners that differ from the CPU's", error=differ, limit=0.0)
