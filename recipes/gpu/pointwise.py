"""Norms, rotary embedding with the KV store, and SwiGLU in the GPU suite: errors against float64 (stage a), times beside those of their bytes (stage b)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from recipes.gpu.stage import Stage
from specdec.kernels import pointwise
from specdec.kernels.pointwise import Place, reference
from specdec.lab.errors import LIMITS, worst

SETS = 2**28  # total bytes of a call's input sets: several times a GPU's last-level cache
Run = Callable[[], Any]
Case = tuple[Run, Callable[[], Tensor], Tensor, int]  # a call, its result, the float64 result, bytes to move


def cases(stage: Stage, tokens: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Cases: name, and constructor."""
    wide, inner, heads, kv, size = (64, 160, 4, 2, 16) if stage.toy else (4096, 14336, 32, 8, 128)
    width = dtype.itemsize

    def numbers(*shape: int) -> Tensor:
        return stage.normal(*shape).to(dtype)

    def norm() -> Case:
        x, y, w = numbers(tokens, wide), numbers(tokens, wide), numbers(wide)
        kept, made = x.clone(), {}

        def run() -> None:
            made["out"] = pointwise.add_norm(kept, y, w, 1e-5)

        exact = reference.add_norm((x.double() + y.double()).to(dtype).double(), None, w.double(), 1e-5)[1]
        return run, lambda: made["out"], exact, 4 * tokens * wide * width

    def turned() -> Case:
        q, k, v = numbers(tokens, heads, size), numbers(tokens, kv, size), numbers(tokens, kv, size)
        angle = stage.normal(tokens, size // 2).repeat(1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        keys, values = numbers(2, 1, tokens, kv, size).unbind(0)
        slots = torch.randperm(tokens, generator=stage.draw, device=stage.device)
        into = q.clone()
        run = partial(pointwise.apply_rotary, into, k, cos, sin, value=v, place=Place(keys, values, slots))
        rotated = [reference.apply_rotary(t.double(), cos.double(), sin.double()) for t in (q, k)]
        exact = torch.cat([*rotated, v.double()], 1)
        moved = 2 * tokens * (heads + 2 * kv) * size * width + 2 * tokens * size * width
        return run, lambda: torch.cat([into, keys[0, slots], values[0, slots]], 1), exact, moved

    def product() -> Case:
        gate, up = numbers(tokens, inner), numbers(tokens, inner)
        into = gate.clone()
        exact = reference.silu_mul(gate.double(), up.double())
        return lambda: pointwise.silu_mul(into, up), lambda: into, exact, 3 * tokens * inner * width

    yield "residual and norm", norm
    yield "rotary embedding and KV store", turned
    yield "SwiGLU", product


def made(
    stage: Stage, tokens: int, dtype: torch.dtype, more: str = ""
) -> Iterator[tuple[str, float, int, Callable[[], Run]]]:
    """For each case: its name (with ``more`` appended), its error and bytes after one run, and its constructor."""
    interpreted = stage.device.type == "cpu" and find_spec("triton") is not None  # set by a dry run
    for name, make in cases(stage, tokens, dtype):
        case = f"{name}, {tokens} tokens{more}"
        if stage.late(case):
            continue
        with stage.case(case):
            if not interpreted and (why := pointwise.why_not(stage.device, dtype)) is not None:
                stage.skip(case, f"cannot: {why}")
                continue
            run, result, exact, moved = make()
            run()
            yield case, worst(result(), exact), moved, lambda make=make: make()[0]


def correct(stage: Stage) -> None:
    """Rows of stage a."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens in (1, 3 if stage.toy else 300):
            if not stage.mine():
                continue
            for case, error, _, _ in made(stage, tokens, dtype, f", {str(dtype).removeprefix('torch.')}"):
                stage.row(case, error=error, limit=LIMITS[dtype])


def timed(stage: Stage) -> None:
    """Rows of stage b, in bfloat16."""
    for tokens in (1, 4) if stage.toy else (1, 64, 384):
        for case, error, moved, again in made(stage, tokens, torch.bfloat16):
            with stage.case(case):
                count = min(128, 1 + SETS // moved)  # sets of one token still fit the cache
                sets = [again() for _ in range(count)]
                stage.timed(case, sets, moved, 0.0, error, limit=LIMITS[torch.bfloat16])
