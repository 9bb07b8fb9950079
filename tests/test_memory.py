"""Feedback memory on plain tensors: both papers' equations, written out."""

from __future__ import annotations

import pytest
import torch

from specdec.memory import FeedbackMemory, SharedMemory, mix


def test_spires_form():
    x = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    memory = FeedbackMemory(2).double()
    torch.nn.init.normal_(memory.weights)
    made = memory(list(x))
    assert made.shape == (2, 2, 5, 4)
    for i in range(2):
        w = memory.weights[i].detach()
        share = (w.exp() / w.exp().sum()).tolist()
        torch.testing.assert_close(made[i], share[0] * x[0] + share[1] * x[1] + share[2] * x[2])


def test_fans_form_is_one_vector_for_all_layers():
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    memory = SharedMemory(3)
    torch.nn.init.normal_(memory.weights)
    made = memory(list(x))
    assert made.shape == (3, 6, 8)
    expected = (memory.weights.softmax(0)[:, None, None] * x).sum(0)
    for layer in made:
        torch.testing.assert_close(layer, expected)


def test_starts_even_and_learns():
    x = torch.randn(3, 4)
    memory = FeedbackMemory(2)
    torch.testing.assert_close(memory(list(x))[1], x.mean(0))
    memory(list(x)).square().sum().backward()
    assert memory.weights.grad is not None
    assert float(memory.weights.grad.abs().sum()) > 0


def test_bad_input():
    with pytest.raises(ValueError, match="layers is 0"):
        FeedbackMemory(0)
    with pytest.raises(ValueError, match="2 entries and weights 3"):
        mix([torch.zeros(4)] * 2, torch.zeros(3))
    with pytest.raises(ValueError, match="must agree"):
        mix([torch.zeros(4), torch.zeros(5)], torch.zeros(2))
