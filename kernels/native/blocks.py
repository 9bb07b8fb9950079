"""Blocks of a llama-like model over few packed tokens in one call of C, ``blocks.c``: no Python between their operators."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, addressof, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.attention.native import PlanStruct
from specdec.kernels.native.build import library
from specdec.kernels.native.ops import MOST, linear_takes

_NORMS = ("before", "after", "query_norm", "key_norm")
_PRODUCTS = ("query", "key", "value", "out", "gate", "up", "down")

CAST = "the model was cast or laid out anew after it was wrapped: make a new HFModel from it"


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Block(Structure):
    _fields_ = [
        *_fields(c_void_p, " ".join(_NORMS)),
        *_fields(c_void_p, " ".join(f"{name} {name}_bias" for name in _PRODUCTS)),
        *_fields(c_int64, "heads kv_heads size inner"),
        *_fields(c_float, "before_eps after_eps query_norm_eps key_norm_eps scale"),
    ]


class _Buffer(Structure):
    _fields_ = [
        *_fields(c_void_p, "keys values"),
        *_fields(c_int64, "k_row k_slot k_head v_row v_slot v_head rows capacity"),
    ]


Buffers = Array[_Buffer]


def buffers(layers: Sequence[tuple[Tensor, Tensor]]) -> Buffers | None:
    """Keys and values ``[B, S, H, D]`` of each layer as the kernel takes them, while these tensors live; ``None`` if it cannot."""
    if any(t.stride(-1) != 1 or not t.is_cpu for pair in layers for t in pair):
        return None
    return (_Buffer * len(layers))(
        *(
            _Buffer(
                keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3], *keys.shape[:2]
            )
            for keys, values in layers
        )
    )


class Blocks:
    """What ``models.native.Native`` computes between embedding and last norm, to the bit.

    Args:
        blocks: of one model, ``models.lean.Block``, in order; ``takes`` says whether they can be computed here.
    """

    def __init__(self, blocks: Sequence[Any]):
        self._blocks, self._table = list(blocks), (_Block * len(blocks))()
        self._tensors: list[Tensor] = []
        self._where: list[tuple[_Block, str]] = []  # whose field each tensor's address goes to
        for b, made in zip(blocks, self._table):
            made.heads, made.kv_heads = (p.out_features // b.size for p in (b.query, b.key))
            made.size, made.inner, made.scale = b.size, b.gate.out_features, b.scale
            for name in _NORMS:
                norm = getattr(b, name)
                if norm is not None:
                    self._add(made, name, norm.weight)
                    setattr(made, f"{name}_eps", norm.variance_epsilon)
            for name in _PRODUCTS:
                product = getattr(b, name)
                self._add(made, name, product.weight)
                if product.bias is not None:
                    self._add(made, f"{name}_bias", product.bias)
        self._at: list[int] = []
        self._dtype: torch.dtype | None = None

    def __reduce__(self) -> Any:  # addresses mean nothing in another process, or to a copy
        return Blocks, (self._blocks,)

    def _add(self, block: _Block, name: str, tensor: Tensor) -> None:
        self._tensors.append(tensor)
        self._where.append((block, name))

    @staticmethod
    def takes(blocks: Sequence[Any]) -> bool:
        """Whether the C kernels are there and take all sizes."""
        return library() is not None and all(
            b.size % 16 == 0 and b.size <= min(256, MOST) and _fits(b) for b in blocks
        )

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        held: Buffers,
        plans: Sequence[PlanStruct],
        taps: dict[int, Tensor] | None = None,
    ) -> None:
        """``x [T, E]`` through all blocks, in place; keys and values go to flat ``slots [T]`` of ``held``.

        Args:
            cos, sin: ``[T, size]``, float32. plans: of each block, ``attention.native.lowered``.
            taps: ``[T, E]`` tensors for the inputs of blocks by number, and for the result.
        Raises:
            IndexError: slots that the buffers do not have. ValueError: arguments that do not fit.
        """
        table, (T, E), half = self._weights(x), x.shape, x.dtype == torch.bfloat16
        count = len(self._blocks)
        _check(x, cos, sin, slots, self._blocks[0].size)
        if len(held) != count or len(plans) != count:
            raise ValueError(f"{count} blocks have {len(held)} buffers and {len(plans)} plans: give as many")
        at = None
        if taps:
            at = (c_void_p * (count + 1))()
            for number, into in taps.items():
                if into.shape != x.shape or into.dtype != x.dtype or not into.is_contiguous():
                    raise ValueError(f"taps[{number}] is {tuple(into.shape)} {into.dtype}: make it as x is")
                at[number] = into.data_ptr()
        lowered = (c_void_p * count)(*map(addressof, plans))
        _done(
            _function("blocks")(
                *(table, held, lowered, at, count, x.data_ptr(), T, E, cos.data_ptr(), sin.data_ptr()),
                *(slots.data_ptr(), half, torch.get_num_threads()),
            ),
            slots,
        )

    def remember(
        self, number: int, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, held: Buffers
    ) -> None:
        """Only keys and values of block ``number`` for inputs ``x [T, E]``."""
        table, (T, E), half = self._weights(x), x.shape, x.dtype == torch.bfloat16
        _check(x, cos, sin, slots, self._blocks[number].size)
        _done(
            _function("remember")(
                *(addressof(table[number]), addressof(held[number]), x.data_ptr(), T, E, cos.data_ptr()),
                *(sin.data_ptr(), slots.data_ptr(), half, torch.get_num_threads()),
            ),
            slots,
        )

    def _weights(self, x: Tensor) -> Array[_Block]:
        """The table, with today's addresses."""
        at = [t.data_ptr() for t in self._tensors]
        if at != self._at or x.dtype != self._dtype:
            if any(t.dtype != x.dtype or not t.is_contiguous() or not t.is_cpu for t in self._tensors):
                raise RuntimeError(CAST)
            for (block, name), address in zip(self._where, at):
                setattr(block, name, address)
            self._at, self._dtype = at, x.dtype
        return self._table


def _fits(b: Any) -> bool:
    return all(linear_takes(p.weight, p.bias) for p in (getattr(b, name) for name in _PRODUCTS))


def _check(x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, size: int) -> None:
    T = len(x)
    right = (
        x.is_contiguous()
        and cos.shape == sin.shape == (T, size)
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.dtype == sin.dtype == torch.float32
        and slots.shape == (T,)
        and slots.dtype == torch.long
        and slots.is_contiguous()
    )
    if not right:
        raise ValueError(
            f"blocks: x {tuple(x.shape)}, cos {tuple(cos.shape)} {cos.dtype}, sin {tuple(sin.shape)} {sin.dtype} and slots "
            f"{tuple(slots.shape)} {slots.dtype} do not go together"
        )


def _done(code: int, slots: Tensor) -> None:
    if code == 1:
        raise MemoryError(f"blocks: no memory for {len(slots)} tokens")
    if code == 2:
        raise IndexError(f"slots {slots.tolist()} are not all in the buffers")


@cache
def _function(name: str) -> Any:
    lib = library()
    assert lib is not None
    function = getattr(lib, name)
    end = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int]
    if name == "blocks":
        function.argtypes = [POINTER(_Block), POINTER(_Buffer), c_void_p, c_void_p, c_int64, *end]
    else:
        function.argtypes = [c_void_p, c_void_p, *end]
    return function
