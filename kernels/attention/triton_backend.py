"""Attention by our own Triton kernel: decode, ragged and tree verification, masks by slot; one launch a layer, or two.

Keys and values of a KV head are read once for all queries and heads that share them, rows are as long as they are, and a row
is cut into equal chunks where a batch is too small to fill the device (flash-decoding); ``triton_kernels`` says how.

**Equal bits.** With ``chunk`` (or ``plan.fragment``) the chunks and tiles are fixed: a query's result then depends neither
on the other rows nor on how many queries its row has, so that a verify pass gives what plain decoding gives, bit by bit, as
far as attention goes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.attention.lowered import Lowered, lower, written_out
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, binding, split
from specdec.kernels.attention.splitting import Work, chunking
from specdec.kernels.attention.tiles import bound, config, power
from specdec.kernels.interpreted import REMEDY

LOG2E = 1.4426950408889634
LARGEST = 256  # head size
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WAVES = 2  # programs of four warps that a multiprocessor holds at a time, as rows are cut for


def missing() -> str | None:
    """Why Triton cannot be used here at all; ``None``: it can."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return None


def supports(
    query: Tensor, softcap: float | None, sink_logits: Tensor | None, plan: AttentionPlan | None = None
) -> str | None:
    """Why this backend cannot serve a call, or ``None``. Any plan will do, pages included."""
    why = missing()
    if why:
        return why
    why = _cannot_run(query)
    if why:
        return why
    if (
        query.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device) < (8, 0)
    ):
        return "the GPU is older than sm_80"
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}: the kernel takes float32, float16 and bfloat16"
    if query.shape[-1] > LARGEST:
        return f"the head size is {query.shape[-1]}: the kernel takes up to {LARGEST}"
    if query.stride(-1) != 1:
        return "query's last dimension is not contiguous: call query.contiguous()"
    if torch.is_grad_enabled() and query.requires_grad:
        return "the kernel has no backward pass: call it under torch.no_grad()"
    if sink_logits is not None and (sink_logits.device != query.device or not sink_logits.is_contiguous()):
        return "the sink logits are on another device than query, or not contiguous"
    return None


def _cannot_run(query: Tensor, name: str = "query") -> str | None:
    """Why no kernel of Triton runs where a tensor is, or ``None``."""
    if query.is_cuda or _kernels().INTERPRET:
        return None
    return f"{name} is on {query.device.type!r} and {REMEDY}"


def fits(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: Reach = None
) -> str | None:
    """Why tensors do not fit the kernel, each other, or the plan; ``None``: they do."""
    for name, buffer in (("keys", keys), ("values", values)):
        if buffer.dtype != query.dtype or buffer.device != query.device:
            return (
                f"{name} are {buffer.dtype} on {buffer.device} and query is {query.dtype} on {query.device}: give one dtype and "
                "one device"
            )
        if buffer.stride(-1) != 1:
            return f"{name}' last dimension has stride {buffer.stride(-1)}: it must be contiguous (stride 1)"
        if buffer.requires_grad and torch.is_grad_enabled():
            return f"{name} require grad and the kernel has no backward pass: use torch.no_grad()"
    key = ("triton fits", query.shape, keys.shape, values.shape)
    if key not in plan.known:  # the same for all layers
        plan.known[key] = _shapes_fit(query, keys, values, plan)
    return plan.known[key]


def _shapes_fit(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> str | None:
    if query.dim() != 4 or query.shape[0] != 1 or query.shape[2] != sum(plan.counts):
        return (
            f"query is {tuple(query.shape)} and the plan has {sum(plan.counts)} queries: give [1, Hq, T, D]"
        )
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        return f"keys are {tuple(keys.shape)} and values {tuple(values.shape)}: give [B, S, Hkv, D] and [B, S, Hkv, Dv]"
    if keys.shape[3] != query.shape[3] or keys.shape[2] < 1 or query.shape[1] % keys.shape[2]:
        return (
            f"query has {query.shape[1]} heads of size {query.shape[3]} and keys {keys.shape[2]} of size {keys.shape[3]}: sizes "
            "must be equal, and the KV heads must divide the query heads"
        )
    if values.shape[3] > LARGEST:
        return f"values have a head size of {values.shape[3]}: the kernel takes up to {LARGEST}"
    B, S = keys.shape[:2]
    if plan.table is None:
        if max(plan.length) > S:
            return f"a row has {max(plan.length)} slots in use and keys have {S}: give larger buffers"
        if min(plan.rows) < 0 or max(plan.rows) >= B:
            return f"the plan's rows are {min(plan.rows)} to {max(plan.rows)} and keys have {B} rows: give larger buffers"
        return None
    if plan.page != S:
        return f"the plan's pages have {plan.page} slots and those of keys {S}: give buffers [pages, page, Hkv, D]"
    pages = [p for row, n in zip(plan.table, plan.length) for p in row[: -(-n // S)]]
    if min(pages) < 0 or max(pages) >= B:
        return f"the table names pages {min(pages)} to {max(pages)} and keys have {B}: give more pages"
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
    *,
    chunk: int | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``. Slots that no query of a row sees may hold anything.

    Args:
        chunk: slots of a chunk, rounded up to whole tiles, for results that do not depend on the batch; by default
            ``plan.fragment``, and without that chosen so that the device is filled.
    Raises:
        ValueError: tensors that do not fit each other or the plan, or whose last dimension is not contiguous.
    """
    lowered, window = _prepare(query, keys, values, plan, window, sink_logits)
    chunk = chunk or plan.fragment
    return launch(query, keys, values, lowered, scale, window, softcap, sink_logits, chunk=chunk, plan=plan)


def attend_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores, float32, natural, a sink logit included."""
    lowered, window = _prepare(query, keys, values, plan, window, sink_logits)
    lse = query.new_empty(1, query.shape[2], query.shape[1], dtype=torch.float32)
    chunk = chunk or plan.fragment
    out = launch(
        query, keys, values, lowered, scale, window, softcap, sink_logits, chunk=chunk, lse=lse, plan=plan
    )
    return out, lse


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lowered: Lowered,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    *,
    chunk: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """The kernels alone, on numbers that are on the device already; nothing is checked and nothing waits for the device.

    Without ``plan``, grid and allocations depend on shapes, ``max_count`` and ``max_length`` only, so a launch can be captured in
    a CUDA graph and replayed after the tensors of ``lowered`` were written anew, as long as rows stay within these.

    Args:
        lowered: as from ``lower``; its ``seen`` already knows about ``window``. With a ``table``, pages are
            ``keys.shape[1]`` slots.
        out: ``[1, T, Hq, Dv]`` contiguous, to be written. lse: ``[1, T, Hq]`` float32, contiguous, to be written.
        plan: what ``lowered`` was made from, where rows are to be cut by what they are now.
    Raises:
        ValueError: ``scale`` or ``softcap`` is not positive, or ``chunk`` is below 1.
    """
    kernels = _kernels()
    if not scale > 0 or (softcap is not None and not softcap > 0):
        raise ValueError(f"scale is {scale} and softcap {softcap}: give positive numbers")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: give the slots of a chunk, at least 1")
    _, heads, T, size = query.shape
    kv_heads, value_size = values.shape[2:]
    group, rows = heads // kv_heads, lowered.rows.shape[0]
    c = config(
        max(size, value_size),
        lowered.max_count * group,
        query.element_size(),
        fixed=chunk is not None,
        written_out=lowered.seen is not None,
        tree=lowered.words is not None,
        paged=lowered.table is not None,
        bent=window is not None or softcap is not None,
    )
    tiles = -(-lowered.max_count * group // c.queries)
    if lowered.seen is not None:
        window = None
    back, initial = (0, 0) if window is None else split(window)
    work = Work(
        copies=tiles * kv_heads,
        resident=max(1, WAVES * 4 // c.warps) * processors(query.device),
        tile=c.slots,
        slot_bytes=(size + value_size) * query.element_size(),
        part_bytes=2 * T * heads * (value_size + 1) * 4,
    )
    chunks, slots, align = chunking(lowered, window, work, chunk, plan)
    if out is None:
        out = query.new_empty(1, T, heads, value_size)
    direct = chunks == 1
    parts, part_lse = out[None], lse[None] if lse is not None else None
    if not direct:
        parts = query.new_empty(chunks, 1, T, heads, value_size, dtype=torch.float32)
        part_lse = query.new_empty(chunks, 1, T, heads, dtype=torch.float32)
    depth, table, seen = lowered.depth, lowered.table, lowered.seen
    with _on(query.device):
        kernels.attend_kernel[(rows * tiles, kv_heads, chunks)](
            query, keys, values, parts, part_lse,
            lowered.starts, lowered.length, lowered.rows, lowered.root, lowered.words, depth, table, seen,
            sink_logits if direct else None,
            (scale if softcap is None else softcap) * LOG2E,
            0.0 if softcap is None else 2 * LOG2E * scale / softcap,
            back, initial or None, slots, align, tiles, 0 if depth is None else depth.shape[1],
            query.stride(2), query.stride(1),
            keys.stride(0), keys.stride(1), keys.stride(2),
            values.stride(0), values.stride(1), values.stride(2),
            parts.stride(0), parts.stride(2), parts.stride(3),
            T * heads, heads,
            0 if depth is None else depth.stride(0),
            0 if table is None else table.stride(0),
            0 if seen is None or seen.shape[0] == 1 else seen.stride(0),
            0 if seen is None else seen.stride(1),
            G=group, D=size, DV=value_size, BD=power(size), BDV=power(value_size), BM=c.queries, BN=c.slots,
            PAGE=0 if table is None else keys.shape[1], WINDOW=window is not None, SOFTCAP=softcap is not None,
            DIRECT=direct, UPCAST=_upcast(query), num_warps=c.warps, num_stages=c.stages, **bound(c),
        )  # fmt: skip
        if not direct:
            assert part_lse is not None
            _merge(
                parts[:, 0].transpose(0, 1),
                part_lse[:, 0].transpose(0, 1),
                out[0],
                lse,
                sink_logits,
                natural=False,
            )
    return out


def merge(outputs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """``kernels.attention.merge`` in one launch; lse is float32.

    Args:
        outputs: ``[..., F, q, D]``. lse: ``[..., F, q]``, natural logarithms.
    Returns:
        output ``[..., q, D]`` and lse ``[..., q]``; 0 and -inf for a query that sees nothing in any part.
    Raises:
        ValueError: shapes that do not match.
    """
    if outputs.shape[:-1] != lse.shape or lse.dim() < 2:
        raise ValueError(
            f"outputs is {tuple(outputs.shape)} and lse {tuple(lse.shape)}: give [..., F, q, D] and [..., F, q]"
        )
    why = _cannot_run(outputs, "outputs")
    if why or lse.device != outputs.device:
        raise ValueError(
            why or f"outputs is on {outputs.device} and lse on {lse.device}: move them to one device"
        )
    before, (_, q, size) = lse.shape[:-2], outputs.shape[-3:]
    parts = outputs.reshape(-1, *outputs.shape[-3:])
    parts = parts if parts.stride(-1) == 1 else parts.contiguous()
    out = outputs.new_empty(parts.shape[0], q, size)
    total = lse.new_empty(parts.shape[0], q, dtype=torch.float32)
    with _on(outputs.device):
        _merge(parts, lse.reshape(-1, *lse.shape[-2:]), out, total, None, natural=True)
    return out.view(*before, q, size), total.view(*before, q)


def _merge(
    parts: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sink_logits: Tensor | None,
    natural: bool,
) -> None:
    """``parts [N, F, Q, Dv]`` and ``part_lse [N, F, Q]`` -> ``out [N, Q, Dv]`` and ``lse [..., N, Q]``."""
    N, F, Q, size = parts.shape
    if N * Q == 0:
        return
    _kernels().merge_kernel[(N, Q)](
        parts, part_lse, out, lse, sink_logits, F,
        *parts.stride()[:3], *part_lse.stride(), *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()[-2:]),
        DV=size, BDV=power(size), NATURAL=natural, num_warps=4 if size > 128 else 2,
    )  # fmt: skip


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _prepare(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach,
    sink_logits: Tensor | None,
) -> tuple[Lowered, Reach]:
    why = _cannot_run(query) or fits(query, keys, values, plan)
    if why:
        raise ValueError(why)
    if query.stride(-1) != 1:
        raise ValueError("query's last dimension is not contiguous: call query.contiguous()")
    if sink_logits is not None:
        if sink_logits.shape != (query.shape[1],):
            raise ValueError(
                f"the sink logits are {tuple(sink_logits.shape)}: give one logit for each of {query.shape[1]} heads"
            )
        if sink_logits.device != query.device or not sink_logits.is_contiguous():
            raise ValueError(
                f"the sink logits are on {sink_logits.device} with stride {sink_logits.stride(0)}: give them on {query.device}, contiguous"
            )
    if plan.ordered:
        window = binding(window, max(plan.length))
    return lower(plan, query.device, window), None if written_out(plan) else window


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _upcast(query: Tensor) -> bool:
    return _kernels().INTERPRET and query.dtype != torch.float32


@lru_cache(maxsize=1)
def _kernels() -> Any:
    return import_module("specdec.kernels.attention.triton_kernels")
