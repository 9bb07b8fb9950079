"""Run a model's forward on packed ``(1, T)`` tokens: no padding and no mask; the plan is passed to every attention layer.

Transformers looks up the attention function by name, and makes no mask for a name without a mask function. The function finds the plan of
the forward in ``CALL``, because some families do not pass a forward's keyword arguments on to their attention layers. With
``use_cache=False`` transformers' cache classes are not used.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec.cache.contract import KVStore
from specdec.configs import setting
from specdec.forward.contract import Caught, Forward, Keep
from specdec.forward.families import refuse
from specdec.forward.llama_c import LlamaC
from specdec.forward.llama_eager import LlamaEager
from specdec.forward.llama_triton import LlamaTriton
from specdec.forward.own_class import has_own_class, outside_inference_mode
from specdec.forward.taps import tapped
from specdec.kernels.attention import AttentionPlan, attention

ATTENTION = "specdec_slots"  # the name under which ``slot_attention`` is registered; it must not look like sdpa or flash


class Call(NamedTuple):
    """What the attention layers of one forward share."""

    plan: AttentionPlan
    store: KVStore
    backend: str


CALL: ContextVar[Call | None] = ContextVar("specdec.packed", default=None)  # each thread has its own


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
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: ``query [1, Hq, T, D]`` against the slots of the store in ``CALL`` -> ``[1, T, Hq, Dv]``."""
    call = CALL.get()
    if call is None or attention_mask is not None:
        raise RuntimeError(
            "this copy of the model belongs to an HFModel: call HFModel.score, or your own model"
        )
    layer: Any = module.layer_idx
    keys, values = call.store.append(layer, call.plan.slots_on(key.device), key, value)
    out = attention(
        query,
        keys,
        values,
        call.plan,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sink_logits=s_aux,
        backend=call.backend,
    )
    return out.contiguous(), None  # some families view it in another shape


AttentionInterface.register(ATTENTION, slot_attention)


def _nothing(*_: Any) -> None:
    pass


class Packed:
    """Passes the plan to every attention layer, which computes it with ``backend`` (``kernels.attention``)."""

    spare = 0
    trees = True
    concurrent = True  # several threads may call it at once

    def __init__(
        self,
        model: Any,
        backend: str = "auto",
        invariant: bool = False,
        modules: bool = False,
        bf16_weights: bool | None = False,
    ):
        """``modules``: call the model's own modules, even where a faster forward could compute the same."""
        attends = [m for m in model.modules() if setting(m, "layer_idx") is not None]
        if any(setting(m, "is_causal") is False for m in attends):
            raise refuse(model.config.model_type, "it has layers that attend in both directions")
        if backend == "cpu":  # as "auto", whose steps of few tokens run in C from ids to logits
            where = {p.device for p in model.parameters() if not p.is_cpu}
            if where:
                raise ValueError(
                    f"attention is 'cpu' and the model has weights on {where.pop()}: leave it 'auto', or move the model"
                )
            backend = "auto"
        model.set_attn_implementation(ATTENTION)
        for part in model.modules():  # packed ids have no padding, and the check for it waits for the device
            if setting(part, "warn_if_padding_and_no_attention_mask") is not None:
                part.warn_if_padding_and_no_attention_mask = _nothing
        self.model, self.body = model, model.base_model
        self.backend = backend
        self.own_class = has_own_class(model)
        self.lean: LlamaEager | None = None
        if modules:
            return
        if LlamaC.suits(model):
            self.lean = LlamaC(model, backend, invariant, bf16_weights)
        elif LlamaTriton.suits(model):
            self.lean = LlamaTriton(model, backend)
        elif LlamaEager.suits(model):
            self.lean = LlamaEager(model, backend)

    @property
    def invariant(self) -> bool:
        return self.lean is not None and self.lean.invariant

    @property
    def bf16_weights(self) -> bool:
        return self.lean is not None and self.lean.narrow is not None

    def check(self) -> None:
        """As ``Runner.check``."""
        if self.lean is not None:
            self.lean.check()

    def capturable(self) -> Forward | str:
        """As ``Runner.capturable``: graphs cannot capture C code, so PyTorch's operators run instead."""
        if self.invariant:
            return "invariant is True, which is computed in C, and graphs cannot capture C code"
        if not isinstance(self.lean, LlamaC):
            return self
        path = copy.copy(self)
        path.lean = LlamaEager(self.model, self.backend) if LlamaEager.suits(self.model) else None
        return path

    def forward(
        self,
        store: KVStore,
        plan: AttentionPlan,
        ids: Tensor,
        positions: Tensor,
        keep: Keep,
        caught: Caught = None,
    ) -> Tensor | None:
        """As ``Forward.forward``."""
        if self.lean is not None and self.lean.usable:
            return self.lean.forward(store, plan, ids, positions, keep, caught)
        wanted: dict[str, Any] = {} if keep is None or keep is False else {"logits_to_keep": keep}
        model = self.model
        if keep is False and (model._forward_pre_hooks or self.body._forward_pre_hooks):
            wanted = {"logits_to_keep": 1}  # the body alone would miss what they do
        elif keep is False:
            model = self.body
        before = CALL.set(Call(plan, store, self.backend))
        try:
            with tapped(self.model, caught, lambda hidden: hidden[0]), outside_inference_mode(self.own_class):
                out = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **wanted)
        finally:
            CALL.reset(before)
        return None if keep is False else out.logits[0]
