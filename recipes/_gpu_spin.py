"""Stage e of the GPU suite: SPIN's request decomposition on rows of unequal length, and its pipeline on streams (arXiv 2503.15921).

Decomposition: one layer of a verify pass, padded to the longest row, packed, decomposed, and by the kernels that take ragged rows as
they are, with chunks of their own choice and of a fixed size. Pipeline: rounds measured serially and with a drafting thread that has
a stream of its own, beside the time model that is fitted to serial rounds of other sizes in the same run (spin_pipeline.py).
"""

from __future__ import annotations

import spin_pipeline
import torch
from _gpu_cases import LLAMA_8B, TINY, slots
from _gpu_lab import LIMITS, Lab, Part, worst
from _gpu_steps import config, llama
from spin_decompose import DISTRIBUTIONS, lengths
from transformers import LlamaForCausalLM
from transformers.utils import logging

import specdec as sd
from specdec.cost import Shape
from specdec.kernels.attention import available
from specdec.kernels.attention.choice import why_not

FRAGMENT = 1024
LONGER = 4  # times the lengths of spin_decompose.py, whose longest row has 1990 tokens


def run(lab: Lab) -> None:
    logging.set_verbosity_error()
    _ = lab.rates
    lab.parts({"decomposition": Part(0.4, decomposition), "pipeline": Part(0.6, pipeline)})


def decomposition(lab: Lab) -> None:
    """Every method on every distribution of lengths, with as many tokens in all."""
    batch, mean, k = (8, 300, 2) if lab.toy else (64, 400, 5)
    heads, dtype = TINY if lab.toy else LLAMA_8B, torch.bfloat16
    ways = [(b, None) for b in ("padded", "packed", "decomposed")]
    ways += [
        (b, f) for b in ("triton", "torch_flash", "flash_attn") for f in (None, 8 if lab.toy else FRAGMENT)
    ]
    for name in DISTRIBUTIONS[:2] if lab.toy else DISTRIBUTIONS:
        # At toy size a sixteenth of the lengths: each tile costs the interpreter milliseconds.
        length = [max(1, n // 16) if lab.toy else LONGER * n for n in lengths(name, batch, mean, lab.seed)]
        base: float | None = None
        for backend, fragment in ways:
            said = f"{backend}, chunks of {fragment}" if fragment else backend
            case = f"verify {k + 1}, {name} lengths, {batch} rows: {said}"
            if backend not in available(lab.device, dtype) or lab.late(case) or not lab.room(case, 2**33):
                continue
            with lab.case(case):
                lab.draw.manual_seed(lab.seed)  # the same numbers for all
                problem = slots(lab, heads, dtype, length, [k + 1] * batch, fragment=fragment)
                why = why_not(backend, *problem.settings())
                if why is not None:
                    lab.skip(case, f"cannot: {why}")
                    continue
                at, exact = problem.exact([0, batch - 1])
                error = worst(problem.run(backend)[:, at], exact)
                time = lab.clock([lambda p=problem, b=backend: p.run(b)])
                base = base or time.seconds
                lab.row(
                    case, time.seconds, lab.floor(problem.bytes, problem.flops), error, limit=LIMITS[dtype],
                    eager_seconds=time.eager, clock=time.how, padded_over_this=base / time.seconds,
                    tokens=sum(length), longest=max(length),
                )  # fmt: skip


def pipeline(lab: Lab) -> None:
    """A Llama-3-8B-shaped target and a draft of an eighth of its layers, with random weights: times, not acceptance."""
    model = llama(lab)
    if model is None:
        return
    draft = small(lab)
    if draft is None:
        return
    graphs = "eager" if lab.device.type == "cpu" else True
    target, small_one = (sd.HFModel(m, prefill_chunk=8192, graphs=graphs) for m in (model, draft))
    decoder = sd.decoder(target).draft(small_one, 4).build()
    host = torch.Generator().manual_seed(lab.seed)
    for batch in (4,) if lab.toy else (16, 64):
        context = 16 if lab.toy else 512
        name = f"pipeline, {batch} x {context}"
        if lab.late(name, 0.0 if lab.toy else 45.0):
            continue
        if not lab.room(name, Shape.of(model.config).kv_values(1) * 4 * batch * (context + 256)):
            continue
        with lab.case(name):
            rows = torch.randint(0, model.config.vocab_size, (batch, context), generator=host).tolist()
            settings = spin_pipeline.Settings(
                micro_batches="2" if lab.toy else "2,4", workers="threads", rounds=2 if lab.toy else 8,
                repeats=1 if lab.toy else 2, seed=lab.seed,
            )  # fmt: skip
            for r in spin_pipeline.one(settings, "random", decoder, rows):
                how = (
                    f"{r['mode']}, {r['micro_batches']} micro-batches" if r["mode"] != "serial" else "serial"
                )
                lab.row(
                    f"{name}: {how}", r["milliseconds"] / 1e3, gain=r["gain"], predicted_gain=r["predicted_gain"],
                    predicted_seconds=r["predicted"] / 1e3, draft_slowdown=r["draft_slowdown"],
                    verify_slowdown=r["verify_slowdown"],
                    note=f"gain {r['gain']:.2f}, the time model says {r['predicted_gain']:.2f}",
                )  # fmt: skip


def small(lab: Lab) -> LlamaForCausalLM | None:
    """A draft for ``llama``: the same shape, 4 of its 32 layers."""
    if lab.toy:
        return LlamaForCausalLM(config(True)).to(torch.bfloat16).eval().requires_grad_(False)
    return llama(lab, layers=4)
