"""To copy or to read a few entries of a large memory takes no copy of all of it."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from specdec.cache.contiguous import SlotCache
from specdec.cache.slots import KVShape
from specdec.kernels.attention.packed import parts
from specdec.kernels.attention.plan import AttentionPlan

SHAPES = [KVShape(2, 16, 16, torch.float32, torch.device("cpu"))] * 3


def most(call):
    """Bytes of the largest tensor that is allocated meanwhile."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        call()
    return max(event.self_cpu_memory_usage for event in seen.events())


def test_few_entries_of_a_cache_that_rows_have_left():
    cache = SlotCache(SHAPES, 4, 1000).select(torch.arange(3))
    whole = sum(block.nbytes for block in cache._blocks)
    assert most(lambda: cache.copy([3, 1005], [2, 1004])) < whole / 100


def test_a_row_in_few_pages_of_a_large_pool():
    pages = torch.randn(2, 1000, 2, 8, 16).transpose(2, 3)
    query = torch.randn(1, 2, 3, 16)
    plan = AttentionPlan(range(1), [30], [3], 40, table=[[900, 17, 400, 3, 77]], page=8)
    assert most(lambda: parts(query, *pages, plan, 0.25, None, False)) < pages[0].nbytes / 100
