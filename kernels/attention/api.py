"""Attention of packed ragged queries over KV slots, by a backend chosen for the call or by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from specdec.kernels.attention.choice import (
    BACKENDS,
    EIGHT_BITS,
    UNORDERED,
    available,
    check,
    choose,
    explain,
    register,
    why_not,
)
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, Streaming, reach, split
from specdec.kernels.float8 import DTYPES

__all__ = ["BACKENDS", "attention", "available", "check", "choose", "explain", "register"]


@overload
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    initial: int = 0,
    backend: str | None = None,
    lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    initial: int = 0,
    backend: str | None = None,
    lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    initial: int = 0,
    backend: str | None = None,
    lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each packed query over the slots that it sees; the new keys and values must be in their slots already.

    Args:
        query: ``[1, Hq, T, D]``. keys: ``[B, S, Hkv, D]`` and values: ``[B, S, Hkv, Dv]``, slots; ``Hkv`` divides ``Hq``. With
            pages in the plan, ``[pages, page, Hkv, D]`` and ``[pages, page, Hkv, Dv]``. Where they have eight bits (``kernels.float8``)
            the result is that of ``keys.to(query.dtype)`` and ``values.to(query.dtype)``.
        plan: which row each query belongs to and what it sees.
        scale: factor of the scores, by default ``D ** -0.5``.
        window: a query at position p sees positions above ``p - window`` only.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sink_logits: ``[Hq]`` an extra logit per head, which takes weight and contributes nothing.
        initial: positions below ``initial`` are seen whatever the window (StreamingLLM's attention sinks).
        backend: a name of ``BACKENDS``, which serves the call or refuses it; ``None`` or ``"auto"`` chooses one that serves it
            (``explain`` says which and why).
        lse: whether to return the log-sum-exp, too, which ``merge`` needs to combine parts of a row.
    Returns:
        ``[1, T, Hq, Dv]``; with ``lse`` also ``[1, T, Hq]``, the natural logarithm of the sum of the exponentiated scores, sink
        logit included: -inf for a query that sees nothing.
    Raises:
        ValueError: an unknown backend, or one that cannot serve this call; arguments that do not fit each other.
        ImportError: the backend needs a package that is not installed.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    sliding = reach(window, initial)
    if plan.attend is not None and not lse:  # a captured step keeps its plan in tensors
        return plan.attend(query, keys, values, scale, sliding, softcap, sink_logits)
    if plan.watch is not None:
        plan.watch(query, scale, sliding, softcap, sink_logits)
    grad = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad)
    key = (
        *(backend, query.shape, query.stride(), query.dtype, query.device),
        *(keys.shape, keys.stride(), keys.dtype, keys.device),
        *(values.shape, values.stride(), values.dtype, values.device),
        *(sliding, softcap, lse, grad),
        None if sink_logits is None else _kind(sink_logits),
    )
    serve = plan.known.get(key)  # checked once for all layers of one kind
    if serve is None:
        serve = plan.known[key] = _serve(
            query, keys, values, plan, sliding, softcap, sink_logits, backend, lse
        )
    return serve(query, keys, values, plan, scale, sliding, softcap, sink_logits)


def _kind(sink_logits: Tensor) -> tuple[Any, ...]:
    """The properties of sink logits that the choice of a backend depends on."""
    if not isinstance(sink_logits, Tensor):
        raise ValueError(
            f"sink_logits is a {type(sink_logits).__name__}: give a tensor, a logit for each head of the query"
        )
    grad = torch.is_grad_enabled() and sink_logits.requires_grad
    return sink_logits.shape, sink_logits.stride(), sink_logits.dtype, sink_logits.device, grad


def _serve(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach,
    softcap: float | None,
    sink_logits: Tensor | None,
    backend: str | None,
    lse: bool,
) -> Callable[..., Any]:
    """The backend's function for such calls."""
    if backend is not None:
        check(backend)
    if query.shape[2] == 0:
        return _nothing_with_lse if lse else _nothing
    _check(query, keys, values, plan, window, softcap, sink_logits)
    if backend is None or backend == "auto":
        backend = choose(query, keys, values, plan, window, softcap, sink_logits, lse)
    else:
        why = why_not(backend, query, keys, values, plan, window, softcap, sink_logits, lse)
        if why:
            raise ValueError(
                f"backend {backend!r} cannot serve this call: {why}; 'auto' chooses one that can"
            )
    module = BACKENDS[backend]
    serve = module.attend_with_lse if lse else module.attend
    if backend in EIGHT_BITS or keys.dtype == values.dtype == query.dtype:
        return serve
    return partial(_widened, serve)


def _widened(serve: Callable[..., Any], query: Tensor, keys: Tensor, values: Tensor, *more: Any) -> Any:
    """``serve`` of copies of keys and values in the query's dtype, in which numbers of eight bits are exact."""
    return serve(query, keys.to(query.dtype), values.to(query.dtype), *more)


def _nothing(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    return query.new_empty(1, 0, query.shape[1], values.shape[-1])


def _nothing_with_lse(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return _nothing(query, keys, values), query.new_empty(1, 0, query.shape[1], dtype=wide)


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> None:
    """Raise ValueError for arguments that do not fit each other."""
    if query.dim() != 4 or query.shape[0] != 1:
        raise ValueError(f"query is {tuple(query.shape)}: give packed queries, [1, heads, tokens, size]")
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"keys is {tuple(keys.shape)} and values {tuple(values.shape)}: give [rows, slots, heads, size] of as "
            "many rows, slots and heads"
        )
    for name, other in (("keys", keys), ("values", values)):
        if other.dtype != query.dtype and other.dtype not in DTYPES:
            raise ValueError(f"query is {query.dtype} and {name} {other.dtype}: give both in one dtype")
        if other.device != query.device:
            raise ValueError(
                f"query is on {query.device} and {name} on {other.device}: move them to one device"
            )
        if other.shape[-1] > 1 and other.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {other.stride(-1)} in its last dimension: allocate it so that each head is contiguous"
            )
    (_, heads, tokens, size), (rows, slots, shared, _) = query.shape, keys.shape
    if keys.shape[-1] != size:
        raise ValueError(f"query has heads of {size} and keys of {keys.shape[-1]}: give one size")
    if shared == 0 or heads % shared:
        raise ValueError(
            f"query has {heads} heads and keys {shared}: give a multiple of the heads of the keys"
        )
    if tokens != sum(plan.counts):
        raise ValueError(f"query has {tokens} tokens and the plan {sum(plan.counts)}: give those of the plan")
    if window is not None and split(window)[0] < 1:
        raise ValueError(f"window is {split(window)[0]}: give at least 1, or None for no window")
    if isinstance(window, Streaming) and not plan.ordered:
        raise ValueError(f"initial is {window.initial}: {UNORDERED}")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap is {softcap}: give a finite number above 0, or None for no cap")
    if sink_logits is not None:
        if sink_logits.shape != (heads,):
            raise ValueError(
                f"sink_logits is {tuple(sink_logits.shape)}: give a logit for each of the {heads} heads of the query"
            )
        if not sink_logits.is_floating_point():
            raise ValueError(f"sink_logits is {sink_logits.dtype}: give logits, floating-point numbers")
        if sink_logits.device != query.device:
            raise ValueError(
                f"query is on {query.device} and sink_logits on {sink_logits.device}: move them to one device"
            )
    if plan.table is None:
        if max(plan.rows) >= rows or min(plan.rows) < 0:
            raise ValueError(
                f"the plan has row {max(plan.rows)} and keys {rows} rows: allocate more, or plan fewer"
            )
        if max(plan.length) > slots:
            raise ValueError(
                f"the plan has a row of {max(plan.length)} slots and keys {slots}: allocate a larger capacity"
            )
    else:
        lowest, highest = min(map(min, plan.table)), max(map(max, plan.table))
        if slots != plan.page or lowest < 0 or highest >= rows:
            raise ValueError(
                f"the plan has pages of {plan.page} slots with numbers from {lowest} to {highest}, and keys {rows} pages of "
                f"{slots}: give the buffers that the table refers to"
            )
