"""FlashAttention backends through emulated operators, against attention written out; and which backend is chosen."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from flash_emulation import HALVES, Emulation
from test_attention import PLANS, case, naive
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
    conformance,
    explain,
    flash,
    reference,
    torch_flash,
    triton_backend,
)
from specdec.kernels.attention import flash_attn as package

KINDS = ["torch 2.12", "torch 2.11", "package"]
EXACT = (*HALVES, torch.float64)
LONG = {
    "mixed": AttentionPlan([0, 1, 3], [9, 0, 5], [1, 70, 2], 80),
    "out of order": AttentionPlan([3, 0, 1, 2], [60, 0, 9, 40], [2, 9, 1, 2], 80),
    "two pages": AttentionPlan([0, 1, 2], [300, 3, 255], [4, 1, 2], 310),
    "prompts": AttentionPlan([0, 1, 2], [0, 5, 0], [150, 130, 7], 160),
    "equal prompts": AttentionPlan([2, 0], [0, 0], [140, 140], 160),
}
CHAINS = {name: plan for name, plan in PLANS.items() if plan.tree is None}
TREES = {name: plan for name, plan in PLANS.items() if plan.tree is not None}
EVERY = {**PLANS, **LONG}
SERVED = [*CHAINS, *LONG]
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)


@pytest.fixture
def emulated(monkeypatch):
    """``emulated(kind)``: the backend's name and its emulated operators, for this test."""

    def make(kind, dtypes=EXACT):
        operators = Emulation(dtypes)
        monkeypatch.setattr(flash, "DTYPES", dtypes)
        monkeypatch.setattr(flash, "device_lacks", lambda query: None)
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
def expected(name, window, heads=4, shared=2, sink_logits=False, softcap=None):
    """``naive``, or the reference (which is tested against it) where there are too many slots for it."""
    args, extra = inputs(name, heads, shared), SINKS if sink_logits else None
    if name in PLANS:
        return naive(*args, EVERY[name], window=window, softcap=softcap, sink_logits=extra, lse=True)
    return reference.attend_with_lse(*args, fresh(name), 8**-0.5, window, softcap, extra)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("name", SERVED)
def test_every_plan(name, window, kind, emulated):
    """With the log-sum-exps; slots that no query of a row sees are NaN."""
    backend, _ = emulated(kind)
    query, keys, values = (t.clone(memory_format=torch.preserve_format) for t in inputs(name))
    conformance.hide(EVERY[name], keys, values, {"window": window}, float("nan"))
    for sinks in (False, True):
        for softcap in (None, 0.7) if kind == "package" else (None,):
            made = attention(
                query, keys, values, fresh(name), window=window, softcap=softcap,
                sink_logits=SINKS if sinks else None, backend=backend, lse=True,
            )  # fmt: skip
            exact = expected(name, window, sink_logits=sinks, softcap=softcap)
            torch.testing.assert_close(made, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("name", ["decode", "verify", "ragged", "one", "fresh"])
def test_grouped_heads(name, heads, kind, emulated):
    backend, _ = emulated(kind)
    out = attention(*inputs(name, *heads), fresh(name), backend=backend)
    torch.testing.assert_close(out, expected(name, None, *heads)[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract(kind, emulated):
    backend, _ = emulated(kind)
    served = conformance.check(backend, dtype=torch.float64)
    assert len(served) >= 18, served
    assert any("window" in call for call in served)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SERVED)
def test_operators_accept_every_call_and_precision_is_theirs(name, dtype, kind, emulated):
    backend, operators = emulated(kind, HALVES)  # which refuse whatever the real ones refuse
    args = inputs(name, dtype=dtype)
    out = attention(*args, fresh(name), backend=backend)
    exact = reference.attend(*(t.double() for t in args), fresh(name), 8**-0.5)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= 3 * torch.finfo(dtype).eps * exact.abs().max()
    assert operators.calls


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
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["two pages", "decode", "ragged", "mixed", "out of order", "prompts"])
def test_pages(name, window, kind, emulated):
    backend, _ = emulated(kind)
    *args, plan = paged(name)
    made = attention(*args, plan, window=window, backend=backend, lse=True)
    torch.testing.assert_close(made, expected(name, window), rtol=0, atol=1e-13)


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


# -- what the operators are asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_one_call_without_a_mask(kind, window, emulated):
    """Only for such calls are keys split over the device and shared within a group of heads."""
    backend, operators = emulated(kind)
    plan = fresh("decode")
    for _ in range(2):  # layers
        attention(*inputs("decode"), plan, window=window, backend=backend)
    assert operators.calls == [{"max_q": 1, "heads": 4, "shared": 2, "sequences": 3, "causal": False}] * 2


def test_prompts_are_one_causal_call(emulated):
    backend, operators = emulated("torch 2.12")
    attention(*inputs("mixed"), fresh("mixed"), backend=backend)
    assert operators.calls == [{"max_q": 70, "heads": 4, "shared": 2, "sequences": 3, "causal": True}]


def test_prompts_have_a_call_each_in_the_package(emulated):
    backend, operators = emulated("package")
    attention(*inputs("prompts"), fresh("prompts"), backend=backend)
    assert [(c["max_q"], c["sequences"]) for c in operators.calls] == [(150, 1), (130, 1), (7, 1)]


def test_emulated_operators_refuse_and_surprise_as_the_real_ones():
    real = list(inspect.signature(varlen.varlen_attn).parameters)
    own = list(inspect.signature(Emulation().varlen_attn).parameters)
    assert own[: len(real)] == real
    assert torch_flash.primitive()[1] == (own == real)  # torch 2.11's takes less, and is not called
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


@pytest.mark.parametrize("name", ["decode", "verify", "mixed"])
def test_the_real_operators_take_the_arguments(name, monkeypatch):
    """On the meta device, where they check arguments and compute shapes."""
    query, keys, values = (t.to("meta", torch.bfloat16) for t in inputs(name))
    operator = torch.ops.aten._flash_attention_forward.default
    for made in (torch_flash.primitive(), (torch_flash.private(operator), False)):
        monkeypatch.setattr(torch_flash, "primitive", lambda made=made: made)
        for window in (None, 3):
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_flash_backend_cannot_do(kind, emulated):
    backend, operators = emulated(kind, HALVES)
    query, keys, values = inputs("one", dtype=torch.bfloat16)
    for args, why in (
        (inputs("one"), "not float64"),
        ((query[..., :6], keys[..., :6], values[..., :6]), "multiple of 8 up to 256, not 6"),
        ((query, keys, values[..., :6]), "one size, not 8 and 6"),
        ((query.clone().requires_grad_(), keys, values), "no backward pass"),
        ((query, keys, values.clone().requires_grad_()), "no backward pass"),
    ):
        with pytest.raises(ValueError, match=why):
            attention(*args, fresh("one"), backend=backend)
    if kind != "package":
        with pytest.raises(ValueError, match="no soft cap"):
            attention(query, keys, values, fresh("one"), softcap=0.7, backend=backend)
    assert not operators.calls


@pytest.mark.parametrize("kind", KINDS)
def test_masks_that_are_not_causal_are_refused_and_served_by_another(kind, emulated, monkeypatch):
    backend, _ = emulated(kind)
    monkeypatch.setattr(choice, "order", lambda device, plan: {backend: "first", "packed": "second"})
    intervals = ExplicitPlan.of_intervals([3], [1], [[(0, 3), (9, 24)]], 24)
    for plan, like, options, why in (
        (intervals, "one", {}, "takes no mask, and this plan says slot by slot"),
        *((plan, name, {}, "causal masks only, and this plan has a tree") for name, plan in TREES.items()),
        (fresh("one"), "one", {"window": 3, "initial": 2}, "no first positions beside a window"),
    ):
        with pytest.raises(ValueError, match=f"{why}.*; 'auto' chooses one that can"):
            attention(*inputs(like), conformance.replace_plan(plan), **options, backend=backend)
        out = attention(*inputs(like), conformance.replace_plan(plan), **options)
        exact = attention(*inputs(like), conformance.replace_plan(plan), **options, backend="reference")
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-13)
    # A window and first positions that hide nothing are no reason.
    out = attention(*inputs("one"), fresh("one"), window=10, initial=2, backend=backend)
    torch.testing.assert_close(out, expected("one", None)[0], rtol=0, atol=1e-13)


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


def test_a_namespace_in_the_packages_place_is_refused(monkeypatch):
    """What is found where another distribution has put a module below ``flash_attn``, as flash-attn-4 does."""
    package.package.cache_clear()
    choice._module.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(ImportError, match="flash-attn of unknown version has no flash_attn_with_kvcache"):
        choice.check("flash_attn")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton_where_it_runs_nowhere():
    args, plan = inputs("verify", dtype=torch.float32), fresh("verify")
    match = "is on 'cpu' and Triton's kernels run on CUDA: move it there, or set TRITON_INTERPRET=1"
    with pytest.raises(ValueError, match=match):
        attention(*args, plan, backend="triton")
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
    torch.testing.assert_close(attention(*args, plan), expected("decode", None)[0], rtol=0, atol=1e-13)


def test_auto_on_a_gpu(monkeypatch):
    monkeypatch.setattr(choice, "BACKENDS", dict.fromkeys(choice._MODULES))
    cuda = torch.device("cuda")
    assert next(iter(choice.order(cuda, fresh("verify")))) == "triton"
    assert next(iter(choice.order(cuda, fresh("mixed")))) == "torch_flash"
    for plan in (fresh("verify"), fresh("mixed")):
        assert list(choice.order(cuda, plan))[-1] == "reference"


def test_auto_takes_the_first_that_can(monkeypatch, emulated):
    emulated("torch 2.12")
    monkeypatch.setattr(choice, "order", lambda device, plan: {"flash_attn": "a", "torch_flash": "b"})
    args, plan = inputs("mixed"), fresh("mixed")
    assert choose(*args, plan) == "torch_flash"
    torch.testing.assert_close(attention(*args, plan), expected("mixed", None)[0], rtol=0, atol=1e-13)
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
def test_a_sink_logit_of_nothing(kind, emulated):
    backend, _ = emulated(kind)
    sink_logits = torch.tensor([-float("inf"), 0.5, -float("inf"), -2.0], dtype=torch.float64)
    made = [
        attention(*inputs("ragged"), fresh("ragged"), sink_logits=sink_logits, backend=b, lse=True)
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
        # What was chosen for this layer is not the next one's.
        attention(*args, plan, sink_logits=SINKS, **options)
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
