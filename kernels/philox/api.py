"""Keyed uniforms and races by Triton. Without Triton or a GPU, ``specdec.rng.Philox`` gives the same results."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels import interpreted
from specdec.kernels.device import current, to_device
from specdec.kernels.philox.reference import TARGET, Key

BLOCK = 1024
OTHERWISE = "rng.Philox gives the same anywhere"
STEPS = 4  # blocks of a race that one program runs


def uniforms(seed: Tensor, key: Key, device: torch.device | str) -> Tensor:
    """float64 in [0, 1) in the broadcast shape of the key's fields, on ``device``: bit-identical to ``Philox(seed).uniform(key)``.

    Raises:
        ImportError: Triton is not installed. ValueError: ``device`` is a CPU, and Triton does not interpret its kernels.
    """
    kernels = interpreted.kernels("philox", torch.device(device), "device", OTHERWISE)
    at, depth, sibling = (torch.as_tensor(f, device=device) for f in key[:3])
    node = depth | (sibling << 16)
    shape = torch.broadcast_shapes(at.shape, node.shape) or (1,)
    rows = seed.to(device).reshape(-1, *[1] * (len(shape) - 1))
    shape = torch.broadcast_shapes(shape, rows.shape)
    who = torch.full((), key.stream | (key.attempt << 8), dtype=torch.long, device=device)
    words = [word.expand(shape).contiguous() for word in (at, node, who, rows)]
    out = torch.empty(shape, dtype=torch.float64, device=device)
    if out.numel():
        with current(out.device):
            kernels.uniform_kernel[(-(-out.numel() // BLOCK),)](*words, out, out.numel(), BLOCK=BLOCK)
    return out


def race(probs: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """``[R]`` the tokens that arrive first, as in ``Philox.race``; one pass over ``probs [R, V]``.

    The random numbers are bit-identical. Logarithms of different libraries differ in the last bit, so if two tokens' arrival times
    agree to about 2^-52 the other one may win: at most once in about 10^14 draws.

    Args:
        probs: ``[R, V]`` in float16, bfloat16, float32 or float64. seed, position: ``[R]`` int64, on any device.
    Raises:
        ImportError: Triton is not installed. ValueError: shapes do not fit, or ``probs`` are on a CPU, and Triton does not interpret its
            kernels.
    """
    kernels = interpreted.kernels("philox", probs.device, "probs", OTHERWISE)
    if probs.dim() != 2:
        raise ValueError(f"probs is {list(probs.shape)}: give [R, V], a distribution for each row")
    R, V = probs.shape
    if seed.shape != (R,) or position.shape != (R,):
        raise ValueError(
            f"seed {list(seed.shape)} and position {list(position.shape)}: a race over probs {list(probs.shape)} needs {[R]} "
            "of each"
        )
    probs = probs if probs.stride(1) == 1 else probs.contiguous()
    splits = max(1, -(-V // (BLOCK * STEPS)))
    time = torch.empty(R, splits, dtype=torch.float64, device=probs.device)
    token = torch.empty(R, splits, dtype=torch.long, device=probs.device)
    if R:
        seed, position = (to_device(t, probs.device).contiguous() for t in (seed, position))
        with current(probs.device):
            kernels.race_kernel[(R, splits)](
                probs, seed, position, time, token, V, probs.stride(0), splits, TARGET=TARGET, STEPS=STEPS, BLOCK=BLOCK
            )  # fmt: skip
    return token.gather(1, time.argmin(1, keepdim=True))[:, 0]
