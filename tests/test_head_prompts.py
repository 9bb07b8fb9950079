"""Heads read prompts causally, in pieces, as they do slot by slot under a mask: the plain reference in this file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_fast_heads import shake
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import MTP, DFlash, DSpark, DynamicTree, Eagle3, Head, Medusa, PEagle, draft, slots
from specdec.drafts.heads.features import Features
from specdec.kernels.attention import ExplicitPlan
from specdec.masks import Causal, Strided, Window, streaming
from specdec.masks.function import Function

PROMPTS = [list(range(5, 28)), [7], [50, 51, 52] * 13, [9, 8, 7, 6]]
HEADS = {
    "eagle3": (Eagle3, {"blocks": 2, "head_norms": True}),
    "mtp": (MTP, {}),
    "peagle": (PEagle, {"blocks": 2, "depth": 4}),
    "dflash": (DFlash, {"blocks": 2, "block_size": 5}),
    "dspark": (DSpark, {"blocks": 1, "block_size": 4, "rank": 16}),
    "medusa": (Medusa, {"own_head": False}),
    "own mask": (Eagle3, {"mask": lambda b, h, q, kv: (kv <= q) & ((q - kv < 3) | (kv % 5 == 0))}),
    "strided": (DFlash, {"mask": Causal() & (Window(2) | Strided(3)), "blocks": 1, "block_size": 4}),
    "window": (Eagle3, {"mask": streaming(6, 2)}),
}


def in_one_pass(row, position, ring):
    """As ``slots.pieces``, where all of a text is held: all positions at once."""
    if ring is None or ring.block == 1:
        return [np.arange(len(row))] if len(row) else []
    return slots.pieces(row, position, ring)


def under_a_mask(ring, row, position, mask, device, kernels=slots.NO_KERNELS):
    """As ``slots.reading``: every query looks at all slots of its row, and a mask hides all but what it sees."""
    last = slots.ends(row)
    rows, counts = row[last].tolist(), np.diff(last, prepend=-1).tolist()
    seen = slots._visible(ring, position[:, None], position, mask)
    seen = np.pad(seen, ((0, 0), (0, ring.extra)))
    at = ring.at(torch.from_numpy(row), torch.from_numpy(position), device)
    plan = ExplicitPlan(rows, counts, seen, None, at)
    return slots.SlotPass(ring, plan, at, torch.from_numpy(position), kernels, lambda sight: plan)


def head_of(name, dtype, seed=1):
    kind, settings = HEADS[name]
    target = sd.HFModel(tiny("llama", dtype=dtype))
    return target, shake(
        kind.from_target(target, (2,) if kind in (MTP, Medusa) else (0, 2), **settings), seed
    )


def drafted(name, dtype, tree=None):
    """The ids of some texts, and all that was drafted for them."""
    target, head = head_of(name, dtype)
    way = Head(head) if tree is None else Head(head, tree)
    decoder = sd.decoder(target).draft(way, length=3).sampling(temperature=0 if tree else 1.0).build()
    proposals, out = [], None
    out = decoder.generate(PROMPTS, [6, 9, 4, 9], seed=2, on_round=lambda r: proposals.append(r.proposal))
    return out.ids, proposals


@pytest.mark.parametrize(
    "entries", [90, pytest.param(1, marks=pytest.mark.slow), pytest.param(2**23, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_under_a_mask(name, dtype, entries, monkeypatch):
    """Rows of unequal length, of which a piece holds a part, one or several. A ring of limited reach wraps."""
    monkeypatch.setattr(slots, "PIECE", 4)
    with monkeypatch.context() as plain:
        plain.setattr(draft, "reading", under_a_mask)
        plain.setattr(draft, "pieces", in_one_pass)
        expected, theirs = drafted(name, dtype)
    monkeypatch.setattr(slots, "ENTRIES", entries)
    found, ours = drafted(name, dtype)
    assert found == expected
    bound = 1e-4 if dtype == torch.float32 else 1e-12
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.tokens, other.tokens)
        assert torch.equal(mine.size, other.size)
        if mine.probs is not None:
            torch.testing.assert_close(mine.probs, other.probs, rtol=0, atol=bound)


@pytest.mark.slow
def test_trees_are_those_under_a_mask(monkeypatch):
    with monkeypatch.context() as plain:
        plain.setattr(draft, "reading", under_a_mask)
        expected, theirs = drafted("eagle3", torch.float64, DynamicTree(2, 2, 6))
    monkeypatch.setattr(slots, "ENTRIES", 90)
    found, ours = drafted("eagle3", torch.float64, DynamicTree(2, 2, 6))
    assert found == expected
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.parents, other.parents)
        assert torch.equal(mine.tokens, other.tokens)


ROW = np.repeat([0, 2, 3], [23, 40, 4])
POSITION = np.concatenate([np.arange(23), np.arange(7, 47), np.arange(3, 7)])


@pytest.mark.parametrize("entries", [1, 46, 47 * 9, 2**23])
def test_pieces_are_in_order_and_within_their_bound(entries, monkeypatch):
    _, head = head_of("eagle3", torch.float64)
    ring = slots.empty(head.shapes, 4, 60, None)
    monkeypatch.setattr(slots, "ENTRIES", entries)
    found = slots.pieces(ROW, POSITION, ring)
    assert np.concatenate(found).tolist() == list(range(len(ROW)))
    assert all(len(piece) * 47 <= entries or len(piece) == 1 for piece in found)
    assert len(found) == {1: 67, 46: 67, 47 * 9: 8}.get(entries, 1)
    assert slots.pieces(ROW[:0], POSITION[:0], ring) == []


@pytest.mark.parametrize("name", ["eagle3", "dflash", "strided"])
def test_a_pass_looks_at_no_slot_behind_its_last_position(name, monkeypatch):
    """Without a mask it is causal by its numbers, and what only stores attends to nothing."""
    target, head = head_of(name, torch.float64)
    head = head.bound(target)
    looked = []
    attention = slots.attention

    def attend(query, keys, values, plan):
        looked.append((type(plan), list(plan.length)))
        return attention(query, keys, values, plan)

    monkeypatch.setattr(slots, "attention", attend)
    ring = slots.empty(head.shapes, 4, 5000, head.mask)
    go = slots.reading(ring, ROW, POSITION, head.mask, torch.device("cpu"))
    count = len(ROW)
    features = {tap: torch.randn(count, 32, dtype=torch.float64) for tap in head.taps}
    with torch.no_grad():
        head.read(Features(features, *torch.zeros(2, count, dtype=torch.long)), go)
    if name == "eagle3":
        assert [plan.__name__ for plan, _ in looked] == ["AttentionPlan"] * 2
        assert all(length == [23, 47, 7] for _, length in looked)
    else:
        assert not looked
        assert max(go.plan.length) == 47


def test_a_window_that_the_text_has_not_filled_is_not_read():
    _, head = head_of("window", torch.float64)
    ring = slots.empty(head.shapes, 4, 5000, streaming(1000, 4))
    go = slots.reading(ring, ROW, POSITION, streaming(1000, 4), torch.device("cpu"))
    assert max(go.plan.length) == 47


def test_rows_that_join_read_what_they_have_not_read(monkeypatch):
    """A longer text joins, so that the ring grows: slots stay positions."""
    _, head = head_of("eagle3", torch.float64)
    rings = [slots.empty(head.shapes, 1, capacity, None) for capacity in (20, 50)]
    grown = rings[0].followed_by(rings[1])
    row, position = np.repeat([0, 1], [3, 30]), np.concatenate([np.arange(3), np.arange(30)])
    ours = slots.reading(grown, row, position, None, torch.device("cpu"))
    theirs = under_a_mask(grown, row, position, None, torch.device("cpu"))
    numbers = lambda heads: torch.randn(33, heads, 8, dtype=torch.float64)  # noqa: E731
    query, key, value = numbers(4), numbers(2), numbers(2)
    torch.testing.assert_close(ours(0, query, key, value), theirs(0, query, key, value))


def test_positions_that_see_nothing_are_refused():
    """A mask is checked at some positions when a head is made, and at all others here."""
    _, head = head_of("own mask", torch.float64)
    ring = slots.empty(head.shapes, 4, 60, head.mask)
    with pytest.raises(ValueError, match="lets position 41 see nothing"):
        slots.reading(
            ring, ROW, POSITION, Function(lambda b, h, q, kv: (kv <= q) & (q != 41)), torch.device("cpu")
        )
