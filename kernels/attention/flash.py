"""Attention by FlashAttention kernels: one call a layer, in which every row of the plan is a sequence (Dao, arXiv 2307.08691).

PyTorch's operators (``torch_flash``) and the flash-attn package (``flash_attn``) are called in different ways, to compute the same:

- **Rows of several queries**, prompts above all, take one causal call over rows of any length. The mask is aligned at the bottom
  right: a row's last query sees all of its keys. A sliding window bounds it on the left.
- **Decoding**, one query a row, needs no mask: a query sees all slots of an interval, and a window only moves where that begins.
  These kernels split keys over the device only for such calls.
- **A sink logit s** takes part of the weight: ``out * sigmoid(lse - s)``, and ``lse`` becomes ``logaddexp(lse, s)``.

Masks of these kernels know neither trees, nor slots in any order, nor first positions beside a window: such calls are refused, and
Triton or ``packed`` serves them. Slots that no query of a row sees are never read, except below a window in pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, Streaming, binding
from specdec.kernels.device import to_device

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
PAGE = 256  # slots of a page: a multiple of this


class Sequences:
    """The rows of a plan as sequences: int32 tensors on the device of a call, and what is needed of them on the host.

    Attributes:
        starts: ``[N + 1]`` first query of each, packed. rows: ``[N]`` buffer row of each. low, high: ``[N]`` its keys are slots
            ``low:high``. used: ``[N]`` how many these are. table: ``[N, P]`` its pages; ``None`` for slots. ``low`` is 0 in pages.
        host: queries, row, low and high of each. max_count, max_used: queries and keys of the largest. skips: whether any ``low``
            is not 0.
        causal: whether the last query of a sequence sees all of its keys, the one before it one less, and so on; otherwise each
            has one query, which sees all. left: how many keys below its own a query sees at most, -1 for all.
        known: what a backend remembers about them.
    """

    def __init__(self, plan: AttentionPlan, window: int | None, device: torch.device):
        counts, first, high = (np.asarray(n) for n in (plan.counts, plan.first, plan.length))
        paged = plan.table is not None
        low = np.zeros_like(first) if window is None or paged else np.maximum(0, first - window + 1)
        starts, rows = np.concatenate([[0], np.cumsum(counts)]), np.asarray(plan.rows)
        self.host = list(zip(plan.counts, plan.rows, low.tolist(), plan.length))
        self.starts, self.rows, self.low, self.high, self.used = upload(
            [starts, rows, low, high, high - low], device
        )
        self.table = None if plan.table is None else upload([_pages(plan.table)], device)[0]
        self.max_count, self.max_used, self.skips = max(plan.counts), int((high - low).max()), bool(low.any())
        self.causal = self.max_count > 1 or (paged and window is not None)
        self.left = window - 1 if self.causal and window is not None else -1
        self.known: dict[Any, Any] = {}


class Call(Protocol):
    """One FlashAttention call: ``query [T, Hq, D]``, packed, over the buffers that a layer was given.

    Returns ``[T, Hq, D]`` and the log-sum-exp ``[T, Hq]``. Every query sees a slot.
    """

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sequences: Sequences,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Flash:
    """``contract.Backend`` by one way to call FlashAttention; ``lacks(query, keys, values, plan, softcap)``: why that way cannot serve a call."""

    lacks: Callable[[Tensor, Tensor, Tensor, AttentionPlan, float | None], str | None]
    call: Call

    def refuses(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        window: Reach = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        lse: bool = False,
    ) -> str | None:
        """As ``contract.Backend.refuses``."""
        return (
            device_lacks(query)
            or cannot(query, keys, values, plan, window)
            or self.lacks(query, keys, values, plan, softcap)
        )

    def attend(self, *call: Any) -> Tensor:
        """Arguments and result as for ``api.attention``."""
        return self.attend_with_lse(*call)[0]

    def attend_with_lse(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: Reach = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores, a sink logit included."""
        window = binding(window, max(plan.length))
        assert not isinstance(window, Streaming)
        key = ("flash", window, query.device)
        sequences = plan.known.get(key)
        if sequences is None:
            sequences = plan.known[key] = Sequences(plan, window, query.device)
        q = query[0].transpose(0, 1)
        out, lse = self.call(
            q if q.stride(-1) == 1 else q.contiguous(), keys, values, sequences, scale, softcap
        )
        if sink_logits is not None:
            logit = sink_logits.to(lse.dtype)
            out = out * torch.sigmoid(lse - logit)[..., None]
            lse = torch.logaddexp(lse, logit)
        return out.to(query.dtype)[None], lse[None]


def device_lacks(query: Tensor) -> str | None:
    """Why there is no kernel where the query lives."""
    if not query.is_cuda:
        return f"FlashAttention needs CUDA tensors, and the query is on {query.device.type}"
    if torch.version.hip is not None:
        return "it is written for FlashAttention of CUDA, not of ROCm"
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return "FlashAttention needs a GPU of compute capability 8.0 or more"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch has no FlashAttention"
    return None


def cannot(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach) -> str | None:
    """What no FlashAttention kernel does."""
    size = query.shape[-1]
    if not plan.ordered:
        return "FlashAttention takes no mask, and this plan says slot by slot what is seen"
    if plan.tree is not None:
        return "FlashAttention has causal masks only, and this plan has a tree"
    if isinstance(binding(window, max(plan.length)), Streaming):
        return "FlashAttention has no first positions beside a window"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, keys, values)):
        return "FlashAttention has no backward pass over slots: call it under torch.no_grad()"
    if query.dtype not in DTYPES:
        return f"FlashAttention computes float16 and bfloat16, not {str(query.dtype).removeprefix('torch.')}"
    if size % 8 or size > 256:
        return f"FlashAttention needs heads of a multiple of 8 up to 256, not {size}"
    if plan.table is not None and plan.page % PAGE:
        return f"FlashAttention needs pages of a multiple of {PAGE} slots, not {plan.page}"
    if size != values.shape[-1]:
        return f"FlashAttention needs keys and values of one size, not {size} and {values.shape[-1]}"
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        return "FlashAttention needs keys and values that are contiguous in their last dimension"
    return None


def _pages(table: Sequence[Sequence[int]]) -> np.ndarray:
    """``[R, P]`` pages of each row, 0 beyond its last."""
    made = np.zeros((len(table), max(map(len, table))), dtype=np.int64)
    for row, own in zip(made, table):
        row[: len(own)] = own
    return made


def upload(arrays: Sequence[np.ndarray], device: torch.device, dtype: Any = np.int32) -> list[Tensor]:
    """All in one copy."""
    flat = np.concatenate([np.asarray(a, dtype=dtype).reshape(-1) for a in arrays])
    parts = to_device(torch.from_numpy(flat), device).split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays)]
