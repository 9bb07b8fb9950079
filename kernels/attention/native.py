"""C kernels for decoding and verification on the CPU: every slot is read once, without padding or repetition.

One call serves a ragged batch of any shape: a task is a row and a KV head, and one pass over the slots serves all of its queries
and query heads (``kernels/native/attention.c``). Slots that no query of a row sees are not read. The kernels are batch-invariant:
a query's result depends on its own row alone, and not on the number of queries in the call. Prompts (more than ``PROMPT`` queries
times query heads per KV head; over pages ``PAGED_PROMPT``) go to PyTorch, whose matrix products are faster there.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int64, c_void_p
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention import packed
from specdec.kernels.attention.explicit import ExplicitPlan
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, Streaming
from specdec.kernels.native import library, reason
from specdec.kernels.native.build import function

PROMPT = 64  # queries of a row times query heads per KV head, above which PyTorch is clearly faster
PAGED_PROMPT = 1024  # the same over pages, which must be copied together for PyTorch
_LANES = 16


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of a ``Structure`` with one type."""
    return [(name, kind) for name in names.split()]


class PlanStruct(Structure):
    """A plan as the kernel reads it."""

    _fields_ = [
        *fields(c_void_p, "rows starts length low high mask mask_from mask_at mask_head table"),
        *fields(c_int64, "rows_count pages page"),
    ]


class _Call(Structure):
    _fields_ = [
        *fields(c_void_p, "keys values query out lse sink_logits"),
        *fields(c_int64, "k_row k_slot k_head v_row v_slot v_head q_token q_head o_token o_head"),
        *fields(c_int64, "heads kv_heads size value_size half"),
        *fields(c_float, "scale softcap"),
    ]


def supports(
    query: Tensor, softcap: float | None, sink_logits: Tensor | None, plan: AttentionPlan | None = None
) -> str | None:
    """Why this backend cannot serve a call, or ``None``."""
    if not query.is_cpu:
        return "the C kernels run on the CPU"
    if query.dtype not in (torch.float32, torch.bfloat16):
        return f"the C kernels compute float32 and bfloat16, not {str(query.dtype).removeprefix('torch.')}"
    if query.shape[-1] % _LANES or query.shape[-1] > 256:
        return f"the C kernels need heads of a multiple of {_LANES} up to 256, not {query.shape[-1]}"
    if library() is None:
        return f"the C kernels are not available: {reason()}"
    return None


def fits(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach = None
) -> str | None:
    """Why the kernel cannot read these buffers, or ``None``."""
    if torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad):
        return "the C kernels have no gradients"
    size = values.shape[-1]
    if size % _LANES or size > 256:
        return f"the C kernels need values of a multiple of {_LANES} up to 256, not {size}"
    if plan.page % _LANES:
        return f"the C kernels need pages of a multiple of {_LANES} slots, not {plan.page}"
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
    if softcap is None and sink_logits is None and prompt(plan, query.shape[1] // keys.shape[2]):
        return packed.attend(query, keys, values, plan, scale, window)
    return _run(query, keys, values, plan, scale, window, softcap, sink_logits, None)


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
    """As ``attend``, with the log-sum-exp of the scores ``[1, T, Hq]``, -inf for a query that sees nothing."""
    lse = query.new_empty(1, query.shape[2], query.shape[1], dtype=torch.float32)
    return _run(query, keys, values, plan, scale, window, softcap, sink_logits, lse), lse


def always(plan: AttentionPlan) -> None:
    """Run prompts on the C kernels, too: slower, but batch-invariant."""
    plan.known["always"] = True


def _run(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach,
    softcap: float | None,
    sink_logits: Tensor | None,
    lse: Tensor | None,
) -> Tensor:
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = query.new_empty(1, query.shape[2], query.shape[1], values.shape[-1])
    key = (
        query.dtype,
        query.stride(),
        query.shape[1],
        keys.shape[2:],
        keys.stride(),
        values.stride(),
        scale,
        softcap,
        out.stride(),
    )
    call = plan.known.get(key)
    if call is None:  # the kernel does not check its arguments
        why = supports(query, softcap, sink_logits, plan) or fits(query, keys, values, plan)
        if why:
            raise ValueError(why)
        call = plan.known[key] = _call(query, keys, values, out, scale, softcap)
    call = _Call.from_buffer_copy(call)  # other threads may use this plan
    made = lowered(plan, window)
    call.keys, call.values = keys.data_ptr(), values.data_ptr()
    call.query, call.out = query.data_ptr(), out.data_ptr()
    call.lse = None if lse is None else lse.data_ptr()
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    call.sink_logits = None if sink_logits is None else sink_logits.data_ptr()
    if function("attend", "ppi")(byref(made), byref(call), torch.get_num_threads()):
        raise MemoryError("attention: no memory for the accumulators of a row")
    return out


def prompt(plan: AttentionPlan, group: int) -> bool:
    """Whether a call with ``group`` query heads per KV head goes to PyTorch."""
    known = plan.known.get(("prompt", group))
    if known is None:
        most = PROMPT if plan.table is None else PAGED_PROMPT
        known = "always" not in plan.known and max(plan.counts) * group > most
        plan.known["prompt", group] = known
    return known


def lowered(plan: AttentionPlan, window: Reach) -> PlanStruct:
    """``lower``, cached in the plan."""
    layer = plan.layer
    made = plan.known.get(("native", window, layer))
    if made is None:
        made = plan.known["native", window, layer] = lower(plan, window)
    return made[0]


def _call(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float, softcap: float | None
) -> _Call:
    """The fields of a call that do not differ between layers: all but the addresses."""
    k_row, k_slot, k_head, _ = keys.stride()
    v_row, v_slot, v_head, _ = values.stride()
    _, q_head, q_token, _ = query.stride()
    _, o_token, o_head, _ = out.stride()
    half = query.dtype == torch.bfloat16
    return _Call(
        *(None,) * 6,
        *(k_row, k_slot, k_head, v_row, v_slot, v_head, q_token, q_head, o_token, o_head),
        *(query.shape[1], keys.shape[2], query.shape[3], values.shape[3], half),
        *(scale, softcap or 0.0),
    )


def lower(plan: AttentionPlan, window: Reach) -> tuple[PlanStruct, list[Any]]:
    """A plan as the kernel reads it, and the arrays that it points to."""
    if plan.ordered and plan.tree is None and plan.table is None and not isinstance(window, Streaming):
        return _chains(plan, window)
    overridden = type(plan).visible is not ExplicitPlan.visible or "visible" in vars(plan)
    if window is None and not overridden:
        return _listed(cast(ExplicitPlan, plan))
    counts = np.array(plan.counts, dtype=np.int32)
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    length = np.array(plan.length, dtype=np.int32)
    rows = np.array(plan.rows, dtype=np.int32)
    first = np.array(plan.first, dtype=np.int32)
    T = int(starts[-1])
    slot = np.repeat(first - starts[:-1], counts) + np.arange(T, dtype=np.int32)
    low, high, mask, begin = np.zeros(T, dtype=np.int32), slot + 1, None, np.zeros_like(rows)
    if not plan.ordered:
        high = np.zeros_like(low)
        mask = [m for s in plan.runs() for m in _bytes(plan.visible(s, window))]  # [heads or none, q, S]
    elif plan.tree is not None or isinstance(window, Streaming):
        if plan.tree is not None and not isinstance(window, Streaming):
            begin = np.minimum(plan.tree.root, length).astype(np.int32)
        high = np.minimum(high, np.repeat(begin, counts))
        each = plan.runs(alone=True)
        if isinstance(window, int):
            position = np.concatenate([plan._query_positions(s)[0] for s in each])
            low = np.maximum(position - (min(window, max(plan.length) + 1) - 1), 0)
        mask = [_bytes(plan.visible(s, window, int(b)))[0] for s, b in zip(each, begin)]
    elif window is not None:
        low = np.maximum(high - min(window, max(plan.length) + 1), 0)
    lowered = PlanStruct(rows_count=len(rows), pages=0, page=0)
    alive: list[Any] = [rows, starts, length, low.astype(np.int32), high.astype(np.int32)]
    for name, array in zip(("rows", "starts", "length", "low", "high"), alive):
        setattr(lowered, name, array.ctypes.data)
    if mask is not None:
        at = np.cumsum([0, *(m.size for m in mask)])[:-1].astype(np.int64)
        head = np.array([m.strides[0] if m.ndim == 3 else 0 for m in mask], dtype=np.int64)
        flat = np.concatenate([*(m.ravel() for m in mask), np.zeros(_LANES, dtype=np.uint8)])
        more = [flat, begin, at, head]
        for name, array in zip(("mask", "mask_from", "mask_at", "mask_head"), more):
            setattr(lowered, name, array.ctypes.data)
        alive += more
    if plan.table is not None:
        table = np.zeros((len(rows), max(map(len, plan.table))), dtype=np.int32)
        for r, pages in enumerate(plan.table):
            table[r, : len(pages)] = pages
        lowered.table, lowered.pages, lowered.page = table.ctypes.data, table.shape[1], plan.page
        alive.append(table)
    return lowered, alive


def _chains(plan: AttentionPlan, window: int | None) -> tuple[PlanStruct, list[Any]]:
    """``lower`` for chains, the most frequent case, in few operations: they take a noticeable part of a small model's step."""
    R, starts = len(plan.rows), [0, *accumulate(plan.counts)]
    high = [s + 1 for f, end in zip(plan.first, plan.length) for s in range(f, end)]
    low = [0] * len(high) if window is None else [max(h - window, 0) for h in high]
    numbers = np.array([*plan.rows, *starts, *plan.length, *low, *high], dtype=np.int32)
    at = numbers.ctypes.data
    ends = [0, *accumulate((4 * R, 4 * R + 4, 4 * R, 4 * len(high)))]
    rows, begin, length, lows, highs = (at + n for n in ends)
    made = PlanStruct(rows, begin, length, lows, highs, *(None,) * 5, R, 0, 0)
    return made, [numbers]


def _listed(plan: ExplicitPlan) -> tuple[PlanStruct, list[Any]]:
    """``lower`` for a plan that lists what is seen slot by slot, in few operations."""
    R, T, S = len(plan.rows), *plan.seen.shape
    starts = [0, *accumulate(plan.counts)]
    numbers = np.zeros(4 * R + 1 + 2 * T, dtype=np.int32)  # the last are mask_from, low and high: 0
    numbers[: 3 * R + 1] = [*plan.rows, *starts, *plan.length]
    mask = np.zeros(T * S + _LANES, dtype=np.uint8)
    mask[: T * S] = plan.seen.reshape(-1)
    places = np.array([*(s * S for s in starts[:-1]), *[0] * R], dtype=np.int64)
    at, where = numbers.ctypes.data, places.ctypes.data
    rows, begin, length, mask_from, low, high = (
        at + 4 * n for n in (0, R, 2 * R + 1, 3 * R + 1, 4 * R + 1, 4 * R + 1 + T)
    )
    made = PlanStruct(
        rows, begin, length, low, high, mask.ctypes.data, mask_from, where, where + 8 * R, None, R, 0, 0
    )
    return made, [numbers, mask, places]


def _bytes(seen: Any) -> np.ndarray:
    seen = seen.numpy() if isinstance(seen, Tensor) else seen
    return np.ascontiguousarray(seen, dtype=bool).view(np.uint8)
