"""FlashAttention-2 as PyTorch brings it along: nothing to install, CUDA only; ``flash`` says what it serves.

The operator is ``torch.nn.attention.varlen.varlen_attn`` from torch 2.12 on, and ``aten::_flash_attention_forward`` before; the
signatures say which. Keys are ``[total, Hkv, D]`` with *one* stride between slots. With ``seqused_k`` only the starts in
``cu_seq_k`` are read, in slots, and of the strides only the last has to be 1. That is enough to read our buffers in place, where
heads come before slots in memory: rows lie ``row_stride`` elements apart, a multiple of the stride between slots, so row b starts
at "slot" ``b * row_stride / slot_stride`` of a view whose heads overlap (``_flat``). Nothing is copied, and heads stay heads, so
that the kernel shares keys within a group of heads itself.

What the operator does, and what follows (flash_api.cpp, ``mha_varlen_fwd``):

- lse is ``[Hq, T]``, natural logarithms.
- Causal masks are aligned at the bottom right: the last query sees the last key.
- Only with ``max_q == 1``, no window and more query heads than key heads are heads folded into queries and keys split over the
  device; every sequence then has to have exactly one query, as in decoding.
- With pages (torch 2.12, multiples of 256 slots) a split result of several sequences is written to wrong places unless
  ``num_splits`` is 1 (pytorch issue 194167).
- A window of at least ``max_k`` is none, so ``max_k`` must not be below the longest sequence.
- Where there is no window, ``private`` gives ``None``, since FlashAttention-4, which can take the operator's place
  (``activate_flash_attention_impl``), reads (-1, 0) as a window. ``varlen_attn`` has no other way to ask for a causal mask without one, so FlashAttention-4
  must not be activated there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.attention.flash import Flash, Sequences
from specdec.kernels.attention.plan import AttentionPlan

Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Sequences, float], tuple[Tensor, Tensor]]


def _lacks(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, softcap: float | None
) -> str | None:
    if softcap is not None:
        return "PyTorch's FlashAttention has no soft cap on scores"
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
    return None


def call(
    query: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """``flash.Call``."""
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
    out, lse = primitive()[0](query, k, v, starts, s, scale)
    return out, lse.transpose(0, 1)


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

    def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, s: Sequences, scale: float) -> Any:
        return varlen_attn(
            *(q, k, v, s.starts, starts, s.max_count, s.max_used),
            return_aux=aux,
            scale=scale,
            window_size=(s.left, 0) if s.causal else (-1, -1),
            enable_gqa=True,
            seqused_k=s.used,
            block_table=s.table,
            num_splits=None if s.table is None else 1,
        )

    return varlen


def private(operator: Callable[..., Any]) -> Varlen:
    """``aten::_flash_attention_forward`` as ``Varlen``; no pages."""

    def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, s: Sequences, scale: float) -> Any:
        left, right = (s.left, 0) if s.left >= 0 else (None, None)
        out, lse, *_ = operator(
            *(q, k, v, s.starts, starts, s.max_count, s.max_used, 0.0, s.causal and left is None, False),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
            seqused_k=s.used,
        )
        return out, lse

    return varlen


_backend = Flash(_lacks, call)
refuses, attend, attend_with_lse = _backend.refuses, _backend.attend, _backend.attend_with_lse
