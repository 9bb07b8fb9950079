"""Stage i of the GPU suite: transformers' ``generate`` at the 8B shape, compiled and not, in a process of its own.

Stage h has specdec's decoding of the same prompts in another process; the bars compare the two.
"""

from __future__ import annotations

import warnings
from time import perf_counter
from typing import Any

import torch
from transformers.utils import logging

from recipes.gpu.ours import BARS, DECODED, points, prompts, report, token_seconds
from recipes.gpu.stage import Stage
from recipes.gpu.steps import llama
from specdec.cost import Shape

COMPILED, EAGER = (
    "transformers, static cache, compiled (its default)",
    "transformers, static cache, not compiled",
)
# transformers compiles by default if the cache is static and the model on a GPU; compilation is not timed.
OPTIONS: dict[str, dict[str, Any]] = {COMPILED: {}, EAGER: {"disable_compile": True}}
ORDER = (
    *((COMPILED, point) for point in BARS),
    *((EAGER, point) for point in BARS),
    *((how, DECODED[0]) for how in (EAGER, COMPILED)),
)
"""Every batch compiles anew, so the points of the bars come first."""
COMPILING = 25.0  # seconds below which compilation is not begun


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    _ = stage.rates
    model = llama(stage)
    if model is None:
        return
    for name, point in ((EAGER, points(stage)[0]),) if stage.toy else ORDER:
        timed(stage, model, name, point)


def timed(stage: Stage, model: Any, name: str, point: tuple[int, int]) -> None:
    """A row for ``generate`` at a point."""
    batch, context = point
    case = f"{name}, {batch} x {context}"
    if stage.late(case, 0.0 if stage.toy else COMPILING if name == COMPILED else 10.0):
        return
    if not stage.room(case, 12 * batch * context * Shape.of(model.config).d_ff):
        return
    bar = f"theirs {batch}" if name == COMPILED and point in BARS else None
    with stage.case(case, bar):
        report(
            stage, model, name, point, theirs(stage, model, prompts(stage, model, point), OPTIONS[name]), bar
        )
    stage.empty()


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
