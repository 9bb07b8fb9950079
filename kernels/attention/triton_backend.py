"""Attention by the library's Triton kernel: decoding, ragged and tree verification, masks by slot; one or two launches per layer.

Keys and values of a KV head are read once for all queries and heads that share them, rows are not padded, and rows are cut into
equal chunks if a batch is too small to fill the device (flash-decoding, see ``triton_kernels``).

**Batch invariance.** With ``chunk`` (or ``plan.fragment``) the chunks and tiles are fixed: a query's result then depends neither on
the other rows nor on how many queries its row has, so attention in a verification pass is bit-identical to that in plain decoding.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specdec.kernels import float8
from specdec.kernels.attention.lowered import Lowered, lower
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, binding, split
from specdec.kernels.attention.splitting import Work, chunking
from specdec.kernels.attention.tiles import bound, config, power
from specdec.kernels.device import current
from specdec.kernels.interpreted import REMEDY

LOG2E = 1.4426950408889634
LARGEST = 256  # head size
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WAVES = 2  # programs of four warps per multiprocessor that the chunk size is chosen for


def missing() -> str | None:
    """Why Triton cannot be used at all, or ``None``."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return None


def supports(
    query: Tensor, softcap: float | None, sink_logits: Tensor | None, plan: AttentionPlan | None = None
) -> str | None:
    """Why this backend cannot serve a call, or ``None``. It serves any plan, pages included."""
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


def reads(device: torch.device, dtype: torch.dtype, *held: torch.dtype) -> str | None:
    """Why the kernel cannot read keys and values ``held`` in these dtypes for queries in ``dtype``, or ``None``."""
    found = {*held} & {*float8.DTYPES}
    if not found or device.type != "cuda":
        return None
    newer = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    if newer and dtype != torch.float32:  # for which it would spill registers
        return None
    return f"keys or values are {found.pop()}, which the kernel converts on NVIDIA's sm_89 and later, for queries of 16 bits"


def _cannot_run(query: Tensor, name: str = "query") -> str | None:
    """Why no Triton kernel runs on a tensor's device, or ``None``."""
    if query.is_cuda or _kernels().INTERPRET:
        return None
    return f"{name} is on {query.device.type!r} and {REMEDY}"


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
    why = supports(query, softcap, sink_logits, plan)
    why = why or reads(query.device, query.dtype, keys.dtype, values.dtype)
    if why:
        return why
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        return "keys or values require grad and the kernel has no backward pass: use torch.no_grad()"
    if values.shape[3] > LARGEST:
        return f"values have a head size of {values.shape[3]}: the kernel takes up to {LARGEST}"
    return None


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
    lse: Tensor | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``. Slots that no query of a row sees may hold anything.

    Args:
        chunk: slots of a chunk, rounded up to whole tiles, for batch-invariant results; by default ``plan.fragment``, else chosen
            to fill the device. lse: as for ``launch``.
    """
    if plan.ordered:
        window = binding(window, max(plan.length))
    lowered = lower(plan, query.device, window)
    chunk = chunk or plan.fragment
    return launch(
        query, keys, values, lowered, scale, window, softcap, sink_logits, chunk=chunk, lse=lse, plan=plan
    )


def attend_with_lse(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, *settings: Any, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores, float32, natural, a sink logit included."""
    lse = query.new_empty(1, query.shape[2], query.shape[1], dtype=torch.float32)
    return attend(query, keys, values, plan, *settings, chunk=chunk, lse=lse), lse


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
    """Launches the kernels on a plan that is already on the device; nothing is checked and nothing waits for the device.

    Without ``plan``, grid and allocations depend on shapes, ``max_count`` and ``max_length`` only, so a launch can be captured in
    a CUDA graph and replayed after the tensors of ``lowered`` were rewritten, as long as rows stay within these bounds.

    Args:
        lowered: from ``lower``; its ``seen`` or ``ring`` includes ``window``. With a ``table``, pages have ``keys.shape[1]`` slots.
        out: ``[1, T, Hq, Dv]`` contiguous, to be written. lse: ``[1, T, Hq]`` float32, contiguous, to be written.
        plan: the source of ``lowered``, if chunks are to be chosen for its present rows.
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
    if lowered.seen is not None or lowered.ring is not None:
        window = None
    back, initial = (0, 0) if window is None else split(window)
    work = Work(
        copies=tiles * kv_heads,
        resident=max(1, WAVES * 4 // c.warps) * processors(query.device),
        tile=c.slots,
        slot_bytes=size * keys.element_size() + value_size * values.element_size(),
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
    depth, table, seen, ring = lowered.depth, lowered.table, lowered.seen, lowered.ring
    at, *turn = (None, 0, 0, 0) if ring is None else (ring.position, ring.sinks, ring.size, ring.far)
    back = back if ring is None else ring.window
    with current(query.device):
        kernels.attend_kernel[(rows * tiles, kv_heads, chunks)](
            query, keys, values, parts, part_lse,
            lowered.starts, lowered.length, lowered.rows, lowered.root, lowered.words, depth, table, seen,
            at, sink_logits if direct else None,
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
            *turn,
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
    with current(outputs.device):
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
    """Multiprocessors of a device; 1 if kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _upcast(query: Tensor) -> bool:
    return _kernels().INTERPRET and query.dtype != torch.float32


@lru_cache(maxsize=1)
def _kernels() -> Any:
    return import_module("specdec.kernels.attention.triton_kernels")
