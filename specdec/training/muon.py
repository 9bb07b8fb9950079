"""The arithmetic of a training on processors that multiply bfloat16 slowly, and Muon (Jordan, 2024) for them.

``torch.optim.Muon`` multiplies in bfloat16 whatever the precision of the weights. On a CPU without AMX and AVX-512-BF16 such products take many times as long as those of float32,
and Muon's take longer than everything else in a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def quick(device: torch.device | str) -> torch.dtype:
    """bfloat16 on a device with instructions for its products (a GPU; a CPU with AMX, AVX-512-BF16 or Arm's), else float32."""
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    has = torch.cpu.get_capabilities()
    fast = any(has.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return torch.bfloat16 if fast else torch.float32


def arithmetic(precision: torch.dtype | None) -> str:
    """What a training in ``precision`` computes in, in words."""
    name = str(precision).removeprefix("torch.").replace("bfloat16", "bf16")
    return name if precision == torch.float32 else f"{name} with float32 master weights"


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` with its products in ``products`` and the original adjustment of rates; it has the same state."""

    products = torch.float32

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                update = orthogonal(
                    update.to(self.products), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])))
        return loss


def muon(
    products: torch.dtype, matrices: Sequence[Tensor], lr: float, weight_decay: float
) -> torch.optim.Muon:
    """The optimiser of ``matrices`` that multiplies in ``products``, float32 or bfloat16, with momentum 0.95."""
    kind = Muon if products == torch.float32 else torch.optim.Muon
    return kind(matrices, lr=lr, momentum=0.95, weight_decay=weight_decay)


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """``x [R, C]`` with singular values near 1, by ``steps`` of the Newton-Schulz iteration."""
    (a, b, c), tall = coefficients, x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
