"""Weights of a tensor class of their own, as of quantised models: some cannot be viewed in inference mode (quanto's of four bits)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def has_own_class(model: Any) -> bool:
    """Whether a weight is of a class of its own."""
    return any(type(p.data) is not Tensor for p in model.parameters())


@contextmanager
def outside_inference_mode(wanted: bool) -> Iterator[None]:
    """No inference mode and no gradients, where ``wanted``; else what is set."""
    if not wanted:
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
