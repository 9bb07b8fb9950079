"""Stage s of the GPU suite: speculative rounds at the 8B shape, and tokens a second at a prescribed acceptance.

Random weights have no acceptance of their own, but a round of k drafted tokens takes about as long whatever is accepted. It is measured
with the verifiers of a decoder, and once with ``verifiers.Synthetic``, which accepts a given share, so that rows grow as with a trained
draft; its output is not the target's. Decoders with "ahead" replay a whole round at a time (``executors.Ahead``).
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from transformers.utils import logging

import specdec as sd
from recipes.gpu.stage import Stage
from recipes.gpu.steps import floor, llama, merged, stopped
from specdec.cost import Shape
from specdec.executors import Ahead
from specdec.verifiers import Synthetic

K, ACCEPTANCE = 4, 0.7
POINTS = ((1, 1024), (16, 1024), (16, 8192), (64, 1024))
TOY_POINTS = ((2, 16),)
BARS = ((1, 1024), (16, 1024))
"""Points whose gain has a bar: with prescribed acceptance, and with whole rounds launched ahead."""
LIMIT = 16 * 1024  # tokens of a point for decoders with "ahead": beyond, the host's time is a small share
PLAIN = "plain, greedy"
BARRED = {"a draft, prescribed": "round", "a draft, sampled, ahead": "round, ahead"}


def decoders(stage: Stage) -> dict[str, sd.Decoder]:
    """Decoders of the 8B shape, with graphs; none if it does not fit."""
    model = llama(stage)
    small = None if model is None else llama(stage, layers=4)
    if model is None or small is None:
        return {}
    graphs = "eager" if stage.device.type == "cpu" else True
    target, draft = (sd.HFModel(raw, prefill_chunk=8192, graphs=graphs) for raw in (model, small))
    plain, drafted = sd.decoder(target), sd.decoder(target).draft(draft, K)
    return {
        # Those of the bars come first.
        PLAIN: plain.greedy().build(),
        "a draft, prescribed": drafted.greedy().verifier(Synthetic(ACCEPTANCE)).build(),
        "plain, sampled, ahead": plain.executor(Ahead()).build(),
        "a draft, sampled, ahead": drafted.executor(Ahead()).build(),
        "a draft, greedy": drafted.greedy().build(),
        "plain, sampled": plain.build(),
        "a draft, sampled": drafted.build(),
        "plain, greedy, ahead": plain.greedy().executor(Ahead()).build(),
        "a draft, greedy, ahead": drafted.greedy().executor(Ahead()).build(),
    }


def prompts(stage: Stage, batch: int, context: int) -> torch.Tensor:
    """``[batch, context]`` random ids."""
    host = torch.Generator().manual_seed(stage.seed)
    return torch.randint(0, 100 if stage.toy else 128_000, (batch, context), generator=host)


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    _ = stage.rates
    made = decoders(stage)
    if not made:
        return
    shape = Shape.of(made[PLAIN].target.model.config)
    small = Shape.of(made["a draft, greedy"].draft.model.model.config)
    points, barred = (TOY_POINTS, TOY_POINTS) if stage.toy else (POINTS, BARS)
    names, first = list(made), list(made)[:4]  # those of the bars
    plans = [(point, first) for point in barred]
    plans += [
        (point, [name for name in names if not (point in barred and name in first)]) for point in points
    ]
    speed: dict[tuple[str, tuple[int, int]], float] = {}
    wrong: dict[tuple[str, tuple[int, int]], dict[str, object]] = {}
    for point, some in plans:
        batch, context = point
        if not stage.room(f"{batch} x {context}", 2.5 * shape.kv_values(1) * 2 * batch * (context + 256)):
            continue
        ids = prompts(stage, batch, context)
        for name in some:
            decoder = made[name]
            case, beyond = f"a round, {name}, {batch} x {context}", batch * context > LIMIT
            if (beyond and name.endswith("ahead")) or stage.late(case, 0.0 if stage.toy else 4.0):
                continue
            with stage.case(case, bar_of(name, batch, context)):
                seconds, rounds = timed(stage, decoder, ids)
                drafted = name.startswith("a draft")
                least = lowest(stage, shape, small if drafted else None, batch, context)
                tokens = Synthetic(ACCEPTANCE).tau(K) if drafted else 1.0
                speed[name, point] = tokens * batch / seconds
                more = stopped(decoder.target) | (stopped(decoder.draft.model) if drafted else {})
                wrong[name, point] = more
                stage.row(
                    case, seconds, least, tokens_per_second=speed[name, point], rounds=rounds, **merged(decoder.target),
                    **{"note": f"{speed[name, point]:.0f} tokens a second at {tokens:.2f} a round"} | more,
                )  # fmt: skip
        for name in some:
            plain, here = name.replace("a draft", "plain").replace("prescribed", "greedy"), (name, point)
            if not name.startswith("a draft") or here not in speed or (plain, point) not in speed:
                continue
            over, tokens = speed[here] / speed[plain, point], Synthetic(ACCEPTANCE).tau(K)
            promised = (
                tokens
                * lowest(stage, shape, None, batch, context)
                / lowest(stage, shape, small, batch, context)
            )
            bar = bar_of(name, batch, context)
            note = f"{over:.2f} at an acceptance of {ACCEPTANCE:g}, and {promised:.2f} if every forward took its floor"
            stage.row(
                f"{name}, {batch} x {context}, over {plain}", ratio=over, promised=promised, promised_share=over / promised,
                **{"note": note} | wrong[plain, point] | wrong[here] | ({} if bar is None else {"bar": bar}),
            )  # fmt: skip


def bar_of(name: str, batch: int, context: int) -> str | None:
    """The key of the bar that a decoder's gain has at a point."""
    return BARRED.get(name) if (batch, context) in BARS else None


def lowest(stage: Stage, shape: Shape, small: Shape | None, batch: int, context: int) -> float:
    """The least seconds of a round: of a plain step, or of K draft steps and the verification of what they drafted."""
    if small is None:
        return floor(stage, shape, batch, 1, context)[0]
    return floor(stage, shape, batch, K + 1, context)[0] + K * floor(stage, small, batch, 1, context)[0]


def timed(stage: Stage, decoder: sd.Decoder, ids: torch.Tensor) -> tuple[float, int]:
    """The median seconds of a round after the captures, and the number of rounds."""
    new = 8 if stage.toy else 96
    ends: list[float] = []
    for turn in range(1 if stage.toy else 2):
        ends.clear()
        decoder.generate(ids, new, seed=turn, eos_token_id=(), on_round=lambda _: ends.append(perf_counter()))
    gaps = [b - a for a, b in pairwise(ends)]
    return median(gaps), len(gaps)
