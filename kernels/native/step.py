"""Packed tokens through whole models in one call of C, ``step.c``: from ids to logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.attention.native import PlanStruct, fields
from specdec.kernels.native.blocks import CAST, Blocks, Buffers, check_inputs, tapped
from specdec.kernels.native.build import function
from specdec.kernels.native.ops import linear_takes


class Reader(NamedTuple):
    """A model, and the ``T`` tokens that it reads.

    Attributes:
        embedding: ``[tokens, E]``. norm: ``[E]`` weights of the last norm, and its ``eps``. head: ``[V, E]``. bias: ``[V]`` or ``None``.
        cos, sin: ``[T, size]``. slots: ``[T]``. held: keys and values.
        plans: of each block, from ``attention.native.lowered``. They are not checked: the caller guarantees that they are for ``T`` tokens
            and for existing rows and slots.
        source: ``[T]`` int64, which of the ids it reads; ``None``: the first T.
        keep: ``[K]`` int64, the tokens whose logits to compute; ``None``: all. rows: ``[K]`` int64, their rows in the logits; ``None``:
            the first K.
        taps: ``[T, E]`` tensors for the inputs of blocks by number, and for the last one's result.
        narrow: the copy of the head by ``narrow.Narrow``, which is read instead.
    """

    blocks: Blocks
    embedding: Tensor
    norm: Tensor
    eps: float
    head: Tensor
    bias: Tensor | None
    cos: Tensor
    sin: Tensor
    slots: Tensor
    held: Buffers
    plans: Sequence[PlanStruct]
    source: Tensor | None = None
    keep: Tensor | None = None
    rows: Tensor | None = None
    taps: dict[int, Tensor] | None = None
    narrow: Tensor | None = None


class _Reader(Structure):
    _fields_ = [
        *fields(
            c_void_p, "blocks buffers plans taps embedding norm head bias cos sin slots source keep rows"
        ),
        *fields(c_int64, "count T kept E V tokens narrow"),
        *fields(c_float, "eps"),
    ]


def step(readers: Sequence[Reader], ids: Tensor, rows: int) -> Tensor:
    """Logits ``[rows, V]`` after ``ids [N]`` int64, every token by its reader, other rows zero; bit-identical to ``LlamaC.forward``.

    Raises:
        ValueError: readers or ids that do not fit. RuntimeError: weights whose shape, layout or dtype has changed. IndexError: ids or slots
            out of range.
    """
    if ids.dim() != 1 or ids.dtype != torch.long:
        raise ValueError(f"ids are {tuple(ids.shape)} {ids.dtype}: give one dimension of int64")
    dtype, vocabulary = readers[0].embedding.dtype, len(readers[0].head)
    alive: list[Any] = []
    table = (_Reader * len(readers))(
        *(_lowered(r, dtype, vocabulary, len(ids), rows, alive) for r in readers)
    )
    written = {
        i
        for r, made in zip(readers, table)
        for i in (range(made.kept) if r.rows is None else r.rows.tolist())
    }
    ids = ids.cpu().contiguous()
    make = torch.empty if len(written) == rows else torch.zeros
    logits = make(rows, vocabulary, dtype=dtype)
    half, threads = dtype == torch.bfloat16, torch.get_num_threads()
    code = _function()(table, len(table), ids.data_ptr(), logits.data_ptr(), half, threads)
    if code == 1:
        raise MemoryError(f"no memory for a step of {len(ids)} tokens")
    if code:
        what = "slots are not all in the buffers" if code == 2 else f"ids {ids.tolist()} are not all tokens"
        raise IndexError(f"step: {what}")
    return logits


def _lowered(
    r: Reader, dtype: torch.dtype, vocabulary: int, ids: int, rows: int, alive: list[Any]
) -> _Reader:
    """A reader as the kernel takes it; ``alive`` gets the arrays that it points to."""
    E, count, T = r.embedding.shape[1], len(r.blocks), len(r.slots)
    kept = T if r.keep is None else len(r.keep)
    weights = [r.embedding, r.norm, r.head, *([] if r.bias is None else [r.bias])]
    shapes = [r.norm.shape == (E,), r.head.shape[1:] == (E,), r.blocks.width == E]
    if not all(shapes) or any(w.dtype != dtype or not w.is_contiguous() or not w.is_cpu for w in weights):
        raise RuntimeError(CAST)
    fits = (
        linear_takes(r.head, r.bias)
        and len(r.head) == vocabulary
        and len(r.plans) == count
        and _within(r.source, T, ids)
        and _within(r.keep, kept, T)
        and _within(r.rows, kept, rows)
    )
    if not fits:
        raise ValueError(
            f"a reader of {T} of {ids} ids, for {kept} of {rows} rows, with head {tuple(r.head.shape)} "
            f"and {len(r.plans)} plans does not go with the others, or with itself"
        )
    table = r.blocks.table(dtype)
    check_inputs(T, r.cos, r.sin, r.slots, r.blocks.size)
    r.blocks.check_buffers(dtype, r.held, range(count))
    plans, taps = (c_void_p * count)(*map(addressof, r.plans)), tapped(r.taps, count, (T, E), dtype)
    alive += (plans, taps)
    head = r.head if r.narrow is None else r.narrow
    some = (r.embedding, r.norm, head, r.bias, r.cos, r.sin, r.slots, r.source, r.keep, r.rows)
    return _Reader(
        *(addressof(table), addressof(r.held.table), addressof(plans)),
        None if taps is None else addressof(taps),
        *(None if t is None else t.data_ptr() for t in some),
        *(count, T, kept, E, vocabulary, len(r.embedding), r.narrow is not None, r.eps),
    )


def _within(numbers: Tensor | None, count: int, limit: int) -> bool:
    """Whether ``numbers`` are ``count`` contiguous int64 values below ``limit``; ``None`` means 0, 1, ..."""
    if numbers is None:
        return count <= limit
    plain = numbers.dtype == torch.long and numbers.is_contiguous() and numbers.is_cpu
    return plain and numbers.shape == (count,) and all(0 <= i < limit for i in numbers.tolist())


@contextmanager
def without_c() -> Iterator[None]:
    """Disable the C call of every step in the body, to measure the host's share of a step."""
    global _function
    own: Any = _function
    _function = lambda: lambda *given: 0  # type: ignore[assignment]  # noqa: E731
    try:
        yield
    finally:
        _function = own


def _function() -> Any:
    return function("step", "plppii")
