"""Request decomposition: exact whatever is cut, planned by a model that it never loses against, and chosen by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny

import specdec as sd
from specdec.kernels.attention import (
    AttentionPlan,
    CostModel,
    attention,
    decompose,
    fit,
    merge,
)
from specdec.kernels.attention.costs import cost_model
from specdec.kernels.attention.decomposed import fragments
from specdec.kernels.attention.merge import merge_two

FAST = ["packed", "padded", "decomposed"]
ALL = ["reference", *FAST]
MODEL = CostModel.of(4, 4, 64)


def naive(query, keys, values, lengths, q, window):
    """Chains of ``q`` queries in rows 0, 1, ...: a dense softmax a row, in float64."""
    rows = []
    group = query.shape[1] // keys.shape[2]
    for b, n in enumerate(lengths):
        mine = query[0, :, b * q : b * q + q].double()
        k, v = (t[b, :n].double().repeat_interleave(group, 1).transpose(0, 1) for t in (keys, values))
        scores = mine @ k.transpose(1, 2) * query.shape[-1] ** -0.5
        at, key = torch.arange(n - q, n)[:, None], torch.arange(n)
        seen = (key <= at) & (key > at - (window or n + 1))
        rows.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(rows)[None]


def make(lengths, q, *, heads=4, kv_heads=4, size=64, dtype=torch.float64, fragment=None, rows=None, seed=0):
    """Arguments of ``attention``, keys and values heads-first in memory as the cache has them."""
    g = torch.Generator().manual_seed(seed)
    rows = list(range(len(lengths))) if rows is None else rows
    plan = AttentionPlan(
        rows, [n - q for n in lengths], [q] * len(lengths), max(lengths) + 3, fragment=fragment
    )
    query = torch.randn(1, len(lengths) * q, heads, size, generator=g, dtype=dtype).transpose(1, 2)
    buffer = torch.randn(2, max(rows) + 1, kv_heads, plan.capacity, size, generator=g, dtype=dtype)
    return query, *buffer.transpose(2, 3), plan


@pytest.mark.parametrize("size", [32, 64, 80])
@pytest.mark.parametrize("fragment", [None, 32])
def test_float32_is_as_good_as_the_reference(size, fragment):
    lengths = [40, 5, 200, 33, 65]
    for q in (1, 5):
        args = make(lengths, q, size=size, dtype=torch.float32, fragment=fragment)
        exact = naive(*args[:3], lengths, q, None)
        error = {b: float((attention(*args, backend=b).double() - exact).abs().max()) for b in ALL}
        for backend in FAST:
            assert error[backend] <= 2 * error["reference"] + torch.finfo(torch.float32).eps


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=7),
    st.integers(1, 9),
    st.sampled_from([None, 1, 5, 16, 31]),
    st.sampled_from([None, 1, 6, 25]),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_lengths(lengths, q, fragment, window, seed):
    lengths = [max(n, q) for n in lengths]
    args = make(lengths, q, heads=2, kv_heads=1, size=8, fragment=fragment, seed=seed)
    expected = naive(*args[:3], lengths, q, window)
    for backend in ("packed", "decomposed"):
        out = attention(*args, window=window, backend=backend)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def parts(F, q=3, D=4, seed=0, batch=2):
    g = torch.Generator().manual_seed(seed)
    outputs = torch.randn(batch, F, q, D, generator=g, dtype=torch.float64)
    return outputs, 30 * torch.randn(batch, F, q, generator=g, dtype=torch.float64)


def test_a_merge_is_the_softmax_of_everything():
    g = torch.Generator().manual_seed(3)
    scores = 9 * torch.randn(2, 3, 20, generator=g, dtype=torch.float64)
    values = torch.randn(2, 20, 4, generator=g, dtype=torch.float64)
    cuts = [(0, 1), (1, 8), (8, 20)]
    outputs = torch.stack([scores[..., a:b].softmax(-1) @ values[:, a:b] for a, b in cuts], 1)
    lse = torch.stack([scores[..., a:b].logsumexp(-1) for a, b in cuts], 1)
    out, total = merge(outputs, lse)
    torch.testing.assert_close(out, scores.softmax(-1) @ values, rtol=0, atol=1e-14)
    torch.testing.assert_close(total, scores.logsumexp(-1), rtol=0, atol=1e-14)


def test_distributions_of_merging():
    outputs, lse = parts(4)
    out, total = merge(outputs, lse)
    one = merge(outputs[:, :1], lse[:, :1])
    torch.testing.assert_close(one[0], outputs[:, 0])
    order = [2, 0, 3, 1]
    torch.testing.assert_close(merge(outputs[:, order], lse[:, order]), (out, total))
    left, right = merge(outputs[:, :2], lse[:, :2]), merge(outputs[:, 2:], lse[:, 2:])
    nested = merge(torch.stack((left[0], right[0]), 1), torch.stack((left[1], right[1]), 1))
    torch.testing.assert_close(nested, (out, total))
    torch.testing.assert_close(merge_two(*left, *right), (out, total))
    shifted = merge(outputs, lse + 700)  # exp(700 + 30) overflows
    torch.testing.assert_close(shifted, (out, total + 700))


def test_fragments_that_see_nothing_do_not_count():
    outputs, lse = parts(3)
    expected = merge(outputs[:, :2], lse[:, :2])
    lse[:, 2] = float("-inf")
    outputs[:, 2] = float("nan")
    torch.testing.assert_close(merge(outputs, lse), expected)
    nothing = merge(outputs, torch.full_like(lse, float("-inf")))
    assert (nothing[0] == 0).all()
    assert (nothing[1] == float("-inf")).all()
    zero, never = torch.zeros_like(outputs[:, 0]), torch.full_like(lse[:, 0], float("-inf"))
    torch.testing.assert_close(merge_two(zero, never, outputs[:, 0], lse[:, 0]), (outputs[:, 0], lse[:, 0]))
    torch.testing.assert_close(merge_two(outputs[:, 0], lse[:, 0], zero, never), (outputs[:, 0], lse[:, 0]))
    assert torch.equal(merge_two(zero, never, zero, never)[0], zero)
    with pytest.raises(ValueError, match="outputs is"):
        merge(outputs, lse[:, :2])


lengths_of_a_batch = st.lists(st.integers(1, 2000), min_size=1, max_size=24)


@given(
    lengths_of_a_batch,
    st.integers(1, 9),
    st.tuples(*[st.floats(0, 1e-3)] * 2, *[st.floats(0, 1e-6)] * 2, *[st.floats(0, 1e-4)] * 2),
    st.sampled_from([None, 100]),
)
@settings(max_examples=150, deadline=None)
def test_never_predicted_worse_than_none(lengths, q, constants, fragment):
    model = CostModel(*constants)
    plan = decompose(lengths, q, model)
    assert plan.seconds <= min(plan.padded, plan.packed) * (1 + 1e-9)
    assert plan == decompose(lengths, q, model)
    for cover in (plan, decompose(lengths, q, model, fragment=100)):
        slots = [np.zeros(n, int) for n in lengths]
        total = 0.0
        for block in cover.walk():
            total += model.block(block.r1 - block.r0, block.high - block.low, q)
            total += sum(model.merging(b.r1 - b.r0, q) for b in block.above)
            for r in range(block.r0, block.r1):
                assert block.low < lengths[r]
                slots[r][block.low : block.high] += 1
        assert all((n == 1).all() for n in slots)  # each slot once
        assert total == pytest.approx(cover.seconds, rel=1e-9, abs=1e-15)


def test_what_is_chosen():
    even = decompose([500] * 8, 5, MODEL)
    assert len(even.blocks) == 1
    assert not even.cut
    sides = decompose([100] * 8 + [2000] + [100] * 8, 5, MODEL)
    assert [(b.r0, b.r1) for b in sides.walk()] == [(0, 8), (8, 9), (9, 17)]
    slow_calls = CostModel.of(4, 4, 64, call=1e-4)
    # Many calls against one with all rows and some above it.
    comb = decompose([900, 1200] * 12, 5, slow_calls)
    assert comb.calls == 1 or comb.cut
    assert decompose([900, 2000] * 8, 5, MODEL, cut=False).cut is False
    assert decompose([900, 900], 5, MODEL, rows=[0, 5]).calls == 2
    assert "padding" in str(sides)
    assert "rows 0-7" in sides.show()
    blocks = list(decompose([25, 10], 1, MODEL, fragment=10).walk())
    assert [(b.r0, b.r1, b.low, b.high) for b in blocks] == [(0, 2, 0, 10), (0, 1, 10, 20), (0, 1, 20, 25)]


def test_a_cut_is_run_and_merged_where_the_model_asks_for_it(monkeypatch):
    from specdec.kernels.attention import decomposed

    eager = CostModel(1e-4, 0.0, 1e-7, 0.0, 0.0, 0.0)  # a call is as long as a thousand slots
    monkeypatch.setattr(decomposed, "cost_model", lambda *_: eager)
    lengths = [300, 900, 310, 900, 320, 2000, 330]
    args = make(lengths, 5, size=32)
    chosen = fragments(*args, None)
    assert chosen.cut
    out = attention(*args, backend="decomposed")
    torch.testing.assert_close(out, naive(*args[:3], lengths, 5, None), rtol=0, atol=1e-12)


def test_the_model_is_monotone_and_fitted():
    for model in (MODEL, fit(2, 1, 32, repeats=3)):
        costs = [
            [model.block(n, slots, q) for q in (1, 5, 9)] for n in (1, 4, 16) for slots in (16, 256, 2000)
        ]
        assert (np.diff(np.array(costs).reshape(3, 3, 3), axis=0) > 0).all()
        assert (np.diff(np.array(costs).reshape(3, 3, 3), axis=1) > 0).all()
        assert (np.diff(np.array(costs), axis=1) >= 0).all()
        assert model.merging(2, 5) >= model.merging(1, 5) >= 0
    assert cost_model(2, 1, 32, torch.float32) is model
    assert cost_model(3, 1, 32, torch.float32) == CostModel.of(3, 1, 32)
    with pytest.raises(ValueError, match="slot is -1"):
        CostModel(0, 0, -1, 0, 0, 0)


def test_any_number_of_shapes_has_a_model():
    for heads in range(1, 301):
        assert cost_model(heads, 1, 64, torch.float32) == CostModel.of(heads, 1, 64, 4)


def test_what_cannot_be_fitted_is_refused():
    for args, why in (
        ((0,), "heads is 0: give at least 1"),
        ((4, 0), "kv_heads is 0"),
        ((4, 3), "kv_heads is 3: give a divisor of the 4 heads"),
        ((4, 2, -1), "size is -1"),
    ):
        with pytest.raises(ValueError, match=why):
            fit(*args)
    with pytest.raises(ValueError, match="repeats is 0"):
        fit(4, repeats=0)


def test_errors_of_the_planner():
    with pytest.raises(ValueError, match="one for each row"):
        decompose([3, 4], [1], MODEL)
    with pytest.raises(ValueError, match="no slots"):
        decompose([3, 0], 1, MODEL)
    with pytest.raises(ValueError, match="fragment is 0"):
        decompose([3], 1, MODEL, fragment=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("coupled", [False, True])
def test_the_same_text_by_every_attention(family, coupled):
    prompts = [[1], list(range(40)), [5, 6, 7], list(range(60, 9, -1))]
    said = []
    for name in ("auto", *FAST):
        target = sd.HFModel(tiny(family, 0), attention=name)
        draft = sd.HFModel(tiny(family, 1), attention=name)
        builder = sd.decoder(target).draft(sd.drafts.Model(draft), length=3)
        builder = builder.sampling(temperature=0.8).verifier(sd.Coupled()) if coupled else builder.greedy()
        said.append(builder.build().generate(prompts, max_new_tokens=12, seed=5).ids)
    assert said[1:] == said[:1] * len(FAST)


def test_the_lean_forward_uses_it():
    rows = sd.Context.of([list(range(30)), [4], list(range(9))], capacity=40)
    logits = []
    for name in ("auto", *FAST):
        model = sd.HFModel(tiny("llama", 0, torch.float32), attention=name)
        assert model._path.lean.backend == name
        cache = model.cache(3, 40)
        model.prefill(cache, rows)
        logits.append(model.score(cache, rows).logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-5)


def test_names_that_do_not_exist_or_cannot_serve():
    with pytest.raises(ValueError, match="no soft cap"):
        sd.HFModel(tiny("gemma2", 0), attention="decomposed")
    with pytest.raises(ValueError, match="computes its own, on padded rows"):
        sd.HFModel(tiny("falcon", 0), attention="packed")
    sd.HFModel(tiny("falcon", 0), attention="padded")
