"""FlashAttention backends through emulated operators, against attention written out; and which backend is chosen."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from flash_emulation import HALVES, Emulation
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import PARENTS, PLANS, case, make_tree, naive
from tiny import tiny
from torch.nn.attention import varlen

import specdec as sd
from specdec.kernels.attention import (
    BACKENDS,
    AttentionPlan,
    ExplicitPlan,
    attention,
    available,
    choice,
    choose,
    explain,
    reference,
    torch_flash,
    triton_backend,
)
from specdec.kernels.attention import flash_attn as package
from specdec.kernels.attention import flash_recipes as recipes
from specdec.kernels.attention.reach import reach

KINDS = ["torch 2.12", "torch 2.11", "package"]
EXACT = (*HALVES, torch.float64)
LONG = {
    "long verify": AttentionPlan([0, 1, 3], [70, 3, 30], [5, 5, 5], 80),
    "long ragged": AttentionPlan([0, 1, 2, 3], [60, 0, 9, 40], [2, 9, 1, 4], 80),
    "long tree": AttentionPlan([0, 2, 3], [60, 3, 30], [8, 8, 8], 80, make_tree([0, 2, 3], [61, 4, 31])),
    "tree with a prompt": AttentionPlan([0, 1], [0, 20], [40, 7], 80, make_tree([0, 1], [33, 20])),
    "mixed": AttentionPlan([0, 1, 3], [9, 0, 5], [1, 70, 2], 80),
    "about as many": AttentionPlan([0, 1, 2, 3], [9, 0, 30, 2], [5, 7, 1, 6], 80),
    "two pages": AttentionPlan([0, 1, 2], [300, 3, 255], [4, 1, 2], 310),
    "prompts": AttentionPlan([0, 1, 2], [0, 5, 0], [150, 130, 7], 160),
}
EVERY = {**PLANS, **LONG}


@pytest.fixture
def emulated(monkeypatch):
    """``emulated(kind)``: the backend's module and its emulation, for this test."""

    def make(kind, dtypes=EXACT, fold_from=0):
        operators = Emulation(dtypes)
        monkeypatch.setattr(torch_flash, "DTYPES", dtypes)
        monkeypatch.setattr(torch_flash, "device_lacks", lambda query: None)
        monkeypatch.setattr(recipes, "FOLD_FROM", fold_from)
        if kind == "package":
            monkeypatch.setitem(sys.modules, "flash_attn", operators.package())
            package.package.cache_clear()
            choice._module.cache_clear()
            return "flash_attn", operators
        aux = varlen.AuxRequest(lse=True)
        made = (
            (torch_flash.public(operators.varlen_attn, aux), True)
            if kind == "torch 2.12"
            else (torch_flash.private(operators.flash_attention_forward), False)
        )
        monkeypatch.setattr(torch_flash, "primitive", lambda: made)
        return "torch_flash", operators

    yield make
    package.package.cache_clear()
    choice._module.cache_clear()


def fresh(name):
    """The plan without what earlier calls remembered."""
    return replace(EVERY[name])


@lru_cache(maxsize=64)
def inputs(name, heads=4, shared=2, dtype=torch.float64):
    """Queries, and buffers whose heads come before slots in memory, as the cache has them."""
    query, keys, values = case(EVERY[name], heads, shared, 8, dtype=dtype)
    return query, *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (keys, values))


@lru_cache(maxsize=256)
def expected(name, window, heads=4, shared=2, sink_logits=False, softcap=None, initial=0):
    """``naive``, or the reference (which is tested against it) where there are too many slots for it."""
    args, extra = inputs(name, heads, shared), SINKS if sink_logits else None
    if name in PLANS:
        return naive(*args, EVERY[name], window=window, softcap=softcap, sink_logits=extra, initial=initial)
    return reference.attend(*args, fresh(name), 8**-0.5, reach(window, initial), softcap, extra)


SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("fold_from", [0, 10**9])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("name", list(EVERY))
def test_every_plan(name, window, kind, fold_from, emulated):
    backend, _ = emulated(kind, fold_from=fold_from)
    out = attention(*inputs(name), fresh(name), window=window, backend=backend)
    torch.testing.assert_close(out, expected(name, window), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("name", ["verify", "ragged", "tree", "one", "fresh"])
def test_grouped_heads(name, heads, kind, emulated):
    backend, _ = emulated(kind)
    out = attention(*inputs(name, *heads), fresh(name), backend=backend)
    torch.testing.assert_close(out, expected(name, None, *heads), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["verify", "ragged tree", "one", "mixed"])
def test_softcap_and_sinks(name, window, softcap, kind, emulated):
    backend, _ = emulated(kind)
    if softcap is not None and backend == "torch_flash":
        with pytest.raises(ValueError, match="no soft cap"):
            attention(*inputs(name), fresh(name), softcap=softcap, backend=backend)
        return
    out = attention(
        *inputs(name), fresh(name), window=window, softcap=softcap, sink_logits=SINKS, backend=backend
    )
    torch.testing.assert_close(
        out, expected(name, window, sink_logits=True, softcap=softcap), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sink_logits", [None, SINKS])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["decode", "long ragged", "tree", "mixed"])
def test_log_sum_exps_are_the_references(name, window, sink_logits, kind, emulated):
    backend, _ = emulated(kind)
    settings = {"window": window, "sink_logits": sink_logits, "lse": True}
    out, lse = attention(*inputs(name), fresh(name), backend=backend, **settings)
    other, exact = attention(*inputs(name), fresh(name), backend="reference", **settings)
    torch.testing.assert_close(lse, exact, rtol=0, atol=1e-13)
    torch.testing.assert_close(out, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("window", "initial", "fold_from"),
    [(1, 1, 0), (3, 2, 0), (3, 2, 10**9), (5, 9, 10**9), (2, 40, 0), (130, 6, 0)],
)
@pytest.mark.parametrize("name", list(EVERY))
def test_first_positions_beside_a_window(name, window, initial, kind, fold_from, emulated):
    backend, _ = emulated(kind, fold_from=fold_from)
    settings = {"window": window, "initial": initial, "lse": True}
    out, lse = attention(*inputs(name), fresh(name), backend=backend, **settings)
    torch.testing.assert_close(out, expected(name, window, initial=initial), rtol=0, atol=1e-13)
    exact = attention(*inputs(name), fresh(name), backend="reference", **settings)[1]
    torch.testing.assert_close(lse, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("name", ["decode", "long ragged", "long tree", "mixed"])
def test_first_positions_with_grouped_heads_and_sink_logits(name, heads, kind, emulated):
    backend, _ = emulated(kind)
    sink_logits = torch.linspace(-1, 1, 8, dtype=torch.float64)
    settings = {
        "window": 4,
        "initial": 3,
        "sink_logits": sink_logits,
        "softcap": 0.7 if backend == "flash_attn" else None,
    }
    out = attention(*inputs(name, *heads), fresh(name), backend=backend, **settings)
    exact = attention(*inputs(name, *heads), fresh(name), backend="reference", **settings)
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["decode", "long ragged", "long tree", "prompts"])
def test_first_positions_are_one_call_more(name, kind, dtype, emulated):
    """Of as few sequences as there are queries of a row that see as many of them, none of which sees the future."""
    backend, operators = emulated(kind, HALVES)
    args = inputs(name, dtype=dtype)
    attention(*args, fresh(name), window=4, backend=backend)
    without = len(operators.calls)
    operators.calls.clear()
    out = attention(*args, fresh(name), window=4, initial=2, backend=backend)
    more = operators.calls[without:]
    assert len(operators.calls) > without
    assert not any(call["causal"] for call in more)
    if kind != "package":  # which calls for groups of sequences
        assert len(more) == 1
        assert more[0]["sequences"] <= 3 * len(EVERY[name].rows)
    exact = reference.attend(*(t.double() for t in args), fresh(name), 8**-0.5, reach(4, 2))
    assert (out.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fragment", [1, 7, 16, 500])
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("name", ["decode", "long verify", "long ragged", "long tree"])
def test_fragments(name, window, fragment, kind, emulated):
    backend, operators = emulated(kind, fold_from=10**9)
    out = attention(*inputs(name), replace(EVERY[name], fragment=fragment), window=window, backend=backend)
    torch.testing.assert_close(out, expected(name, window), rtol=0, atol=1e-13)
    if fragment == 16 and window is None and name != "decode":  # rows of up to 70 slots below the new ones
        assert operators.calls[0]["sequences"] >= 4 * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", list(EVERY))
def test_nothing_leaks_from_slots_that_are_not_seen(name, window, kind, emulated):
    plan = fresh(name)
    query, keys, values = (t.clone(memory_format=torch.preserve_format) for t in inputs(name))
    used = torch.zeros(4, plan.capacity, dtype=torch.bool)
    for r, (b, n) in enumerate(zip(plan.rows, plan.length)):
        used[b, :n] = True
        if plan.tree is not None:  # nodes of earlier calls that no query here is below
            root, first = int(plan.tree.root[r]), plan.first[r]
            above = torch.from_numpy(plan.tree.ancestors[r, max(first - root, 0) : n - root]).any(0)
            used[b, root:n] = above[: n - root]
    keys[~used], values[~used] = float("nan"), float("nan")
    backend, _ = emulated(kind)
    for initial in (0, 2) if window else (0,):
        out = attention(query, keys, values, plan, window=window, initial=initial, backend=backend)
        torch.testing.assert_close(out, expected(name, window, initial=initial), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", list(EVERY))
def test_operators_accept_every_call_and_precision_is_theirs(name, dtype, kind, emulated):
    backend, operators = emulated(kind, HALVES)  # which refuse whatever the real ones refuse
    args = inputs(name, dtype=dtype)
    out = attention(*args, fresh(name), backend=backend)
    exact = reference.attend(*(t.double() for t in args), fresh(name), 8**-0.5)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= 3 * torch.finfo(dtype).eps * exact.abs().max()
    assert operators.calls or name == "fresh"  # in which nothing lies below the block


def paged(name, seed=0):
    """The plan over shuffled pages of 256 slots, and its buffers; slots that no row uses are NaN."""
    plan, (query, keys, values) = EVERY[name], inputs(name)
    per_row = 2
    order = torch.randperm(per_row * len(plan.rows), generator=torch.Generator().manual_seed(seed)).tolist()
    table = [order[per_row * r : per_row * r + -(-n // 256)] for r, n in enumerate(plan.length)]
    pools = []
    for buffer in (keys, values):
        pool = torch.full((len(order), 2, 256, 8), float("nan"), dtype=torch.float64).transpose(1, 2)
        for r, (row, n) in enumerate(zip(plan.rows, plan.length)):
            for s in range(n):
                pool[table[r][s // 256], s % 256] = buffer[row, s]
        pools.append(pool)
    return query, *pools, replace(plan, table=table, page=256, slots=None)


@pytest.mark.parametrize("kind", ["torch 2.12", "package"])
@pytest.mark.parametrize("fold_from", [0, 10**9])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "name", ["two pages", "decode", "ragged", "ragged tree", "mixed", "about as many", "prompts"]
)
def test_pages(name, window, fold_from, kind, emulated):
    backend, _ = emulated(kind, fold_from=fold_from)
    *args, plan = paged(name)
    if plan.tree is not None and window is not None:
        with pytest.raises(ValueError, match="windows by position over pages"):
            attention(*args, plan, window=window, backend=backend)
        return
    out = attention(*args, plan, window=window, backend=backend)
    torch.testing.assert_close(out, expected(name, window), rtol=0, atol=1e-13)
    if window is not None:
        out = attention(*args, plan, window=window, initial=2, backend=backend)
        torch.testing.assert_close(out, expected(name, window, initial=2), rtol=0, atol=1e-13)


def test_pages_that_cannot_be_read(emulated):
    backend, _ = emulated("torch 2.11")
    *args, plan = paged("decode")
    with pytest.raises(ValueError, match=r"from torch 2\.12 on"):
        attention(*args, plan, backend=backend)
    small = AttentionPlan([0], [3], [1], 8, table=[[0, 1]], page=4)
    pool = torch.zeros(2, 4, 2, 8, dtype=torch.float64)
    for kind in ("torch 2.12", "package"):
        backend, _ = emulated(kind)
        with pytest.raises(ValueError, match="multiple of 256"):
            attention(args[0][:, :, :1], pool, pool, small, backend=backend)
    with pytest.raises(ValueError, match="slots, not pages"):
        attention(args[0][:, :, :1], pool, pool, small, backend="padded")


rows = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    rows,
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([0, 1, 4, 8]),
)
def test_any_rows(rows, window, shared, root, initial):
    there = [b for b, row in enumerate(rows) if row[2]] or [0]
    first, counts = [rows[b][0] for b in there], [rows[b][1] for b in there]
    shape = None
    if root is not None:
        shape = make_tree(there, [f + root for f in first])
        counts = [min(c, root + len(PARENTS)) for c in counts]
    plan = AttentionPlan(there, first, counts, 18, shape)
    args = case(plan, 4, shared, 8)
    window = reach(window, initial)
    exact, lse = reference.attend_with_lse(*args, replace(plan), 8**-0.5, window)
    operators = Emulation(EXACT)
    varlen_attn = torch_flash.public(operators.varlen_attn, varlen.AuxRequest(lse=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flash, "primitive", lambda: (varlen_attn, True))
        patch.setattr(package, "package", operators.package)
        for module in (torch_flash, package):
            for fold_from in (0, 100):
                patch.setattr(recipes, "FOLD_FROM", fold_from)
                out, own = module.attend_with_lse(*args, replace(plan), 8**-0.5, window)
                torch.testing.assert_close(out, exact, rtol=0, atol=1e-13)
                torch.testing.assert_close(own, lse, rtol=0, atol=1e-13)


# -- what the operators are asked ------------------------------------------------------------------------------------------


def test_a_long_verify_pass_is_one_query_a_sequence_for_the_kernel(emulated):
    """Only then are keys split over the device and shared within a group of heads."""
    for kind in KINDS:
        backend, operators = emulated(kind)
        plan = fresh("long verify")
        for _ in range(2):  # layers
            attention(*inputs("long verify"), plan, backend=backend)
        one = {"max_q": 1, "heads": 5 * 4, "shared": 2, "sequences": 3, "causal": False}
        assert operators.calls == [one] * 2


@pytest.mark.parametrize("name", ["decode", "one", "mixed"])
def test_decoding_and_prompts_are_one_call(name, emulated):
    backend, operators = emulated("torch 2.12", fold_from=10**9)
    attention(*inputs(name), fresh(name), backend=backend)
    assert len(operators.calls) == 1
    assert operators.calls[0]["causal"] == (name == "mixed")


def test_prompts_have_a_call_each_in_the_package(emulated):
    backend, operators = emulated("package", fold_from=10**9)
    attention(*inputs("prompts"), fresh("prompts"), backend=backend)
    assert [c["max_q"] for c in operators.calls] == [7, 150, 130]


def test_emulated_operators_refuse_and_surprise_as_the_real_ones():
    real = inspect.signature(varlen.varlen_attn).parameters
    assert list(inspect.signature(Emulation().varlen_attn).parameters) == list(real)
    schema = [a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    own = list(inspect.signature(Emulation().flash_attention_forward).parameters)
    assert own == schema[: len(own)]
    ones, ints = torch.ones(3, 2, 8, dtype=torch.bfloat16), torch.tensor([0, 2, 3], dtype=torch.int32)
    used = torch.tensor([0, 1], dtype=torch.int32)
    aux = varlen.AuxRequest(lse=True)
    out, lse = Emulation().varlen_attn(ones, ones, ones, ints, ints, 2, 1, return_aux=aux, seqused_k=used)
    assert lse.shape == (2, 3)
    assert (lse[:, :2] == float("inf")).all()
    assert (out[:2] == 0).all()
    for wrong in (
        (ones.float(), ones, ints),
        (ones, torch.ones(3, 2, 16, dtype=torch.bfloat16)[..., ::2], ints),
        (ones, ones, ints.long()),
        (ones[..., :7], ones[..., :7], ints),
    ):
        with pytest.raises(RuntimeError):
            Emulation().varlen_attn(wrong[0], wrong[1], wrong[1], wrong[2], ints, 2, 1, seqused_k=used)
    grouped = torch.ones(3, 4, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="one query a sequence"):
        Emulation().varlen_attn(grouped, ones, ones, ints, ints, 1, 1, enable_gqa=True, seqused_k=used)


@pytest.mark.parametrize("name", ["decode", "long verify", "ragged tree", "mixed"])
def test_the_real_operators_take_the_arguments(name, monkeypatch):
    """On the meta device, where they check arguments and compute shapes."""
    query, keys, values = (t.to("meta", torch.bfloat16) for t in inputs(name))
    monkeypatch.setattr(recipes, "FOLD_FROM", 0)
    operator = torch.ops.aten._flash_attention_forward.default
    for made in (torch_flash.primitive(), (torch_flash.private(operator), False)):
        monkeypatch.setattr(torch_flash, "primitive", lambda made=made: made)
        for window in (None, 3, reach(3, 2)):
            out, lse = torch_flash.attend_with_lse(query, keys, values, fresh(name), 0.3, window)
            assert out.shape == (1, query.shape[2], 4, 8)
            assert lse.shape == (1, query.shape[2], 4)
            assert out.dtype == torch.bfloat16


def test_the_flat_view_is_the_buffer():
    for keys in (
        torch.randn(3, 2, 5, 4).transpose(1, 2),
        torch.randn(3, 5, 2, 4),
        torch.randn(9, 5, 2, 4)[::3],
    ):
        view, rows = torch_flash._flat(keys)
        for b in range(3):
            assert torch.equal(view[b * rows : b * rows + 5], keys[b])


# -- what is refused --------------------------------------------------------------------------------------------------------


def test_what_a_flash_backend_cannot_do(emulated):
    for kind in ("torch 2.12", "package"):
        backend, _ = emulated(kind, HALVES)
        query, keys, values = inputs("one", dtype=torch.bfloat16)
        plan = fresh("one")
        for args, why in (
            (inputs("one"), "not float64"),
            ((query[..., :6], keys[..., :6], values[..., :6]), "multiple of 8 up to 256, not 6"),
            ((query, keys, values[..., :6]), "one size, not 8 and 6"),
        ):
            with pytest.raises(ValueError, match=why):
                attention(*args, plan, backend=backend)
        seen = np.ones((1, 24), dtype=bool)
        explicit = ExplicitPlan([3], [1], seen, np.zeros((1, 24), dtype=int), torch.tensor([83]))
        with pytest.raises(ValueError, match="takes no mask"):
            attention(query, keys, values, explicit, backend=backend)
        with pytest.raises(ValueError, match="no backward pass"):
            attention(query.clone().requires_grad_(), keys, values, fresh("one"), backend=backend)
    odd = torch.zeros(500, dtype=torch.bfloat16).as_strided((4, 24, 2, 8), (49, 2, 1, 1))
    assert torch_flash.fits(query, keys, values, plan, None) is None
    assert "slots below 2" in torch_flash.fits(query, odd, odd, plan, None)


def test_flash_needs_cuda_and_the_package():
    plan, args = fresh("one"), inputs("one", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="needs CUDA tensors, and the query is on cpu"):
        attention(*args, plan, backend="torch_flash")
    with pytest.raises(ImportError, match=r"pip install flash-attn"):
        attention(*args, plan, backend="flash_attn")
    with pytest.raises(ImportError, match=r"attention is 'flash_attn' but .*pip install flash-attn"):
        sd.HFModel(tiny("llama"), attention="flash_attn")
    with pytest.raises(ValueError, match="needs CUDA tensors"):
        sd.HFModel(tiny("llama"), attention="torch_flash")
    with pytest.raises(ValueError, match="attention is 'flash': there are auto, packed"):
        sd.HFModel(tiny("llama"), attention="flash")


def test_an_old_package_is_refused(monkeypatch):
    old = Emulation().package()
    old.flash_attn_with_kvcache = lambda q, k_cache, v_cache, cache_seqlens=None: None
    old.__version__ = "2.2.0"
    package.package.cache_clear()
    choice._module.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    with pytest.raises(
        ImportError, match=r"flash-attn 2\.2\.0 has no flash_attn_with_kvcache with .*softcap"
    ):
        choice.check("flash_attn")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton_where_it_runs_nowhere():
    args, plan = inputs("verify", dtype=torch.float32), fresh("verify")
    match = "is on 'cpu' and Triton's kernels run on CUDA: move it there, or set TRITON_INTERPRET=1"
    with pytest.raises(ValueError, match=match):
        attention(*args, plan, backend="triton")
    for attend in (triton_backend.attend, triton_backend.attend_with_lse):
        with pytest.raises(ValueError, match=match):
            attend(*args, plan, 0.25)
    with pytest.raises(ValueError, match=match):
        triton_backend.merge(torch.ones(2, 3, 4), torch.zeros(2, 3))


def test_triton_that_is_not_installed(monkeypatch):
    choice._module.cache_clear()
    find = choice.find_spec
    monkeypatch.setattr(choice, "find_spec", lambda name: None if name == "triton" else find(name))
    with pytest.raises(ImportError, match=r"backend is 'triton' but .*pip install triton"):
        choice.check("triton")
    choice._module.cache_clear()


# -- the choice -------------------------------------------------------------------------------------------------------------


def test_auto_on_a_cpu():
    args, plan = inputs("verify"), fresh("verify")
    assert choose(*args, plan) == "packed"
    assert choose(*args, plan, softcap=1.0) == "reference"
    assert choose(*args, plan, sink_logits=SINKS) == "reference"
    assert choose(*args, plan, lse=True) == "packed"
    assert choose(*args, plan, lse=True, softcap=1.0) == "reference"
    assert choose(*args, plan, window=3, initial=2) == "packed"
    *args, plan = paged("decode")
    assert choose(*args, plan) == "packed"
    torch.testing.assert_close(attention(*args, plan), expected("decode", None), rtol=0, atol=1e-13)


def test_auto_on_a_gpu(monkeypatch):
    monkeypatch.setattr(choice, "BACKENDS", dict.fromkeys(choice._MODULES))
    cuda = torch.device("cuda")
    assert next(iter(choice.order(cuda, fresh("verify")))) == "triton"
    assert next(iter(choice.order(cuda, fresh("mixed")))) == "flash_attn"
    for plan in (fresh("verify"), fresh("mixed")):
        assert list(choice.order(cuda, plan))[-1] == "reference"


def test_auto_takes_the_first_that_can(monkeypatch, emulated):
    emulated("torch 2.12")
    monkeypatch.setattr(choice, "order", lambda device, plan: {"flash_attn": "a", "torch_flash": "b"})
    args, plan = inputs("mixed"), fresh("mixed")
    assert choose(*args, plan) == "torch_flash"
    torch.testing.assert_close(attention(*args, plan), expected("mixed", None), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=r"(?s)no backend can serve this call: .*no soft cap"):
        choose(*args, plan, softcap=1.0)


def test_explain_has_a_line_for_each_backend():
    text = explain(*inputs("verify"), fresh("verify"))
    lines = {line.split()[0]: line.split()[1] for line in text.splitlines()}
    assert lines.keys() == set(BACKENDS)
    assert lines["packed"] == "chosen"
    assert lines["reference"] == lines["padded"] == "could"
    assert lines["torch_flash"] == lines["flash_attn"] == "cannot"
    assert "pip install flash-attn" in text


def test_available():
    there = available("cpu")
    assert {"packed", "padded", "decomposed", "reference"} <= set(there)
    assert not {"torch_flash", "flash_attn"} & set(there)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no CUDA device"):
            available("cuda")


def test_a_choice_is_made_once_for_layers_of_one_kind(monkeypatch):
    asked = []
    from specdec.kernels.attention import api

    monkeypatch.setattr(api, "choose", lambda *args: asked.append(args) or "packed")
    plan = fresh("verify")
    for _ in range(3):
        attention(*inputs("verify"), plan)
        attention(*inputs("verify"), plan, window=3)
    assert len(asked) == 2


def test_a_layer_with_other_strides_is_looked_at_anew(emulated):
    backend, _ = emulated("torch 2.12")
    plan, (query, keys, values) = fresh("verify"), inputs("verify")
    attention(query, keys, values, plan, backend=backend)

    def odd(t):  # rows that do not begin a number of slots apart
        B, S, H, D = t.shape
        row = S * H * D + 5
        return t.new_zeros(B * row).as_strided(t.shape, (row, H * D, D, 1)).copy_(t)

    with pytest.raises(ValueError, match="it starts rows at a number of slots below"):
        attention(query, odd(keys), odd(values), plan, backend=backend)
    with pytest.raises(ValueError, match="no backward pass"):
        attention(query, keys, values.clone().requires_grad_(), plan, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_logit_of_nothing_and_a_query_that_sees_nothing(kind, emulated):
    backend, _ = emulated(kind)
    plan = ExplicitPlan.of_intervals([0, 1], [2, 1], [[], [(3, 6)], []], 9)
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 3, 8, generator=g, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 9, 2, 8, generator=g, dtype=torch.float64)
    sink_logits = torch.tensor([-float("inf"), 0.5, -float("inf"), -2.0], dtype=torch.float64)
    made = [
        attention(query, keys, values, plan, sink_logits=sink_logits, backend=b, lse=True)
        for b in (backend, "reference")
    ]
    for mine, exact in zip(*made):
        torch.testing.assert_close(mine, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rows", [slice(None), slice(1)])
def test_slots_that_share_their_memory_are_refused(rows, emulated):
    backend, _ = emulated("torch 2.12")
    query, keys, values = inputs("verify")
    same = [t[rows, :1].expand(t.shape) for t in (keys, values)]
    expected = attention(query, *same, fresh("verify"), backend="reference")
    torch.testing.assert_close(attention(query, *same, fresh("verify")), expected, rtol=0, atol=1e-13)
    for pair in (same, (keys, same[1]), (same[0], values)):
        with pytest.raises(ValueError, match="share their memory"):
            attention(query, *pair, fresh("verify"), backend=backend)


def test_sink_logits_that_need_a_gradient_have_one():
    for options in ({}, {"backend": "reference"}):
        sink_logits = SINKS.clone().requires_grad_()
        args = inputs("verify", heads=4, shared=2, dtype=torch.float32)
        plan = fresh("verify")
        attention(
            *args, plan, sink_logits=SINKS, **options
        )  # what was chosen for this layer is not the next one's
        out = attention(*args, plan, sink_logits=sink_logits, **options)
        assert torch.autograd.grad(out.sum(), sink_logits)[0].abs().min() > 0
    with pytest.raises(ValueError, match="no gradient of sink logits"):
        attention(*args, plan, sink_logits=sink_logits, backend="cpu")
    with torch.no_grad():
        assert choose(*args, plan, sink_logits=sink_logits) == choose(*args, plan, sink_logits=SINKS)


def test_no_queries_with_their_log_sum_exps():
    query, keys, values = inputs("one")
    out, lse = attention(query[:, :, :0], keys, values, fresh("one"), lse=True)
    assert out.shape == (1, 0, 4, 8)
    assert lse.shape == (1, 0, 4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (lambda q, k, v: {"query": q[0]}, "query is .* packed queries"),
        (lambda q, k, v: {"values": v[:, :-1]}, "as many rows, slots and heads"),
        (lambda q, k, v: {"keys": k.float()}, "query is torch.float64 and keys torch.float32"),
        (lambda q, k, v: {"values": v.float()}, "and values torch.float32"),
        (lambda q, k, v: {"values": v.to("meta")}, "and values on meta"),
        (lambda q, k, v: {"query": q[:, :3]}, "3 heads and keys 2"),
        (lambda q, k, v: {"query": q[..., :6]}, "heads of 6 and keys of 8"),
        (lambda q, k, v: {"query": q[:, :, :5]}, "5 tokens and the plan 12"),
        (lambda q, k, v: {"keys": k.repeat_interleave(2, -1)[..., ::2]}, "keys has stride 2"),
        (lambda q, k, v: {"keys": k[:, :15], "values": v[:, :15]}, "a row of 16 slots and keys 15"),
        (lambda q, k, v: {"keys": k[:2], "values": v[:2]}, "row 2 and keys 2 rows"),
        (lambda q, k, v: {"window": 0}, "window is 0"),
        (lambda q, k, v: {"softcap": 0.0}, "softcap is 0.0"),
        (lambda q, k, v: {"sink_logits": SINKS[:2]}, "a logit for each of the 4 heads"),
        (lambda q, k, v: {"sink_logits": SINKS.tolist()}, "sink_logits is a list: give a tensor"),
        (
            lambda q, k, v: {"sink_logits": SINKS.to("meta")},
            "query is on cpu and sink_logits on meta: move them",
        ),
        (lambda q, k, v: {"sink_logits": SINKS.long()}, "sink_logits is torch.int64: give logits"),
    ],
)
def test_arguments_that_do_not_fit(changes, why):
    query, keys, values = inputs("verify")
    args = {"query": query, "keys": keys, "values": values, "plan": fresh("verify")}
    with pytest.raises(ValueError, match=why):
        attention(**{**args, **changes(query, keys, values)})


def test_pages_that_do_not_fit():
    *args, plan = paged("decode")
    with pytest.raises(ValueError, match="the buffers that the table refers to"):
        attention(args[0], args[1][:1], args[2][:1], plan)
    below = replace(plan, table=[[-1, *pages[1:]] for pages in plan.table])
    with pytest.raises(ValueError, match="with numbers from -1 to "):
        attention(*args, below)
