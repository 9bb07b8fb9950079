"""The Triton attention kernel against the reference in float64: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from interpreted import interpreter

from specdec import tree
from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.kernels.attention import (
    AttentionPlan,
    ExplicitPlan,
    Tree,
    attention,
    reference,
    splitting,
    triton_backend,
)
from specdec.kernels.attention import merge as merge_reference
from specdec.kernels.attention.lowered import RingSight, lower
from specdec.kernels.attention.reach import reach

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# There a float32 division and exp2 are approximate, to a few units in the last place.
LOOSER = 4 if DEVICE.type == "cuda" else 1


@pytest.fixture(autouse=True)
def _mode():
    if DEVICE.type == "cuda":
        yield
    else:
        with interpreter():
            yield


PARENTS = [-1, 0, 0, 1, 1, 2, 5]


def make_tree(roots, parents=PARENTS):
    p = torch.tensor([parents] * len(roots))
    return Tree(np.array(roots), tree.ancestors(p).numpy(), tree.depths(p).numpy())


def case(plan, Hq=4, Hkv=2, D=64, dtype=torch.float32, B=4, S=None, seed=0, Dv=None):
    """Random tensors; in the buffers heads come before slots, as in a cache."""
    g = torch.Generator().manual_seed(seed)
    S = S or (plan.page if plan.table else plan.capacity)
    query = torch.randn(1, sum(plan.counts), Hq, D, generator=g).transpose(1, 2)
    keys, values = (torch.randn(B, Hkv, S, size, generator=g).transpose(1, 2) for size in (D, Dv or D))
    return tuple(t.to(DEVICE, dtype) for t in (query, keys, values))


def work(copies, multiprocessors=132, queries=1):
    """Of bf16 and 32 heads of size 128: 512 bytes a slot."""
    part = 2 * queries * 32 * 129 * 4
    return splitting.Work(copies, 2 * multiprocessors, tile=64, slot_bytes=512, part_bytes=part)


def close(args, plan, scale=None, window=None, softcap=None, sink_logits=None, chunk=None):
    """Output and log-sum-exp against the reference in float64, with an error that belongs to the dtype."""
    scale = args[0].shape[-1] ** -0.5 if scale is None else scale
    assert triton_backend.supports(args[0], softcap, sink_logits, plan) is None
    out, lse = triton_backend.attend_with_lse(*args, plan, scale, window, softcap, sink_logits, chunk=chunk)
    wide = None if sink_logits is None else sink_logits.double()
    exact, exact_lse = reference.attend_with_lse(
        *(t.double() for t in args), plan, scale, window, softcap, wide
    )
    assert (out.shape, out.dtype, lse.dtype) == (exact.shape, args[0].dtype, torch.float32)
    atol = torch.finfo(args[0].dtype).eps * (16 * LOOSER if args[0].dtype == torch.float32 else 4)
    atol += (softcap or 0) * torch.finfo(torch.float32).eps * LOOSER  # tanh ends with a subtraction from 1
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)
    return out


PLANS = {
    "decode": AttentionPlan([0, 1, 2], [99, 3, 64], [1, 1, 1], 130),
    "ragged": AttentionPlan([0, 2, 3], [99, 0, 62], [3, 1, 5], 130),  # a row of one token
    "prompt": AttentionPlan([1], [0], [35], 130),
    "piece of a prompt": AttentionPlan([2], [40], [37], 130),
    "tree": AttentionPlan([0, 1, 2], [90, 3, 61], [8, 8, 8], 130, make_tree([91, 4, 62])),
    "ragged tree": AttentionPlan([0, 2, 3], [90, 0, 121], [8, 2, 6], 130, make_tree([91, 1, 122])),
    "end of a tree": AttentionPlan([0, 2], [73, 7], [3, 3], 130, make_tree([71, 5])),
    "tree not begun": AttentionPlan([1], [50], [3], 130, make_tree([60])),
}


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("name", list(PLANS))
def test_every_plan(name, window):
    close(case(PLANS[name], Hq=2, Hkv=1), PLANS[name], window=window)


@pytest.mark.parametrize("window", [None, 2, 40])
@pytest.mark.parametrize("name", ["decode", "ragged", "tree", "end of a tree"])
def test_rows_in_chunks(name, window):
    """As many chunks as the longest row needs; shorter rows end in earlier ones, a window begins in later ones."""
    args = case(PLANS[name], Hq=2, Hkv=1)
    close(args, PLANS[name], window=window, chunk=64)


def test_a_window_that_begins_before_a_tile():
    """Nodes 2 to 4 are at positions 72 and 73 and slots 73 to 75: what slot 63 holds is seen by the first alone."""
    close(case(PLANS["end of a tree"], dtype=torch.bfloat16), PLANS["end of a tree"], window=10)


REACHES = [
    (1, 1),
    (50, 4),
    (3, 70),
    (20, 85),
    (40, 60),
]  # the last two overlap in some rows and are apart in others


@pytest.mark.parametrize(
    ("name", "window", "initial"),
    [
        pytest.param(name, *REACHES[j], marks=() if (i - j) % 5 in (0, 3) else pytest.mark.slow)
        for i, name in enumerate(PLANS)
        for j in range(5)
    ],
)
def test_first_positions_beside_a_window(name, window, initial):
    close(case(PLANS[name], Hq=2, Hkv=1), PLANS[name], window=reach(window, initial))


@pytest.mark.parametrize(
    ("window", "initial", "chunk", "processors"),
    [
        *((2, 1, 64, 1), (40, 5, 128, 132), (70, 65, None, 132), (70, 65, 64, 1), (130, 100, 128, 1)),
        *(
            pytest.param(*reach, chunk, processors, marks=pytest.mark.slow)
            for reach in ((2, 1), (40, 5), (70, 65), (130, 100))
            for chunk in (None, 64, 128)
            for processors in (1, 132)
        ),
    ],
)
def test_first_positions_and_chunks(window, initial, chunk, processors, monkeypatch):
    """Long ragged rows, a one-token row and a tree; first positions of less and of more than a tile or a chunk."""
    monkeypatch.setattr(triton_backend, "processors", lambda device: processors)
    for name, bytes in (("LEAST", 64 * 128), ("START", 64), ("MERGE", 64)):
        monkeypatch.setattr(splitting, name, bytes)
    for plan in (
        AttentionPlan([0, 1, 2], [390, 3, 207], [3, 1, 5], 400),
        AttentionPlan([0, 1, 2], [380, 3, 207], [8, 8, 8], 400, make_tree([381, 4, 208])),
    ):
        close(case(plan, Hq=2, Hkv=1, D=16, B=3), plan, window=reach(window, initial), chunk=chunk)


@pytest.mark.parametrize(
    ("name", "sink_logits", "Hq", "Hkv"),
    [
        pytest.param(name, sinks, *heads, marks=() if (i + j + sinks) % 2 else pytest.mark.slow)
        for i, name in enumerate(("ragged", "ragged tree"))
        for j, heads in enumerate(((2, 2), (4, 1), (8, 1)))
        for sinks in (False, True)
    ],
)
def test_first_positions_with_grouped_heads_sink_logits_and_soft_cap(name, sink_logits, Hq, Hkv):
    logits = torch.linspace(-1, 2, Hq, device=DEVICE) if sink_logits else None
    close(case(PLANS[name], Hq, Hkv), PLANS[name], window=reach(9, 3), softcap=5.0, sink_logits=logits)


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("page", [16, 48, 64])
def test_first_positions_in_pages(page, chunk):
    lengths = [page, 2 * page + 1, 190]
    need = [-(-n // page) for n in lengths]
    order = np.random.default_rng(0).permutation(sum(need)).tolist()
    table = [[order.pop() for _ in range(n)] for n in need]
    plan = AttentionPlan(range(3), [n - 2 for n in lengths], [2] * 3, 0, table=table, page=page)
    close(case(plan, Hq=2, Hkv=1, D=16, B=sum(need)), plan, window=reach(20, 18), chunk=chunk)


def test_the_slots_between_are_skipped():
    """As many chunks as first positions and a window need, however long the row is."""
    low = lower(AttentionPlan([0], [99_999], [1], 100_000), "cpu")
    assert splitting.chunking(low, reach(512, 4), work(1), 64)[0] == 1 + 9
    assert splitting.chunking(low, reach(512, 4), work(10**6), None) == (1, 640, 64)
    assert splitting.chunking(low, reach(512, 65), work(10**6), None) == (1, 704, 64)


@pytest.mark.parametrize(
    ("window", "initial", "tree"),
    [
        *((64, 4, True), (100, 70, False)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((64, 4, False), (100, 70, True))),
    ],
)
def test_first_positions_and_equal_bits(window, initial, tree):
    """With fixed chunks: alone, beside others, in a step of one query or of many."""
    n, q = 286, 4
    shape = make_tree([n], chain(q)) if tree else None
    query, keys, values = case(AttentionPlan([0], [n], [q], 300), 2, 1, D=16, dtype=torch.bfloat16, B=2)

    def run(plan, query):
        return triton_backend.attend_with_lse(query, keys, values, plan, 0.125, reach(window, initial))

    whole = run(AttentionPlan([0], [n], [q], 300, shape, fragment=64), query)
    for i in range(q):
        alone = run(AttentionPlan([0], [n + i], [1], 300, fragment=64), query[:, :, i : i + 1])
        for a, b in zip(alone, whole):
            assert torch.equal(a, b[:, i : i + 1])
    both = torch.cat([query, query.flip(2)], 2)
    beside = run(AttentionPlan([0, 1], [n, 77], [q, q], 300, fragment=64), both)
    for a, b in zip(beside, whole):
        assert torch.equal(a[:, :q], b)


@pytest.mark.parametrize(("Hq", "Hkv"), [(2, 2), (4, 1), (8, 1), (6, 2)])
@pytest.mark.parametrize("name", ["ragged", "tree"])
def test_grouped_heads(name, Hq, Hkv):
    close(case(PLANS[name], Hq, Hkv), PLANS[name], scale=0.2)


@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        *((D, torch.bfloat16) for D in (64, 80, 96, 128, 256)),
        *((D, torch.float32) for D in (6, 80, 128, 256)),
        *((D, torch.float16) for D in (64, 80)),
    ],
)
def test_head_sizes_and_dtypes(D, dtype):
    close(case(PLANS["ragged"], D=D, dtype=dtype), PLANS["ragged"])


def test_values_of_another_size():
    assert close(case(PLANS["ragged"], D=64, Dv=24), PLANS["ragged"], chunk=64).shape[-1] == 24


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize(
    ("softcap", "sink_logits"),
    [(0.7, None), (30.0, torch.float32), (None, torch.float32), (None, torch.bfloat16)],
)
def test_softcap_and_sinks(sink_logits, softcap, chunk):
    plan = PLANS["ragged tree"]
    # Takes half, little, most, none.
    logits = None if sink_logits is None else torch.tensor([0.5, -1.0, 3.0, -80.0]).to(DEVICE, sink_logits)
    close(case(plan), plan, softcap=softcap, sink_logits=logits, window=20, chunk=chunk)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_borders_of_tiles_and_chunks(length):
    for count in {1, min(length, 3)}:
        plan = AttentionPlan([1], [length - count], [count], 129)
        for window in (None, 64):
            close(case(plan, 2, 1, B=2), plan, window=window, chunk=64)


@pytest.mark.parametrize(("page", "window"), [(16, None), (48, 33), (64, None), (128, 33)])
def test_pages(page, window):
    """Pages that hold tiles, lie within tiles, or across them; lengths at and beside their borders."""
    lengths = [page, page + 1, 2 * page - 1, 100]
    need = [-(-n // page) for n in lengths]
    order = np.random.default_rng(0).permutation(sum(need) + 3).tolist()
    table = [[order.pop() for _ in range(n)] for n in need]
    plan = AttentionPlan(
        range(4), [n - 2 for n in lengths], [2] * 4, 0, make_tree([n - 2 for n in lengths]), table=table, page=page
    )  # fmt: skip
    args = case(plan, 2, 1, B=sum(need) + 3)
    seen = torch.zeros(*args[1].shape[:2], dtype=torch.bool)
    for pages, n in zip(table, lengths):
        for s in range(n):
            seen[pages[s // page], s % page] = True
    for buffer in args[1:]:
        buffer[~seen.to(DEVICE)] = float("nan")
    out = close(args, plan, window=window, chunk=64)
    flat = AttentionPlan(range(4), plan.first, plan.counts, max(lengths), plan.tree)  # the same in slots
    keys, values = (
        torch.stack([b[pages].flatten(0, 1)[: page * max(need)] if len(pages) == max(need) else
                     torch.cat([b[pages].flatten(0, 1), b.new_zeros((max(need) - len(pages)) * page, *b.shape[2:])])
                     for pages in table])
        for b in args[1:]
    )  # fmt: skip
    assert torch.equal(out, close((args[0], keys, values), flat, window=window, chunk=64))


def chain(n):
    return [-1, *range(n - 1)]


@pytest.mark.parametrize(
    ("nodes", "window"),
    [
        *((63, 9), (64, None), (65, None), (70, 9)),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((63, None), (64, 9), (65, 9), (70, None))),
    ],
)
def test_large_trees(nodes, window):
    """64 nodes are one word; more are written out."""
    parents = [-1, 0, *(i // 2 for i in range(2, nodes))]
    plan = AttentionPlan([0, 2], [20, 3], [nodes, 5], 100, make_tree([20, 3], parents))
    assert (lower(plan, "cpu", window).words is None) == (nodes > 64)
    close(case(plan, 2, 1, B=3), plan, window=window)


@pytest.mark.parametrize("window", [None, 5])
def test_a_ring_in_one_launch(window):
    """Sinks and a ring, whose slots are in no order: a mask by slot; a layer's own window counts positions."""
    ring = Ring([KVShape(1, 64, 64, torch.float32, DEVICE)], 3, 4, 40, 5)
    first, counts = [100, 2, 61], [1, 5, 3]
    queries = np.concatenate([np.arange(f, f + n) for f, n in zip(first, counts)])
    at = ring.at(torch.from_numpy(np.repeat([0, 1, 2], counts)), torch.from_numpy(queries))
    distance = queries[:, None] - ring.held(queries)
    plan = ExplicitPlan(range(3), counts, ring.visible(queries), distance, at)
    args = case(plan, B=3)
    for chunk in (None, 32):
        close(args, plan, window=window, chunk=chunk)


@pytest.mark.parametrize("window", [None, 5])
def test_a_ring_by_arithmetic(window):
    """One query a row, before the ring, while it fills, and after it has been written several times; no mask is read."""
    ring = Ring([KVShape(1, 16, 16, torch.float32, DEVICE)], 4, 4, 12, 5)
    queries = np.array([100, 2, 11, 20])
    seen, distance = ring.visible(queries), queries[:, None] - ring.held(queries)
    plan = ExplicitPlan(range(4), [1] * 4, seen, distance)
    query, keys, values = case(plan, 4, 2, 16)
    expected = reference.attend(*(t.double() for t in (query, keys, values)), plan, 0.25, window)
    unseen = torch.from_numpy(~(seen & (distance < (window or 999))))
    for buffer in (keys, values):
        buffer[unseen.to(DEVICE)] = float("nan")
    far = 2**31 - 1 if window is None else window
    sight = RingSight(torch.from_numpy(queries).to(DEVICE), 4, ring.size, window or 12, far)
    low = replace(lower(plan, DEVICE), seen=None, ring=sight)
    out = triton_backend.launch(query, keys, values, low, 0.25)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


class ByHead(ExplicitPlan):
    """What is seen differs between heads and layers, as where a pruner chose."""

    def visible(self, segment, window=None, low=0):
        seen = torch.from_numpy(super().visible(segment, window, low))[:, None].repeat(1, 4, 1, 1)
        for h in range(4):
            seen[:, h, :, h + self.layer :: 3] = False
        return seen


def test_masks_by_head_and_layer():
    g = np.random.default_rng(0)
    counts = [2, 1, 3]
    seen = g.random((6, 70)) < 0.3
    plan = ByHead([0, 1, 3], counts, seen, np.zeros((6, 70), dtype=int), torch.arange(6))
    args = case(plan)
    outs = []
    for layer in (0, 1, 0):
        plan.layer = layer
        outs.append(close(args, plan))
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("sink_logits", [False, True])
@pytest.mark.parametrize("chunk", [None, 32])
def test_a_query_that_sees_nothing(chunk, sink_logits):
    seen = np.zeros((3, 50), dtype=bool)
    seen[1, 40] = True
    plan = ExplicitPlan([0, 1], [2, 1], seen, np.zeros_like(seen, dtype=int), torch.arange(3))
    logits = torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE) if sink_logits else None
    args = case(plan)
    out = close(args, plan, sink_logits=logits, chunk=chunk)
    assert not out[0, [0, 2]].any()
    lse = triton_backend.attend_with_lse(*args, plan, 0.1, None, None, logits, chunk=chunk)[1]
    expected = logits if sink_logits else torch.full((4,), float("-inf"), device=DEVICE)
    torch.testing.assert_close(lse[0, 0], expected)


def test_a_layer_with_other_strides_is_looked_at_anew():
    plan = AttentionPlan([0], [17], [3], 32)
    args, sink_logits = case(plan, D=16, B=1), torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE)
    attention(*args, plan, sink_logits=sink_logits, backend="triton")
    apart = torch.full((8,), 9.0, device=DEVICE)
    apart[::2] = sink_logits
    wide = args[0].repeat_interleave(2, -1)[..., ::2]
    for query, logits, why in (
        (args[0], apart[::2], "sink logits are .* not contiguous"),
        (wide, sink_logits, "query's last dimension is not contiguous"),
    ):
        with pytest.raises(ValueError, match=why):
            attention(query, *args[1:], plan, sink_logits=logits, backend="triton")


def test_what_is_seen_and_not_finite_is_not_hidden():
    plan = AttentionPlan([0], [70], [2], 80)
    args = case(plan, B=1)
    args[2][0, 5, 0, 3] = float("nan")
    args[1][0, 66, 1] = float("nan")
    for chunk in (None, 64):
        out = triton_backend.attend(*args, plan, 0.1, chunk=chunk)
        assert out[0, :, :2, 3].isnan().all()  # heads 0 and 1 share values
        assert out[0, :, :2].isnan().sum() == 4
        assert out[0, :, 2:].isnan().all()  # heads 2 and 3 a key


@pytest.mark.parametrize(
    ("dtype", "window", "sink_logits"),
    [(torch.float32, None, False), (torch.bfloat16, None, True), (torch.bfloat16, 64, False)],
)
def test_equal_bits_alone_or_with_others(dtype, window, sink_logits):
    """With fixed chunks a query's bits depend neither on how many its row has, nor on a tree's form, nor on other rows."""
    S, n, q = 260, 126, 4  # the queries are on both sides of a border between chunks
    # Of two tiles: the window of the first query begins in the first, others' in the second.
    chunk = 128 if window else 64
    logits = torch.tensor([0.5, -1.0], device=DEVICE) if sink_logits else None
    one = AttentionPlan([0], [n], [q], S, fragment=chunk)
    query, keys, values = case(one, 2, 1, dtype=dtype, B=3)

    def run(plan, query):
        return triton_backend.attend_with_lse(query, keys, values, plan, 0.125, window, None, logits)

    def same(got, expected):
        for a, b in zip(got, expected):
            assert torch.equal(a, b)

    out, lse = run(one, query)
    same([triton_backend.attend(query, keys, values, one, 0.125, window, None, logits)], [out])
    tree_of_a_path = AttentionPlan([0], [n], [q], S, make_tree([n], chain(q)), fragment=chunk)
    same(run(tree_of_a_path, query), (out, lse))
    for i in range(q):
        alone = run(AttentionPlan([0], [n + i], [1], S, fragment=chunk), query[:, :, i : i + 1])
        same(alone, (out[:, i : i + 1], lse[:, i : i + 1]))
    keys[1], values[1] = keys[0], values[0]  # the row is now the second, between a short and a long one
    others = torch.randn(1, 2, 3, 64, device=DEVICE).to(dtype)
    packed = torch.cat([others[:, :, :2], query, others[:, :, 2:]], 2)
    batch = run(AttentionPlan([0, 1, 2], [3, n, 250], [2, q, 1], S, fragment=chunk), packed)
    same([t[:, 2 : 2 + q] for t in batch], (out, lse))


def test_equal_bits_of_a_branch():
    """A node of a tree gets what its path alone would get, where its ancestors have the same slots."""
    parents = [-1, 0, 1, 0, 2]  # 0, 1, 2, 4 are a path that skips slot 3
    plan = AttentionPlan([0], [60], [5], 100, make_tree([60], parents), fragment=64)
    query, keys, values = case(plan, B=1, dtype=torch.bfloat16)
    out = triton_backend.attend(query, keys, values, plan, 0.1)
    first = AttentionPlan([0], [60], [3], 100, fragment=64)
    assert torch.equal(triton_backend.attend(query[:, :, :3], keys, values, first, 0.1), out[:, :3])


def test_one_chunk_or_many_agree():
    plan = AttentionPlan([0, 1], [250, 20], [4, 2], 300)
    args = case(plan, 2, 1, B=2)
    whole = triton_backend.attend(*args, plan, 0.1, chunk=1024)
    for chunk in (1, 100):  # rounded up to tiles
        torch.testing.assert_close(
            triton_backend.attend(*args, plan, 0.1, chunk=chunk), whole, rtol=0, atol=1e-6 * LOOSER
        )


def test_chunks_fill_the_device(monkeypatch):
    """A small batch is cut until there are programs enough, a large one is not; a window bounds what is visited."""
    low = lower(AttentionPlan([0], [8191], [1], 8192), "cpu")

    def chunks(programs, window=None, chunk=None):
        return splitting.chunking(low, window, work(programs), chunk)

    assert chunks(8) == (32, 256, 64)
    assert chunks(64) == (4, 2048, 64)
    assert chunks(512) == (1, 8192, 64)
    assert chunks(512, window=512) == (1, 576, 64)
    assert chunks(1, window=512) == (3, 192, 64)
    assert chunks(1, window=512, chunk=512) == (2, 512, 512)
    assert chunks(512, chunk=500) == (16, 512, 512)
    monkeypatch.setattr(triton_backend, "processors", lambda device: 4)
    plan = AttentionPlan([0, 1], [510, 20], [2, 2], 600)
    launches = counted(monkeypatch)
    close(case(plan, 2, 1, B=2, D=128), plan)  # chunks of 64 KiB
    assert launches == ["attend_kernel", "merge_kernel"]


def test_uneven_rows_are_cut_by_their_lengths():
    """With the plan at hand all its lengths count, once for all layers; a captured launch expects uneven ones."""
    even = AttentionPlan(range(64), [8186] * 64, [6] * 64, 8192)
    uneven = AttentionPlan(range(64), range(4090, 12282, 128), [6] * 64, 13000)
    asked = work(8, queries=6 * 64)
    for plan, cut in ((even, False), (uneven, True)):
        low = lower(plan, "cpu")
        made = splitting.chunking(low, None, asked, None, plan)
        assert made is splitting.chunking(low, None, asked, None, plan)
        assert (made[0] > 1) == cut
        assert 4 <= splitting.chunking(low, None, asked, None)[0] <= 12
        fixed = splitting.chunking(low, None, asked, 1024, plan)
        assert fixed == splitting.chunking(low, None, work(8, 1), 1024)  # on any device


def counted(monkeypatch):
    """Names of the kernels that are launched from here on, in order."""
    launches, kernels = [], triton_backend._kernels()

    class Counted:
        INTERPRET = kernels.INTERPRET

        def __getattr__(self, name):
            class Kernel:
                def __getitem__(self, grid):
                    launches.append(name)
                    return getattr(kernels, name)[grid]

            return Kernel()

    monkeypatch.setattr(triton_backend, "_kernels", Counted)
    return launches


@pytest.mark.parametrize(("ring", "expected"), [(64, 1), (600, 2)])
def test_a_step_of_a_ring_takes_one_launch_a_layer(ring, expected, monkeypatch):
    """Sinks and the window together, for one row on a large device; a ring of many KiB is cut there, and merged."""
    monkeypatch.setattr(triton_backend, "processors", lambda device: 132)
    ring = Ring([KVShape(1, 64, 64, torch.float32, DEVICE)], 3, 4, ring, 5)
    query = np.array([2000])
    at = ring.at(torch.tensor([0]), torch.from_numpy(query))
    plan = ExplicitPlan([0], [1], ring.visible(query), query[:, None] - ring.held(query), at)
    args = case(plan, 2, 1, B=1)
    launches = counted(monkeypatch)
    close(args, plan)
    assert len(launches) == expected
    assert launches[0] == "attend_kernel"


def test_launch_takes_ready_numbers_and_larger_bounds():
    """As a captured graph does: one launch for lengths up to a bound, into tensors that stay."""
    bound = AttentionPlan([0, 1], [127, 127], [1, 1], 130)
    fixed = replace(lower(bound, DEVICE), max_count=4, max_length=130)
    query, keys, values = case(bound, B=3)
    out, lse = torch.empty_like(query.transpose(1, 2)), torch.empty(1, 2, 4, device=DEVICE)
    for rows, first in (([0, 1], [127, 3]), ([0, 2], [64, 0])):
        plan = AttentionPlan(rows, first, [1, 1], 130)
        for name in ("starts", "length", "rows", "root"):
            getattr(fixed, name).copy_(getattr(lower(plan, DEVICE), name))
        got = triton_backend.launch(query, keys, values, fixed, 0.125, chunk=64, out=out, lse=lse)
        assert got.data_ptr() == out.data_ptr()
        exact, exact_lse = reference.attend_with_lse(query, keys, values, plan, 0.125)
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-6 * LOOSER)
        torch.testing.assert_close(lse, exact_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 5, 2, 8), (1, 1, 24), (2, 2, 17, 3, 40)])
def test_merge(shape):
    outputs = torch.randn(shape, device=DEVICE)
    lse = torch.randn(shape[:-1], device=DEVICE) * 5
    lse[..., 0, :1] = float("-inf")
    outputs[..., 0, 0, :] = float("nan")  # what sees nothing does not count
    lse.view(-1, *lse.shape[-2:])[0, :, 0] = float("-inf")  # this one sees nothing at all
    outputs.view(-1, *outputs.shape[-3:])[0, :, 0] = float("inf")
    got, expected = triton_backend.merge(outputs, lse), merge_reference(outputs.double(), lse.double())
    for a, b in zip(got, expected):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=5e-6)
    with pytest.raises(ValueError, match=r"give \[\.\.\., F, q, D\]"):
        triton_backend.merge(outputs, lse[..., :1, :0])


def test_merge_of_cut_rows_is_the_whole():
    """Parts that two calls computed, of slots below and from 64 on."""
    plan = AttentionPlan([0, 1], [99, 70], [3, 3], 130)
    query, keys, values = case(plan, B=2, dtype=torch.bfloat16)
    below = ExplicitPlan(
        [0, 1], [3, 3], np.ones((6, 64), dtype=bool), np.zeros((6, 64), dtype=int), torch.arange(6)
    )
    above = AttentionPlan([0, 1], [35, 6], [3, 3], 66)
    parts = [
        triton_backend.attend_with_lse(query, keys[:, :64], values[:, :64], below, 0.1),
        triton_backend.attend_with_lse(query, keys[:, 64:], values[:, 64:], above, 0.1),
    ]
    out, lse = triton_backend.merge(
        *(torch.stack([t[0].flatten(0, 1) for t in both]) for both in zip(*parts))
    )
    exact, exact_lse = reference.attend_with_lse(*(t.double() for t in (query, keys, values)), plan, 0.1)
    torch.testing.assert_close(out.view(1, 6, 4, -1).double(), exact, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.view(1, 6, 4).double(), exact_lse, rtol=0, atol=1e-5)


def test_lowered_numbers():
    plan = AttentionPlan([0, 2], [5, 3], [3, 2], 10, make_tree([6, 3]))
    low = lower(plan, "cpu")
    assert low is lower(plan, torch.device("cpu"), 4)  # the same for all layers
    assert [t.tolist() for t in (low.starts, low.length, low.rows)] == [[0, 3, 5], [8, 5], [0, 2]]
    assert [t.tolist() for t in (low.root, low.depth)] == [[6, 3], [[0, 1], [0, 1]]]
    assert low.words.tolist() == [0, 0b1, 0b11, 0b1, 0b11]
    assert (low.words.dtype, low.depth.dtype, low.max_count, low.max_length) == (
        torch.int64,
        torch.int32,
        3,
        8,
    )
    assert low.table is low.seen is None
    assert {t.untyped_storage().data_ptr() for t in (low.starts, low.words, low.depth)} == {
        low.root.untyped_storage().data_ptr()
    }  # one copy
    paged = lower(AttentionPlan([0, 1], [5, 3], [3, 2], 0, table=[[7, 1], [4]], page=5), "cpu")
    assert paged.table.tolist() == [[7, 1], [4, 0]]
    assert paged.words is None
    assert paged.root.tolist() == paged.length.tolist()


def test_slots_of_pages():
    plan = AttentionPlan([0, 1], [4, 0], [3, 2], 0, table=[[7, 1], [4]], page=5)
    assert plan.slots.tolist() == [39, 5, 6, 20, 21]
    with pytest.raises(ValueError, match="give both, or neither"):
        AttentionPlan([0], [0], [1], 5, page=5)
    with pytest.raises(ValueError, match="give both, or neither"):
        AttentionPlan([0], [0], [1], 5, table=[[0]])
    with pytest.raises(ValueError, match="give the pages of each row"):
        AttentionPlan([0, 1], [0, 0], [1, 1], 5, table=[[0]], page=5)
    with pytest.raises(ValueError, match=r"table\[0\] has 1 pages of 5 slots and the row 6 slots in use"):
        AttentionPlan([0], [5], [1], 5, table=[[0]], page=5)


def test_what_cannot_be_served():
    plan = PLANS["decode"]
    query = case(plan)[0]
    assert "float64" in triton_backend.supports(query.double(), None, None)
    assert "up to 256" in triton_backend.supports(query.repeat(1, 1, 1, 5), None, None, plan)
    strided = query.repeat_interleave(2, -1)[..., ::2]
    assert "call query.contiguous()" in triton_backend.supports(strided, None, None, plan)
    assert "no backward pass" in triton_backend.supports(query.clone().requires_grad_(), None, None, plan)
    with torch.no_grad():
        assert triton_backend.supports(query.clone().requires_grad_(), None, None, plan) is None


def test_bad_input_is_refused_before_a_launch():
    plan = PLANS["decode"]
    query, keys, values = case(plan)

    def refused(match, keys=keys, values=values, scale=0.1, **others):
        with pytest.raises(ValueError, match=match):
            attention(query, keys, values, plan, scale=scale, backend="triton", **others)

    refused("keys or values require grad", keys=keys.clone().requires_grad_())
    refused("up to 256", values=values.repeat(1, 1, 1, 5))
    refused("scale is -1", scale=-1.0)
    for softcap, chunk in ((0.0, None), (None, -1)):
        with pytest.raises(ValueError, match="chunk is -1" if chunk else "softcap 0"):
            triton_backend.attend(query, keys, values, plan, 0.1, None, softcap, chunk=chunk)
