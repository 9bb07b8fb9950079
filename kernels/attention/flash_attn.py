"""The flash-attn package, ``pip install flash-attn``: FlashAttention-2 with soft caps. CUDA only; ``flash`` says what it serves.

``flash_attn_with_kvcache`` reads our buffers in place: a sequence is a row (``cache_batch_idx``) from ``cache_leftpad`` to
``cache_seqlens``, or its pages (``block_table``, multiples of 256 slots). It wants equally many queries a sequence, so rows with as
many share a call. Rows of ``LONG`` queries or more are a call of ``flash_attn_varlen_func`` each, a kernel made for prompts; its
``cu_seqlens_k`` are lengths as well as starts, so it cannot read several of our rows at once.
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

LONG = 128

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
    if "groups" not in sequences.known:
        sequences.known["groups"] = _groups(sequences)
    groups, back = sequences.known["groups"]
    parts = []
    for group in groups:
        q = query if group.take is None else query.index_select(0, group.take)
        parts.append((_prompt if group.alone else _batch)(q, keys, values, group, settings))
    if back is None:
        return parts[0]
    out, lse = (torch.cat(p) for p in zip(*parts))
    return out.index_select(0, back), lse.index_select(0, back)


class _Group:
    """Sequences with ``count`` queries each that share a call, or one ``alone``; ``take``: their queries, ``None`` for all, in order."""

    def __init__(self, s: Sequences, which: np.ndarray, alone: bool):
        counts, rows, low, high = (a[which] for a in s.host)
        self.alone, self.n, self.count = alone, len(which), int(counts[0])
        self.row, self.begin, self.end = int(rows[0]), int(low[0]), int(high[0])  # of one alone
        self.from_zero, self.max_high = not low.any(), int(high.max())
        self.take: Tensor | None = None
        ends = np.array([0, self.count]), np.array([0, self.end - self.begin])
        self.rows, self.low, self.high, numbers, self.starts_q, self.starts_k = upload(
            [rows, low, high, which, *ends], s.rows.device
        )
        self.table = None if s.table is None else s.table.index_select(0, numbers)


def _groups(s: Sequences) -> tuple[list[_Group], Tensor | None]:
    """Which sequences share a call; ``back [T]``: where each packed query is in their outputs, ``None`` for one call of all."""
    counts, groups, places = s.host[0], [], []
    starts = np.concatenate([[0], np.cumsum(counts)])
    for count in np.unique(counts):
        same, alone = np.flatnonzero(counts == count), int(count) >= LONG
        for which in np.split(same, len(same)) if alone else [same]:
            groups.append(_Group(s, which, alone))
            places.append((starts[which][:, None] + np.arange(count)).reshape(-1))
    if len(groups) == 1:
        return groups, None
    *takes, back = upload([*places, np.argsort(np.concatenate(places))], s.rows.device, np.int64)
    for group, take in zip(groups, takes):
        group.take = take
    return groups, back


def _batch(
    query: Tensor, keys: Tensor, values: Tensor, group: _Group, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """``[n * count, Hq, D]`` and lse ``[n * count, Hq]``."""
    heads, size = query.shape[1:]
    where: dict[str, Any] = {"block_table": group.table}
    if group.table is None:
        end = group.max_high  # keys are split by what is given
        keys, values = keys[:, :end], values[:, :end]
        where = {"cache_batch_idx": group.rows, "cache_leftpad": None if group.from_zero else group.low}
    out, lse = package().flash_attn_with_kvcache(
        query.reshape(group.n, group.count, heads, size),
        keys,
        values,
        cache_seqlens=group.high,
        return_softmax_lse=True,
        **where,
        **settings,
    )
    return out.reshape(-1, heads, size), lse.transpose(1, 2).reshape(-1, heads)


def _prompt(
    query: Tensor, keys: Tensor, values: Tensor, group: _Group, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """``[count, Hq, D]`` and lse ``[count, Hq]`` of one row."""
    if group.table is None:
        at = slice(group.begin, group.end)
        keys, values = keys[group.row, at], values[group.row, at]
    out, lse, *_ = package().flash_attn_varlen_func(
        query,
        keys,
        values,
        group.starts_q,
        group.starts_k,
        group.count,
        group.end - group.begin,
        block_table=group.table,
        return_attn_probs=True,
        **settings,
    )
    return out, lse.transpose(0, 1)


_backend = Flash(_lacks, call)
refuses, attend, attend_with_lse = _backend.refuses, _backend.attend, _backend.attend_with_lse
