"""The flash-attn package, ``pip install flash-attn``: FlashAttention-2 with soft caps. CUDA only; ``flash`` says what it serves.

Decoding is one call of ``flash_attn_with_kvcache``, which reads our buffers in place: a sequence is a row (``cache_batch_idx``) from
``cache_leftpad`` to ``cache_seqlens``, or its pages (``block_table``, multiples of 256 slots). Other rows are a call of
``flash_attn_varlen_func`` each, a kernel made for prompts: its ``cu_seqlens_k`` are lengths as well as starts, so it cannot read
several of our rows at once.
"""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention.flash import Flash, Sequences, upload
from specdec.kernels.attention.plan import AttentionPlan

_NEEDED = {
    "flash_attn_with_kvcache": "cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "return_softmax_lse",
    "flash_attn_varlen_func": "softmax_scale causal window_size softcap return_attn_probs block_table",
}


@lru_cache(maxsize=1)
def package() -> Any:
    """The module ``flash_attn``.

    Raises:
        ImportError: it is not installed, or too old.
    """
    try:
        module = importlib.import_module("flash_attn")
    except ImportError as error:
        raise ImportError(
            "flash-attn is not installed: pip install flash-attn (it is built from source and needs CUDA)"
        ) from error
    for name, wanted in _NEEDED.items():
        function = getattr(module, name, None)
        there = () if function is None else inspect.signature(function).parameters
        lacking = [argument for argument in wanted.split() if argument not in there]
        if lacking:
            version = getattr(module, "__version__", "of unknown version")
            raise ImportError(
                f"flash-attn {version} has no {name} with {', '.join(lacking)}: pip install -U 'flash-attn>=2.8'"
            )
    return module


def _lacks(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, softcap: float | None
) -> str | None:
    try:
        package()
    except ImportError as error:
        return str(error)
    return None


def call(
    query: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """``flash.Call``."""
    settings: dict[str, Any] = {
        "softmax_scale": scale,
        "softcap": softcap or 0.0,
        "causal": sequences.causal,
        "window_size": (sequences.left, 0) if sequences.left >= 0 else (-1, -1),
    }
    return (_decode if sequences.max_count == 1 else _prompts)(query, keys, values, sequences, settings)


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, s: Sequences, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    where: dict[str, Any] = {"block_table": s.table}
    if s.table is None:
        end = max(high for *_, high in s.host)  # keys are split by what is given
        keys, values = keys[:, :end], values[:, :end]
        where = {"cache_batch_idx": s.rows, "cache_leftpad": s.low if s.skips else None}
    out, lse = package().flash_attn_with_kvcache(
        query[:, None], keys, values, cache_seqlens=s.high, return_softmax_lse=True, **where, **settings
    )
    return out[:, 0], lse[:, :, 0]


def _prompts(
    query: Tensor, keys: Tensor, values: Tensor, s: Sequences, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if "ends" not in s.known:
        ends = np.array([[[0, count], [0, high - low]] for count, _, low, high in s.host])
        s.known["ends"] = upload([ends], query.device)[0]
    parts, t = [], 0
    for n, (count, row, low, high) in enumerate(s.host):
        k, v, table = keys, values, None if s.table is None else s.table[n : n + 1]
        if table is None:
            k, v = keys[row, low:high], values[row, low:high]
        out, lse, *_ = package().flash_attn_varlen_func(
            query[t : t + count],
            k,
            v,
            *s.known["ends"][n],
            count,
            high - low,
            block_table=table,
            return_attn_probs=True,
            **settings,
        )
        parts.append((out, lse.transpose(0, 1)))
        t += count
    out, lse = (torch.cat(p) for p in zip(*parts))
    return out, lse


_backend = Flash(_lacks, call)
refuses, attend, attend_with_lse = _backend.refuses, _backend.attend, _backend.attend_with_lse
