"""Masks against their definitions, against the attention plan, and on hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec import tree
from specdec.kernels.attention import AttentionPlan, ExplicitPlan, attention
from specdec.kernels.attention import plan as planning
from specdec.masks import (
    Block,
    Causal,
    InCache,
    Mask,
    OriginalText,
    Sinks,
    Strided,
    Tree,
    Window,
    block_mask,
    dense,
    intervals,
)

SPIRE = Causal() & (Sinks(1) | Window(64))
AT = torch.arange(20)


@pytest.mark.parametrize(
    ("mask", "sees"),
    [
        (Causal(), lambda q, kv: kv <= q),
        (Sinks(3), lambda q, kv: kv in (0, 1, 2)),
        (Sinks(0), lambda q, kv: False),
        (Window(1), lambda q, kv: kv >= q),
        (Window(4), lambda q, kv: kv - q in (-3, -2, -1) or kv >= q),
        (Block(4), lambda q, kv: [q in range(s, s + 4) for s in range(0, 20, 4)] == [kv in range(s, s + 4) for s in range(0, 20, 4)]),
        (Strided(5), lambda q, kv: abs(q - kv) in (0, 5, 10, 15)),
        (Causal() & (Sinks(2) | Window(3)), lambda q, kv: kv in {0, 1, q - 2, q - 1, q} and kv <= q),
    ],
    ids=lambda x: repr(x) if isinstance(x, Mask) else "as defined",  # the same in every process, for pytest-xdist
)  # fmt: skip
def test_what_a_mask_sees(mask, sees):
    assert dense(mask, AT, AT).tolist() == [[sees(q, kv) for kv in range(20)] for q in range(20)]


def chains() -> AttentionPlan:
    return AttentionPlan(rows=[0, 1], first=[7, 7], counts=[4, 4], capacity=16)


@pytest.mark.parametrize("window", [None, 1, 3, 9, 50])
def test_a_window_is_the_plans(window):
    plan = chains()
    (segment,) = plan.segments
    mask = Causal() if window is None else Causal() & Window(window)
    q = torch.arange(7, 11).expand(2, -1)
    expected = plan.visible(segment, window)
    assert dense(mask, q, torch.arange(segment.keys)).tolist() == expected.tolist()


PARENTS = torch.tensor([[-1, -1, 0, 0, 1, 3], [-1, 0, 0, 1, -1, 2]])
ROOT = torch.tensor([5, 3])


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6])
@pytest.mark.parametrize("before", [0, 2])
def test_a_tree_is_the_plans(window, before):
    """With ``before`` committed tokens fed in the same call, and a window of positions, in which siblings are equal."""
    above, depth = tree.ancestors(PARENTS).numpy(), tree.depths(PARENTS).numpy()
    for b in range(2):
        root = int(ROOT[b])
        held = planning.Tree(np.array([root]), above[b : b + 1], depth[b : b + 1])
        plan = AttentionPlan([b], [root - before], [6 + before], 16, held)
        (segment,) = plan.segments
        mask = Tree(ROOT, PARENTS)
        if window is not None:
            mask = mask & OriginalText(Window(window), mask.positions(16))
        q = torch.arange(root - before, root + 6)
        seen = dense(mask, q, torch.arange(segment.keys), row=b)
        assert seen.tolist() == plan.visible(segment, window)[0].tolist()


def test_a_node_sees_nothing_behind_its_tree():
    for b in range(2):
        root = int(ROOT[b])
        seen = dense(Tree(ROOT, PARENTS), torch.arange(root, root + 6), torch.arange(20), row=b)
        assert not seen[:, root + 6 :].any()
        assert seen[:, :root].all()


def test_positions_of_a_tree():
    mask = Tree(ROOT, PARENTS)
    assert mask.positions(12).tolist() == [
        [0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7, -1],
        [0, 1, 2, 3, 4, 4, 5, 3, 5, -1, -1, -1],
    ]
    nothing = Tree(torch.tensor([3]), torch.zeros(1, 0, dtype=torch.long))
    assert nothing.positions(5).tolist() == [[0, 1, 2, -1, -1]]
    assert dense(nothing, AT[:3], AT[:3]).tolist() == dense(Causal(), AT[:3], AT[:3]).tolist()


def test_intervals():
    assert intervals(Causal(), 5) == [(0, 6)]
    assert intervals(SPIRE, 0) == [(0, 1)]
    assert intervals(SPIRE, 64) == [(0, 65)]  # the window has just reached the sink
    assert intervals(SPIRE, 65) == [(0, 1), (2, 66)]
    assert intervals(SPIRE, 1000) == [(0, 1), (937, 1001)]
    assert intervals(Causal() & Block(8), 21) == [(16, 22)]
    assert intervals(Block(8), 21, 40) == [(16, 24)]  # both directions: the slots must be said
    assert intervals(Sinks(0) & Causal(), 9) == []
    assert intervals(Causal() & Strided(4), 9, limit=3) == [(1, 2), (5, 6), (9, 10)]
    kept = torch.tensor([[0, 1, 5, 6, 9, 10, 11, 12]])
    assert intervals(OriginalText(Causal() & (Sinks(1) | Window(4)), kept), 7) == [(0, 1), (4, 8)]
    assert intervals(lambda b, h, q, kv: kv == q, 4) == [(4, 5)]


MASKS = [
    Causal(),
    Causal() & Window(5),
    SPIRE,
    Causal() & (Sinks(2) | Window(4)),
    Causal() & Block(8),
    Block(8) & Window(6),
    Causal() & Strided(4),
    Causal() & (Strided(6) | Window(3) | Sinks(2)),
    Causal() & Block(16) & (Sinks(18) | Window(2)),
    Causal() & Sinks(3),
    Sinks(0) & Causal(),  # sees nothing
    lambda b, h, q, kv: (kv <= q) & (kv != 7),
]
QUERIES = [[3], [38, 39], [20, 21, 22]]  # positions of three rows' queries
COUNTS, ROWS, SLOTS = [1, 2, 3], [0, 2, 3], 40


def explicit(mask, limit=99):
    """One mask in two ways: a boolean mask of all slots, and intervals."""
    at = [(row, q) for row, queries in zip(ROWS, QUERIES) for q in queries]
    seen = torch.cat([dense(mask, torch.tensor([q]), torch.arange(SLOTS), row) for row, q in at])
    ranges = [intervals(mask, q, SLOTS, row=row, limit=limit) for row, q in at]
    return ExplicitPlan(ROWS, COUNTS, seen.numpy()), ExplicitPlan.of_intervals(ROWS, COUNTS, ranges, SLOTS)


def tensors(dtype=torch.float64, size=16):
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, sum(COUNTS), size, generator=g, dtype=dtype)
    return query, *torch.randn(2, 4, SLOTS, 2, size, generator=g, dtype=dtype).unbind(0)


@pytest.mark.parametrize("mask", MASKS, ids=[repr(m) if isinstance(m, Mask) else "a function" for m in MASKS])
def test_attention_by_a_dense_mask_and_by_intervals_is_the_same(mask):
    """And the one that is written out here, by SDPA."""
    args = tensors()
    by_mask, by_intervals = explicit(mask)
    assert np.array_equal(by_mask.seen, by_intervals.seen)
    expected = attention(*args, by_mask, backend="reference", lse=True)
    for backend in ("reference", "packed", "padded", "decomposed"):
        for plan in explicit(mask):
            for a, b in zip(attention(*args, plan, backend=backend, lse=True), expected):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    t = 0
    for row, queries in zip(ROWS, QUERIES):
        seen = dense(mask, torch.tensor(queries), torch.arange(SLOTS), row)
        k, v = (x[row].transpose(0, 1).repeat_interleave(2, 0) for x in args[1:])
        mine = scaled_dot_product_attention(args[0][0, :, t : t + len(queries)], k, v, attn_mask=seen)
        mine = mine.nan_to_num(0.0).transpose(0, 1)
        torch.testing.assert_close(expected[0][0, t : t + len(queries)], mine, rtol=0, atol=1e-12)
        t += len(queries)


@pytest.mark.parametrize(("window", "sinks"), [(4, 2), (30, 1), (1, 6), (5, 0)])
def test_sinks_and_a_window_are_the_ordered_plans(window, sinks):
    mask = Causal() & (Sinks(sinks) | Window(window))
    ordered = AttentionPlan(ROWS, [q[0] for q in QUERIES], COUNTS, SLOTS)
    args = tensors()
    for plan in explicit(mask):
        expected = attention(*args, plan, backend="reference")
        for backend in ("reference", "packed"):
            out = attention(*args, ordered, window=window, initial=sinks, backend=backend)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_intervals_that_make_no_plan():
    def refused(match, counts, intervals, **others):
        with pytest.raises(ValueError, match=match):
            ExplicitPlan.of_intervals([0, 1], counts, intervals, 10, **others)

    refused("intervals has 1 lists and counts say 3 queries", [1, 2], [[(0, 3)]])
    for wrong in ([(3, 3)], [(4, 2)], [(-1, 2)], [(0, 11)], [(0, 4), (3, 6)], [(5, 6), (0, 2)]):
        refused(r"intervals\[1\] is .*ascending, apart, and within the row's 10 slots", [1, 1], [[], wrong])
    refused(r"counts\[1\] is 0", [1, 0], [[(0, 3)]])
    refused(
        r"distance is \(1, 10\): give \[queries, slots\], \(2, 10\)",
        [1, 1],
        [[], []],
        distance=np.ones((1, 10)),
    )
    with pytest.raises(ValueError, match="a row of 4 queries and seen 3 slots"):
        ExplicitPlan([0], [4], np.ones((4, 3), dtype=bool))
    plan = ExplicitPlan.of_intervals([0, 2], [1, 1], [[(0, 3), (5, 6)], []], 10)
    assert plan.seen.tolist() == [[s in (0, 1, 2, 5) for s in range(10)], [False] * 10]
    assert plan.slots.tolist() == [9, 29]
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="window is 3, and this plan does not know how far behind slots are"):
        attention(q, torch.zeros(3, 10, 1, 4), torch.zeros(3, 10, 1, 4), plan, window=3)


@pytest.mark.parametrize("other", [np.int64, np.uint8, np.float32])
def test_a_mask_that_is_not_boolean_is_refused(other):
    seen = np.ones((3, 8), dtype=bool)
    for wrong, why in (
        (seen.astype(other), f"seen is {np.dtype(other)} of 2 dimensions: give bool"),
        (seen[0], "seen is bool of 1 dimensions"),
        (torch.from_numpy(seen), r"seen is a Tensor: give a NumPy array of bool.*\.numpy\(\)"),
        (seen.tolist(), "seen is a list: give a NumPy array of bool"),
    ):
        with pytest.raises(ValueError, match=why):
            ExplicitPlan([0], [3], wrong)
    for wrong, why in (
        (seen, "distance is bool of 2 dimensions: give numbers"),
        (seen[0].astype(int), "distance is int64 of 1 dimensions"),
        (torch.ones(3, 8), "distance is a Tensor: give a NumPy array of numbers"),
    ):
        with pytest.raises(ValueError, match=why):
            ExplicitPlan([0], [3], seen, wrong)


def test_intervals_and_a_layers_own_window():
    """Ascending positions with a gap: the slots of a row that a cache kept."""
    kept = np.array([0, 1, 2, 9, 10, 11, 12, 13])
    plan = ExplicitPlan.of_intervals([1], [1], [[(0, 2), (3, 8)]], 8, distance=13 - kept[None])
    query, keys, values = torch.randn(1, 1, 1, 4), *torch.randn(2, 2, 8, 1, 4)
    out = attention(query, keys, values, plan, window=4)
    same = ExplicitPlan.of_intervals([1], [1], [[(4, 8)]], 8)
    torch.testing.assert_close(out, attention(query, keys, values, same))


def test_what_has_no_intervals_is_refused():
    with pytest.raises(ValueError, match=r"Strided\(4\).* 26 intervals .* limit is 4.*block_mask"):
        intervals(Causal() & Strided(4), 100)
    with pytest.raises(ValueError, match=r"AttentionPlan\(tree"):
        intervals(Causal() & OriginalText(Tree(ROOT, PARENTS), torch.zeros(2, 9, dtype=torch.long)), 6)
    with pytest.raises(ValueError, match="counted from 0"):
        intervals(Causal(), -1)
    with pytest.raises(ValueError, match="at least 1"):
        block_mask(Causal(), 0, 4)


KEPT = torch.tensor([[0, 1, 5, 6, 9, 10, 11, 12, -1, -1], [0, 2, 3, 4, 8, 9, 10, 20, 21, 22]])


@pytest.mark.parametrize("wrapper", [OriginalText, InCache])
def test_positions_in_the_text_or_in_the_cache(wrapper):
    mask = wrapper(Causal() & (Sinks(2) | Window(4)), KEPT)
    for b in range(2):
        for q in range(10):
            for kv in range(12):  # slots behind the end are empty
                if q >= 8 and b == 0:
                    continue  # there is nobody to ask
                where = KEPT[b].tolist() if wrapper is OriginalText else list(range(10))
                expected = (
                    kv < 10
                    and int(KEPT[b, kv]) >= 0
                    and kv <= q
                    and (where[kv] < 2 or where[kv] > where[q] - 4)
                )
                assert bool(mask(b, 0, q, kv)) == expected
    # The text has gaps: 20, 21, 22.
    assert dense(OriginalText(Window(4), KEPT), AT[7:8], AT[:10], 1).sum() == 3
    assert dense(InCache(Causal() & Window(4), KEPT), AT[7:8], AT[:10], 1).sum() == 4


def test_heads_that_keep_different_tokens():
    positions = torch.tensor([[[0, 1, 2, 9], [0, 7, 8, 9]]])
    mask = OriginalText(Causal() & Window(3), positions)
    assert dense(mask, AT[3:4], AT[:4], head=0).tolist() == [[False, False, False, True]]
    assert dense(mask, AT[3:4], AT[:4], head=1).tolist() == [[False, True, True, True]]
    blocks = block_mask(mask, 1, 4, first=3, rows=1, heads=2, block=1)
    assert blocks.to_dense().tolist() == [[[[0, 0, 0, 1]], [[0, 1, 1, 1]]]]


def rotated(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """RoPE on ``x [S, D]``."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def test_for_sinks_and_a_window_only_rotations_differ():
    """StreamingLLM's own example: tokens 0, 1, 2, 3, 6, 7, 8 are cached, and token 9 is decoded."""
    kept = torch.tensor([[0, 1, 2, 3, 6, 7, 8, 9]])
    streaming = Causal() & (Sinks(4) | Window(4))
    text, cache = OriginalText(streaming, kept), InCache(streaming, kept)
    query = torch.tensor([7])
    assert torch.equal(dense(text, query, AT[:8]), dense(cache, query, AT[:8]))
    assert dense(text, query, AT[:8]).all()
    assert text.rotary.tolist() == kept.tolist()
    assert cache.rotary.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    # Stored rotated by the text, the window's keys may stay, and the sinks turn by the number of evicted tokens, 2.
    torch.manual_seed(0)
    x = torch.randn(8, 16, dtype=torch.float64)
    by_slot = rotated(x, cache.rotary[0]) @ rotated(x[7:], cache.rotary[0, 7:]).T
    stored = rotated(x, kept[0])
    stored[:4] = rotated(stored[:4], torch.full((4,), 2))
    assert torch.allclose(by_slot, stored @ rotated(x[7:], kept[0, 7:]).T, atol=1e-12)
    true = rotated(x, text.rotary[0]) @ rotated(x[7:], text.rotary[0, 7:]).T
    assert torch.allclose(by_slot[4:], true[4:], atol=1e-12)
    assert not torch.allclose(by_slot[:4], true[:4], atol=1e-3)


def test_values_and_names():
    assert Window(3) == Window(3) != Window(4)
    assert len({SPIRE, Causal() & (Sinks(1) | Window(64))}) == 1
    assert repr(SPIRE) == "Causal() & (Sinks(1) | Window(64))"
    assert repr(Causal() & Window(3) | Sinks(1)) == "(Causal() & Window(3)) | Sinks(1)"
    assert repr(OriginalText(Window(3), KEPT)) == "OriginalText(Window(3), positions[2, 10])"

    def mine(b, h, q, kv):
        return kv == q

    assert repr(mine | Sinks(2)) == "mine | Sinks(2)"


def test_the_picture():
    assert str((Causal() & (Sinks(1) | Window(2))).show(5)) == "\n".join(
        [
            "Causal() & (Sinks(1) | Window(2))",
            "     0 ██ · · · ·",
            "     1 ████ · · ·",
            "     2 ██████ · ·",
            "     3 ██ ·████ ·",
            "     4 ██ · ·████",
            "queries down, keys across; ██ seen, ▒▒ partly; a cell is one position each way",
        ]
    )
    assert len((Causal() & Window(1_000_000)).show().splitlines()) <= 26  # and it is quick
    with pytest.raises(ValueError, match="at least 1 position"):
        Causal().show(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(0), r"Window.size is 0: .*leave it out"),
        (lambda: Window(-3), r"Window.size is -3"),
        (lambda: Sinks(-1), r"Sinks.count is -1: .*0 leaves them out"),
        (lambda: Block(0), r"Block.size is 0"),
        (lambda: Strided(0), r"Strided.stride is 0"),
        (lambda: Tree(ROOT, PARENTS[:1]), r"Tree: root is \[2\] and parents \[1, 6\]"),
        (lambda: OriginalText(Causal(), ROOT), r"OriginalText: positions is \[2\]"),
        (lambda: InCache(Causal(), ROOT), r"InCache: positions is \[2\]"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window("4"), "size is '4': give a whole number"),
        (lambda: Window(2.5), r"size is 2\.5"),
        (lambda: Sinks(1.0), r"count is 1\.0"),
        (lambda: Block("4"), "size is '4'"),
        (lambda: Strided(2.0), r"stride is 2\.0"),
        (lambda: Causal() & Window, r"Window is a class: give an object, such as Window\(\.\.\.\)"),
        (lambda: Causal & Window(4), "Causal is a class"),
        (lambda: Window | Causal(), "Window is a class"),
        (lambda: Causal() & (Sinks | Window), "is no mask"),
        (lambda: Causal() | None, "a NoneType is no mask"),
        (lambda: Causal() & torch.ones(2, 2).bool(), "is no mask"),
        (lambda: OriginalText(Window, KEPT), "Window is a class"),
        (lambda: InCache(3, KEPT), "a int is no mask"),
        (lambda: Causal() and Window(4), "by & and |, not by 'and' and 'or'"),
        (lambda: Causal() or Window(4), "by & and |"),
    ],
)
def test_what_is_no_mask_is_refused(make, message):
    with pytest.raises(TypeError, match=message.replace("|", "[|]")):
        make()


def test_compiled_functions_call_masks_and_their_truth_value_stays_refused():
    """Dynamo of torch 2.11 asks for the truth value of everything that it calls; ``and`` and ``or`` are refused in compiled code, too."""
    mask = SPIRE & OriginalText(Causal(), torch.arange(20)[None])

    def sees(kv):
        return mask(0, 0, 9, kv)

    def joins(kv):
        return (mask and Causal())(0, 0, 9, kv)

    compiled = torch.compile(sees, backend="eager", fullgraph=True)
    assert compiled(AT).tolist() == sees(AT).tolist() == [kv <= 9 for kv in range(20)]
    with pytest.raises(TypeError, match=r"by & and \|, not by 'and' and 'or'"):
        torch.compile(joins, backend="eager")(AT)
    assert eval("bool(mask)", {"__name__": "torch._dynamo.symbolic_convert", "mask": mask})
    with pytest.raises(TypeError, match="a mask is neither true nor false"):
        eval("bool(mask)", {"__name__": "torch.nn", "mask": mask})
