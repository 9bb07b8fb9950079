"""Stage e of the GPU suite: SPIN's request decomposition on rows of unequal length, and its pipeline on streams (arXiv 2503.15921).

Decomposition: one layer of a verification pass, padded to the longest row, packed, decomposed, and by the kernels for ragged rows,
with chunks of their own choice and of a fixed size. Pipeline: rounds measured serially and with a drafting thread on a separate
stream, beside the time model fitted to serial rounds of other sizes in the same run (``lab.pipeline``).
"""

from __future__ import annotations

import torch
from transformers.utils import logging

import specdec as sd
from recipes.gpu.cases import LLAMA_8B, TINY, slots
from recipes.gpu.stage import Part, Stage
from recipes.gpu.steps import llama
from specdec.cost import Shape
from specdec.kernels.attention import available
from specdec.kernels.attention.choice import why_not
from specdec.lab.errors import LIMITS, worst
from specdec.lab.pipeline import PipelineComparison
from specdec.lab.workload import DISTRIBUTIONS, lengths

FRAGMENT = 1024
LONGER = 4  # times the lengths of spin_decompose.py, whose longest row has 1990 tokens


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    _ = stage.rates
    stage.parts({"decomposition": Part(0.4, decomposition), "pipeline": Part(0.6, pipeline)})


def decomposition(stage: Stage) -> None:
    """Every method on every distribution of lengths, with the same number of tokens."""
    batch, mean, k = (8, 300, 2) if stage.toy else (64, 400, 5)
    heads, dtype = TINY if stage.toy else LLAMA_8B, torch.bfloat16
    ways = [(b, None) for b in ("padded", "packed", "decomposed", "triton", "torch_flash", "flash_attn")]
    ways += [("triton", 8 if stage.toy else FRAGMENT)]
    ways = [way for way in ways if way[0] in available(stage.device, dtype)]
    for name in DISTRIBUTIONS[:2] if stage.toy else DISTRIBUTIONS:
        # At toy size lengths are a sixteenth: each tile costs the interpreter milliseconds.
        drawn = lengths(name, batch, mean, stage.seed)
        length = [max(1, n // 16) if stage.toy else LONGER * n for n in drawn]
        base: float | None = None
        for backend, fragment in ways:
            said = f"{backend}, chunks of {fragment}" if fragment else backend
            case = f"verify {k + 1}, {name} lengths, {batch} rows: {said}"
            if stage.late(case) or not stage.room(case, 2**33):
                continue
            with stage.case(case):
                stage.draw.manual_seed(stage.seed)  # the same tensors for all methods
                problem = slots(stage, heads, dtype, length, [k + 1] * batch, fragment=fragment)
                why = why_not(backend, *problem.settings())
                if why is not None:
                    stage.skip(case, f"cannot: {why}")
                    continue
                at, exact = problem.exact([0, batch - 1])
                error = worst(problem.run(backend)[:, at], exact)
                time = stage.clock([lambda p=problem, b=backend: p.run(b)])
                base = time.seconds if backend == "padded" else base
                stage.row(
                    case, time.seconds, stage.floor(problem.bytes, problem.flops), error, limit=LIMITS[dtype],
                    eager_seconds=time.eager, clock=time.how, padded_over_this=None if base is None else base / time.seconds,
                    tokens=sum(length), longest=max(length),
                )  # fmt: skip


def pipeline(stage: Stage) -> None:
    """A Llama-3-8B-shaped target and a draft of an eighth of its layers, with random weights, for times only."""
    model = llama(stage)
    draft = None if model is None else llama(stage, layers=4)
    if model is None or draft is None:
        return
    graphs = "eager" if stage.device.type == "cpu" else True
    target, small_one = (sd.HFModel(m, prefill_chunk=8192, graphs=graphs) for m in (model, draft))
    # Greedy: of random weights almost nothing is accepted, so all rounds have one shape.
    decoder = sd.decoder(target).greedy().draft(small_one, 4).build()
    host = torch.Generator().manual_seed(stage.seed)
    for batch in (4,) if stage.toy else (16, 64):
        context = 16 if stage.toy else 512
        name = f"pipeline, {batch} x {context}"
        bytes = Shape.of(model.config).kv_values(1) * 4 * batch * (context + 256)
        if stage.late(name, 0.0 if stage.toy else 20.0) or not stage.room(name, bytes):
            continue
        with stage.case(name):
            rows = torch.randint(0, model.config.vocab_size, (batch, context), generator=host).tolist()
            micro, rounds, repeats = ((2,), 2, 1) if stage.toy else ((2, 4), 8, 2)
            compare = PipelineComparison(micro, ("threads",), rounds, repeats, stage.seed)
            for r in compare.rows("random", decoder, rows):
                how = r["mode"] + (f", {r['micro_batches']} micro-batches" if r["mode"] != "serial" else "")
                stage.row(
                    f"{name}: {how}", r["milliseconds"] / 1e3, gain=r["gain"], predicted_gain=r["predicted_gain"],
                    predicted_seconds=r["predicted"] / 1e3, draft_slowdown=r["draft_slowdown"],
                    verify_slowdown=r["verify_slowdown"],
                    note=f"gain {r['gain']:.2f}, the time model predicts {r['predicted_gain']:.2f}",
                )  # fmt: skip
