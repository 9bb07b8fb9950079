"""A short name for a model's weights, so that a draft or data made for one target is not used with another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


def fingerprint(model: nn.Module, samples: int = 256) -> str:
    """16 hexadecimal digits from every parameter's name, shape and ``samples`` evenly spaced values.

    Values are rounded to bf16 first: a bf16 checkpoint has the same fingerprint in whatever precision it was loaded.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        flat = value.detach().flatten()
        last = len(flat) - 1
        # The same values on every device and with every default dtype; float32 rounds the last number of a large weight up.
        at = torch.linspace(0, max(last, 0), min(samples, len(flat)), dtype=torch.float32, device="cpu")
        at = at.long().clamp(max=last)
        digest.update(f"{name}{list(value.shape)}".encode())
        digest.update(flat[at.to(flat.device)].to(torch.bfloat16).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def unwrapped(model: Any) -> Any:
    """The transformers model of an ``HFModel``; anything else as it is."""
    return model.model if hasattr(model, "score") and hasattr(model, "clone") else model
