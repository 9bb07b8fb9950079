"""The forward of Llama-like blocks on a GPU in half precision, with one launch for what lies between two products (``kernels.pointwise``).

Beside its attention a block is seven products, two norms with the residual before them, one launch that turns queries and keys and stores
keys and values, and SwiGLU: 11 launches. Transformers' modules take one for every operator of these, and a captured step of a small batch
waits for each.

Same numbers as the modules up to rounding: what they round after every operator is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cache.slots import Slots
from specdec.forward.llama_eager import LlamaEager
from specdec.graphs.static import StaticMemo
from specdec.kernels.attention import AttentionPlan, attention
from specdec.kernels.pointwise import MOST, Place, add_norm, silu_mul, turn, why_not


class LlamaTriton(LlamaEager):
    """As ``LlamaEager``, for models on a GPU in float16 or bfloat16, where Triton is; without gradients."""

    @staticmethod
    def suits(model: Any, dtype: torch.dtype | None = None) -> bool:
        """Whether the model is one that this path computes."""
        found = {(p.device, p.dtype) for p in model.parameters()}
        if len(found) != 1:
            return False
        device, dtype = found.pop()
        if dtype is torch.float32 or why_not(device, dtype) is not None or not LlamaEager.suits(model, dtype):
            return False
        return model.config.hidden_size <= MOST and all(
            block.self_attn.head_dim in range(2, 513, 2) for block in model.model.layers
        )

    @property
    def usable(self) -> bool:
        return super().usable and not torch.is_grad_enabled()

    def forward(
        self,
        memo: Any,
        plan: AttentionPlan,
        ids: Tensor,
        positions: Tensor,
        keep: Any,
        caught: dict[int, list[Tensor]] | None = None,
    ) -> Tensor | None:
        """As ``LlamaEager.forward``."""
        x = F.embedding(ids, self.body.embed_tokens.weight)
        T, slots = len(ids), plan.slots_on(x.device)
        cos, sin = (t[0].contiguous() for t in self.body.rotary_emb(x, positions[None]))
        direct = type(memo).append in (Slots.append, StaticMemo.append)  # others do more than to store
        more: Tensor | None = None  # what the block before adds to x
        for number, b in enumerate(self.blocks):
            y = add_norm(x, more, b.before.weight, b.before.variance_epsilon)
            if caught and number in caught:
                caught[number].append(x.clone())
            q, k, v = (F.linear(y, p.weight, p.bias).view(T, -1, b.size) for p in (b.query, b.key, b.value))
            norms = None
            if b.query_norm is not None:
                norms = (b.query_norm.weight, b.key_norm.weight, b.query_norm.variance_epsilon)
            if direct:
                keys, values = memo.layers[b.layer]
                turn(q, k, cos, sin, norms=norms, value=v, place=Place(keys, values, slots))
            else:
                turn(q, k, cos, sin, norms=norms)
                keys, values = memo.append(b.layer, slots, *(t[None].transpose(1, 2) for t in (k, v)))
            seen = attention(
                q[None].transpose(1, 2),
                keys,
                values,
                plan,
                scale=b.scale,
                window=b.window,
                backend=self.backend,
            )
            out = F.linear(seen.reshape(T, -1), b.out.weight, b.out.bias)
            y = add_norm(x, out, b.after.weight, b.after.variance_epsilon)
            gate, up = F.linear(y, b.gate.weight, b.gate.bias), F.linear(y, b.up.weight, b.up.bias)
            more = F.linear(silu_mul(gate, up), b.down.weight, b.down.bias)
        if more is not None:
            x += more
        if caught and len(self.blocks) in caught:
            caught[len(self.blocks)].append(x)
        if keep is False:
            return None
        if keep is not None:
            x = x[keep]
        norm = self.body.norm
        y = add_norm(x.contiguous(), None, norm.weight, norm.variance_epsilon)
        return F.linear(y, self.head.weight, self.head.bias)
