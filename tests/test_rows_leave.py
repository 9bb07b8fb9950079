"""Rows that finish leave the batch: which rows go on, and that a cache keeps what each of them had."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny

import specdec as sd
from specdec.executors.round import staying


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_staying_keeps_every_unfinished_row_once_and_moves_few(finished):
    stay = staying(torch.tensor(finished)).tolist()
    assert sorted(stay) == [b for b, done in enumerate(finished) if not done]
    assert all(old == new or old >= len(stay) for new, old in enumerate(stay))


def test_a_cache_keeps_its_rows_whichever_way_they_are_selected():
    model = sd.HFModel(tiny("llama", 0))
    rows = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]]
    for order in ([0, 3, 2], [3, 1], [2, 0, 1], [1], [0, 1, 2, 3]):
        context = sd.Context.of(rows, capacity=12)
        cache = model.cache(4, 12)
        model.score(cache, context)
        keep = torch.tensor(order)
        cache, context = cache.select(keep), context.select(keep)
        more = context.append(torch.full((len(order), 1), 20), torch.ones(len(order), dtype=torch.long))
        assert cache.length.tolist() == [len(rows[b]) for b in order]
        got = model.score(cache, more).logits
        fresh = model.score(model.cache(len(order), 12), more).logits
        torch.testing.assert_close(got, fresh, rtol=1e-10, atol=1e-10)
