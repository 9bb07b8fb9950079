"""Prompts of models with constant memory: rows are fed side by side, in pieces that are not much longer than what a query sees."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.cache.ring_cache import Stage
from specdec.models import masked

LENGTHS = [70, 1, 33, 8, 64]


@pytest.mark.parametrize("limit", [1, 7, 40, 1000])
def test_pieces_of_prompts_say_what_whole_prompts_say(limit, monkeypatch):
    """Row by row, in one forward each, and side by side in pieces, after which the next tokens have the same logits."""
    monkeypatch.setattr(masked, "PIECE", 16)
    model = tiny("llama", 0, torch.float64)
    draw = torch.Generator().manual_seed(limit)
    text = [torch.randint(0, 97, (n,), generator=draw).tolist() for n in LENGTHS]
    made, fed = [], []

    class Noted(Stage):
        def __init__(self, ring, rows):
            fed.append([(r.b, r.first, r.end) for r in rows])
            super().__init__(ring, rows)

    for chunk, rows in ((1001, [[b] for b in range(len(text))]), (limit, [list(range(len(text)))])):
        windowed = sd.models.Windowed(sd.HFModel(model, prefill_chunk=chunk), 6, 2, block=3)
        cache, context = windowed.cache(len(text), 80), sd.Context.of(text, 80)
        with monkeypatch.context() as patch:
            if chunk == limit:
                patch.setattr("specdec.cache.ring_cache.Stage", Noted)
            for some in rows:
                windowed.prefill(cache, context, torch.tensor(some))
        made.append(windowed.score(cache, context).logits)
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=1e-12)
    assert all(sum(end - first for _, first, end in rows) <= limit for rows in fed)
    assert all(end - first <= 16 for rows in fed for _, first, end in rows)
    if limit == 1000:  # five rows, then those that are longer than one piece, two pieces ...
        assert [len(rows) for rows in fed] == [4, 3, 2, 2, 1]
