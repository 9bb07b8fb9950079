"""Attention backends against attention written out query by query."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import tree
from specdec.kernels.attention import AttentionPlan, Tree, attention

PARENTS = [-1, 0, 0, 1, 1, 2, 5]
CPU = ["packed", "padded", "decomposed", "reference"]  # backends that run everywhere, in any dtype


def naive(query, keys, values, plan, scale=None, window=None, softcap=None, sinks=None):
    """One query, one head, one slot at a time, from the words of the docstrings; float64."""
    T, Hq, Hkv = query.shape[2], query.shape[1], keys.shape[2]
    out = torch.zeros(T, Hq, values.shape[-1], dtype=torch.float64)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    t = 0
    for r, (b, first, count) in enumerate(zip(plan.rows, plan.first, plan.counts)):
        root = None if plan.tree is None else int(plan.tree.root[r])

        def position(slot, r=r, root=root):
            return slot if root is None or slot < root else root + int(plan.tree.depth[r, slot - root])

        for slot in range(first, first + count):
            seen = []
            for key in range(first + count):
                if root is not None and key >= root:
                    ok = slot >= root and bool(plan.tree.ancestors[r, slot - root, key - root])
                else:
                    ok = key <= slot
                if window is not None:
                    ok = ok and position(key) > position(slot) - window
                if ok:
                    seen.append(key)
            for h in range(Hq):
                kv = h * Hkv // Hq
                q = query[0, h, t].double()
                s = torch.stack([q @ keys[b, key, kv].double() * scale for key in seen])
                if softcap is not None:
                    s = softcap * torch.tanh(s / softcap)
                w = torch.exp(s - s.max())
                total = w.sum() + (0 if sinks is None else torch.exp(sinks[h].double() - s.max()))
                out[t, h] = sum(w[i] / total * values[b, key, kv].double() for i, key in enumerate(seen))
            t += 1
    return out[None]


def make_tree(rows, roots):
    parents = torch.tensor([PARENTS] * len(rows))
    return Tree(np.array(roots), tree.ancestors(parents).numpy(), tree.depths(parents).numpy())


PLANS = {
    "decode": AttentionPlan([0, 1, 2], [12, 3, 9], [1, 1, 1], 24),
    "verify": AttentionPlan([0, 1, 2], [12, 3, 9], [4, 4, 4], 24),
    "uneven lengths": AttentionPlan([0, 1, 2, 3], [0, 0, 0, 200], [1, 1, 1, 1], 201),
    "ragged": AttentionPlan([0, 2, 3], [12, 0, 9], [3, 1, 5], 24),
    "gaps": AttentionPlan([0, 2, 3], [5, 3, 9], [2, 2, 2], 24),
    "fresh": AttentionPlan([1], [0], [9], 24),
    "first token": AttentionPlan([1], [0], [1], 24),
    "one": AttentionPlan([3], [11], [1], 24),
    "piece of a prompt": AttentionPlan([2], [6], [8], 24),
    "tree": AttentionPlan([0, 1, 2], [10, 3, 6], [8, 8, 8], 24, make_tree([0, 1, 2], [11, 4, 7])),
    "ragged tree": AttentionPlan([0, 2, 3], [10, 0, 15], [8, 2, 6], 24, make_tree([0, 2, 3], [11, 1, 16])),
    "end of a tree": AttentionPlan([0, 2], [13, 7], [3, 3], 24, make_tree([0, 2], [11, 5])),
    "tree alone": AttentionPlan([2], [12], [5], 24, make_tree([2], [14])),
}


def case(plan, Hq=4, Hkv=2, D=6, Dv=None, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(1, sum(plan.counts), Hq, D, generator=g, dtype=dtype).transpose(1, 2)
    keys = torch.randn(4, plan.capacity, Hkv, D, generator=g, dtype=dtype)
    return query, keys, torch.randn(4, plan.capacity, Hkv, Dv or D, generator=g, dtype=dtype)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("name", list(PLANS))
def test_every_plan(name, window, backend):
    plan = PLANS[name]
    args = case(plan)
    out = attention(*args, plan, window=window, backend=backend)
    expected = naive(*args, plan, window=window)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("name", ["verify", "ragged", "tree", "one", "fresh"])
def test_grouped_heads_and_other_value_size(name, heads, backend):
    plan = PLANS[name]
    args = case(plan, *heads, Dv=10)
    out = attention(*args, plan, scale=0.3, backend=backend)
    torch.testing.assert_close(out, naive(*args, plan, scale=0.3), rtol=0, atol=1e-13)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", ["verify", "ragged tree", "one"])
def test_softcap_and_sinks(name, sinks, softcap):
    plan = PLANS[name]
    args = case(plan)
    s_aux = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64) if sinks else None
    out = attention(*args, plan, softcap=softcap, sinks=s_aux, window=4)
    torch.testing.assert_close(
        out, naive(*args, plan, softcap=softcap, sinks=s_aux, window=4), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", list(PLANS))
def test_nothing_leaks_from_slots_that_are_not_seen(name, window):
    plan = PLANS[name]
    query, keys, values = case(plan)
    expected = attention(query, keys, values, plan, window=window, backend="reference")
    used = torch.zeros(4, plan.capacity, dtype=torch.bool)
    for r, (b, n) in enumerate(zip(plan.rows, plan.length)):
        used[b, :n] = True
        if plan.tree is not None:  # nodes of earlier calls that no query here is below
            root, first = int(plan.tree.root[r]), plan.first[r]
            above = torch.from_numpy(plan.tree.ancestors[r, max(first - root, 0) : n - root]).any(0)
            used[b, root:n] = above[: n - root]
    far = torch.ones_like(used)  # slots that a batched call does not even read
    for s in plan.segments:
        far[s.b0 : s.b0 + s.r1 - s.r0, : s.keys] = False
    for buffer in (keys, values):
        buffer[~used] = float("nan")
    out = attention(query, keys, values, plan, window=window, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for buffer in (keys, values):  # those that it does read have to be finite, and then never count
        buffer[~used & ~far] = 1e30
    out = attention(query, keys, values, plan, window=window, backend="packed")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["reference", "packed", "padded", "decomposed", "cpu"])
@pytest.mark.parametrize("name", ["one", "verify", "ragged"])
def test_what_is_not_finite_beyond_a_row_does_not_count(name, backend, dtype):
    plan = PLANS[name]
    query, keys, values = (t.to(dtype) for t in case(plan, D=16, Dv=16))
    expected = naive(query.double(), keys.double(), values.double(), plan).to(dtype)
    for b in range(4):
        end = dict(zip(plan.rows, plan.length)).get(b, 0)
        keys[b, end:], values[b, end:] = float("nan"), float("inf")
    out = attention(query, keys, values, plan, backend=backend)
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13 if dtype is torch.float64 else 1e-5)


def test_rows_of_a_batch_alone_do_not_read_each_other():
    plan = PLANS["ragged"]  # no two neighbours with as many queries: each row is a call of its own
    query, keys, values = case(plan)
    expected = naive(query, keys, values, plan)
    for b in range(4):
        end = dict(zip(plan.rows, plan.length)).get(b, 0)
        keys[b, end:], values[b, end:] = float("nan"), float("nan")
    torch.testing.assert_close(
        attention(query, keys, values, plan, backend="packed"), expected, rtol=0, atol=1e-13
    )


rows = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()), min_size=1, max_size=4
)  # first slot, queries, whether the row is there


@settings(max_examples=60, deadline=None)
@given(rows, st.sampled_from([None, 1, 2, 5]), st.sampled_from([1, 2, 4]), st.sampled_from([None, 0, 2]))
def test_any_rows(rows, window, Hkv, root):
    there = [b for b, row in enumerate(rows) if row[2]] or [0]
    first, counts = [rows[b][0] for b in there], [rows[b][1] for b in there]
    shape = None
    if root is not None:  # node 0 sits `root` slots after the first query
        shape = make_tree(there, [f + root for f in first])
        counts = [min(c, root + len(PARENTS)) for c in counts]
    plan = AttentionPlan(there, first, counts, 18, shape)
    args = case(plan, 4, Hkv)
    expected = naive(*args, plan, window=window)
    for backend in CPU:
        out = attention(*args, plan, window=window, backend=backend)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("first", "count"), [(0, 70), (9, 70), (40, 31)])
def test_long_pieces(first, count):
    plan = AttentionPlan([1], [first], [count], 128)
    args = case(plan)
    for window in (None, 16):
        a, *others = (attention(*args, plan, window=window, backend=name) for name in CPU)
        for b in others:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    torch.testing.assert_close(a, naive(*args, plan, window=16), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_good_as_the_reference(dtype):
    plan = PLANS["verify"]
    args = case(plan, D=64, dtype=dtype)
    exact = naive(*args, plan)
    error = {b: (attention(*args, plan, backend=b).double() - exact).abs().max() for b in CPU}
    assert 0 < error["packed"] <= 2 * error["reference"] + torch.finfo(dtype).eps


def test_the_steady_state_is_one_call_and_a_decoding_row_needs_no_mask():
    assert len(PLANS["verify"].segments) == 1
    assert len(PLANS["ragged"].segments) == 3
    assert len(PLANS["uneven lengths"].segments) == 4  # one call would be masked almost everywhere
    for window in (None, 4):
        plan = AttentionPlan([3], [11], [1], 24)
        attention(*case(plan), plan, window=window, backend="packed")
        assert not plan._masks


def test_masks_are_made_once_per_forward():
    plan = AttentionPlan([0, 1], [5, 3], [2, 2], 24)
    for _ in range(3):  # layers
        attention(*case(plan), plan, backend="packed")
        attention(*case(plan), plan, window=2, backend="packed")
    assert len(plan._masks) == 4  # one a window, and one folded for the heads that share keys


def test_slots_are_numbered_by_row():
    assert PLANS["ragged"].slots.tolist() == [12, 13, 14, 48, *range(81, 86)]


def test_no_queries():
    plan = PLANS["one"]
    query, keys, values = case(plan, Dv=3)
    assert attention(query[:, :, :0], keys, values, plan).shape == (1, 0, 4, 3)


def test_backends_by_name():
    plan = PLANS["one"]
    args = case(plan)
    with pytest.raises(ValueError, match="'gpu': there are auto, packed, padded, decomposed, reference"):
        attention(*args, plan, backend="gpu")
    with pytest.raises(ValueError, match="no soft cap"):
        attention(*args, plan, backend="packed", softcap=1.0)
    with pytest.raises(ValueError, match="no sink logits"):
        attention(*args, plan, backend="packed", sinks=torch.zeros(4))
    assert math.isfinite(float(attention(*args, plan).sum()))
