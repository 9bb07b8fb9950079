"""Run a model's forward on packed ``(1, T)`` tokens: no padding and no mask; the plan travels to every attention layer.

Transformers hands extra keyword arguments of a forward to the attention function that is registered by name, and makes no mask
for a name that it has no mask function for. With ``use_cache=False`` nothing depends on its cache classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec.forward.families import refuse
from specdec.forward.llama_c import LlamaC
from specdec.forward.llama_eager import LlamaEager
from specdec.forward.llama_triton import LlamaTriton
from specdec.forward.taps import tapped
from specdec.kernels.attention import AttentionPlan, attention

ATTENTION = "specdec_slots"  # the name under which ``slot_attention`` is registered; it must not look like sdpa or flash


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    plan: AttentionPlan | None = None,
    memo: Any = None,
    backend: str = "auto",
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: ``query [1, Hq, T, D]`` against the slots of ``memo`` -> ``[1, T, Hq, Dv]``."""
    if plan is None or attention_mask is not None:
        raise RuntimeError(
            "this copy of the model belongs to an HFModel: call HFModel.score, or your own model"
        )
    keys, values = memo.append(module.layer_idx, plan.slots_on(key.device), key, value)
    out = attention(
        query,
        keys,
        values,
        plan,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        backend=backend,
    )
    return out, None


AttentionInterface.register(ATTENTION, slot_attention)


def _nothing(*_: Any) -> None:
    pass


class Packed:
    """No padding and no mask: the plan travels to every attention layer, which computes it by ``backend`` (``kernels.attention``)."""

    spare = 0
    trees = True
    concurrent = True  # several threads may call it at once

    def __init__(
        self,
        model: Any,
        backend: str = "auto",
        invariant: bool = False,
        modules: bool = False,
        bf16_weights: bool = False,
    ):
        """``modules``: call the model's own, even where their arithmetic could be done without them."""
        if any(getattr(m, "is_causal", True) is False for m in model.modules() if hasattr(m, "layer_idx")):
            raise refuse(model.config.model_type, "it has layers that attend in both directions")
        if backend == "cpu":  # as "auto" there, whose steps of few tokens are C from ids to logits
            where = {p.device for p in model.parameters() if not p.is_cpu}
            if where:
                raise ValueError(
                    f"attention is 'cpu' and the model has weights on {where.pop()}: leave it 'auto', or move the model"
                )
            backend = "auto"
        model.set_attn_implementation(ATTENTION)
        for part in model.modules():  # packed ids have no padding, and looking for it waits for the device
            if hasattr(part, "warn_if_padding_and_no_attention_mask"):
                part.warn_if_padding_and_no_attention_mask = _nothing
        self.model, self.body = model, model.base_model
        self.backend = backend
        self.lean: LlamaEager | None = None
        if modules:
            return
        if LlamaC.suits(model):
            self.lean = LlamaC(model, backend, invariant, bf16_weights)
        elif LlamaTriton.suits(model):
            self.lean = LlamaTriton(model, backend)
        elif LlamaEager.suits(model):
            self.lean = LlamaEager(model, backend)

    def forward(
        self,
        memo: Any,
        plan: AttentionPlan,
        ids: Tensor,
        positions: Tensor,
        keep: Any,
        caught: dict[int, list[Tensor]] | None = None,
    ) -> Tensor | None:
        """PackedBatch packed ``ids [T]`` at ``positions [T]``.

        Args:
            keep: which of the T tokens' logits are wanted: a tensor of indices, ``None`` for all, ``False`` for none.
            caught: layer -> list, to which its activations ``[T, E]`` are added (``taps.tapped``).
        Returns:
            ``[K, V]``, or ``None`` when none are wanted.
        """
        if self.lean is not None and self.lean.usable:
            return self.lean.forward(memo, plan, ids, positions, keep, caught)
        wanted: dict[str, Any] = {} if keep is None or keep is False else {"logits_to_keep": keep}
        model = self.body if keep is False else self.model
        with tapped(self.model, caught, lambda hidden: hidden[0]):
            out = model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                plan=plan,
                memo=memo,
                backend=self.backend,
                **wanted,
            )
        return None if keep is False else out.logits[0]
