"""Memory for keys and values."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

LARGE = 2**20  # bytes; smaller memory is written at once
PAGE = 4096  # bytes, of the smallest page


def zeros(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As ``torch.zeros``. On the CPU, large memory is not written but taken from the system, which gives it out as zeros. NumPy asks for huge pages, which are
    taken and read faster. One byte of each page is written, so that all memory is taken now, and a lack of it does not show later, in the middle of a run.

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
