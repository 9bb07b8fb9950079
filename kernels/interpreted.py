"""Where Triton kernels run: on a GPU, or on the CPU by Triton's interpreter, a mode that is set before Triton is imported."""

from __future__ import annotations

from typing import Any

import torch

REMEDY = "Triton's kernels run on CUDA: move it there, or set TRITON_INTERPRET=1 before Triton is imported"


def nowhere(kernel: Any, device: torch.device, name: str) -> str | None:
    """Why a kernel cannot run on the device of the argument ``name``, and the remedy, or ``None``."""
    if device.type != "cpu" or type(kernel).__name__ == "InterpretedFunction":
        return None
    return f"{name} is on 'cpu' and {REMEDY}"
