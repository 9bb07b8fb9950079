"""Triton's kernel in a captured step over pages: the table is a tensor that is written anew for every replay."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interpreted import Launch, interpreter

from specdec import tree
from specdec.cache.paged import PagedCache
from specdec.cache.slots import KVShape
from specdec.cache.static import StaticStore
from specdec.cache.static_pool import StaticPool
from specdec.cache.token_index import Row
from specdec.graphs import static
from specdec.graphs.capture import capture_for
from specdec.graphs.static import ALL, Bucket, StaticStep
from specdec.kernels.attention import AttentionPlan, Tree, attention, reference, triton_backend

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARENTS = [-1, 0, 0, 1]
slow = () if DEVICE.type == "cuda" else pytest.mark.slow  # which stage t of the GPU suite leaves out


@pytest.fixture
def tables():
    """The tables of all launches. On a CPU steps call Triton's kernel, too, and its launches are recorded."""
    found: list[torch.Tensor | None] = []

    def attend(query, keys, values, lowered, *more):
        found.append(lowered.table)
        return triton_backend.launch(query, keys, values, lowered, *more)

    with nullcontext() if DEVICE.type == "cuda" else interpreter(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "attend", attend)
        if DEVICE.type != "cuda":
            kernels = triton_backend._kernels()
            named = {name: Launch(name, vars(kernels)[name]) for name in ("attend_kernel", "merge_kernel")}
            patch.setattr(triton_backend, "_kernels", lambda: SimpleNamespace(INTERPRET=True, **named))
        yield found


@pytest.mark.parametrize(
    ("page", "window", "branching", "kv"),
    [
        (48, 33, True, None),
        pytest.param(16, None, False, None, marks=slow),
        pytest.param(64, None, True, None, marks=slow),
        pytest.param(128, None, False, torch.float8_e4m3fn, marks=slow),
        pytest.param(1, 7, False, None, marks=slow),
    ],
)
def test_one_recording_reads_the_pages_of_each_call(page, window, branching, kv, tables):
    """Whatever is not a row's own is NaN: free pages, the spare one, and the page that the table names beyond a row's last."""
    draw = torch.Generator().manual_seed(page)
    pool = StaticPool([KVShape(2, 32, 16, kv or torch.float32, DEVICE)], page)
    pool.reserve(4 * -(-200 // page))
    for block in pool._whole:
        block.fill_(float("nan") if kv is None else 0x7F)
    assert pool.take(1) == [0]
    cache = PagedCache(pool, 3, 200)
    dtype, atol = (torch.float32, 1e-5) if kv is None else (torch.bfloat16, 2e-2)
    queries = torch.zeros(1, 16, 4, 32, device=DEVICE, dtype=dtype).transpose(1, 2)
    new = [torch.zeros(1, 16, 2, size, device=DEVICE, dtype=dtype).transpose(1, 2) for size in (32, 16)]

    def forward(store, plan, *_):
        keys, values = store.append(0, plan.slots_on(queries.device), *new)
        return attention(queries, keys, values, plan, window=window)[0]

    store = StaticStore(pool)
    step = StaticStep(forward, store, Bucket(4, 4, ALL, 256, 4 if branching else 0), DEVICE)
    for turn, (firsts, rows) in enumerate(
        (([100, 3, 62], [0, 1, 2]), ([64, 101, 7], [2, 0, 1]), ([103, 17], [1, 2]))
    ):
        cache = cache.select(torch.tensor(rows)) if turn else cache
        for b, n in enumerate(firsts):
            cache.remember(b, np.zeros(200, np.int64), 0, n, 0)
        counts = [4] * len(firsts) if branching else [4, 2, 1][: len(firsts)]
        table = cache.hold([Row(b, 0, n, n + count) for b, (n, count) in enumerate(zip(firsts, counts))])
        for b, n in enumerate(firsts):
            flat = [table[b][s // page] * page + s % page for s in range(n)]
            pool.append(
                0,
                torch.tensor(flat, device=DEVICE),
                *(torch.randn(1, 2, n, d, generator=draw).to(DEVICE) for d in (32, 16)),
            )
        for t in (queries, *new):
            t.copy_(torch.randn(t.shape, generator=draw))
        queries[:, :, sum(counts) :] = float("nan")
        shape = None
        if branching:
            parents = torch.tensor([PARENTS] * len(firsts))
            shape = Tree(np.array(firsts), tree.ancestors(parents).numpy(), tree.depths(parents).numpy())
        plan = AttentionPlan(
            range(len(firsts)),
            firsts,
            counts,
            0,
            shape,
            table=[table[b] for b in range(len(firsts))],
            page=page,
        )
        step.update(plan, [0] * sum(counts), [0] * sum(counts), [])
        if not turn:
            step.capture(capture_for("cuda" if DEVICE.type == "cuda" else "recorded", DEVICE))
        with torch.inference_mode():
            out, _ = step.replay()
        T = sum(counts)
        wide = [(t if kv is None else t.float()).double() for t in pool.layers[0]]
        exact = reference.attend(queries[:, :, :T].double(), *wide, plan, 32**-0.5, window)
        torch.testing.assert_close(out[:T].double(), exact[0], rtol=0, atol=atol)
    assert {id(t) for t in tables} == {id(step.staged.on["table"])}
    assert not bool(pool.layers[0][0][0].float().isfinite().any())
