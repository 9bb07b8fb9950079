"""Memory for keys and values."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

LARGE = 2**20  # bytes
PAGE = 4096  # the least that the system fills at once


def zeros(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As ``torch.zeros``. On the CPU the system itself fills large memory, in huge pages where it has them, since NumPy asks for these: both ways of filling
    are several times as fast. All of it is taken now, so that memory that is short is noticed here, and not when texts have grown.

    Raises:
        MemoryError: there is no memory for it on the CPU.
    """
    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < LARGE:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = np.zeros(size + 64, dtype=np.uint8)
    memory[::PAGE] = 0
    start = -memory.ctypes.data % 64  # aligned as PyTorch's own
    return torch.from_numpy(memory)[start : start + size].view(dtype).view(shape)
