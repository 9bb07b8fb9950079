"""The settings of SPIRe's figures: shapes, measured τ, ablations, and Llama 3 (arXiv 2504.06419, sections 2 to 5)."""

from __future__ import annotations

from typing import NamedTuple

from specdec.cost.methods import Method, full, magicdec, spire, vanilla
from specdec.cost.shapes import Shape

K = 4
"""Tokens drafted a round."""

VOCAB = 50_304
"""Of LongCrawl64 (manifestai.com/articles/longcrawl64). Only the terms that the paper leaves out use it."""

TARGET = Shape(layers=8, d_model=512, heads=8, kv_heads=8, d_head=128, d_ff=4096, vocab=VOCAB)
VANILLA_DRAFT = Shape(layers=4, d_model=256, heads=8, kv_heads=8, d_head=64, d_ff=2048, vocab=VOCAB)
SPIRE_DRAFT = TARGET.with_layers(2)

METHODS = {"vanilla": vanilla(VANILLA_DRAFT), "magicdec": magicdec(TARGET), "spire": spire(SPIRE_DRAFT)}

TAU: dict[int, dict[str, float]] = {
    960: {"vanilla": 2.644, "magicdec": 3.793, "spire": 3.382},
    512: {"vanilla": 2.647, "magicdec": 3.891, "spire": 3.401},
    256: {"vanilla": 2.637, "magicdec": 4.005, "spire": 3.427},
}
"""Measured tokens a round by context (§4). The figures use those at 512 for every batch and context."""


class Ablation(NamedTuple):
    """A variant of SPIRe: its costs and its measured τ at a context of 512."""

    method: Method
    tau: float


_NO_FEEDBACK = spire(SPIRE_DRAFT, feedback=False)

ABLATIONS: dict[str, Ablation] = {
    "spire": Ablation(METHODS["spire"], 3.401),
    "distillation_only": Ablation(METHODS["spire"], 3.375),
    "no_feedback": Ablation(_NO_FEEDBACK, 3.352),
    "random_init": Ablation(METHODS["spire"], 3.105),
    "hard_target_loss": Ablation(METHODS["spire"], 3.069),
    "no_feedback_no_activations": Ablation(Method("spire", SPIRE_DRAFT, _NO_FEEDBACK.view), 2.959),
    "no_sparse_kv": Ablation(spire(SPIRE_DRAFT, view=full), 3.401),
}
"""Fig. 5. The last τ was not measured: the paper takes SPIRe's."""

LLAMA_70B = Shape(layers=80, d_model=8192, heads=64, kv_heads=8, d_head=128, d_ff=28672, vocab=128_256)
LLAMA_8B = Shape(layers=32, d_model=4096, heads=32, kv_heads=8, d_head=128, d_ff=14336, vocab=128_256)
LLAMA_METHODS = {
    "vanilla": vanilla(LLAMA_8B),
    "magicdec": magicdec(LLAMA_70B),
    "spire": spire(LLAMA_70B.with_layers(20)),
}
"""Fig. 6, with the τ of the small models."""
