"""Stage h of the GPU suite: greedy decoding at the 8B shape beside transformers' generate, compiled and not.

specdec is timed first, then transformers without compilation, and compiled last, which takes minutes. After that specdec decodes once
more: PyTorch's compiler captures graphs of its own, and must not have freed memory that specdec's graphs use.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers.utils import logging

import specdec as sd
from recipes.gpu.stage import Part, Stage
from recipes.gpu.steps import GRAPHS, floor, llama, stopped, wrapped
from specdec.cost import Shape

# transformers compiles by default if the cache is static and the model on a GPU; compilation is not timed.
THEIRS: dict[str, dict[str, Any]] = {
    "transformers, static cache, not compiled": {"disable_compile": True},
    "transformers, static cache, compiled (its default)": {},
}
COMPILING = 60.0  # seconds below which compilation is not begun
DECODED = ((16, 1024), (1, 1024), (64, 1024))  # batch and context; the bar uses the first


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    _ = stage.rates
    model = llama(stage)
    if model is None:
        return
    kinds = wrapped(model)
    points = ((2, 16),) if stage.toy else DECODED
    mine: dict[tuple[int, int], tuple[float, list[list[int]]]] = {}

    def all_of_ours(stage: Stage) -> None:
        for kind in kinds:
            for point in points:
                ours_at(stage, kinds[kind], kind, point, mine if kind == GRAPHS else {})

    def all_of_theirs(stage: Stage) -> None:
        for name, options in THEIRS.items():
            for point in points:
                theirs_at(stage, model, kinds[GRAPHS], name, options, point, mine.get(point))

    def again(stage: Stage) -> None:
        for point, (_, before) in mine.items():
            if stage.late(f"ours again at {point[0]} x {point[1]}"):
                continue
            with stage.case("ours again"):
                _, after = ours(stage, kinds[GRAPHS], prompts(stage, model, point))
                differ = sum(a != b for one, other in zip(before, after) for a, b in zip(one, other))
                more: dict[str, Any] = {"failed": True} if differ else {}
                stage.row(f"ours after transformers, {point[0]} x {point[1]}: tokens that differ from before",
                        differ=differ, **more)  # fmt: skip

    parts = {
        "ours": Part(0.3, all_of_ours),
        "theirs": Part(0.6, all_of_theirs),
        "ours again": Part(0.1, again),
    }
    stage.parts(parts)


def prompts(stage: Stage, model: Any, point: tuple[int, int]) -> torch.Tensor:
    """Random ids, ``[batch, context]``."""
    host = torch.Generator().manual_seed(stage.seed)
    return torch.randint(0, model.config.vocab_size, point, generator=host)


def report(stage: Stage, model: Any, name: str, point: tuple[int, int], seconds: float, **more: Any) -> float:
    """The row of a time; returns tokens a second."""
    batch, context = point
    least, *_ = floor(stage, Shape.of(model.config), batch, 1, context + 32)
    case = f"a token of {batch} rows after {context}: {name}"
    stage.row(case, seconds, least, tokens_per_second=batch / seconds, **more)
    return batch / seconds


def ours_at(stage: Stage, one: Any, kind: str, point: tuple[int, int], keep: dict[Any, Any]) -> None:
    name = f"ours, {kind}"
    if stage.late(f"{point[0]} x {point[1]}: {name}", 0.0 if stage.toy else 3.0):
        return
    with stage.case(f"{point[0]} x {point[1]}: {name}"):
        seconds, ids = ours(stage, one, prompts(stage, one.model, point))
        speed = report(stage, one.model, name, point, seconds, **stopped(one))
        keep[point] = speed, ids


def theirs_at(
    stage: Stage,
    model: Any,
    captured: Any,
    name: str,
    options: dict[str, Any],
    point: tuple[int, int],
    mine: tuple[float, Any] | None,
) -> None:
    batch, context = point
    first = point == DECODED[0]
    case = f"{batch} x {context}: {name}"
    if stage.toy and not options:
        return
    if stage.late(case, 0.0 if stage.toy else 10.0 if options or not first else COMPILING):
        return
    if not stage.room(case, 12 * batch * context * Shape.of(model.config).d_ff):
        return
    bar = "generate" if first else None
    with stage.case(case, bar):
        speed = report(stage, model, name, point, theirs(stage, model, prompts(stage, model, point), options))
        if mine is not None:
            more = {"bar": bar} | stopped(captured) if bar else {}
            stage.row(f"tokens a second of {batch} rows after {context}: ours, {GRAPHS}, over {name}",
                    ratio=mine[0] / speed, **{"note": f"{mine[0]:.0f} over {speed:.0f}"} | more)  # fmt: skip
    stage.empty()


def token_seconds(marks: list[float]) -> float:
    """The median time between tokens, which excludes occasional outliers (the capture for a new cache)."""
    return median(b - a for a, b in pairwise(marks))


def ours(stage: Stage, model: Any, ids: torch.Tensor) -> tuple[float, list[list[int]]]:
    """Seconds of a round of plain decoding, after a warm-up, and the text."""
    decoder, new = sd.decoder(model).greedy().build(), 4 if stage.toy else 64
    for turn in range(1 if stage.toy else 2):
        marks: list[float] = []

        def mark(_: Any, marks: list[float] = marks) -> None:
            marks.append(perf_counter())

        made = decoder.generate(ids, new, seed=turn, eos_token_id=(), on_round=mark)
    return token_seconds(marks), made.ids


def theirs(stage: Stage, model: Any, ids: torch.Tensor, options: dict[str, Any]) -> float:
    """Seconds per token of transformers' ``generate``, timed by a stopping criterion that only reads the clock."""
    new = 4 if stage.toy else 64
    ids = ids.to(stage.device)
    for _ in range(1 if stage.toy else 2):
        marks: list[float] = []

        def look(input_ids: torch.Tensor, scores: Any, marks: list[float] = marks, **_: Any) -> torch.Tensor:
            stage.sync()
            marks.append(perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        with warnings.catch_warnings(), torch.inference_mode(False):
            warnings.simplefilter("ignore")
            ids = ids.clone()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                cache_implementation="static", stopping_criteria=[look], pad_token_id=0, **options,
            )  # fmt: skip
    return token_seconds(marks)
