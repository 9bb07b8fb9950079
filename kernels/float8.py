"""Floating-point numbers of eight bits, in which a cache may keep keys and values: rounding, and moving them about."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in one of ``DTYPES``, to the nearest number; beyond the largest, to that. For any other ``dtype`` ``x`` itself."""
    if dtype not in DTYPES or x.dtype == dtype:
        return x
    most = torch.finfo(dtype).max  # a plain cast may make NaN or infinities of larger numbers
    return x.clamp(-most, most).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor in one of ``DTYPES``, a view, which PyTorch can index on every device; any other tensor itself."""
    return x.view(torch.uint8) if x.dtype in DTYPES else x
