"""The C kernels of ``ops.c`` on contiguous tensors, float32 or bfloat16 unless noted otherwise. They need ``library()``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from specdec.kernels.native.build import function, library

MOST = 512  # the largest head size of ``apply_rotary``
BLOCK = 256  # rows of a product at a time, which are read again for every few outputs
_DTYPES = (torch.float32, torch.bfloat16)


@cache
def tiles() -> bool:
    """Whether bfloat16 products use the processor's matrix units (AMX)."""
    lib = library()
    return lib is not None and bool(lib.units())


@cache
def half_units() -> bool:
    """Whether PyTorch has products of bfloat16 made for this processor, and does not multiply number by number."""
    lib = library()
    return lib is not None and bool(lib.half_units())


@cache
def threaded() -> bool:
    """Whether the kernels use more than one thread: with PyTorch's OpenMP, and so if GCC compiled them."""
    lib = library()
    return lib is not None and bool(lib.threaded())


def _check(name: str, *tensors: Tensor | None) -> bool:
    """Whether the tensors are bfloat16. The kernels themselves check nothing.

    Raises:
        ValueError: tensors that are not contiguous, on the CPU, and of one dtype, float32 or bfloat16.
    """
    first = tensors[0]
    assert first is not None
    dtype = first.dtype
    if dtype not in _DTYPES or any(
        t is not None and (t.dtype != dtype or not t.is_contiguous() or not t.is_cpu) for t in tensors
    ):
        found = [(str(t.dtype), tuple(t.stride()), str(t.device)) for t in tensors if t is not None]
        raise ValueError(
            f"{name}: give contiguous tensors on the CPU, all float32 or all bfloat16, not {found}; a model that was cast or moved after "
            "it was wrapped needs a new HFModel"
        )
    return dtype == torch.bfloat16


def _shape(name: str, right: bool, *tensors: Tensor | None) -> None:
    if not right:
        raise ValueError(
            f"{name}: shapes {[tuple(t.shape) for t in tensors if t is not None]} do not go together"
        )


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """``x [..., n] += y`` in place (unless y is None), and the RMS norm of the sum times ``weight [n]``."""
    half, n = _check("add_norm", x, y, weight), x.shape[-1]
    _shape("add_norm", weight.shape == (n,) and (y is None or y.shape == x.shape), x, y, weight)
    out = torch.empty_like(x)
    function("add_norm", "ppppllfi")(
        x.data_ptr(),
        None if y is None else y.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        *(x.numel() // n, n, eps, half),
    )
    return out


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, size: int) -> Tensor:
    """Rotary embedding of ``x [T, heads * size]`` in place, by float32 ``cos`` and ``sin [T, size]``, as transformers' llama."""
    half, (T, wide) = _check("apply_rotary", x), x.shape
    _check("apply_rotary", cos, sin)
    right = cos.shape == sin.shape == (T, size) and cos.dtype == torch.float32
    _shape("apply_rotary", right and wide % size == 0 == size % 2 and size <= MOST, x, cos, sin)
    function("turn", "pppllli")(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), T, wide // size, size, half)
    return x


def store_kv(buffer: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write ``new [T, H, D]`` to flat ``slots [T]`` (int64) of ``buffer [B, S, H, D]``, any dtype; last dimensions contiguous.

    Raises:
        IndexError: slots outside of the buffer; nothing is written then.
        ValueError: shapes, dtypes or strides that do not go together.
    """
    T, heads, size = new.shape
    same = new.dtype == buffer.dtype and slots.dtype == torch.long and new.is_cpu and buffer.is_cpu
    lie = new.stride(-1) == 1 == buffer.stride(-1) or size == 1
    if not (same and lie and slots.shape == (T,) and buffer.shape[2:] == (heads, size)):
        raise ValueError(
            f"new entries {tuple(new.shape)} {new.dtype} for slots {tuple(slots.shape)} {slots.dtype} do not fit a buffer "
            f"{tuple(buffer.shape)} {buffer.dtype}"
        )
    by_row, by_slot, by_head, _ = buffer.stride()
    by_token, by_source, _ = new.stride()
    b, slots = buffer.element_size(), slots.contiguous()
    outside = function("keep", "pppllllllllll")(
        buffer.data_ptr(),
        new.data_ptr(),
        slots.data_ptr(),
        *(T, heads, size * b, buffer.shape[0], buffer.shape[1]),
        *(by_row * b, by_slot * b, by_head * b, by_token * b, by_source * b),
    )
    if outside:
        raise IndexError(
            f"slots {slots.tolist()} are not all in a buffer of {buffer.shape[0]} x {buffer.shape[1]}"
        )


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gate = silu(gate) * up`` in place."""
    half = _check("silu_mul", gate, up)
    _shape("silu_mul", gate.shape == up.shape, gate, up)
    function("silu_mul", "ppli")(gate.data_ptr(), up.data_ptr(), gate.numel(), half)
    return gate


def linear_takes(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether ``linear`` supports ``weight [O, E]``: sizes are multiples of 16, and it is contiguous."""
    plain = weight.dtype in (torch.float32, torch.bfloat16) and weight.is_cpu and weight.is_contiguous()
    plain = plain and type(weight.data) is Tensor  # a subclass may store its values elsewhere
    same = bias is None or (
        bias.dtype == weight.dtype and bias.is_contiguous() and bias.shape == weight.shape[:1]
    )
    return plain and same and weight.dim() == 2 and weight.shape[0] % 16 == 0 == weight.shape[1] % 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [T, E]`` times ``weight [O, E]`` transposed, plus ``bias [O]``, of one dtype: ``[T, O]``, for few rows.

    A row's bits do not depend on the number of rows.
    """
    _check("linear", x, weight, bias)
    _, E = x.shape
    O = weight.shape[0]
    right = weight.shape == (O, E) and E % 16 == 0 == O % 16 and (bias is None or bias.shape == (O,))
    _shape("linear", right, x, weight, bias)
    return unchecked_linear(x, weight, bias)


def unchecked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear`` without checks, which take longer than the products of a small model.

    For float32 inputs ``weight`` may be a copy made by ``narrow.Narrow``.
    """
    T, E = x.shape
    O = weight.shape[0]
    half = weight.dtype == torch.bfloat16
    kind = 0 if not half else 1 if x.dtype == torch.bfloat16 else 2
    out = x.new_empty(T, O)
    step = T if tiles() else BLOCK
    for t in range(0, T, step):
        failed = function("linear", "pppplllii")(
            x.data_ptr() + t * E * x.element_size(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr() + t * O * out.element_size(),
            *(min(step, T - t), O, E, kind, torch.get_num_threads()),
        )
        if failed:
            raise MemoryError(f"linear: no memory for {T} rows of {E} numbers")
    return out


def race_numbers(token: Tensor, position: Tensor, seed: Tensor, columns: int) -> Tensor:
    """Random numbers ``(k + 1/2) 2^-53``, float64 ``[R, columns]``, k being 53 bits of Philox at (seed, position, token, the target's stream).

    Args:
        token: ``[columns]`` or ``[R, columns]``. position, seed: ``[R]``. All int64 on the CPU.
    """
    token, position, seed = (t.to("cpu", torch.long).contiguous() for t in (token, position, seed))
    R = len(position)
    if token.shape not in ((columns,), (R, columns)) or seed.shape != (R,):
        raise ValueError(
            f"token is {tuple(token.shape)}, position {tuple(position.shape)} and seed {tuple(seed.shape)}"
        )
    out = torch.empty(R, columns, dtype=torch.float64)
    by_row = columns if token.dim() == 2 else 0
    function("race_numbers", "pplppll")(
        out.data_ptr(), token.data_ptr(), by_row, position.data_ptr(), seed.data_ptr(), R, columns
    )
    return out
