"""The C kernels against attention written out and against PyTorch's operators; and life without them."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_attention import PLANS, case, make_tree, naive
from tiny import tiny

from specdec.forward.llama_c import LlamaC
from specdec.kernels.attention import AttentionPlan, ExplicitPlan, attention
from specdec.kernels.attention import native as backend
from specdec.kernels.native import build, library, ops, reason

needed = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")

KINDS = [
    (torch.float32, 16),
    (torch.bfloat16, 16),
    (torch.bfloat16, 64),
]  # the last by matrix units, where there are any


def close(out, expected, dtype=torch.float32):
    rtol = {torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    error = float((out.double() - expected).norm() / expected.norm().clamp_min(1e-30))
    assert error < rtol, error


def doubles(*tensors):
    return [t.double() for t in tensors]


def test_a_machine_with_a_compiler_has_them():
    """So that the tests below do not skip where it matters."""
    if any(shutil.which(c) for c in ("cc", "gcc", "clang")) and os.environ.get("SPECDEC_NATIVE") != "0":
        assert library() is not None, reason()


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"CC": "false"}, 4, "there is a C compiler, but no C kernels"),
        ({"CC": "false", "SPECDEC_NATIVE": "0"}, 0, "SPECDEC_NATIVE=0 is set"),
    ],
    ids=["broken", "switched off"],
)
@pytest.mark.slow
def test_without_them_their_tests_are_skipped_by_wish_alone(tmp_path, settings, code, said):
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-rs",
        "-k",
        "two_threads",
        str(Path(__file__).with_name("test_narrow.py")),
    ]
    env = {**os.environ, "SPECDEC_CACHE": str(tmp_path), **settings}
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_a_compiler_that_takes_too_long_is_named(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 60\n')
    slow.chmod(0o700)
    code = (
        "from specdec.kernels.native import build; build.LONGEST = 1; print(build.library(), build.reason())"
    )
    env = {**os.environ, "CC": str(slow), "SPECDEC_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("None "), done.stderr
    assert "slow' did not compile the C kernels in 1 seconds: start again" in done.stdout


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_pytorch_may_keep_its_thread_pool_elsewhere(tmp_path, monkeypatch):
    expected = build._openmp()
    monkeypatch.setattr(build.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    loaded = build._loaded()
    assert not expected or any(file.samefile(expected) for file in loaded)
    if len(loaded) == 1:
        assert build._openmp() == loaded[0]
    monkeypatch.setattr(build, "_loaded", lambda: [Path("libgomp.so.1"), Path("libiomp5.so")])
    assert build._openmp() is None  # which of them is PyTorch's?


@needed
@pytest.mark.parametrize(("dtype", "D"), KINDS)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("name", list(PLANS))
def test_every_plan(name, window, dtype, D):
    plan = PLANS[name]
    args = case(plan, D=D, dtype=dtype)
    out = attention(*args, plan, window=window, backend="native")
    close(out, naive(*doubles(*args), plan, window=window), dtype)


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (128, 128), (80, 48), (256, 256)])
def test_head_groups_and_sizes(sizes, heads, dtype):
    D, Dv = sizes
    plan = AttentionPlan([0, 2, 3], [150, 0, 61], [3, 1, 5], 200)  # borders of blocks and of vectors
    args = case(plan, *heads, D=D, Dv=Dv, dtype=dtype)
    out = attention(*args, plan, scale=0.3, backend="native")
    close(out, naive(*doubles(*args), plan, scale=0.3), dtype)


@needed
@pytest.mark.parametrize(("dtype", "D"), KINDS)
@pytest.mark.parametrize("length", [*range(1, 19), 63, 64, 65, 79, 80, 127, 128, 129])
def test_lengths_at_borders(length, dtype, D):
    plan = AttentionPlan([0], [length - 1], [1], 130)
    args = case(plan, D=D, dtype=dtype)
    close(attention(*args, plan, backend="native"), naive(*doubles(*args), plan), dtype)


@needed
@pytest.mark.parametrize(("dtype", "D"), KINDS)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sink_logits", [False, True])
@pytest.mark.parametrize("name", ["verify", "ragged tree", "one"])
def test_softcap_sinks_and_log_sum_exp(name, sink_logits, softcap, dtype, D):
    plan = PLANS[name]
    args = case(plan, D=D, dtype=dtype)
    s_aux = torch.tensor([0.5, -1.0, 3.0, 0.0]) if sink_logits else None
    more = {"softcap": softcap, "window": 4}
    out, lse = attention(*args, plan, sink_logits=s_aux, **more, backend="native", lse=True)
    wide = doubles(*args)
    close(out, naive(*wide, plan, sink_logits=None if s_aux is None else s_aux.double(), **more), dtype)
    ones = [wide[0], wide[1], torch.ones_like(wide[2])]  # a uniform value: the reference's own log-sum-exp
    expected = attention(*ones, plan, sink_logits=s_aux, **more, backend="reference", lse=True)[1]
    torch.testing.assert_close(lse.double(), expected.double(), rtol=1e-5, atol=1e-5)


@needed
@pytest.mark.parametrize(("dtype", "D"), KINDS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", list(PLANS))
def test_what_is_not_seen_is_not_read(name, window, dtype, D):
    plan = PLANS[name]
    query, keys, values = case(plan, D=D, dtype=dtype)
    expected = attention(query, keys, values, plan, window=window, backend="native")
    seen = torch.zeros(4, plan.capacity, dtype=torch.bool)
    for s in plan.runs(alone=True):
        seen[s.b0, : s.keys] |= torch.from_numpy(plan.visible(s, window)[0]).any(0)
    for buffer in (keys, values):
        buffer[~seen] = float("nan")
    out = attention(query, keys, values, plan, window=window, backend="native")
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@needed
@pytest.mark.parametrize(("dtype", "D"), KINDS)
def test_scores_that_are_not_numbers_show(dtype, D):
    plan = PLANS["decode"]
    query, keys, values = case(plan, D=D, dtype=dtype)
    keys[0, :3] = float("nan")  # seen by the first row alone
    query[0, :, 1] = float("nan")
    out, lse = attention(query, keys, values, plan, backend="native", lse=True)
    for made in (out, lse):
        assert made[0, :2].isnan().all()
        assert made[0, 2].isfinite().all()


@needed
@pytest.mark.parametrize(("dtype", "D"), KINDS)
def test_what_is_seen_and_not_finite_shows(dtype, D):
    plan = PLANS["verify"]
    query, keys, values = case(plan, D=D, dtype=dtype)
    values[0, 3] = float("nan")
    out = attention(query, keys, values, plan, backend="native")
    assert out[0, :4].isnan().all()
    assert out[0, 4:].isfinite().all()


@needed
@pytest.mark.parametrize(("dtype", "D"), KINDS)
@pytest.mark.parametrize("by_head", [False, True])
def test_slots_in_no_order(by_head, dtype, D):
    rows, counts, S = [0, 1, 3], [2, 1, 3], 45
    draw = np.random.default_rng(0)
    seen = draw.random((6, S)) < 0.4
    seen[5] = False  # a query that sees nothing
    plan = ExplicitPlan(rows, counts, seen, draw.integers(0, 30, (6, S)), torch.arange(6))
    if by_head:
        each = draw.random((3, 4, 3, S)) < 0.5
        plan.visible = lambda s, window=None, low=0: torch.from_numpy(each[s.r0 : s.r1, :, : s.queries])
        plan.layer = 0
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 6, D, generator=g).to(dtype)
    keys, values = torch.randn(2, 4, S, 2, D, generator=g).to(dtype).unbind(0)
    for window in (None, 12):
        out = attention(query, keys, values, plan, window=window, backend="native")
        expected = attention(*doubles(query, keys, values), plan, window=window, backend="reference")
        expected = expected.nan_to_num(0.0)
        close(out, expected, dtype)


@needed
@pytest.mark.parametrize(("dtype", "D"), KINDS)
def test_pages(dtype, D):
    table = [[4, 1, 0], [2, 5], [3]]
    plan = AttentionPlan([0, 1, 2], [35, 20, 0], [3, 5, 1], 48, table=table, page=16)
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 9, D, generator=g).to(dtype)
    keys, values = torch.randn(2, 6, 16, 2, D, generator=g).to(dtype).unbind(0)
    close(
        attention(query, keys, values, plan, backend="native"),
        attention(*doubles(query, keys, values), plan, backend="reference"),
        dtype,
    )


@needed
@pytest.mark.parametrize("D", [32, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_does_not_depend_on_company(dtype, D):
    """To the bit: one query alone, in a verification, in a tree, beside other rows, and on more threads."""
    first = 150
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 4, 170, 2, D, generator=g).to(dtype).unbind(0)
    query = torch.randn(1, 4, 8, D, generator=g).to(dtype)

    def run(plan, q):
        return attention(q, keys, values, plan, backend="native")

    alone = [run(AttentionPlan([1], [first + i], [1], 170), query[:, :, i : i + 1]) for i in range(8)]
    together = run(AttentionPlan([1], [first], [8], 170), query)
    assert torch.equal(together, torch.cat(alone, 1))
    others = torch.cat([query.flip(2), query], 2)
    beside = run(AttentionPlan([0, 1], [40, first], [8, 8], 170), others)
    assert torch.equal(beside[:, 8:], together)
    chain = make_tree([0], [first])  # nodes 0 1 3 are a chain in it: the first three of the row's slots are
    tree = run(AttentionPlan([1], [first], [2], 170, chain), query[:, :, :2])
    assert torch.equal(tree, together[:, :2])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(run(AttentionPlan([0, 1], [40, first], [8, 8], 170), others), beside)
    finally:
        torch.set_num_threads(threads)


@needed
@pytest.mark.parametrize("layout", ["slots", "heads first", "pages"])
def test_heads_of_a_row_together_or_apart(layout):
    """To the bit: many queries go head by head, few through all heads at once, on two threads through half of them."""
    D, first, count = 64, 1190, 30
    g = torch.Generator().manual_seed(0)
    shapes = {"slots": (1, 1232, 3, D), "heads first": (1, 3, 1232, D), "pages": (77, 16, 3, D)}
    keys, values = torch.randn(2, *shapes[layout], generator=g).unbind(0)
    paged = {"table": [list(range(77))], "page": 16} if layout == "pages" else {}
    if layout == "heads first":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    query = torch.randn(1, 6, count, D, generator=g)

    def run(start, n):
        plan = AttentionPlan([0], [first + start], [n], 1232, **paged)
        return attention(query[:, :, start : start + n], keys, values, plan, backend="native")

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        many = run(0, count)
        plain = doubles(query, keys.reshape(1, -1, 3, D), values.reshape(1, -1, 3, D))
        close(many, naive(*plain, AttentionPlan([0], [first], [count], 1232)))
        for n in (1, 2):
            torch.set_num_threads(n)
            assert torch.equal(run(0, count), many)
            assert torch.equal(torch.cat([run(0, 1), run(1, 4), run(5, 25)], 1), many)
    finally:
        torch.set_num_threads(threads)


def test_refusals():
    plan = PLANS["one"]
    for args, why in (
        (case(plan, D=16), "float64"),
        (case(plan, D=24, dtype=torch.float32), "multiple of 16"),
        (case(plan, D=16, Dv=24, dtype=torch.float32), "multiple of 16"),
    ):
        with pytest.raises(ValueError, match=why if library() is not None else "C kernels"):
            attention(*args, plan, backend="native")


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(dtype):
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    g = torch.Generator().manual_seed(0)
    x, y, w = (torch.randn(*shape, generator=g).to(dtype) for shape in ((5, 100), (5, 100), (100,)))
    before = x.clone()
    out = ops.add_norm(x, y, w, 1e-6)
    assert torch.equal(x, before + y)
    expected = F.rms_norm((before + y).float(), (100,), w.float(), 1e-6).to(dtype)
    torch.testing.assert_close(out, expected, **near)
    assert torch.equal(ops.add_norm(x, None, w, 1e-6), out)
    gate, up = (torch.randn(5, 77, generator=g) * 30).to(dtype), torch.randn(5, 77, generator=g).to(dtype)
    expected = (F.silu(gate.float()) * up.float()).to(dtype)
    torch.testing.assert_close(ops.silu_mul(gate.clone(), up), expected, **near)
    extreme = torch.tensor([0.0, -0.0, 1e30, -1e30, 80.5, -80.5, float("nan")]).to(dtype)
    got, expected = (
        ops.silu_mul(extreme.clone(), torch.ones(7, dtype=dtype)),
        F.silu(extreme.float()).to(dtype),
    )
    torch.testing.assert_close(got, expected, **near | {"atol": 1e-30}, equal_nan=True)
    q, angle = torch.randn(5, 3 * 8, generator=g).to(dtype), torch.randn(5, 4, generator=g).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    heads = q.view(5, 3, 8).float()
    half = torch.cat([-heads[..., 4:], heads[..., :4]], -1)
    expected = (heads * cos[:, None] + half * sin[:, None]).to(dtype)
    torch.testing.assert_close(ops.apply_rotary(q, cos, sin, 8).view(5, 3, 8), expected, **near)


@needed
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_models(family):
    """As near to the model in float32 as its own bfloat16 forward is."""
    import specdec as sd

    model = tiny(family, 0, torch.bfloat16)
    context = sd.Context.of([[1], list(range(20)), [5, 6, 7] * 5])
    wrapped = sd.HFModel(model)
    assert type(wrapped._path.lean) is LlamaC
    logits = [wrapped.score(wrapped.cache(3, 32), context).logits]
    wrapped._path.lean = None
    logits.append(wrapped.score(wrapped.cache(3, 32), context).logits)
    wide = sd.HFModel(tiny(family, 0, torch.bfloat16).float())
    exact = wide.score(wide.cache(3, 32), context).logits
    mine, own = (float((made - exact).norm() / exact.norm()) for made in logits)
    assert mine < max(1.5 * own, 1e-2)


@needed
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_entries_into_slots(dtype):
    buffer = torch.zeros(2, 3, 7, 4, dtype=dtype).transpose(1, 2)
    new = torch.randn(3, 5, 4).to(dtype).transpose(0, 1)
    slots = torch.tensor([[13, 0, 8, 2, 6], [0] * 5]).t()[:, 0]  # not contiguous
    ops.store_kv(buffer, slots, new)
    expected = torch.zeros(14, 3, 4, dtype=dtype)
    expected[slots] = new
    assert torch.equal(buffer.reshape(14, 3, 4), expected)
    for bad in (14, -1):
        with pytest.raises(IndexError, match="not all in a buffer of 2 x 7"):
            ops.store_kv(buffer, torch.tensor([0, 1, 2, 3, bad]), new)
    assert torch.equal(buffer.reshape(14, 3, 4), expected)


def test_the_choice_can_be_explained():
    plan = PLANS["one"]
    args = case(plan, D=16, dtype=torch.float32)
    why = backend.refuses(*args, plan)
    assert why is None or "not there" in why


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("E", "O"), [(16, 16), (80, 48), (256, 64)])
def test_matrix_products(E, O, dtype):
    g = torch.Generator().manual_seed(0)
    w, b = torch.randn(O, E, generator=g).to(dtype), torch.randn(O, generator=g).to(dtype)
    x = torch.randn(20, E, generator=g).to(dtype)
    assert ops.linear_takes(w, b)
    for bias in (b, None):
        out = ops.linear(x, w, bias)
        close(out, F.linear(*doubles(x, w), None if bias is None else bias.double()), dtype)
        for T in (1, 2, 5, 6, 7, 13):
            assert torch.equal(ops.linear(x[:T], w, bias), out[:T])
    assert not ops.linear_takes(w[:, :8].contiguous(), None)
    assert not ops.linear_takes(w.t()[:, :16], None)


@needed
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_logits_do_not_depend_on_company(family, dtype, page):
    """To the bit: one row token by token, and verified in one pass beside other rows, after prompts fed together."""
    import specdec as sd

    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96}
    changes |= {"num_attention_heads": 16, "num_key_value_heads": 1}
    wrapped = sd.HFModel(tiny(family, 0, dtype, **changes), invariant=True, page=page)
    rows = [[n % 90 + 3 for n in range(130)], [5, 6, 7] * 5, [1]]
    nodes = torch.tensor([[3, 4, 5, 6, 7, 8]] * 3)
    context = sd.Context.of(rows, capacity=140)
    cache = wrapped.cache(3, 140)
    wrapped.prefill(cache, context)
    together = wrapped.score(cache, context, sd.Proposal.chain(nodes, torch.tensor([6, 2, 3]))).logits
    for b, row in enumerate(rows):
        alone = wrapped.cache(1, 140)
        wrapped.prefill(alone, sd.Context.of([row]))
        for n in range((6, 2, 3)[b] + 1):
            text = sd.Context.of([row + nodes[b, :n].tolist()])
            assert torch.equal(wrapped.score(alone, text).logits[0, 0], together[b, n])


@needed
def test_trees_are_not_invariant_and_refused():
    import specdec as sd

    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96}
    model = tiny("llama", 0, torch.float32, **changes)
    small = sd.HFModel(tiny("llama", 1, torch.float32, vocab_size=96))
    wrapped = sd.HFModel(model, invariant=True)
    tree = sd.drafts.Tree(small, widths=(2, 1))
    with pytest.raises(
        ValueError, match=r"takes chains only \(its family does, or invariant=True\): use drafts.Model"
    ):
        sd.decoder(wrapped).draft(tree).build()
    sd.decoder(wrapped).draft(small).build()
    sd.decoder(sd.HFModel(model)).draft(tree).build()


@needed
def test_a_verification_gives_the_logits_of_plain_steps():
    """To the bit, over the same prompts, in float32 without being asked to."""
    import specdec as sd

    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96}
    wrapped = sd.HFModel(tiny("llama", 0, torch.float32, **changes))
    rows, nodes = [list(range(40)), [5, 6, 7] * 5], torch.tensor([[3, 4, 5, 6]] * 2)
    caches = [wrapped.cache(2, 48) for _ in range(2)]
    for cache in caches:
        wrapped.prefill(cache, sd.Context.of(rows, capacity=48))
    whole = wrapped.score(
        caches[0], sd.Context.of(rows, capacity=48), sd.Proposal.chain(nodes, torch.tensor([4, 4]))
    ).logits
    for n in range(5):
        text = sd.Context.of([row + nodes[b, :n].tolist() for b, row in enumerate(rows)])
        assert torch.equal(wrapped.score(caches[1], text).logits[:, 0], whole[:, n])


@needed
def test_what_the_kernels_cannot_take_is_refused():
    x, w = torch.randn(4, 16), torch.ones(16)
    bad = [
        lambda: ops.add_norm(x.t().contiguous().t(), None, w, 1e-6),
        lambda: ops.add_norm(x, x[:2], w, 1e-6),
        lambda: ops.add_norm(x, None, w.bfloat16(), 1e-6),
        lambda: ops.add_norm(x.half(), None, w.half(), 1e-6),
        lambda: ops.silu_mul(x, torch.randn(4, 8)),
        lambda: ops.silu_mul(x.double(), x.double()),
        lambda: ops.apply_rotary(x, torch.ones(4, 4), torch.ones(4, 4), 8),
        lambda: ops.apply_rotary(torch.randn(1, 1024), torch.ones(1, 1024), torch.ones(1, 1024), 1024),
        lambda: ops.linear(x, torch.randn(16, 32), None),
        lambda: ops.linear(x, torch.randn(8, 16), None),
    ]
    slots, new = torch.arange(3), torch.randn(3, 2, 4)
    buffer = torch.zeros(2, 5, 2, 4)
    bad += [
        lambda: ops.store_kv(buffer, slots[:2], new),
        lambda: ops.store_kv(buffer, slots.int(), new),
        lambda: ops.store_kv(buffer, slots, new.double()),
        lambda: ops.store_kv(buffer, slots, torch.randn(3, 5, 4)),
    ]
    for call in bad:
        with pytest.raises(ValueError, match=r"give contiguous|do not go together|do not fit"):
            call()
    assert not buffer.any()


@needed
def test_gradients_go_through_pytorch():
    plan = PLANS["verify"]
    query, keys, values = case(plan, D=16, dtype=torch.float32)
    attention(query, keys, values, plan)  # what was chosen once is not kept for calls that want gradients
    assert attention(query.requires_grad_(), keys, values, plan).requires_grad


@needed
def test_threads_may_share_a_plan():
    from concurrent.futures import ThreadPoolExecutor

    plan = PLANS["ragged"]
    cases = [case(plan, D=64, dtype=torch.float32, seed=i) for i in range(4)]
    expected = [attention(*c, plan, backend="native") for c in cases]
    with ThreadPoolExecutor(4) as pool:
        jobs = [(i % 4, pool.submit(attention, *cases[i % 4], plan, backend="native")) for i in range(400)]
        assert all(torch.equal(job.result(), expected[i]) for i, job in jobs)


@pytest.mark.slow
@needed
def test_a_damaged_library_is_made_again(tmp_path):
    """By a compiler that copies what the real one has made."""
    from specdec.kernels.native import build

    (cc := tmp_path / "cc").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done\n'
        f"cp '{build.library()._name}' \"$2\"\n"
    )
    cc.chmod(0o700)
    code = """
from specdec.kernels.native import build
made = build._compile()
size = made.stat().st_size
made.unlink()
made.write_bytes(b"")
assert build.library() is not None, build.reason()
assert build._compile().stat().st_size == size > 0

# A library that somebody else put there is not loaded: other content, a link, a file that others can write.
made, good = build._compile(), build._compile().read_bytes()
elsewhere = made.with_name("elsewhere")
elsewhere.write_bytes(good)
for plant in (
    lambda: (made.unlink(), made.write_bytes(b"planted")),
    lambda: (made.unlink(), made.symlink_to(elsewhere)),
    lambda: made.chmod(0o777),
    lambda: build._digest(made).unlink(),
):
    assert build._trusted(made)
    plant()
    assert not build._trusted(made)
    assert build._compile() == made and made.read_bytes() == good and not made.is_symlink()

made.parent.chmod(0o777)
build._made.cache_clear()
assert build.library() is None
assert "others can write" in build.reason() and "SPECDEC_CACHE" in build.reason()
"""
    folder = tmp_path / "cache"
    env = {**os.environ, "SPECDEC_CACHE": str(folder), "CC": str(cc)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("native-*.so"))) == 1


def test_files_of_another_user_are_not_loaded(tmp_path, monkeypatch):
    from specdec.kernels.native import build

    made = tmp_path / "native.so"
    made.write_bytes(b"code")
    build._digest(made).write_text(build._sha256(made))
    for path, mode in ((made, 0o600), (build._digest(made), 0o600), (tmp_path, 0o700)):
        path.chmod(mode)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    assert build._folder() == tmp_path
    assert build._trusted(made)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert not build._trusted(made)
    with pytest.raises(
        RuntimeError, match="belongs to another user: set SPECDEC_CACHE to a folder of your own"
    ):
        build._folder()


def test_models_that_cannot_be_invariant_say_so():
    import specdec as sd

    for model in (tiny("gpt2", 0, torch.float32), tiny("llama", 0), tiny("llama", 0, torch.float32)):
        with pytest.raises(
            ValueError, match="invariant is True but this"
        ):  # the last has sizes that do not fit
            sd.HFModel(model, invariant=True)


@needed
def test_a_model_that_was_cast_after_it_was_wrapped_is_refused():
    import specdec as sd

    context = sd.Context.of([[1, 2, 3]])
    for change in (lambda m: m.half(), lambda m: m.double(), _relaid):
        model = tiny("llama", 0, torch.float32)
        wrapped = sd.HFModel(model)
        cache = wrapped.cache(1, 8)
        change(model)
        with pytest.raises((RuntimeError, ValueError), match="HFModel"):
            wrapped.score(cache, context)


def _relaid(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t().contiguous().t()


@needed
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its options are those of x86")
@pytest.mark.parametrize(("option", "width"), [("-mno-avx512f", 8), ("-mno-avx", 4), ("clang", None)])
def test_with_other_vectors_and_compilers(tmp_path, option, width):
    """The main tests of the kernels, as on a processor whose registers hold fewer numbers, and by another compiler."""
    own = shlex.split(build.compiler())
    words = [option] if width is None else [*own, option]
    if not shutil.which(words[0]):
        pytest.skip("there is no clang")

    def vectors(words):
        header = tmp_path / "width.c"
        header.write_text(f'#include "{Path(ops.__file__).with_name("vector.h")}"\nW\n')
        line = [*words, "-march=native", "-E", "-P", str(header)]
        return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()[-1])

    if width == vectors(own):
        pytest.skip(f"this processor has vectors of {width}: the other tests are of them")
    assert width in (None, vectors(words))
    env = {**os.environ, "CC": shlex.join(words), "SPECDEC_CACHE": str(tmp_path)}
    files = [str(Path(__file__).with_name(f"test_{n}.py")) for n in ("native", "native_steps", "narrow")]
    some = "compiler or sizes or company or plain_steps or steps or narrow or prompts"
    line = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-k", some, *files]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
