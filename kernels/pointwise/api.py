"""The operators by Triton, on tensors of one dtype and device. Plain versions: ``pointwise.reference``.

Tensors are contiguous. Tokens of queries, keys and values, of gate and of up may lie further apart, as they do in the result of one product.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import interpreted
from specdec.kernels.device import current

MOST = 16384  # the longest row that is normed
HEADS = 4  # heads of a token per program of ``apply_rotary``
BLOCK = 1024


class Place(NamedTuple):
    """Where new entries go: ``keys`` and ``values [B, S, H, D]``, last dimension contiguous, and flat ``slots [T]`` int64, ``b * S + s``.

    Slots are not checked: a slot out of range is written out of bounds.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels do not support a device or dtype, or ``None``."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"they compute float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if find_spec("triton") is None:
        return "they need Triton: pip install triton"
    if device.type != "cuda":
        return f"they run on CUDA devices, not on {device}"
    return None


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """``x [..., n] += y`` in place (unless y is None), and the RMS norm of the sum times ``weight [n]``, rounded once.

    Raises:
        ValueError: tensors that are not contiguous, not on a GPU, or do not fit. ImportError: Triton is not installed.
    """
    n = x.shape[-1]
    fit = weight.shape == (n,) and n <= MOST and (y is None or y.shape == x.shape)
    _check("add_norm", fit, x, weight, *([] if y is None else [y]))
    out = torch.empty_like(x)
    if x.numel():
        block = 1 << (n - 1).bit_length()
        with current(x.device):
            _kernels(x, "x").add_norm_kernel[(x.numel() // n,)](
                *(x, x if y is None else y, weight, out, n, eps),
                ADD=y is not None,
                BLOCK=block,
                num_warps=min(max(block // 512, 1), 16),
            )
    return out


def apply_rotary(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    value: Tensor | None = None,
    place: Place | None = None,
) -> None:
    """Rotary embedding, as transformers' llama, of ``query [T, Hq, D]`` and ``key [T, H, D]`` in place, rounded once.

    Args:
        cos, sin: ``[T, D]``. norms: RMS norms before the rotation, of query and key heads: weights ``[D]``, ``[D]`` and eps.
        value, place: with ``value [T, H, D]`` keys and values are stored in ``place``, and ``key`` is not changed.
    Raises:
        ValueError: tensors that are not contiguous, not on a GPU, or do not fit. ImportError: Triton is not installed.
    """
    T, Hq, D = query.shape
    H = key.shape[1]
    fit = key.shape == (T, H, D) and cos.shape == sin.shape == (T, D) and D % 2 == 0 and D <= 512
    _check("apply_rotary", fit, query[:1], key[:1], *(norms[:2] if norms else ()))
    _check("apply_rotary", norms is None or norms[0].shape == norms[1].shape == (D,), cos, sin)
    strides: tuple[int, ...] = (0,) * 6
    S = 1
    keys = values = slots = kept = key  # placeholders that are not read
    if place is not None:
        (keys, values, slots), kept = place, key if value is None else value
        lie = (
            keys.stride(3) == values.stride(3) == 1
            and keys.shape == values.shape
            and keys.shape[2:] == (H, D)
        )
        same = slots.shape == (T,) and slots.dtype == torch.long and keys.dtype == values.dtype == key.dtype
        _check("apply_rotary", lie and same and value is not None and value.shape == key.shape, kept[:1])
        _check("apply_rotary", True, slots)
        strides, S = (*keys.stride()[:3], *values.stride()[:3]), keys.shape[1]
    parts = -(-H // HEADS) * (1 if place is None else 2)
    if T:
        with current(query.device):
            _kernels(query, "query").turn_kernel[(T, -(-Hq // HEADS) + parts)](
                *(query, key, kept, cos, sin),
                *((query, key) if norms is None else norms[:2]),
                *(
                    keys,
                    values,
                    slots,
                    Hq,
                    H,
                    D // 2,
                    S,
                    query.stride(0),
                    key.stride(0),
                    kept.stride(0),
                    *strides,
                ),
                0.0 if norms is None else norms[2],
                HALF=1 << (D // 2 - 1).bit_length(),
                HEADS=HEADS,
                NORM=norms is not None,
                KEEP=place is not None,
            )


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gate [T, n] = silu(gate) * up`` in place, rounded once.

    Raises:
        ValueError: tensors that are not contiguous, not on a GPU, or do not fit. ImportError: Triton is not installed.
    """
    _check("silu_mul", gate.dim() == 2 and gate.shape == up.shape, gate[:1], up[:1])
    T, n = gate.shape
    if gate.numel():
        with current(gate.device):
            _kernels(gate, "gate").silu_mul_kernel[(T, -(-n // BLOCK))](
                gate, up, n, gate.stride(0), up.stride(0), BLOCK=BLOCK
            )
    return gate


def _check(name: str, fit: bool, *tensors: Tensor) -> None:
    first = tensors[0]
    dtype, device = first.dtype, first.device
    if fit and all(t.dtype == dtype and t.device == device and t.is_contiguous() for t in tensors):
        return
    found = [(tuple(t.shape), str(t.dtype), tuple(t.stride()), str(t.device)) for t in tensors]
    raise ValueError(
        f"{name}: give contiguous tensors of one dtype and device that fit each other, not {found}"
    )


def _kernels(x: Tensor, name: str) -> ModuleType:
    return interpreted.kernels("pointwise", x.device, name, "pointwise.reference runs anywhere")
