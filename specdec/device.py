"""Host and device: small numbers go over without the host waiting, and come back in one copy, since every copy back is a wait."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Host numbers on a device; the host does not wait for what the device has still to do."""
    if device.type == "cuda" and tensor.is_cpu:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetched(*tensors: Tensor) -> list[Tensor]:
    """int64 or bool tensors on the host, in one copy where they are on one device."""
    away = [t for t in tensors if not t.is_cpu]
    if len(away) < 2 or len({t.device for t in away}) > 1:
        return [t.cpu() for t in tensors]
    parts = iter(torch.cat([t.reshape(-1).long() for t in away]).cpu().split([t.numel() for t in away]))
    return [t if t.is_cpu else next(parts).view(t.shape).to(t.dtype) for t in tensors]
