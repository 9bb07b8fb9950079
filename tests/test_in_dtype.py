"""Models in half precision: their parameters are, and the frequencies of their rotary embeddings are not."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

from specdec.lab.loading import in_dtype, load


@pytest.mark.parametrize("made", ["cast", "loaded"])
def test_frequencies_are_not_rounded(made):
    model = tiny("llama") if made == "cast" else load("pocket-vanilla")[0]
    exact = model.model.rotary_emb.inv_freq.clone()
    low = in_dtype(model, torch.bfloat16) if made == "cast" else load("pocket-vanilla", torch.bfloat16)[0]
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert low.model.rotary_emb.inv_freq.equal(exact)
    assert not exact.equal(exact.bfloat16().to(exact.dtype))
