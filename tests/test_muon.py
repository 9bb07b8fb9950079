"""Our Muon against PyTorch's, and which precision a training takes."""

from __future__ import annotations

import sys

import pytest
import torch
from tiny import tiny

from specdec.training import muon
from specdec.training.muon import Muon, arithmetic, quick
from specdec.training.train import Settings, train

SHAPES = ((6, 6), (12, 5), (5, 12), (1, 7))


def run(make, steps=3):
    """The matrices after some steps; the last has no gradient in the second step."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=draw).requires_grad_() for shape in SHAPES]
    optimiser = make(params, lr=0.05, momentum=0.9, weight_decay=0.1)
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw)
        if step == 1:
            params[-1].grad = None
        optimiser.step()
    return params, optimiser


def test_with_products_of_bfloat16_it_is_pytorchs_bit_for_bit():
    ours, theirs = (run(make) for make in (lambda p, **s: Muon(p, torch.bfloat16, **s), torch.optim.Muon))
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0]))
    again = Muon(ours[0])
    again.load_state_dict(theirs[1].state_dict())  # one continues what the other began
    kept = [s["momentum_buffer"] for s in theirs[1].state.values()]
    assert all(torch.equal(s["momentum_buffer"], k) for s, k in zip(again.state.values(), kept))


def test_with_products_of_float32_it_differs_by_roundings():
    ours, theirs = run(Muon)[0], run(torch.optim.Muon)[0]
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=0.01)  # three steps of 0.05
    assert not all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("fast", [True, False])
def test_the_precision_is_one_that_the_processor_multiplies(fast, monkeypatch):
    for module in (sys.modules[train.__module__], muon):
        monkeypatch.setattr(module, "quick", lambda device: torch.bfloat16 if fast else torch.float32)
    used = []
    step = Muon.step
    monkeypatch.setattr(Muon, "step", lambda self, *a: used.append(self.products) or step(self, *a))
    target, draft = tiny("llama", 0), tiny("llama", 1)
    ids = torch.randint(0, 97, (4, 9), generator=torch.Generator().manual_seed(0))
    report = train(draft, target, ids, settings=Settings(1, 2), progress=False)
    assert report.settings.precision == (torch.bfloat16 if fast else torch.float32)
    assert used == ([] if fast else [torch.float32])
    asked = train(draft, target, ids, settings=Settings(1, 2, precision=torch.float64), progress=False)
    assert asked.settings.precision == torch.float64


def test_a_gpu_multiplies_bfloat16(monkeypatch):
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    assert (quick("cuda"), quick("cpu")) == (torch.bfloat16, torch.float32)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert quick("cpu") == torch.bfloat16
    words = [arithmetic(dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert words == ["bf16 with float32 master weights", "float32"]
