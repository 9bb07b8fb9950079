"""The largest scores by blocks against torch's."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels.topk import BLOCK, topk


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5000,), (3, 4099), (2, 3, 8 * BLOCK * 4), (0, 5000)])
def test_values_and_places(shape, dtype):
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for k in (1, 2, 8):
        found, wanted = topk(scores, k), scores.topk(k, -1)
        assert torch.equal(found.values, wanted.values)
        assert torch.equal(scores.gather(-1, found.indices), wanted.values)
        distinct = found.indices.sort(-1).values
        assert bool((distinct[..., 1:] > distinct[..., :-1]).all())


def test_equal_scores_are_named_once():
    scores = torch.full((2, 40 * BLOCK + 3), float("-inf"))
    found = topk(scores, 8)
    assert bool((found.values == float("-inf")).all())
    assert bool((found.indices < scores.shape[-1]).all())
    assert all(len(set(row)) == 8 for row in found.indices.tolist())
    scores[0, -3:] = 1.0
    assert set(topk(scores, 3).indices[0].tolist()) == {40 * BLOCK, 40 * BLOCK + 1, 40 * BLOCK + 2}


def test_nan_counts_as_the_largest():
    scores = torch.zeros(40 * BLOCK)
    scores[700] = float("nan")
    assert topk(scores, 2).indices[0] == 700


def test_few_scores_are_selected_by_torch(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("blocks were made")

    monkeypatch.setattr(torch, "cat", refuse)
    topk(torch.randn(4 * 8 * BLOCK - 1), 8)
    with pytest.raises(AssertionError, match="blocks were made"):
        topk(torch.randn(4 * 8 * BLOCK), 8)
