"""FlashAttention-2 as PyTorch brings it along: nothing to install, CUDA only (Dao, arXiv 2307.08691).

The operator is ``torch.nn.attention.varlen.varlen_attn`` from torch 2.12 on, and ``aten::_flash_attention_forward`` before; the
signatures say which. Keys are ``[total, Hkv, D]`` with *one* stride between slots. With ``seqused_k`` only the starts in
``cu_seq_k`` are read, in slots, and of the strides only the last has to be 1. That is enough to read our buffers in place, where
heads come before slots in memory: rows lie ``row_stride`` elements apart, a multiple of the stride between slots, so row b starts
at "slot" ``b * row_stride / slot_stride`` of a view whose heads overlap (``_flat``). Nothing is copied, and heads stay heads, so
that the kernel shares keys within a group of heads itself.

What the operator does, and what follows (flash_api.cpp, ``mha_varlen_fwd``):

- lse is ``[Hq, T]``, natural logarithms, and **+inf** for a query without keys; here it is -inf.
- Causal masks are aligned at the bottom right: the last query sees the last key.
- Only with ``max_q == 1``, no window and more query heads than key heads are heads folded into queries and keys split over the
  device; every sequence then has to have exactly one query. The recipes arrange for that.
- With pages (torch 2.12, multiples of 256 slots) a split result of several sequences is written to wrong places unless
  ``num_splits`` is 1 (pytorch issue 194167).
- A window of at least ``max_k`` is none, so ``max_k`` must not be below the longest sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.attention import flash_recipes
from specdec.kernels.attention.flash_recipes import Sequences
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
PAGE = 256  # slots of a page: a multiple of this

Varlen = Callable[..., tuple[Tensor, Tensor]]


def supports(
    query: Tensor, softcap: float | None, sink_logits: Tensor | None, plan: AttentionPlan | None = None
) -> str | None:
    """Why this backend cannot serve a call, or ``None``."""
    if softcap is not None:
        return "PyTorch's FlashAttention has no soft cap on scores"
    return device_lacks(query) or cannot(query, plan)


def fits(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach) -> str | None:
    """Why buffers like these cannot be read, or ``None``."""
    if plan.table is not None and not primitive()[1]:
        return "PyTorch's FlashAttention reads pages from torch 2.12 on"
    if plan.table is None and keys.shape[0] > 1:
        (row, slot), (other_row, other_slot) = keys.stride()[:2], values.stride()[:2]
        if not slot or not other_slot:  # tensors that were expanded
            return "it starts rows at a number of slots, and those of keys or values share their memory"
        if row % slot or row * other_slot != other_row * slot or keys.shape[0] * row // slot >= 2**31:
            return (
                f"it starts rows at a number of slots below 2**31, and those of keys are {row} elements apart and slots {slot} "
                f"(values: {other_row} and {other_slot})"
            )
    return unreadable(keys, values, plan, window)


def cannot(query: Tensor, plan: AttentionPlan | None) -> str | None:
    """What no FlashAttention kernel here does."""
    size = query.shape[-1]
    if torch.is_grad_enabled() and query.requires_grad:
        return "FlashAttention has no backward pass over slots: call it under torch.no_grad()"
    if query.dtype not in DTYPES:
        return f"FlashAttention computes float16 and bfloat16, not {str(query.dtype).removeprefix('torch.')}"
    if size % 8 or size > 256:
        return f"FlashAttention needs heads of a multiple of 8 up to 256, not {size}"
    if plan is not None and not plan.ordered:
        intervals = plan.intervals
        if intervals is None:
            return "FlashAttention takes no mask, and this plan says slot by slot what is seen"
        most = max(map(len, intervals))
        if most > flash_recipes.INTERVALS:
            return f"FlashAttention is called with up to {flash_recipes.INTERVALS} intervals a query, and this plan has {most}"
    if plan is not None and plan.table is not None and plan.page % PAGE:
        return f"FlashAttention needs pages of a multiple of {PAGE} slots, not {plan.page}"
    return None


def unreadable(keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach) -> str | None:
    """What no FlashAttention kernel here reads."""
    if keys.shape[-1] != values.shape[-1]:
        return (
            f"FlashAttention needs keys and values of one size, not {keys.shape[-1]} and {values.shape[-1]}"
        )
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        return "FlashAttention has no backward pass over slots: call it under torch.no_grad()"
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        return "FlashAttention needs keys and values that are contiguous in their last dimension"
    if not plan.ordered and window is not None:
        return "FlashAttention has no windows by position over intervals of slots"
    if plan.table is not None and plan.tree is not None and window is not None:
        return "FlashAttention has no windows by position over pages, which a tree in a windowed layer needs"
    return None


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


def refuses(
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
    return supports(query, softcap, sink_logits, plan) or fits(query, keys, values, plan, window)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``."""
    return attend_with_lse(query, keys, values, plan, scale, window, softcap, sink_logits)[0]


def attend_with_lse(
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
    return flash_recipes.attend_with_lse(call, query, keys, values, plan, scale, window, softcap, sink_logits)


def call(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: Sequences,
    scale: float,
    softcap: float | None,
    causal: bool,
    left: int,
) -> tuple[Tensor, Tensor]:
    """``flash_recipes.Call``."""
    s = sequences
    if s.table is None:
        k, rows = _flat(keys)
        v, _ = _flat(values)
        starts = s.known.get(rows)
        if starts is None:  # what follows the last start is never read
            starts = s.known[rows] = torch.cat([s.rows * rows + s.low, s.used[:1]])
    else:
        k, v = keys, values
        starts = s.known.get("pages")
        if starts is None:
            starts = s.known["pages"] = torch.nn.functional.pad(s.used.cumsum(0, dtype=torch.int32), (1, 0))
    out, lse = primitive()[0](
        query, k, v, s.starts, starts, s.max_count, s.max_used, s.used, s.table, scale, causal, left
    )
    lse = lse.transpose(0, 1)
    return out, lse.masked_fill(lse == float("inf"), float("-inf")) if s.blind else lse


def _flat(buffer: Tensor) -> tuple[Tensor, int]:
    """``[B, S, H, D]`` as ``[slots, H, D]`` in which row b starts at slot ``b * rows``; and ``rows``."""
    by_row, by_slot, by_head, _ = buffer.stride()
    B, S, H, D = buffer.shape
    rows = by_row // by_slot if B > 1 else 0
    view = buffer.as_strided(((B - 1) * rows + S, H, D), (by_slot, by_head, 1), buffer.storage_offset())
    return view, rows


@lru_cache(maxsize=1)
def primitive() -> tuple[Varlen, bool]:
    """The operator of this torch behind one signature, and whether it reads pages.

    Raises:
        ImportError: no operator with what is needed.
    """
    from torch.nn.attention import varlen

    wanted = {"return_aux", "scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
    if wanted <= inspect.signature(varlen.varlen_attn).parameters.keys():
        return public(varlen.varlen_attn, varlen.AuxRequest(lse=True)), True
    operator = torch.ops.aten._flash_attention_forward.default
    there = {argument.name for argument in operator._schema.arguments}
    if not {"scale", "window_size_left", "window_size_right", "seqused_k"} <= there:
        raise ImportError(
            f"torch {torch.__version__} has no FlashAttention with seqused_k: install torch 2.11 or later"
        )
    return private(operator), False


def public(varlen_attn: Callable[..., Any], aux: Any) -> Varlen:
    """``torch.nn.attention.varlen.varlen_attn`` as ``Varlen``."""

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        max_q: int,
        max_k: int,
        used: Tensor,
        table: Tensor | None,
        scale: float,
        causal: bool,
        left: int,
    ) -> tuple[Tensor, Tensor]:
        return varlen_attn(
            q,
            k,
            v,
            starts_q,
            starts_k,
            max_q,
            max_k,
            return_aux=aux,
            scale=scale,
            window_size=(left, 0) if causal else (-1, -1),
            enable_gqa=True,
            seqused_k=used,
            block_table=table,
            num_splits=None if table is None else 1,
        )

    return varlen


def private(operator: Callable[..., Any]) -> Varlen:
    """``aten::_flash_attention_forward`` as ``Varlen``; no pages."""

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        max_q: int,
        max_k: int,
        used: Tensor,
        table: Tensor | None,
        scale: float,
        causal: bool,
        left: int,
    ) -> tuple[Tensor, Tensor]:
        window = (left, 0) if causal else (-1, -1)
        out, lse, *_ = operator(
            q,
            k,
            v,
            starts_q,
            starts_k,
            max_q,
            max_k,
            0.0,
            causal and left < 0,
            False,
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
            seqused_k=used,
        )
        return out, lse

    return varlen
