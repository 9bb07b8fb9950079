"""Attention backends against attention written out query by query."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import tree
from specdec.kernels.attention import (
    AttentionPlan,
    ExplicitPlan,
    Tree,
    attention,
    choose,
    conformance,
    explain,
    reference,
)
from specdec.kernels.attention.plan import additive
from specdec.kernels.attention.reach import reach
from specdec.kernels.native import library, reason

PARENTS = [-1, 0, 0, 1, 1, 2, 5]
CPU = ["packed", "padded", "decomposed", "reference"]  # backends that run everywhere, in any dtype
C = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")


def naive(
    query, keys, values, plan, scale=None, window=None, softcap=None, sink_logits=None, initial=0, lse=False
):
    """One query at a time over the slots that it sees, one by one, from the words of the docstrings; float64."""
    T, Hq, Hkv = query.shape[2], query.shape[1], keys.shape[2]
    out = torch.zeros(T, Hq, values.shape[-1], dtype=torch.float64)
    logs = torch.zeros(T, Hq, dtype=torch.float64)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kv = [h * Hkv // Hq for h in range(Hq)]
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
                    ok = ok and (position(key) > position(slot) - window or position(key) < initial)
                if ok:
                    seen.append(key)
            q, k, v = query[0, :, t].double(), keys[b, seen].double(), values[b, seen].double()
            s = (q * k[:, kv]).sum(-1) * scale  # [n, Hq]
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            top = s.max(0).values
            w = torch.exp(s - top)
            total = w.sum(0) + (0 if sink_logits is None else torch.exp(sink_logits.double() - top))
            out[t] = ((w / total)[..., None] * v[:, kv]).sum(0)
            logs[t] = top + torch.log(total)
            t += 1
    return (out[None], logs[None]) if lse else out[None]


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
    "out of order": AttentionPlan([3, 2, 1, 0], [12, 3, 9, 0], [4, 4, 4, 4], 24),
    "one row thrice": AttentionPlan([1, 1, 1, 2], [12, 3, 9, 0], [3, 1, 1, 8], 24),
}
WAYS = [*((name, None) for name in CPU), *(("decomposed", fragment) for fragment in (1, 4, 8))]


def case(plan, Hq=4, Hkv=2, D=6, Dv=None, dtype=torch.float64, seed=0):
    g, slots = torch.Generator().manual_seed(seed), plan.page or plan.capacity
    query = torch.randn(1, sum(plan.counts), Hq, D, generator=g, dtype=dtype).transpose(1, 2)
    keys = torch.randn(4, slots, Hkv, D, generator=g, dtype=dtype)
    return query, keys, torch.randn(4, slots, Hkv, Dv or D, generator=g, dtype=dtype)


@pytest.mark.parametrize(
    ("window", "initial"),
    [(None, 0), (1, 0), (3, 0), (100, 0), (1, 1), (3, 2), (5, 9), (2, 30), (100, 3), (3, 12)],
)  # some plans' trees begin below 12
@pytest.mark.parametrize("name", list(PLANS))
def test_every_plan(name, window, initial):
    """Rows shorter than the window, rows in which it meets or overlaps the first positions, and rows with a gap between them."""
    args, reached = case(PLANS[name]), {"window": window, "initial": initial}
    expected = naive(*args, PLANS[name], **reached, lse=True)
    for backend, fragment in WAYS:
        plan, said = replace(PLANS[name], fragment=fragment), f"{backend}, {fragment}: {{}}".format
        made = attention(*args, plan, **reached, backend=backend, lse=True)
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-13, msg=said)
        alone = attention(*args, plan, **reached, backend=backend)
        torch.testing.assert_close(alone, expected[0], rtol=0, atol=1e-13, msg=said)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("name", ["verify", "ragged", "tree", "one", "fresh"])
def test_grouped_heads_and_other_value_size(name, heads):
    plan = PLANS[name]
    args = case(plan, *heads, Dv=10)
    expected = naive(*args, plan, scale=0.3)
    for backend in CPU:
        out = attention(*args, plan, scale=0.3, backend=backend)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13, msg=f"{backend}: {{}}".format)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sink_logits", [False, True])
@pytest.mark.parametrize("name", ["verify", "ragged tree", "one"])
def test_softcap_and_sinks(name, sink_logits, softcap):
    plan = PLANS[name]
    args = case(plan)
    s_aux = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64) if sink_logits else None
    out = attention(*args, plan, softcap=softcap, sink_logits=s_aux, window=4)
    torch.testing.assert_close(
        out, naive(*args, plan, softcap=softcap, sink_logits=s_aux, window=4), rtol=0, atol=1e-13
    )


def hiding_plans():
    """(name, plan, window, initial): windows, first positions beside them, branches of a tree that is not asked about, masks, pages."""
    draw = np.random.default_rng(0)
    seen = draw.random((10, 24)) < 0.3
    seen[:, -1] = seen[4] = False  # a slot that nobody sees, and a query that sees nothing
    distance, same = draw.integers(0, 9, (10, 24)), np.tile(draw.random(24) < 0.5, (20, 1))
    for window, initial in ((None, 0), (3, 0), (3, 2)):
        for name, plan in PLANS.items():
            yield name, replace(plan), window, initial
        pages = AttentionPlan([0, 1], [17, 21], [3, 3], 0, table=[[2, 0], [3, 1]], page=16)
        yield "pages", pages, window, initial
    yield "mask", ExplicitPlan([0, 1, 3], [4, 4, 2], seen), None, 0
    yield "mask and window", ExplicitPlan([0, 1, 3], [4, 4, 2], seen, distance), 4, 0
    yield "prompt over a mask", ExplicitPlan([2], [20], same), None, 0
    yield "heads", ByHead([0, 1], [5, 5], seen), None, 0


HIDING = [
    *WAYS[:4],
    ("decomposed", 8),
    ("cpu", None),
    ("auto", None),
    *[("native", None)] * (library() is not None),
]


@pytest.mark.parametrize(
    ("poison", "dtype", "D"),
    [
        pytest.param(float(poison), dtype, D, marks=() if poison == once else pytest.mark.slow)
        for poison in ("nan", "inf", "-inf")
        for dtype, D, once in (
            (torch.float32, 8, "inf"),
            (torch.float32, 16, "nan"),
            (torch.float16, 16, "-inf"),
            (torch.bfloat16, 16, "nan"),
        )
    ],
)
def test_what_is_not_finite_inside_a_row_does_not_count(dtype, D, poison):
    atol, hidden = 2e-6 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps, 0
    for name, plan, window, initial in hiding_plans():
        given, settings = [t.to(dtype) for t in case(plan, D=D)], {"window": window, "initial": initial}
        wide = (t.double() for t in given)
        exact = attention(*wide, plan, backend="reference", **settings, lse=True)
        conformance.hide(plan, *given[1:], settings, poison)
        hidden += int((~given[1].isfinite()).sum())
        for backend, fragment in HIDING:
            fresh = copy(plan)  # without what it remembers
            fresh.fragment = fragment
            if backend == "native" and (D == 8 or dtype is torch.float16):
                continue  # it refuses these
            if backend in ("padded", "decomposed") and plan.table is not None:
                continue
            both = attention(*given, fresh, backend=backend, **settings, lse=True)
            alone = attention(*given, fresh, backend=backend, **settings)
            for mine, expected in ((both[0], exact[0]), (both[1], exact[1]), (alone, exact[0])):
                close = torch.allclose(mine.double(), expected, rtol=0, atol=atol)
                assert close, f"{backend}, {fragment}, {name}, window {window}, initial {initial}"
    assert hidden > 100


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)])  # 1, 4 and 8 query heads a KV head
# 5 is beyond a root.
@pytest.mark.parametrize(("window", "initial"), [(5, 3), (20, 20), (2, 70), (1, 1), (1, 5)])
def test_first_positions_in_float32(window, initial, heads):
    """Ragged rows with borders of vectors and blocks, one-token rows, a row of its first token, a tree."""
    for plan in (
        AttentionPlan([0, 1, 2, 3], [150, 3, 61, 0], [3, 1, 5, 1], 200),
        AttentionPlan([0, 2, 3], [99, 0, 17], [1, 1, 1], 130),
        AttentionPlan([0, 2, 3], [60, 3, 30], [8, 8, 8], 80, make_tree([0, 2, 3], [61, 4, 31])),
    ):
        args = case(plan, *heads, D=16, dtype=torch.float32)
        for backends, sink_logits in (
            (("packed", "cpu"), None),
            (("reference", "native"), torch.linspace(-1, 1, heads[0])),
        ):
            settings = {"window": window, "initial": initial, "sink_logits": sink_logits}
            expected, logs = naive(*args, plan, **settings, lse=True)
            for backend in backends:
                if backend == "native" and library() is None:
                    continue
                out, lse = attention(*args, plan, **settings, backend=backend, lse=True)
                torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
                torch.testing.assert_close(lse.double(), logs, rtol=0, atol=1e-5)
                again = attention(*args, plan, **settings, backend=backend)
                assert torch.equal(again, out) or backend != "native"


@C
@pytest.mark.parametrize(("dtype", "D"), [(torch.float32, 16), (torch.bfloat16, 64)])
def test_first_positions_do_not_make_c_kernels_depend_on_company(dtype, D):
    """To the bit: rows whose first positions and window meet, alone and beside a row in which they lie apart."""
    both = AttentionPlan([0, 1], [150, 20], [4, 4], 170)
    query, keys, values = case(both, D=D, dtype=dtype)
    settings = {"window": 16, "initial": 6, "backend": "native"}
    out = attention(query, keys, values, both, **settings)
    for i in range(4):
        for row, first, t in ((0, 150, i), (1, 20, 4 + i)):
            alone = AttentionPlan([row], [first + i], [1], 170)
            one = attention(query[:, :, t : t + 1], keys, values, alone, **settings)
            assert torch.equal(one, out[:, t : t + 1])
    exact = naive(query, keys, values, both, window=16, initial=6)
    assert (out - exact).abs().max() <= (3e-6 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("backend", ["reference", "packed", "cpu", pytest.param("native", marks=C)])
@pytest.mark.parametrize(("window", "initial"), [(5, 3), (33, 20)])
def test_first_positions_in_pages(window, initial, backend):
    table, lengths = [[4, 1, 0], [2, 5], [3]], [38, 25, 1]
    plan = AttentionPlan([0, 1, 2], [35, 20, 0], [3, 5, 1], 48, table=table, page=16)
    flat = AttentionPlan([0, 1, 2], [35, 20, 0], [3, 5, 1], 48)
    query, keys, values = case(flat, D=16, dtype=torch.float32)
    pools = [torch.full((6, 16, 2, 16), float("nan")) for _ in range(2)]
    for pool, buffer in zip(pools, (keys, values)):
        for r, (pages, n) in enumerate(zip(table, lengths)):
            for s in range(n):
                pool[pages[s // 16], s % 16] = buffer[r, s]
    out = attention(query, *pools, plan, window=window, initial=initial, backend=backend)
    expected = naive(query, keys, values, flat, window=window, initial=initial)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("window", [None, 50])
def test_first_positions_that_change_nothing(window):
    """Without a window, or where it reaches them anyway, the call is the one without them."""
    plan = PLANS["verify"]
    args = case(plan)
    for backend in CPU:
        plain = attention(*args, plan, backend=backend)
        assert torch.equal(attention(*args, plan, window=window, initial=4, backend=backend), plain)


def test_first_positions_that_cannot_be():
    plan = PLANS["verify"]
    args = case(plan)
    with pytest.raises(ValueError, match="initial is -1: give how many"):
        attention(*args, plan, window=3, initial=-1)
    with pytest.raises(ValueError, match="window is 0: give at least 1"):
        attention(*args, plan, window=0, initial=2)
    seen = np.ones((12, 24), dtype=bool)
    mask = ExplicitPlan([0, 1, 2], [4, 4, 4], seen, np.zeros((12, 24), dtype=int))
    with pytest.raises(ValueError, match="initial is 2: initial counts positions"):
        attention(*args, mask, window=3, initial=2)
    with pytest.raises(ValueError, match="initial is 2, and this plan lists slot by slot"):
        reference.attend(*args, mask, 1.0, reach(3, 2))
    said = explain(*args, mask, window=3, initial=2)
    assert len(said.splitlines()) == said.count("cannot") == said.count("initial counts positions")


class ByHead(ExplicitPlan):
    """What is seen differs between heads and layers."""

    def visible(self, segment, window=None, low=0):
        seen = torch.from_numpy(super().visible(segment, window, low))[:, None].repeat(1, 4, 1, 1)
        for h in range(4):
            seen[:, h, :, h + self.layer :: 3] = False
        return seen

    def mask(self, segment, window, low, dtype, device):
        return additive(self.visible(segment, window, low), dtype)


@pytest.mark.parametrize("backend", CPU)
def test_log_sum_exps_of_masks_by_head_and_layer(backend):
    seen = np.zeros((6, 24), dtype=bool)
    seen[[0, 3, 5]] = np.random.default_rng(0).random((3, 24)) < 0.4
    seen[1, 4] = seen[2, 7] = True  # seen by some heads alone, others see nothing
    plan = ByHead([0, 1, 3], [2, 1, 3], seen)
    query, keys, values = case(AttentionPlan([0, 1, 3], [3, 3, 3], [2, 1, 3], 24))
    for plan.layer in (0, 1):
        out, lse = attention(query, keys, values, plan, backend=backend, lse=True)
        expected, logs = attention(query, keys, values, plan, backend="reference", lse=True)
        assert logs[:, 1].isinf().any()
        assert logs[:, 1].isfinite().any()
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, logs, rtol=0, atol=1e-13)


def test_log_sum_exps_that_cannot_be_said():
    plan = PLANS["verify"]
    args = case(plan, Dv=10)
    for backend in ("packed", "padded", "decomposed", "cpu"):
        with pytest.raises(ValueError, match="of one size, not 6 and 10"):
            attention(*args, plan, backend=backend, lse=True)
    query, keys, values = case(plan)
    with pytest.raises(ValueError, match=r"has no gradient: call it under torch.no_grad\(\)"):
        attention(query.requires_grad_(), keys, values, plan, backend="packed", lse=True)
    _, lse = attention(query, keys, values, plan, lse=True)  # the reference has one
    assert lse.requires_grad
    assert choose(*args, plan, lse=True) == "reference"


def test_the_cpus_two_ways_do_not_lose_a_soft_cap():
    """Values of 10 are not for C, and a soft cap is not for PyTorch."""
    plan = PLANS["verify"]
    args = case(plan, D=16, Dv=10, dtype=torch.float32)
    for lse in (False, True):
        with pytest.raises(ValueError, match="no soft cap"):
            attention(*args, plan, softcap=1.0, backend="cpu", lse=lse)
        (said,) = (
            line
            for line in explain(*args, plan, softcap=1.0, lse=lse).splitlines()
            if line.startswith("cpu ")
        )
        assert "cannot" in said


def test_plans_that_cannot_be_are_refused():
    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            AttentionPlan(**{"rows": [0, 2], "first": [17, 5], "counts": [3, 2], "capacity": 20, **changes})

    refused(r"first\[1\] is -1: give the slot", first=[17, -1])
    refused("row 1 of the plan has queries up to slot 20 and capacity is 20", first=[17, 19])
    refused(r"slots is \(4,\) and the plan has 5 queries", slots=torch.arange(4))
    refused(r"slots is \(5, 1\) and", slots=torch.arange(5)[:, None])
    refused("fragment is 0: give at least 1", fragment=0)
    tall, mine = make_tree([0], [17]), make_tree([0, 2], [17, 5])
    refused(r"tree has root \(1,\).* for the 2 rows of the plan", tree=tall)
    refused(r"tree has root \(1,\)", tree=mine._replace(root=np.array([17])))
    refused(r"ancestors \(2, 7, 6\)", tree=mine._replace(ancestors=mine.ancestors[:, :, :6]))
    refused(r"tree.root is \[17, -2\]", tree=make_tree([0, 2], [17, -2]))
    refused(
        "tree has 7 nodes and a row of the plan 9 slots from its root on", tree=make_tree([0, 2], [11, 5])
    )
    AttentionPlan([0, 2], [17, 5], [3, 2], 0, table=[[0, 1, 2], [3]], page=8)  # pages have no capacity


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_numbers_that_cannot_be_are_refused(backend):
    plan = PLANS["verify"]
    args = case(plan)
    for options, why in (
        ({"window": 2.5}, "window is 2.5: give a whole number"),
        ({"window": "4"}, "window is '4': give a whole number"),
        ({"window": float("nan")}, "window is nan"),
        ({"window": 4, "initial": 1.5}, "initial is 1.5: give a whole number"),
        ({"softcap": float("inf")}, "softcap is inf: give a finite number above 0"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"softcap": -1.0}, "softcap is -1.0"),
    ):
        with pytest.raises(ValueError, match=why):
            attention(*args, plan, backend=backend, **options)
    out = attention(*args, plan, backend=backend, window=np.int64(4), initial=np.int32(1))
    assert torch.equal(out, attention(*args, plan, backend=backend, window=4, initial=1))


def test_rows_without_queries_are_refused():
    with pytest.raises(ValueError, match=r"counts\[1\] is 0: give rows at least 1 query, and leave rows"):
        AttentionPlan([0, 1, 2], [5, 3, 9], [1, 0, 2], 24)
    with pytest.raises(ValueError, match=r"counts\[0\] is 0"):
        ExplicitPlan([0], [0], np.zeros((0, 5), dtype=bool))
    with pytest.raises(ValueError, match="rows, first and counts have 0, 0 and 0 entries"):
        AttentionPlan([], [], [], 24)
    with pytest.raises(ValueError, match="rows, first and counts have 2, 2 and 1 entries"):
        AttentionPlan([0, 1], [5, 3], [1], 24)


# First slot, queries, whether the row is there.
rows = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    rows,
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([0, 1, 4, 8]),
)
def test_any_rows(rows, window, Hkv, root, initial):
    there = [b for b, row in enumerate(rows) if row[2]] or [0]
    first, counts = [rows[b][0] for b in there], [rows[b][1] for b in there]
    shape = None
    if root is not None:  # node 0 sits `root` slots after the first query
        shape = make_tree(there, [f + root for f in first])
        counts = [min(c, root + len(PARENTS)) for c in counts]
    plan = AttentionPlan(there, first, counts, 18, shape)
    args = case(plan, 4, Hkv)
    expected, logs = naive(*args, plan, window=window, initial=initial, lse=True)
    for backend in CPU:
        out, lse = attention(*args, plan, window=window, initial=initial, backend=backend, lse=True)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, logs, rtol=0, atol=1e-13)
        out = attention(*args, plan, window=window, initial=initial, backend=backend)
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


def test_the_steady_state_is_one_call_and_a_decoding_row_needs_no_mask():
    assert len(PLANS["verify"].segments) == 1
    assert len(PLANS["ragged"].segments) == 3
    assert len(PLANS["uneven lengths"].segments) == 4  # one call would be masked almost everywhere
    for window in (None, 4):
        plan = AttentionPlan([3], [11], [1], 24)
        attention(*case(plan), plan, window=window, backend="packed")
        assert not plan._masks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_on_a_gpu_have_aligned_rows(dtype):
    """A mask may be a slice of a larger one, whose rows begin anywhere."""
    from specdec.kernels.attention.fused import aligned

    for shape, first, n in (((2, 6, 40), 0, 16), ((6, 40), 3, 13), ((2, 1, 6, 37), 8, 21)):
        mask = torch.randn(shape, dtype=dtype)[..., first : first + n]
        made = aligned(mask)
        assert made.equal(mask)
        assert aligned(made) is made
        assert made.data_ptr() % 16 == 0
        assert all(step * made.element_size() % 16 == 0 for step in made.stride()[:-1])
        assert made.stride(-1) == 1


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
        attention(*args, plan, backend="packed", sink_logits=torch.zeros(4))
    assert math.isfinite(float(attention(*args, plan).sum()))
