"""Our Muon against PyTorch's, and which precision a training takes."""

from __future__ import annotations

import sys

import pytest
import torch
from tiny import tiny

from specdec.pruning import keep_layers
from specdec.training.muon import Muon, arithmetic, quick
from specdec.training.train import Settings, train

IDS = torch.randint(0, 97, (4, 9), generator=torch.Generator().manual_seed(0))
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
    ours, theirs = run(type("Half", (Muon,), {"products": torch.bfloat16})), run(torch.optim.Muon)
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
    monkeypatch.setattr(
        sys.modules[train.__module__], "quick", lambda device: torch.bfloat16 if fast else torch.float32
    )
    used = []
    step = Muon.step
    monkeypatch.setattr(Muon, "step", lambda self, *a: used.append(self.products) or step(self, *a))
    target, draft = tiny("llama", 0), tiny("llama", 1)
    report = train(draft, target, IDS, settings=Settings(1, 2), progress=False)
    assert report.settings.precision == (torch.bfloat16 if fast else torch.float32)
    assert used == ([] if fast else [torch.float32])
    asked = train(draft, target, IDS, settings=Settings(1, 2, precision=torch.float64), progress=False)
    assert asked.settings.precision == torch.float64


def test_a_gpu_multiplies_bfloat16(monkeypatch):
    has = {"amx_bf16": False, "avx512_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert (quick("cuda"), quick("cpu")) == (torch.bfloat16, torch.float32)
    has["amx_bf16"] = True
    assert quick("cpu") == torch.bfloat16
    words = [arithmetic(dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert words == ["bf16 with float32 master weights", "float32"]


@pytest.mark.parametrize("precision", [None, torch.float32, torch.bfloat16])
def test_weights_that_lie_in_the_targets_memory_are_copied(precision):
    target = tiny("llama", 0, torch.float32)
    draft = keep_layers(target, [0, 1], share=True).requires_grad_(True)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    train(draft, target, IDS, settings=Settings(2, 2, precision=precision), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert not torch.equal(
        draft.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight
    )


def test_a_run_continues_in_the_precision_in_which_it_began(tmp_path):
    """Also on another processor; but another precision that is asked for is refused."""
    path, target = tmp_path / "run.pt", tiny("llama", 0)
    first = Settings(1, 2, precision=torch.bfloat16)
    train(tiny("llama", 1), target, IDS, settings=first, checkpoint=path, progress=False)
    report = train(tiny("llama", 1), target, IDS, settings=Settings(2, 2), checkpoint=path, progress=False)
    assert report.settings.precision == torch.bfloat16
    with pytest.raises(ValueError, match=r"precision = torch.bfloat16, and it is torch.float64 now"):
        other = Settings(2, 2, precision=torch.float64)
        train(tiny("llama", 1), target, IDS, settings=other, checkpoint=path, progress=False)
