"""Run a model's forward on padded ``[R, q]`` rows with a 4-D mask, for families whose attention cannot be replaced.

An object in place of transformers' cache writes into the same slots, and a float mask says what each query sees. Padding goes to a
spare slot at the end of each row, which is never read.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec.cache.contract import KVStore
from specdec.configs import cache_name, setting
from specdec.forward.contract import Caught, Keep
from specdec.forward.families import refuse
from specdec.forward.own_class import has_own_class, outside_inference_mode
from specdec.forward.taps import tapped
from specdec.kernels.attention.plan import AttentionPlan, Segment


class Padded:
    """``[R, q]`` rows, padded at the end, and a 4-D mask; for families without a replaceable attention."""

    spare = 1
    concurrent = True  # the state of a call is in ``_CALL``
    invariant = bf16_weights = False

    def __init__(self, model: Any, trees: bool):
        self.model, self.body, self.trees = model, model.base_model, trees
        self.memory, self.own_class = cache_name(model), has_own_class(model)
        if any("Flash" in type(m).__name__ for m in model.modules()):
            raise refuse(
                model.config.model_type,
                "flash attention takes no mask; load it with attn_implementation='eager'",
            )
        for part in model.modules():
            if setting(part, "config") is not None:
                part.config._attn_implementation_internal = "eager"
        self.window: int | None = None
        if model.config.model_type == "gpt_neo":
            self._open_gpt_neo()

    def check(self) -> None:
        """As ``Runner.check``; no weights are copied."""

    def capturable(self) -> str:
        """As ``Runner.capturable``."""
        return "this family runs padded, with masks made on the host"

    def _open_gpt_neo(self) -> None:
        """GPT-Neo slices its own causal and local masks by slot: replace them with masks by position."""
        self.window = self.model.config.window_size
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 2**24, 2**24)  # one byte
        for block in self.body.h:
            block.attn.attention.bias = everything.to(block.attn.attention.bias.device)
            if block.attn.attention_type == "local":
                block.attn.register_forward_pre_hook(self._local, with_kwargs=True)

    def _local(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": _CALL.get().mask(self.window)}

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
        rows, first, counts = (np.array(a) for a in (plan.rows, plan.first, plan.counts))
        R, q = len(rows), int(counts.max())
        column = np.arange(q)
        live = column < counts[:, None]
        last = counts.cumsum()[:, None]
        packed = np.minimum(last - counts[:, None] + column, last - 1)  # padding repeats the row's last token
        slot = np.where(live, first[:, None] + column, plan.capacity - 1) + rows[:, None] * plan.capacity
        call = _Call(plan, Segment(0, R, 0, 0, q, max(plan.length)), self.model.dtype, ids.device)
        there = tuple(torch.from_numpy(i).to(ids.device) for i in live.nonzero())
        at = torch.from_numpy(packed).to(ids.device)
        slots = _Slots(store, plan, torch.from_numpy(slot.reshape(-1)).to(ids.device))
        wanted: dict[str, Any] = {self.memory: slots}
        model, pick = self.model, there
        if keep is False and (model._forward_pre_hooks or self.body._forward_pre_hooks):
            wanted["logits_to_keep"] = 1  # the body alone would miss what they do
        elif keep is False:
            model = self.body
        elif keep is not None:
            r, c = (i[keep] for i in there)
            columns, c = torch.unique(c, return_inverse=True)
            wanted["logits_to_keep"], pick = columns, (r, c)
        before = _CALL.set(call)
        try:
            with (
                tapped(self.model, caught, lambda hidden: hidden[there]),
                outside_inference_mode(self.own_class),
            ):
                out = model(
                    input_ids=ids[at],
                    position_ids=positions[at],
                    attention_mask=call.mask(None),
                    use_cache=True,
                    **wanted,
                )
        finally:
            _CALL.reset(before)
        return None if keep is False else out.logits[pick]


class _Call:
    """The masks of one call, made when a layer first asks for them."""

    def __init__(self, plan: AttentionPlan, segment: Segment, dtype: torch.dtype, device: torch.device):
        self.plan, self.segment, self.dtype, self.device = plan, segment, dtype, device
        self.masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """``[R, 1, q, S']`` to be added to scores. It is finite, because some families divide it afterwards."""
        if window not in self.masks:
            seen = torch.from_numpy(self.plan.visible(self.segment, window)[:, None])
            low = torch.finfo(self.dtype).min
            made = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, low)
            self.masks[window] = made.to(self.device)
        return self.masks[window]


_CALL: ContextVar[_Call] = ContextVar("specdec.padded")  # each thread has its own


class _Slots(Cache):
    """Stands in for the model's cache: writes go to slots, which the model sees up to the end of the longest row."""

    def __init__(self, store: KVStore, plan: AttentionPlan, slots: Tensor):
        super().__init__(layers=[])
        self.store, self.slots = store, slots
        self.rows, self.high = torch.tensor(plan.rows), max(plan.length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # [1, H, R * q, D]
        key, value = (t.transpose(0, 1).flatten(1, 2)[None] for t in (key_states, value_states))
        buffers = self.store.append(layer_idx, self.slots.to(key.device), key, value)
        whole = len(self.rows) == buffers[0].shape[0]  # rows ascend, so these are all rows
        seen = [(b if whole else b[self.rows.to(b.device)])[:, : self.high].transpose(1, 2) for b in buffers]
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given
