"""Inputs of a captured step: arrays of fixed shapes in one block on the device, written by one copy."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from specdec.graphs.capture import Capture

_DTYPES = {"i4": torch.int32, "i8": torch.int64, "f8": torch.float64}


class Staged:
    """Named arrays in one block.

    Args:
        fields: name -> type (``"i4"``, ``"i8"`` or ``"f8"``) and shape. device: where a step reads them.
    Attributes:
        on: name -> tensor on the device, always the same. Each begins at a multiple of 16 bytes, for which kernels are
            specialised.
    """

    def __init__(self, fields: Mapping[str, tuple[str, tuple[int, ...]]], device: torch.device):
        self._cuda = device.type == "cuda"
        places, end = {}, 0
        for name, (kind, shape) in fields.items():
            size = int(np.prod(shape)) * int(kind[1])
            places[name] = (end, end + size, kind, shape)
            end += -(-size // 16) * 16
        with torch.inference_mode(False):
            self._block = torch.zeros(end, dtype=torch.uint8, device=device)
            # Two blocks, so that one can be filled while the other is still read.
            self._host = [torch.zeros(end, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
            self.on = {
                name: self._block[a:b].view(_DTYPES[kind]).view(shape)
                for name, (a, b, kind, shape) in places.items()
            }
        self._arrays = [
            {
                name: host.numpy()[a:b].view(f"<{kind}").reshape(shape)
                for name, (a, b, kind, shape) in places.items()
            }
            for host in self._host
        ]
        self._sent: list[Any] = [None, None]  # CUDA events
        self._turn = 0

    def begin(self) -> dict[str, np.ndarray]:
        """Arrays to fill, with arbitrary contents; ``send`` copies them. Waits until the copy before the last is done."""
        self._turn ^= 1
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self) -> None:
        """Copy the filled arrays to the device; the host does not wait."""
        self._block.copy_(self._host[self._turn], non_blocking=True)
        if self._cuda:
            self._sent[self._turn] = torch.cuda.Event()
            self._sent[self._turn].record(torch.cuda.current_stream(self._block.device))


class Program(ABC):
    """A body over staged inputs, which can be captured and replayed.

    Attributes:
        staged: its inputs. owner: of whose weights and memory the program holds, besides those of the model that runs it; when it is gone, the
            program is dropped. ``None``: nobody.
    """

    staged: Staged
    owner: weakref.ref[Any] | None = None
    _replay: Any = None

    @abstractmethod
    def body(self) -> Any:
        """What is captured: a function of tensors at fixed addresses."""

    @property
    def captured(self) -> bool:
        return self._replay is not None

    def capture(self, capture: Capture) -> None:
        """Capture the body on the inputs that were sent last; it may run more than once."""
        self._replay = capture(self.body)

    def replay(self) -> Any:
        """The body's results for the inputs that were sent last, in tensors that hold until the next replay."""
        return self._replay()


def pad(array: np.ndarray, values: Any, rest: int = 0) -> None:
    """Put ``values`` at the beginning of an array, followed by ``rest``."""
    array[: len(values)] = values
    array[len(values) :] = rest
