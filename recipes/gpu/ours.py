"""Stage h of the GPU suite: greedy decoding at the 8B shape, in a process of its own; stage i has transformers' ``generate`` in another.

At the end transformers' ``generate`` compiles two layers of the model, and specdec decodes once more: PyTorch's compiler captures graphs of
its own, and must not have freed memory that specdec's graphs use.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers.utils import logging

import specdec as sd
from recipes.gpu.stage import Part, Stage
from recipes.gpu.steps import EAGER, GRAPHS, floor, llama, merged, stopped, wrapped
from specdec.cost import Shape
from specdec.executors import Ahead

BARS = ((16, 1024), (1, 1024))
"""Batch and context of the bars."""
DECODED = ((64, 1024), *BARS)
"""The largest first: the others take its memory, so that no graph is dropped."""
AHEAD = f"{GRAPHS}, ahead"


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    _ = stage.rates
    model = llama(stage)
    if model is None:
        return
    kinds, texts = wrapped(model, (EAGER, GRAPHS)), dict[tuple[int, int], list[list[int]]]()
    decoders = {kind: sd.decoder(one).greedy().build() for kind, one in kinds.items()}
    decoders[AHEAD] = sd.decoder(kinds[GRAPHS]).greedy().executor(Ahead()).build()

    def ours(stage: Stage) -> None:
        for kind in (GRAPHS, AHEAD, EAGER):  # those of the bars first
            for point in points(stage):
                ids = timed(stage, decoders[kind], kind, point)
                if kind == GRAPHS and ids is not None:
                    texts[point] = ids

    compiled = False

    def compiler(stage: Stage) -> None:
        nonlocal compiled
        from recipes.gpu.others import theirs

        case = "transformers' generate with two layers"
        small = None if stage.late(case, 0.0 if stage.toy else 10.0) else llama(stage, layers=2)
        if small is not None:
            options = {"disable_compile": True} if stage.toy else {}
            with stage.case(case):
                theirs(stage, small, prompts(stage, small, (2, 16)), options)
                compiled = True

    def again(stage: Stage) -> None:
        for point, before in sorted(texts.items()):  # the smallest first
            case = f"{point[0]} x {point[1]}, after transformers compiled: tokens that differ from before"
            if not compiled:
                stage.skip(case, "not run: transformers has not compiled")
            if not compiled or stage.late(case):
                continue
            with stage.case(case):
                _, after = decoded(stage, decoders[GRAPHS], prompts(stage, model, point))
                differ = sum(a != b for one, other in zip(before, after) for a, b in zip(one, other))
                more: dict[str, Any] = {"failed": True} if differ else {}
                stage.row(case, differ=differ, **more)

    stage.parts({"ours": Part(0.6, ours), "compiler": Part(0.25, compiler), "again": Part(0.15, again)})


def points(stage: Stage) -> tuple[tuple[int, int], ...]:
    """Batches and contexts."""
    return ((2, 16),) if stage.toy else DECODED


def prompts(stage: Stage, model: Any, point: tuple[int, int]) -> torch.Tensor:
    """Random ids, ``[batch, context]``."""
    host = torch.Generator().manual_seed(stage.seed)
    return torch.randint(0, model.config.vocab_size, point, generator=host)


def report(
    stage: Stage, model: Any, name: str, point: tuple[int, int], seconds: float, bar: str | None, **more: Any
) -> None:
    """The row of a token's time, and of the bar whose key is ``bar``."""
    batch, context = point
    least, *_ = floor(stage, Shape.of(model.config), batch, 1, context + 32)
    if bar is not None:
        more["bar"] = bar
    case = f"a token of {batch} rows after {context}: {name}"
    stage.row(case, seconds, least, tokens_per_second=batch / seconds, **more)


def timed(stage: Stage, decoder: sd.Decoder, kind: str, point: tuple[int, int]) -> list[list[int]] | None:
    """A row for a decoder at a point, and the ids; ``None`` if there was no time, or an error."""
    batch, context = point
    case, one = f"ours, {kind}, {batch} x {context}", decoder.target
    if stage.late(case, 0.0 if stage.toy else 3.0):
        return None
    bar = {GRAPHS: f"ours {batch}", AHEAD: f"ours {batch}, ahead"}.get(kind) if point in BARS else None
    ids = None
    with stage.case(case, bar):
        seconds, ids = decoded(stage, decoder, prompts(stage, one.model, point))
        report(stage, one.model, f"ours, {kind}", point, seconds, bar, **merged(one), **stopped(one))
    return ids


def decoded(stage: Stage, decoder: sd.Decoder, ids: torch.Tensor) -> tuple[float, list[list[int]]]:
    """Seconds of a round of plain decoding, after a warm-up, and the text."""
    marks, new = list[float](), 4 if stage.toy else 64
    mark: Callable[[Any], None] = lambda _: marks.append(perf_counter())  # noqa: E731
    for turn in range(1 if stage.toy else 2):
        marks.clear()
        made = decoder.generate(ids, new, seed=turn, eos_token_id=(), on_round=mark)
    return token_seconds(marks), made.ids


def token_seconds(marks: list[float]) -> float:
    """The median time between tokens, which excludes occasional outliers (the capture for a new cache)."""
    return median(b - a for a, b in pairwise(marks))
