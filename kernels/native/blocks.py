"""Blocks of a llama-like model over few packed tokens in one call of C, ``blocks.c``: no Python between their operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Array, Structure, addressof, c_float, c_int64, c_void_p, sizeof
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.attention.native import PlanStruct, fields
from specdec.kernels.native.build import function, library
from specdec.kernels.native.narrow import Narrow
from specdec.kernels.native.ops import linear_takes

_NORMS = ("before", "after", "query_norm", "key_norm")
_END = "pllpppii"  # x, T, E, cos, sin, slots, half, threads
_PRODUCTS = ("query", "key", "value", "out", "gate", "up", "down")

CAST = "the model was cast, or its layout or shapes changed, after it was wrapped: make a new HFModel (or SpireModel) from it"


class _Block(Structure):
    _fields_ = [
        *fields(c_void_p, " ".join(_NORMS)),
        *fields(c_void_p, " ".join(f"{name} {name}_bias" for name in _PRODUCTS)),
        *fields(c_int64, "heads kv_heads size inner narrow"),
        *fields(c_float, "before_eps after_eps query_norm_eps key_norm_eps scale"),
    ]


class _Buffer(Structure):
    _fields_ = [
        *fields(c_void_p, "keys values"),
        *fields(c_int64, "k_row k_slot k_head v_row v_slot v_head rows capacity"),
    ]


class Buffers:
    """Keys and values ``[B, S, H, D]`` of each layer as the kernel takes them, and the tensors, which keep the addresses valid.

    Attributes:
        kinds: heads, sizes and dtypes of each layer.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]):
        self.layers = list(layers)
        self.kinds = [(*k.shape[2:], *v.shape[2:], k.dtype, v.dtype) for k, v in layers]
        self.table = (_Buffer * len(layers))(
            *(
                _Buffer(k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3], *k.shape[:2])
                for k, v in layers
            )
        )


def buffers(layers: Sequence[tuple[Tensor, Tensor]]) -> Buffers | None:
    """``Buffers``, or ``None`` where the kernel cannot read these tensors."""
    if any(t.stride(-1) != 1 or not t.is_cpu for pair in layers for t in pair):
        return None
    return Buffers(layers)


class Blocks:
    """The blocks of ``forward.llama_c.LlamaC``, between embedding and last norm, with bit-identical results.

    Args:
        blocks: of one model, ``forward.llama_eager.Block``, in order; ``takes`` says whether they are supported.
        narrow: bfloat16 copies of the products' weights, which are read instead.
        keys_only: it has ``remember`` alone, for which only the weights of keys and values are read.
    """

    def __init__(self, blocks: Sequence[Any], narrow: Narrow | None = None, keys_only: bool = False):
        self._blocks, self._table, self._narrow = list(blocks), (_Block * len(blocks))(), narrow
        self.keys_only, read = keys_only, ("key", "value") if keys_only else _PRODUCTS
        # A field, and the module and name of its parameter.
        self._places: list[tuple[_Block, str, Any, str]] = []
        self._shapes: list[torch.Size] = []
        for b, made in zip(blocks, self._table):
            made.heads, made.kv_heads = (p.out_features // b.size for p in (b.query, b.key))
            made.size, made.inner, made.scale = b.size, b.gate.out_features, b.scale
            made.narrow = narrow is not None
            norms = (b.before, b.after, b.query_norm, b.key_norm)
            for name, norm in zip(_NORMS, norms):
                if norm is not None:
                    self._add(made, name, norm, "weight")
                    setattr(made, f"{name}_eps", norm.variance_epsilon)
            for name, product in zip(_PRODUCTS, b.products):
                if name not in read:
                    continue
                self._add(made, name, product, "weight")
                if product.bias is not None:
                    self._add(made, f"{name}_bias", product, "bias")
        self._seen: list[Any] = []
        self._dtype: torch.dtype | None = None

    def __reduce__(self) -> Any:  # addresses are invalid in another process and for a copy
        return Blocks, (self._blocks, self._narrow, self.keys_only)

    def _add(self, block: _Block, field: str, module: Any, name: str) -> None:
        self._places.append((block, field, module, name))
        self._shapes.append(getattr(module, name).shape)

    @property
    def width(self) -> int:
        """The hidden size."""
        return self._blocks[0].query.in_features

    @property
    def size(self) -> int:
        """The head size."""
        return self._blocks[0].size

    @property
    def plain(self) -> bool:
        """Whether all weights are still plain parameters of their modules (not pruned or parametrised, for example)."""
        return all(module._parameters.get(name) is not None for _, _, module, name in self._places)

    @staticmethod
    def takes(blocks: Sequence[Any]) -> bool:
        """Whether the C kernels are available and support all sizes."""
        return library() is not None and all(b.size % 16 == 0 and b.size <= 256 and _fits(b) for b in blocks)

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        held: Buffers,
        plans: Sequence[PlanStruct],
        taps: dict[int, Tensor] | None = None,
        read: Tensor | None = None,
        layer: int = 0,
    ) -> None:
        """``x [T, E]`` through all blocks, in place; keys and values go to flat ``slots [T]`` of ``held``.

        Args:
            cos, sin: ``[T, size]``, float32. plans: of each block, from ``attention.native.lowered``.
            taps: ``[T, E]`` tensors for the inputs of blocks by number, and for the result.
            read: ``[T, inputs]``, what the first block's attention reads in place of the norm of ``x``, in the dtype of ``x``.
            layer: the first block's layer in ``held``; the others follow.
        Raises:
            IndexError: slots outside of the buffers. ValueError: arguments that do not fit. RuntimeError: weights whose shape,
                layout or dtype has changed; or these blocks have ``remember`` alone.
        """
        if self.keys_only:
            raise RuntimeError(
                "these blocks have the weights of keys and values alone: make Blocks without keys_only"
            )
        table, (T, E), half = self.table(x.dtype), x.shape, x.dtype == torch.bfloat16
        first, count = self._blocks[0], len(self._blocks)
        _check(x, cos, sin, slots, first.size)
        self.check_buffers(x.dtype, held, range(count), layer)
        if len(plans) != count:
            raise ValueError(f"{count} blocks have {len(plans)} plans: give as many")
        inputs = first.query.in_features
        given = x if read is None else read
        if (
            given.shape != (T, inputs)
            or given.dtype != x.dtype
            or not (given.is_contiguous() and given.is_cpu)
        ):
            raise ValueError(
                f"blocks: the first block reads {tuple(given.shape)} {given.dtype}: make it {(T, inputs)} {x.dtype}"
            )
        if first.out.out_features != E or (read is None and first.before is None):
            raise ValueError(
                f"blocks: x is {tuple(x.shape)}, and the first block returns {first.out.out_features}"
            )
        at = tapped(taps, count, (T, E), x.dtype)
        lowered = (c_void_p * count)(*map(addressof, plans))
        _done(
            function("blocks", "pppplpl" + _END)(
                *(table, addressof(held.table) + layer * sizeof(_Buffer), lowered, at, count),
                *(None if read is None else read.data_ptr(), inputs),
                *(x.data_ptr(), T, E, cos.data_ptr(), sin.data_ptr(), slots.data_ptr()),
                *(half, torch.get_num_threads()),
            ),
            slots,
        )

    def remember(
        self,
        number: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        held: Buffers,
        normed: bool = False,
        layer: int = 0,
    ) -> None:
        """Compute and store only the keys and values of block ``number`` for inputs ``x [T, E]``.

        Args:
            normed: whether ``x`` is what attention reads, normed already. layer: as for a call.
        """
        table, (T, E), half = self.table(x.dtype), x.shape, x.dtype == torch.bfloat16
        b = self._blocks[number]
        _check(x, cos, sin, slots, b.size)
        self.check_buffers(x.dtype, held, (number,), layer)
        if b.key.in_features != E or (b.before is None and not normed):
            raise ValueError(f"remember: x is {tuple(x.shape)}, and the block reads {b.key.in_features}")
        _done(
            function("remember", "ppi" + _END)(
                *(addressof(table[number]), addressof(held.table[layer + number]), normed),
                *(x.data_ptr(), T, E, cos.data_ptr(), sin.data_ptr(), slots.data_ptr()),
                *(half, torch.get_num_threads()),
            ),
            slots,
        )

    def __len__(self) -> int:
        return len(self._blocks)

    def table(self, dtype: torch.dtype) -> Array[_Block]:
        """The blocks as the kernel takes them, with current addresses, for inputs of ``dtype``."""
        tensors = [module._parameters[name] for _, _, module, name in self._places]
        seen = [(t.data_ptr(), t.shape, t.stride()) for t in tensors]
        if seen != self._seen or dtype != self._dtype:
            if self._narrow is not None and dtype != torch.float32:
                raise RuntimeError(CAST)
            for t, shape in zip(tensors, self._shapes):
                if t.shape != shape or t.dtype != dtype or not t.is_contiguous() or not t.is_cpu:
                    raise RuntimeError(CAST)
            for (block, field, _, _), t, (address, _, _) in zip(self._places, tensors, seen):
                if self._narrow is not None and field in _PRODUCTS:
                    address = self._narrow[t].data_ptr()
                setattr(block, field, address)
            self._seen, self._dtype = seen, dtype
        return self._table

    def check_buffers(
        self, dtype: torch.dtype, held: Buffers, numbers: Iterable[int], layer: int = 0
    ) -> None:
        """Raise ValueError for a cache that was made for another model or dtype; ``layer``: of block 0."""
        for number in numbers:
            heads, size, i = self._table[number].kv_heads, self._table[number].size, layer + number
            kind = (heads, size, heads, size, dtype, dtype)
            if not 0 <= i < len(held.kinds) or held.kinds[i] != kind:
                found = held.kinds[i] if 0 <= i < len(held.kinds) else "missing"
                raise ValueError(
                    f"the cache's layer {i} is {found} and this model's keys and values are {kind} (heads, size, heads, size, dtypes): "
                    "give the cache that this model made"
                )


def _fits(b: Any) -> bool:
    return all(linear_takes(p.weight, p.bias) for p in b.products)


def _check(x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, size: int) -> None:
    if not x.is_contiguous():
        raise ValueError(f"blocks: x {tuple(x.shape)} is not contiguous")
    check_inputs(len(x), cos, sin, slots, size)


def tapped(
    taps: dict[int, Tensor] | None, count: int, shape: tuple[int, int], dtype: torch.dtype
) -> Array[c_void_p] | None:
    """Addresses for the inputs of ``count`` blocks, and for the result; ``None`` without taps."""
    if not taps:
        return None
    at = (c_void_p * (count + 1))()
    for number, into in taps.items():
        if into.shape != shape or into.dtype != dtype or not into.is_contiguous():
            raise ValueError(f"taps[{number}] is {tuple(into.shape)} {into.dtype}: make it {shape} {dtype}")
        at[number] = into.data_ptr()
    return at


def check_inputs(T: int, cos: Tensor, sin: Tensor, slots: Tensor, size: int) -> None:
    """Raise ValueError unless ``cos``, ``sin`` and ``slots`` are those of ``T`` tokens with head size ``size``, as the kernels take them."""
    right = (
        cos.shape == sin.shape == (T, size)
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.dtype == sin.dtype == torch.float32
        and slots.shape == (T,)
        and slots.dtype == torch.long
        and slots.is_contiguous()
    )
    if not right:
        raise ValueError(
            f"blocks: {T} tokens, cos {tuple(cos.shape)} {cos.dtype}, sin {tuple(sin.shape)} {sin.dtype} and slots "
            f"{tuple(slots.shape)} {slots.dtype} do not go together"
        )


def _done(code: int, slots: Tensor) -> None:
    if code == 1:
        raise MemoryError(f"blocks: no memory for {len(slots)} tokens")
    if code == 2:
        raise IndexError(f"slots {slots.tolist()} are not all in the buffers")
