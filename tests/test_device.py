"""What goes to a device and comes back, where a CPU can say it."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels.device import to_device


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3).expand(2, 3),
        torch.zeros(1, 1).expand(1, 4),
        torch.zeros(2, 0),
        torch.arange(6).view(2, 3).t(),
    ],
)
def test_memory_that_is_pinned_is_the_tensors_own(tensor, monkeypatch):
    """Pinning an expanded tensor would copy to memory with several elements in one place, which PyTorch refuses."""
    pinned = []

    def pin_memory(self):
        pinned.append(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype).copy_(self))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: self)
    assert to_device(tensor, "cuda").equal(tensor)
    assert len(pinned) == 1
