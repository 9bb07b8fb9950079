"""One token of each row through whole models in one call of C, ``step.c``: all that can be known before the tokens is found out before."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.attention.native import PlanStruct
from specdec.kernels.native.blocks import CAST, Blocks, Buffers, check_inputs, fields
from specdec.kernels.native.build import library, reason
from specdec.kernels.native.ops import linear_takes


class Reader(NamedTuple):
    """A model, and the ``T`` rows that it reads in each of some steps.

    Attributes:
        embedding: ``[tokens, E]``. norm: ``[E]`` weights of the last norm, and its ``eps``. head: ``[V, E]``. bias: ``[V]`` or ``None``.
        cos, sin: ``[steps * T, size]``. slots: ``[steps * T]``. held: keys and values.
        plans: of each block, ``attention.native.series``; ``alive``: what they point to.
        rows: ``[T]`` int64, which rows they are; ``None``: all of the batch.
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
    alive: Any
    rows: Tensor | None = None


class _Reader(Structure):
    _fields_ = [
        *fields(c_void_p, "blocks buffers plans embedding norm head bias cos sin slots rows"),
        *fields(c_int64, "count T E V size tokens"),
        *fields(c_float, "eps"),
    ]


class Steps:
    """``(n, ids [B]) -> logits [B, V]``, every row by its reader and rows of none zero: what ``Native.forward`` computes, to the bit.

    Addresses are taken once: for use at once, while nobody changes the models' weights or frees what the readers hold.

    Raises:
        ValueError: readers that do not fit. RuntimeError: weights that have changed their shape, layout or dtype.
    """

    def __init__(self, readers: Sequence[Reader], batch: int, steps: int):
        first = readers[0]
        self._batch, self._steps, self._dtype = batch, steps, first.embedding.dtype
        self._vocabulary = len(first.head)
        self._alive: list[Any] = [readers]
        self._table = (_Reader * len(readers))(*map(self._lowered, readers))
        self._every = sum(r.T for r in self._table) == batch

    def _lowered(self, r: Reader) -> _Reader:
        E, dtype = r.embedding.shape[1], self._dtype
        T = self._batch if r.rows is None else len(r.rows)
        weights = [r.embedding, r.norm, r.head, *([] if r.bias is None else [r.bias])]
        if any(w.dtype != dtype or not w.is_contiguous() or not w.is_cpu for w in weights):
            raise RuntimeError(CAST)
        fits = (
            linear_takes(r.head, r.bias)
            and r.head.shape == (self._vocabulary, E)
            and r.norm.shape == (E,)
            and len(r.plans) == len(r.blocks)
            and all(plan.rows_count == T for plan in r.plans)
            and (r.rows is None or _within(r.rows, self._batch))
        )
        if not fits:
            raise ValueError(
                f"a reader of {T} of {self._batch} rows with head {tuple(r.head.shape)}, norm {tuple(r.norm.shape)} and "
                f"{len(r.plans)} plans does not go with the others, or with itself"
            )
        table = r.blocks.table(dtype)
        check_inputs(self._steps * T, r.cos, r.sin, r.slots, r.blocks.size)
        r.blocks.check_buffers(dtype, r.held, range(len(r.blocks)))
        plans = (c_void_p * len(r.plans))(*map(addressof, r.plans))
        self._alive.append(plans)
        return _Reader(
            *(addressof(table), addressof(r.held.table), addressof(plans)),
            *(None if t is None else t.data_ptr() for t in (r.embedding, r.norm, r.head, r.bias)),
            *(None if t is None else t.data_ptr() for t in (r.cos, r.sin, r.slots, r.rows)),
            *(len(r.blocks), T, E, self._vocabulary, r.blocks.size, len(r.embedding), r.eps),
        )

    def __call__(self, n: int, ids: Tensor) -> Tensor:
        """Logits ``[B, V]`` after ``ids [B]`` int64, in step ``n``, counted from 0.

        Raises:
            ValueError: a step that there is not, or ids of another shape. IndexError: ids or slots that there are not.
        """
        if not 0 <= n < self._steps or ids.shape != (self._batch,) or ids.dtype != torch.long:
            raise ValueError(
                f"step {n} of {self._steps}, ids {tuple(ids.shape)} {ids.dtype}: give an int64 for each of {self._batch} rows"
            )
        ids = ids.cpu().contiguous()
        make = torch.empty if self._every else torch.zeros
        logits = make(self._batch, self._vocabulary, dtype=self._dtype)
        code = _function()(
            *(self._table, len(self._table), n, ids.data_ptr(), logits.data_ptr()),
            *(self._dtype == torch.bfloat16, torch.get_num_threads()),
        )
        if code == 1:
            raise MemoryError(f"no memory for a step of {self._batch} rows")
        if code:
            what = (
                "slots are not all in the buffers" if code == 2 else f"ids {ids.tolist()} are not all tokens"
            )
            raise IndexError(f"step {n}: {what}")
        return logits


def _within(rows: Tensor, batch: int) -> bool:
    plain = rows.dim() == 1 and rows.dtype == torch.long and rows.is_contiguous() and rows.is_cpu
    return plain and len(rows) > 0 and int(rows.min()) >= 0 and int(rows.max()) < batch


@cache
def _function() -> Any:
    lib = library()
    if lib is None:
        raise RuntimeError(f"there are no C kernels: {reason()}")
    lib.step.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int, c_int]
    return lib.step
