"""Peak memory of a code block."""

from __future__ import annotations

from pathlib import Path

import torch


class Peak:
    """A context manager: peak resident bytes above those at its start, from the kernel's high-water mark (CUDA: the allocator's).

    Attributes:
        bytes: available after the context; ``None`` if the system does not report it.
    """

    bytes: int | None = None

    def __enter__(self) -> Peak:
        self._base: int | None = None
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")
                self._base = _resident("VmRSS")
            except OSError:
                pass
        return self

    def __exit__(self, *error: object) -> None:
        if self._base is None:
            return
        if torch.cuda.is_initialized():
            self.bytes = torch.cuda.max_memory_allocated() - self._base
        else:
            self.bytes = max(0, _resident("VmHWM") - self._base)


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(name)
