"""Attention from tensors alone, as captured steps call it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec import tree
from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.graphs.ring_plan import RingPlan
from specdec.graphs.static import StaticPlan
from specdec.kernels.attention import AttentionPlan, Tree, attention, reference, static_reference
from specdec.kernels.attention.lowered import Lowered, RingSight, lower
from specdec.kernels.attention.reach import Streaming, reach

PARENTS = [-1, -1, 0, 2, 0]


def plan_of(kind, paged):
    rows, first, counts = [0, 2, 3], [7, 0, 11], [3, 6, 5]
    shape = None
    if kind == "tree":
        parents = torch.tensor([[-1, 0, 0, 1, 0], PARENTS, PARENTS])
        root = np.array([8, 1, 11])
        shape = Tree(root, tree.ancestors(parents).numpy(), tree.depths(parents).numpy())
    table = [[3, 1, 8, 4], [0, 7], [2, 6, 9, 5]] if paged else None
    return AttentionPlan(rows, first, counts, 20, shape, table=table, page=5 if paged else 0)


def padded(lowered, rows, tokens, length):
    """As many rows without queries, and tokens of no row, as make it so many."""
    more = rows - len(lowered.rows)
    pad = torch.nn.functional.pad
    parts = {name: pad(getattr(lowered, name), (0, more)) for name in ("length", "rows", "root")}
    parts["starts"] = torch.cat([lowered.starts, lowered.starts[-1:].expand(more)])
    for name in ("depth", "table"):
        part = getattr(lowered, name)
        parts[name] = None if part is None else pad(part, (0, 0, 0, more))
    words = None if lowered.words is None else pad(lowered.words, (0, tokens - len(lowered.words)))
    return Lowered(**parts, words=words, seen=None, max_count=8, max_length=length)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize(
    "extras", [{}, {"window": 4}, {"window": Streaming(4, 2)}, {"softcap": 2.0, "sink_logits": True}]
)
def test_attention_from_tensors_alone(kind, paged, extras):
    torch.manual_seed(0)
    plan = plan_of(kind, paged)
    extras = {**extras, "sink_logits": torch.randn(4)} if extras.get("sink_logits") else extras
    query = torch.randn(1, 4, 14, 8)
    keys, values = (torch.randn(10 if paged else 4, 5 if paged else 20, 2, size) for size in (8, 6))
    wanted = reference.attend(query, keys, values, plan, 0.3, **extras)
    low = lower(plan, "cpu")
    wide = torch.cat([query, torch.full((1, 4, 3, 8), float("nan"))], 2)
    seen = torch.zeros(keys.shape[:2], dtype=torch.bool)
    for r, (row, length) in enumerate(zip(plan.rows, plan.length)):
        for s in range(length):
            seen[(plan.table[r][s // 5], s % 5) if paged else (row, s)] = True
    for buffer in (keys, values):
        buffer[~seen] = float("nan")  # nobody sees these
    for q, lowered in ((query, low), (wide, padded(low, 5, 17, 20))):
        out = static_reference.attend(q, keys, values, lowered, 0.3, **extras)
        torch.testing.assert_close(out[:, :14], wanted)
        assert not out[:, 14:].any()
    at = torch.arange(14)[:, None] - low.starts[:-1]  # [T, R] of a token as a query of each row
    own = ((at >= 0) & (torch.arange(14)[:, None] < low.starts[1:])).int().argmax(1)
    queries = torch.arange(14)[None].expand(3, -1)
    said = static_reference.visible(low, queries, extras.get("window"))[own, torch.arange(14)]
    said = torch.nn.functional.pad(said, (0, 20 - said.shape[1])).to(torch.uint8)[None]  # slot by slot
    written = Lowered(**{**vars(low), "words": None, "depth": None, "seen": said, "max_length": 20})
    out = static_reference.attend(query, keys, values, written, 0.3, **extras)
    torch.testing.assert_close(out, wanted)
    with pytest.raises(ValueError, match="seen has 4 heads"):
        heads = SimpleNamespace(**{**vars(written), "seen": said.expand(4, -1, -1)})
        static_reference.attend(query, keys, values, heads, 0.3)


def test_a_step_in_tensors_takes_first_positions():
    """Through ``attention``, as a layer asks."""
    plan = plan_of("chain", False)
    query, keys, values = (torch.randn(*s, 8) for s in ((1, 4, 14), (4, 20, 2), (4, 20, 2)))
    step = StaticPlan(lower(plan, "cpu"), plan.slots)
    for window, initial in ((4, 2), (4, 0), (4, 60)):
        out = attention(query, keys, values, step, window=window, initial=initial)
        wanted = reference.attend(query, keys, values, plan, 8**-0.5, reach(window, initial))
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("sinks", "window", "block"), [(0, 1, 1), (2, 5, 3), (4, 3, 2), (7, 4, 1)])
def test_what_a_ring_shows_by_arithmetic(sinks, window, block):
    ring = Ring([KVShape(1, 4, 4, torch.float32, torch.device("cpu"))], 1, sinks, window, block)
    queries = np.arange(40)
    for own in (None, 2, 30):
        plan = RingPlan(
            RingSight(torch.from_numpy(queries), sinks, ring.size, window, 2**31 - 1), torch.arange(40)
        )
        said = static_reference.visible(plan._lowered(own), torch.arange(40)[:, None])[:, 0]
        behind = queries[:, None] - ring.held(queries)
        expected = ring.visible(queries) & (behind < (own or 99))
        assert np.array_equal(said.numpy(), expected)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_triton_ignores_padding(kind):
    pytest.importorskip("triton")
    from interpreted import interpreter
    from test_triton_attention import DEVICE, triton_backend

    torch.manual_seed(0)
    query, keys, values = (torch.randn(*s, 16) for s in ((1, 4, 17), (4, 20, 2), (4, 20, 2)))
    low = padded(lower(plan_of(kind, False), "cpu"), 5, 17, 20)
    wanted = static_reference.attend(query, keys, values, low, 0.3)
    low = Lowered(**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in vars(low).items()})
    with interpreter() if DEVICE.type == "cpu" else nullcontext():
        out = triton_backend.launch(*(t.to(DEVICE) for t in (query, keys, values)), low, 0.3).cpu()
    torch.testing.assert_close(out[:, :14], wanted[:, :14], rtol=1e-4, atol=1e-5)
