"""Stage c of the GPU suite: steps of a Llama-3-8B-shaped model with random weights, plain and verify.

Keys and values are random, which does not affect the time of a step. The floor of a step is that of its matrix products (all weights
once, or their FLOPs) plus that of its attention (all keys and values once, or its FLOPs), since they cannot overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import specdec as sd
from recipes.gpu.stage import Part, Stage
from specdec.cost import FULL, Forward, Shape, step
from specdec.forward.llama_triton import LlamaTriton
from specdec.lab.captured import captured

VERIFY = 6  # tokens per row
# Batch and context, most informative first, since time may run out.
POINTS = (
    (1, 1024),
    (16, 1024),
    (64, 8192),
    (1, 32768),
    (16, 8192),
    (64, 1024),
    (128, 1024),
    (16, 32768),
    (128, 4096),
)
TOY_POINTS = ((2, 24), (1, 40))
BARS = {(1, 1024): "decode_step", (16, 1024): "decode_step", (64, 8192): "long_step"}
"""The bar of a plain step with graphs at a point."""
EAGER, GRAPHS, COMPILED, FORWARD = "eager", "graphs", "graphs, compiled", "forward alone"


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    _ = stage.rates
    model = llama(stage)
    if model is None:
        return
    models = wrapped(model, (EAGER, GRAPHS))
    shares = {GRAPHS: 0.75, EAGER: 0.25}  # the bar's kind comes first
    stage.parts(
        {
            kind: Part(share, lambda stage, kind=kind: steps(stage, models[kind], kind))
            for kind, share in shares.items()
        }
    )


def config(toy: bool, layers: int = 32) -> LlamaConfig:
    """The config of Llama-3-8B, or a tiny one of the same kind."""
    sizes = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": layers,
             "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    if toy:
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                 "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    return LlamaConfig(
        **sizes, max_position_embeddings=65_536, rope_theta=500_000.0, bos_token_id=0, eos_token_id=None,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip


def llama(stage: Stage, layers: int = 32) -> LlamaForCausalLM | None:
    """The model, made on the device in bf16; ``None`` if it does not fit."""
    made = config(stage.toy, layers)
    if not stage.room("Llama-3-8B-shaped model", 2.2 * Shape.of(made).parameters):
        return None
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(stage.seed + 32 - layers)  # a toy has as many layers as another, and other weights
        with torch.inference_mode(False), torch.no_grad(), stage.device:
            model = LlamaForCausalLM(made)
            for p in model.parameters():  # independent of the version's bf16 initialisation
                if p.dim() > 1:
                    p.normal_(std=0.02)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def wrapped(model: Any, kinds: Sequence[str] = (EAGER, GRAPHS, COMPILED)) -> dict[str, Any]:
    """The model as decoders use it: step by step from Python, and by CUDA graphs, plain and with compiled norms and MLPs.

    On a CPU the same steps are not captured, and are traced but not compiled.
    """
    gpu = next(model.parameters()).is_cuda
    graphs, compiled = (True, True) if gpu else ("eager", {"backend": "eager"})
    made: dict[str, dict[str, Any]] = {
        EAGER: {"graphs": False},
        GRAPHS: {"graphs": graphs},
        COMPILED: {"graphs": graphs, "compile": compiled},
    }
    return {kind: sd.HFModel(model, prefill_chunk=8192, **made[kind]) for kind in kinds}


# -- steps ------------------------------------------------------------------------------------------------------------------


def floor(stage: Stage, shape: Shape, batch: int, tokens: int, context: int) -> tuple[float, float, float]:
    """A lower bound of a step's seconds, and its bytes and FLOPs."""
    work = {w.name: w for w in step(Forward(shape, batch, tokens, context, 2, 2), FULL).work}
    attention = [work.pop(name) for name in ("kv_reads", "kv_writes", "attention")]
    parts = [(sum(w.bytes for w in some), sum(w.flops for w in some)) for some in (attention, work.values())]
    return sum(stage.floor(*p) for p in parts), sum(p[0] for p in parts), sum(p[1] for p in parts)


def steps(stage: Stage, one: Any, kind: str) -> None:
    shape, slot = Shape.of(one.model.config), one.bytes_per_token()
    for batch, context in TOY_POINTS if stage.toy else POINTS:
        name = f"{batch} x {context}: {kind}"
        if stage.late(name, 0.0 if stage.toy else 5.0):
            continue
        logits = 4 * batch * VERIFY * shape.vocab * 4
        if not stage.room(name, slot * batch * (context + 64) + logits):
            continue
        with stage.case(name, BARS.get((batch, context)) if kind == GRAPHS else None):
            point(stage, one, kind, shape, batch, context)
        if one.steps is not None:
            one.steps.release()
        stage.empty()


def point(stage: Stage, model: Any, kind: str, shape: Shape, batch: int, context: int) -> None:
    """Plain and verification steps at one batch and context."""
    cache, text = filled(stage, model, batch, context, VERIFY + 2)
    for tokens in (1, VERIFY):
        nodes = None
        if tokens > 1:
            drafted = torch.randint(0, model.vocab_size, (batch, tokens - 1))
            nodes = sd.Proposal.chain(drafted.to(model.device), torch.full((batch,), tokens - 1))
        what = "plain step" if tokens == 1 else f"verify {tokens}"
        least, bytes, flops = floor(stage, shape, batch, tokens, context)
        more: dict[str, Any] = {"batch": batch, "context": context, "tokens": tokens, "kind": kind}
        more |= {"bytes": bytes, "flops": flops}
        for how, run in calls(model, cache, text, nodes, kind):
            case = f"{what}, {batch} x {context}: {how}"
            bar: dict[str, Any] = {}
            if tokens == 1 and kind == GRAPHS and (batch, context) in BARS:
                bar = {"bar": BARS[batch, context]}
            with stage.case(case, **bar):
                for _ in range(0 if model.steps is None else 2):  # a shape is captured at its second use
                    run()
                time = stage.clock([run], seconds=0.5, graph=how == FORWARD)
                stage.row(
                    case, time.seconds, least, eager_seconds=time.eager, clock=time.how,
                    share_of_copy=bytes / time.seconds / stage.rates.copy, **more, **bar, **merged(model), **stopped(model),
                )  # fmt: skip


def calls(
    model: Any, cache: Any, text: sd.Context, nodes: sd.Proposal | None, kind: str
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The timed calls: the prepared forward alone (replayed if possible), and the whole of ``score``."""
    if kind == EAGER:
        yield FORWARD, model.bare_step(cache, text, nodes)
    yield f"score, {kind}", lambda: model.score(cache, text, nodes)


def filled(stage: Stage, model: Any, batch: int, context: int, more: int) -> tuple[Any, sd.Context]:
    """A cache of all but the last token of random texts, with random keys and values."""
    cache = model.cache(batch, context + more)
    for keys, values in cache.layers:
        for buffer in (keys, values):
            buffer.normal_(generator=stage.draw)
    host = torch.Generator().manual_seed(stage.seed)
    ids = torch.randint(0, model.vocab_size, (batch, context + more), generator=host)
    length = torch.full((batch,), context)
    text = sd.Context(ids, length, length.clone(), torch.arange(batch))
    for b in range(batch):
        cache.remember(b, ids[b].numpy(), 0, context - 1, 0)
    return cache, text


def merged(model: Any) -> dict[str, bool]:
    """Whether products of the same input are one (``forward.merged``), which depends on the device's memory."""
    lean = getattr(model.engine, "lean", None)
    return {"merged": isinstance(lean, LlamaTriton) and lean.ops.merged is not None}


def stopped(model: Any) -> dict[str, Any]:
    """The note of a row whose steps should be captured and are not. They are forgotten then, so that a later row says only what failed there."""
    if model.steps is None:
        return {}
    why = model.steps.why
    if why is None and model.steps.too_large:
        why = "too little memory"
    if why is None and model.steps.failed:
        why = "some were not, as the warnings say"
    if why is None and not captured(model):
        why = "none was"
    if why is not None:
        model.steps.release()
    return {} if why is None else {"failed": True, "note": f"its steps are not captured: {why}"[:300]}
