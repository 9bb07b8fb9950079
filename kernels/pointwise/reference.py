"""The operators in plain PyTorch, in the dtype of their inputs; they change nothing in place."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x [..., n] + y``, and its RMS norm times ``weight [n]``."""
    x = x if y is None else x + y
    return x, x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [T, H, D]`` by ``cos`` and ``sin [T, D]``, as transformers' llama."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return gate * torch.sigmoid(gate) * up
