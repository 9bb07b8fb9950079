"""The ``Runner`` of a model, and the options of ``HFModel`` that it does not support."""

from __future__ import annotations

from typing import Any

import torch

from specdec.forward.contract import Runner
from specdec.forward.families import SUPPORTED
from specdec.forward.packed import Packed
from specdec.forward.padded import Padded


def runner_for(
    model: Any,
    how: str,
    attention: str,
    *,
    invariant: bool = False,
    bf16_weights: bool | None = False,
    modules: bool = False,
    page: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Runner:
    """Arguments as for ``HFModel``; ``model`` is its private copy.

    Args:
        how: of ``families.path_of``. modules: whether the model's own modules are called, even where a faster forward could
            compute the same.
    Raises:
        ValueError: the model does not support an option; the message says which models do.
    """
    family = model.config.model_type
    path: Runner
    if how == "packed":
        path = Packed(model, attention, invariant, modules, bf16_weights)
    else:
        path = Padded(model, trees="chains" not in how)
    if bf16_weights and not path.bf16_weights:
        raise ValueError(
            f"bf16_weights is True but this {family} cannot read such copies: llama-like models in float32, with sizes that "
            "are multiples of 16, can, on a CPU where specdec.kernels.native.reason() is None, without graphs or compile; leave it None, or "
            "load the model with dtype=torch.float32"
        )
    if invariant and not path.invariant:
        raise ValueError(
            f"invariant is True but this {family} cannot be: llama-like models in float32 or bfloat16, with sizes that are "
            "multiples of 16, can, on a CPU where specdec.kernels.native.reason() is None; leave it False"
        )
    if how != "packed" and attention not in ("auto", "padded"):
        raise ValueError(
            f"attention is {attention!r} but {family} computes its own, on padded rows: leave it 'auto'"
        )
    if kv_dtype is not None and (how != "packed" or family not in SUPPORTED):
        why = "computes its own attention, in its own dtype"
        if how == "packed":
            why = "is not listed, and is compared with its own forward, which does not round"
        raise ValueError(f"kv_dtype is {kv_dtype} but {family} {why}: leave it None")
    if how != "packed" and page is not None:
        raise ValueError(
            f"page is {page} but {family} computes its own attention, on padded rows of slots: leave it None"
        )
    return path
