"""The forward of llama-like models: transformers' operators and parameters without its Python in between.

Dispatch is most of a small model's step. For float32 models built of plain modules this path gives the same bits as
transformers' own forward in a third less time at batch 1; everything else goes through transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.forward.block import CLASSES, EAGER, Angles, Operations, block_of, eager_angles, run_block
from specdec.forward.contract import Caught, Keep
from specdec.kernels.attention import AttentionPlan, attention
from specdec.kernels.native.narrow import Narrow
from specdec.kernels.pointwise import Place


class LlamaEager:
    """A ``Forward`` for a model that ``suits``; ``backend``: of ``kernels.attention``."""

    ops: Operations = EAGER
    invariant = False
    narrow: Narrow | None = None  # bfloat16 copies of the weights

    def __init__(self, model: Any, backend: str = "auto"):
        self.backend = backend
        self.head, self.body = model.lm_head, model.model
        self.layers = list(model.model.layers)
        self.blocks = [block_of(layer, model) for layer in self.layers]

    @staticmethod
    def suits(model: Any, dtype: torch.dtype = torch.float32) -> bool:
        """Whether this path computes exactly what the model's own forward does, for a model in ``dtype``."""
        if type(model) not in CLASSES or model.config.hidden_act != "silu":
            return False
        plain = {"Linear", "Embedding", "ModuleList", "SiLU", "SiLUActivation"}
        family = type(model).__name__.removesuffix("ForCausalLM")
        own = {
            family + part for part in ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
        }
        own |= {family + "RotaryEmbedding"}
        return all(
            type(m).__name__ in plain | own
            and type(m).__module__.partition(".")[0] in ("torch", "transformers")
            and not (m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m))
            for m in model.modules()
        ) and all(p.dtype == dtype and type(p.data) is Tensor for p in model.parameters())

    @property
    def usable(self) -> bool:
        """False while a block has hooks, because the blocks' own modules are not called."""
        return not any(layer._forward_hooks or layer._forward_pre_hooks for layer in self.layers)

    def check(self) -> None:
        """As ``Runner.check``."""

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
        x = F.embedding(ids, self.body.embed_tokens.weight)
        return self.run(self.ops, x, self.angles(x, positions, plan), store, plan, keep, caught)

    def angles(self, x: Tensor, positions: Tensor, plan: AttentionPlan) -> Angles:
        """Of ``positions [T]``, in the dtype of ``x``; ``plan``: of the same tokens."""
        return eager_angles(*(t[0] for t in self.body.rotary_emb(x, positions[None])))

    def run(
        self,
        ops: Operations,
        x: Tensor,
        angles: Angles,
        store: KVStore,
        plan: AttentionPlan,
        keep: Keep,
        caught: Caught,
    ) -> Tensor | None:
        """``forward`` of embedded tokens ``x [T, E]`` with a table of operations."""
        slots = plan.slots_on(x.device)
        direct = store.direct if ops.stores else None
        more: Tensor | None = None  # what the previous block adds to x
        for number, b in enumerate(self.blocks):
            x, y = ops.add_norm(x, more, b.before)
            if caught and number in caught:
                caught[number].append(x)
            place = None if direct is None else Place(*direct[b.layer], slots)

            def attend(query: Tensor, key: Tensor, value: Tensor, b: Any = b, place: Any = place) -> Tensor:
                q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
                keys, values = store.append(b.layer, slots, k, v) if place is None else place[:2]
                seen = attention(q, keys, values, plan, scale=b.scale, window=b.window, backend=self.backend)
                return seen[0]

            x, more = run_block(ops, b, x, y, angles, attend, place)
        x = x if more is None else x + more
        if caught and len(self.blocks) in caught:
            caught[len(self.blocks)].append(x)
        if keep is False:
            return None
        _, y = ops.add_norm((x if keep is None else x[keep]).contiguous(), None, self.body.norm)
        (logits,) = ops.products(y, self.head)
        return logits
