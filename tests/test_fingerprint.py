"""The fingerprint of a model's weights: what changes it, and what does not."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice, onto
from tiny import tiny
from torch import nn

from specdec.models.fingerprint import fingerprint


class Weight(nn.Module):
    def __init__(self, *shape, dtype=torch.bfloat16):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("shape", [(151_936, 1024), (14_336, 4096), (2**24 + 1,), (0,), (1,), (2, 3)])
def test_weights_of_every_size(shape):
    """As large as a model's of eight billion parameters; float32 cannot tell the last of their values from the one after it."""
    one = Weight(*shape)
    flat = one.weight.flatten()
    if len(flat):
        flat[0] = flat[-1] = 1.0
    before = fingerprint(one)
    assert len(before) == 16
    assert before == fingerprint(one)
    if len(flat):
        flat[0] = 2.0
        assert fingerprint(one) != before


def test_precision_and_device_do_not_matter_and_names_and_values_do():
    model = tiny("llama", 0, torch.bfloat16)
    found = fingerprint(model)
    assert fingerprint(tiny("llama", 0, torch.bfloat16).float()) == found
    with FakeDevice():
        assert fingerprint(onto(tiny("llama", 0, torch.bfloat16))) == found
    assert fingerprint(tiny("llama", 1, torch.bfloat16)) != found
    assert fingerprint(nn.ModuleList([model])) != found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_defaults_do_not_matter(dtype):
    model = tiny("llama", 0, torch.bfloat16)
    found = fingerprint(model)
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            assert fingerprint(model) == found
    finally:
        torch.set_default_dtype(torch.float32)
