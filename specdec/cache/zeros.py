"""Memory for keys and values: zeros that cost nothing until they are written to."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

LARGE = 2**20  # bytes: numbers that fit the processor's caches are cheaper to write at once


def zeros(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As ``torch.zeros``. On the CPU the system fills large memory when it is first used, in huge pages where it has them (NumPy asks for them), which also
    makes reading faster.

    Raises:
        MemoryError: there is no memory for it on the CPU.
    """
    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < LARGE:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size + 64, dtype=np.uint8))
    start = -memory.data_ptr() % 64  # aligned as PyTorch's own
    return memory[start : start + size].view(dtype).view(shape)
