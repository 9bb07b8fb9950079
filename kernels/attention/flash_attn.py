"""The flash-attn package, ``pip install flash-attn``: FlashAttention-2 with soft caps (Dao, arXiv 2307.08691). CUDA only.

``flash_attn_with_kvcache`` reads our buffers in place: a sequence is a row (``cache_batch_idx``) from ``cache_leftpad`` to
``cache_seqlens``, or its pages (``block_table``, multiples of 256 slots). It wants equally many queries a sequence. Where they
differ, rows with about as many are padded *in front*: masks are aligned at the bottom right, so what is padded is dropped
and nothing else changes. Rows of a prompt (``LONG`` queries or more) are a call of ``flash_attn_varlen_func`` each, a kernel
made for many queries; its ``cu_seqlens_k`` are lengths too, which is why it cannot read several of our rows at once.
"""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention import flash_recipes, torch_flash
from specdec.kernels.attention.flash_recipes import Sequences, by_count, upload
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach
from specdec.kernels.device import to_device

LONG = 128

_NEEDED = {
    "flash_attn_with_kvcache": "cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "return_softmax_lse",
    "flash_attn_varlen_func": "softmax_scale causal window_size softcap return_attn_probs block_table",
}


def supports(
    query: Tensor, softcap: float | None, sinks: Tensor | None, plan: AttentionPlan | None = None
) -> str | None:
    """Why this backend cannot serve a call, or ``None``."""
    try:
        package()
    except ImportError as error:
        return str(error)
    return torch_flash.device_lacks(query) or torch_flash.cannot(query, plan)


def fits(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach) -> str | None:
    """Why buffers like these cannot be read, or ``None``."""
    return torch_flash.unreadable(keys, values, plan, window)


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


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``."""
    return attend_with_lse(query, keys, values, plan, scale, window, softcap, sinks)[0]


def attend_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores, a sink logit included."""
    return flash_recipes.attend_with_lse(call, query, keys, values, plan, scale, window, softcap, sinks)


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
    settings: dict[str, Any] = {
        "softmax_scale": scale,
        "softcap": softcap or 0.0,
        "causal": causal,
        "window_size": (left, 0) if causal and left >= 0 else (-1, -1),
    }
    groups, back = _groups(sequences)
    parts = []
    for group in groups:
        if group.alone:
            parts.append(_prompt(query, keys, values, group, settings))
        else:
            parts.append(_batch(query, keys, values, group, settings))
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(p) for p in zip(*parts))
    if back is not None:
        out, lse = out.index_select(0, back), lse.index_select(0, back)
    return out, lse.masked_fill(lse == float("inf"), float("-inf")) if sequences.blind else lse


class _Group:
    """Sequences of one call: ``take [n * count]`` their packed queries, padded in front; ``None``: all, in order."""

    def __init__(self, sequences: Sequences, chosen: np.ndarray, count: int, alone: bool):
        self.alone, self.count, self.n = alone, count, len(chosen)
        rows, _, low, high = (a[chosen] for a in sequences.host)
        device = sequences.rows.device
        self.rows, self.low, self.high = upload([rows, low, high], device)
        self.from_zero, self.max_high = not low.any(), int(high.max())
        self.table = (
            None if sequences.table is None else sequences.table[to_device(torch.from_numpy(chosen), device)]
        )
        self.row = int(rows[0])
        self.take: Tensor | None = None
        if alone:
            self.starts_q, self.starts_k = upload(
                [np.array([0, count]), np.array([0, self.max_high])], device
            )


def _groups(s: Sequences) -> tuple[list[_Group], Tensor | None]:
    """Which sequences share a call; ``back [T]``: where each packed query is in their outputs."""
    if "groups" in s.known:
        return s.known["groups"]
    counts = s.host[1]
    starts = np.concatenate([[0], np.cumsum(counts)])
    groups, places, back, at = [], [], np.zeros(int(starts[-1]), dtype=np.int64), 0
    for same in by_count(counts):
        count = int(counts[same].max())
        # An interval that does not begin at slot 0 is not what varlen_func reads, but such are not prompts.
        alone = count >= LONG and s.from_zero
        for chosen in np.split(same, len(same)) if alone else [same]:
            count = int(counts[chosen].max())
            groups.append(_Group(s, chosen, count, alone))
            inside = np.arange(count) - (count - counts[chosen])[:, None]  # [n, count], negative in front
            take = starts[chosen][:, None] + inside.clip(0)
            places.append(take.reshape(-1))
            real = (inside >= 0).reshape(-1)
            back[places[-1][real]] = at + np.flatnonzero(real)
            at += take.size
    order = np.concatenate(places)
    made: tuple[list[_Group], Tensor | None] = groups, None
    if len(order) != len(back) or (order != np.arange(len(back))).any() or len(groups) > 1:
        *takes, there = upload([*places, back], s.rows.device, np.int64)
        for group, take in zip(groups, takes):
            group.take = take
        made = groups, there
    s.known["groups"] = made
    return made


def _batch(
    query: Tensor, keys: Tensor, values: Tensor, group: _Group, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """``[n * count, Hq, D]`` and lse ``[n * count, Hq]``."""
    q = query if group.take is None else query.index_select(0, group.take)
    heads, size = q.shape[1:]
    if group.table is None:
        keys, values = (
            keys[:, : group.max_high],
            values[:, : group.max_high],
        )  # keys are split by what is given
        where = {"cache_batch_idx": group.rows, "cache_leftpad": None if group.from_zero else group.low}
    else:
        where = {"block_table": group.table}
    out, lse = package().flash_attn_with_kvcache(
        q.reshape(group.n, group.count, heads, size),
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
    q = query if group.take is None else query.index_select(0, group.take)
    if group.table is None:
        keys, values = keys[group.row, : group.max_high], values[group.row, : group.max_high]
    out, lse, *_ = package().flash_attn_varlen_func(
        q,
        keys,
        values,
        group.starts_q,
        group.starts_k,
        group.count,
        group.max_high,
        block_table=group.table,
        return_attn_probs=True,
        **settings,
    )
    return out, lse.transpose(0, 1)
