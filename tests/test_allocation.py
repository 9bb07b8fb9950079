"""Memory of caches: zeros of any type, aligned, and taken at once."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch

from specdec.kernels.allocation import LARGE, empty, zeros


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
)
@pytest.mark.parametrize("rows", [3, 3 * LARGE // 1000])
def test_zeros_of_any_size_and_type(dtype, rows):
    made = zeros(2, rows, 125, dtype=dtype, device="cpu")
    assert made.shape == (2, rows, 125)
    assert made.dtype == dtype
    assert made.is_contiguous()
    assert made.data_ptr() % 64 == 0
    assert not made.view(torch.uint8).any()
    made.view(torch.uint8).fill_(1)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made.view(torch.uint8))), made.clone()):
        assert torch.equal(other.view(torch.uint8), made.view(torch.uint8))


@pytest.mark.parametrize("size", [0, 1, 100, LARGE, 5 * LARGE + 3])
def test_empty_memory_is_aligned_and_its_own(size):
    made, other = empty(size), empty(size)
    assert made.shape == (size,)
    assert made.dtype == torch.uint8
    assert made.data_ptr() % 64 == 0 or not size
    made.fill_(1)
    other.fill_(2)
    assert made.eq(1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_at_once():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    made = zeros(64 * LARGE, dtype=torch.uint8, device="cpu")
    assert resident() - before > 0.9 * made.nbytes
