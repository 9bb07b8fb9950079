"""Where Triton kernels run: on a GPU, or on the CPU by Triton's interpreter, a mode that is set before Triton is imported."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

REMEDY = "Triton's kernels run on CUDA: move it there, or set TRITON_INTERPRET=1 before Triton is imported"


def kernels(folder: str, device: torch.device, name: str, otherwise: str) -> ModuleType:
    """The Triton kernels of a folder, for a call whose argument ``name`` is on ``device``.

    Raises:
        ImportError: Triton is not installed. ValueError: they do not run on the device; the message ends with ``otherwise``.
    """
    try:
        module = import_module(f"specdec.kernels.{folder}.triton_kernels")
    except ImportError as error:
        raise ImportError("backend 'triton' needs Triton: pip install triton") from error
    if device.type == "cpu" and not any(
        type(k).__name__ == "InterpretedFunction" for k in vars(module).values()
    ):
        raise ValueError(f"{name} is on 'cpu' and {REMEDY}; {otherwise}")
    return module
