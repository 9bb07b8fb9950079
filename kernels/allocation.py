"""Large memory on the CPU, in huge pages where the system has them: it is taken and read faster than in pages of 4 KiB."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

LARGE = 2**20  # bytes; smaller memory is written at once
PAGE = 4096  # bytes, of the smallest page
ALIGNED = 64  # bytes, as PyTorch's own memory


def empty(size: int) -> Tensor:
    """As ``torch.empty(size, dtype=torch.uint8)``, ``size`` in bytes; NumPy asks for huge pages.

    Raises:
        MemoryError: there is no memory for it.
    """
    return _aligned(np.empty(size + ALIGNED, dtype=np.uint8), size)


def zeros(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As ``torch.zeros``. On the CPU, large memory is not written but taken from the system, which gives it out as zeros. One byte of each page is written,
    so that all memory is taken now, and a lack of it does not show later, in the middle of a run.

    Raises:
        MemoryError: there is no memory for it on the CPU.
    """
    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < LARGE:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = np.zeros(size + ALIGNED, dtype=np.uint8)
    memory[::PAGE] = 0
    return _aligned(memory, size).view(dtype).view(shape)


def _aligned(memory: np.ndarray, size: int) -> Tensor:
    start = -memory.ctypes.data % ALIGNED
    return torch.from_numpy(memory)[start : start + size]
