"""How a draft's logits are computed over whole sequences: the function that training differentiates and τ is estimated from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from specdec.training.passes import k_pass
from specdec.training.states import Batch


@dataclass(frozen=True)
class KPass:
    """SPIRe's k passes (``passes.k_pass``) for a ``SpireModel``: blocks of ``k`` positions. Needs the target's inputs."""

    k: int = 4

    def layers(self, draft: Any) -> tuple[int, ...]:
        """The target's layers whose inputs ``Batch.inputs`` must hold."""
        return draft.layers

    def __call__(self, draft: Any, batch: Batch) -> Tensor:
        """Logits ``[B, T, V]`` after the first T positions, T the largest multiple of k."""
        return k_pass(draft, batch.tokens[:, :-1], batch.inputs, self.k)


@dataclass(frozen=True)
class Parallel:
    """The ordinary forward of a transformers causal LM; with ``window``, every layer sees ``sinks`` first positions and that many
    last ones, itself included (the control "windowed vanilla")."""

    window: int | None = None
    sinks: int = 1

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window is {self.window}: a query must see at least itself (window=1), or None for all"
            )

    def layers(self, draft: Any) -> tuple[int, ...]:
        return ()

    def __call__(self, draft: Any, batch: Batch) -> Tensor:
        """Logits ``[B, L, V]`` after every position."""
        tokens = batch.tokens[:, :-1]
        before = draft.config._attn_implementation
        draft.set_attn_implementation("specdec_band")
        try:  # the draft's own generate must find its own attention again
            made = draft.base_model(input_ids=tokens, use_cache=False, band=(self.sinks, self.window))
        finally:
            draft.set_attn_implementation(before)
        head = draft.get_output_embeddings()
        return F.linear(made.last_hidden_state, head.weight, head.bias)


def band_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    band: tuple[int, int | None] = (0, None),
    block: int = 128,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention over sinks and a window, one block of queries at a time against the keys that it may see.

    Plain matrix products: PyTorch's fused attention has a slow backward on CPUs in bf16. ``query [B, Hq, L, D]``.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(
            "a draft with a soft cap on scores or with sink logits cannot be trained here: use a llama-like one"
        )
    sinks, window = band
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    L = query.shape[2]
    query, key = query * (scaling or query.shape[-1] ** -0.5), key.transpose(2, 3)
    block = block if window is not None else 256
    outputs = []
    for start in range(0, L, block):
        stop = min(start + block, L)
        low = 0 if window is None else max(0, start - window + 1)
        at, q = (
            torch.arange(low, stop, device=query.device),
            torch.arange(start, stop, device=query.device)[:, None],
        )
        keys, values, seen = key[..., low:stop], value[:, :, low:stop], at <= q
        if window is not None:
            seen = seen & ((at > q - window) | (at < sinks))
        if low and sinks:  # sinks that the band does not reach
            far = min(sinks, low)
            keys, values = torch.cat([key[..., :far], keys], -1), torch.cat([value[:, :, :far], values], 2)
            seen = F.pad(seen, (far, 0), value=True)
        weights = (query[:, :, start:stop] @ keys).masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append(weights @ values)
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register("specdec_band", band_attention)
