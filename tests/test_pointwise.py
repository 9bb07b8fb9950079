"""Norms, rotary embedding with the KV store, and SwiGLU by Triton against plain PyTorch, and whole models made of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from interpreted import interpreted  # noqa: F401 (a fixture)
from tiny import tiny
from without_a_gpu import compiled

import specdec as sd
from specdec.drafts.spire import SpireModel
from specdec.drafts.spire.launches import SpireLaunches
from specdec.drafts.spire.layers import remember
from specdec.drafts.spire.steps import SpireSteps
from specdec.forward.llama_triton import LlamaTriton
from specdec.forward.merged import small
from specdec.kernels import pointwise
from specdec.kernels.pointwise import Place, reference

TRITON = importlib.util.find_spec("triton") is not None
GPU = TRITON and torch.cuda.is_available()
KERNELS = Path(pointwise.__file__).with_name("triton_kernels.py")
needs_triton = pytest.mark.skipif(not TRITON, reason="needs triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def draws(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def close(got, expected, dtype):
    """Every number within one rounding of its own size (the interpreter cuts bfloat16 off: two), and a little of the largest."""
    one = ROUNDING[dtype] * (1 if got.is_cuda else 2)
    got, expected = got.double().cpu(), expected.double().cpu()
    room = one * expected.abs() + 1e-6 * expected.abs().max() + 1e-30
    worst = ((got - expected).abs() / room).max()
    assert worst <= 1, float(worst)


def norms_are_right(rows, n, dtype, device="cpu"):
    x, y, w = (
        draws(*shape, dtype=dtype, device=device, seed=i)
        for i, shape in enumerate(((rows, n), (rows, n), (n,)))
    )
    sums = (x.double() + y.double()).to(dtype)
    for more, stored in ((None, x.clone()), (y, sums)):
        into = x.clone()
        out = pointwise.add_norm(into, more, w, 1e-5)
        close(into, stored, dtype)
        close(out, reference.add_norm(into.double(), None, w.double(), 1e-5)[1], dtype)


def turns_are_right(T, heads, D, dtype, device="cpu", layout="heads first", normed=False, apart=False):
    Hq, H = heads
    q, k, v = (draws(T, h, D, dtype=dtype, device=device, seed=i) for i, h in enumerate((Hq, H, H)))

    def copies():  # of queries and keys, in one tensor if they are the result of one product
        if not apart:
            return q.clone(), k.clone()
        return torch.cat([q, k], 1).split([Hq, H], 1)

    angle = torch.arange(T)[:, None] * 0.37 ** torch.arange(D // 2) + 0.1
    cos, sin = (
        torch.cat([f(angle), f(angle) * 0.9], -1).to(dtype).to(device) for f in (torch.cos, torch.sin)
    )
    weights = (
        draws(D, dtype=dtype, device=device, seed=5),
        draws(D, dtype=dtype, device=device, seed=6),
        1e-5,
    )

    def expected(x, w):
        x = x.double()
        if normed:
            x = reference.add_norm(x, None, w.double(), 1e-5)[1]
        return reference.apply_rotary(x, cos.double(), sin.double())

    norms = weights if normed else None
    mine, theirs = copies()
    pointwise.apply_rotary(mine, theirs, cos, sin, norms=norms)
    close(mine, expected(q, weights[0]), dtype)
    close(theirs, expected(k, weights[1]), dtype)

    rows, S = 3, T + 5
    shape = (2, rows, H, S, D) if layout == "heads first" else (2, rows, S, H, D)
    buffers = torch.full(shape, torch.nan, dtype=dtype, device=device)
    keys, values = (b.transpose(1, 2) if layout == "heads first" else b for b in buffers.unbind(0))
    slots = torch.randperm(rows * S, generator=torch.Generator().manual_seed(3))[:T].to(device)
    mine, theirs = copies()
    new = torch.cat([v, v], 1)[:, :H] if apart else v
    pointwise.apply_rotary(mine, theirs, cos, sin, norms=norms, value=new, place=Place(keys, values, slots))
    close(mine, expected(q, weights[0]), dtype)
    assert torch.equal(theirs, k)
    at = (slots // S, slots % S)
    close(keys[at], expected(k, weights[1]), dtype)
    assert torch.equal(values[at], v)
    assert int(buffers.isfinite().sum()) == 2 * T * H * D  # and nothing else is written


def products_are_right(n, dtype, device="cpu"):
    gate, up = 4 * draws(3, n, dtype=dtype, device=device), draws(3, n, dtype=dtype, device=device, seed=1)
    expected = reference.silu_mul(gate.double(), up.double())
    one = torch.cat([gate, up], 1)
    assert pointwise.silu_mul(gate, up) is gate
    close(gate, expected, dtype)
    close(pointwise.silu_mul(*one.split(n, 1)), expected, dtype)
    assert torch.equal(one[:, n:], up)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 80, 1024, 1100])
def test_interpreted_norms_and_products(n, dtype):
    norms_are_right(5, n, dtype)
    products_are_right(n, dtype)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "D", "layout"), [((4, 4), 16, "heads first"), ((9, 3), 80, "slots first"), ((8, 1), 2, "slots first")])  # fmt: skip
@pytest.mark.slow
def test_interpreted_turns(heads, D, layout, normed, dtype):
    turns_are_right(7, heads, D, dtype, layout=layout, normed=normed)


@pytest.mark.usefixtures("interpreted")
def test_interpreted_turns_of_one_product():
    turns_are_right(5, (4, 2), 16, torch.float32, normed=True, apart=True)


@pytest.mark.usefixtures("interpreted")
def test_interpreted_nothing_to_do_and_what_is_refused():
    empty, w = torch.empty(0, 8), torch.ones(8)
    assert pointwise.add_norm(empty, None, w, 1e-5).shape == (0, 8)
    pointwise.apply_rotary(torch.empty(0, 2, 8), torch.empty(0, 1, 8), empty, empty)
    assert pointwise.silu_mul(empty, empty).shape == (0, 8)
    x, q = torch.ones(3, 8), torch.ones(3, 2, 8)
    for call, name in (
        (lambda: pointwise.add_norm(x, x[:2], w, 1e-5), "add_norm"),
        (lambda: pointwise.add_norm(x, None, w.double(), 1e-5), "add_norm"),
        (lambda: pointwise.add_norm(x.t(), None, torch.ones(3), 1e-5), "add_norm"),
        (lambda: pointwise.silu_mul(x, x[:, :4]), "silu_mul"),
        (lambda: pointwise.apply_rotary(q, q.transpose(0, 1), x, x), "apply_rotary"),
        (lambda: pointwise.apply_rotary(q, q, x[:2], x), "apply_rotary"),
        (
            lambda: pointwise.apply_rotary(q, q, x, x, place=Place(q[None], q[None], torch.arange(3))),
            "apply_rotary",
        ),
        (
            lambda: pointwise.apply_rotary(
                q, q, x, x, value=q, place=Place(q[None], q[None], torch.arange(2))
            ),
            "apply_rotary",
        ),
        (lambda: pointwise.apply_rotary(q, q, x, x, norms=(w, w[:4], 1e-5)), "apply_rotary"),
    ):
        with pytest.raises(ValueError, match=f"{name}: give contiguous tensors of one dtype and device"):
            call()


@needs_triton
def test_tensors_of_the_cpu_are_refused():
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="Triton's kernels run on CUDA"):
        pointwise.add_norm(x, None, x[0], 1e-5)
    assert "CUDA" in pointwise.why_not(x.device, torch.bfloat16)
    assert "float64" in pointwise.why_not(torch.device("cuda"), torch.float64)


def logits(model, path, context, proposal, **options):
    """Of a prompt and then of a proposal after it, computed by ``path`` of the private copy."""
    wrapped = sd.HFModel(model, **options)
    wrapped._path.lean = path(wrapped.clone)
    if wrapped.steps is not None:
        wrapped.steps.forward = wrapped._path.forward
    cache = wrapped.cache(context.batch, context.tokens.shape[1])
    wrapped.prefill(cache, context)
    for _ in range(1 if wrapped.steps is None else 3):  # a step is captured when its shape is met again
        found = wrapped.score(cache, context, proposal, taps=(0, 2))
    assert wrapped.steps is None or "0 captured" not in repr(wrapped.steps)
    live = torch.arange(found.logits.shape[1])[None] < 1 + (0 if proposal is None else proposal.size[:, None])
    return found.logits[live.expand(found.logits.shape[:2])].double(), found.fed.layers


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("llama", torch.float32, {}),
        pytest.param("llama", torch.float32, {"graphs": "eager"}, marks=pytest.mark.slow),
        ("llama", torch.float32, {"page": 16}),
        pytest.param("qwen3", torch.float32, {"graphs": "eager"}, marks=pytest.mark.slow),
        ("qwen3", torch.float16, {}),
        *(
            pytest.param(family, torch.float16, {}, marks=pytest.mark.slow)
            for family in ("llama", "mistral", "qwen2")
        ),
    ],
    ids=str,
)
def test_interpreted_models_give_the_numbers_of_their_modules(family, dtype, options):
    """In float32 up to rounding; in float16 no further from float64 than the modules are (bfloat16 the interpreter cuts off)."""
    changes = {"mlp_bias": True, "attention_bias": True} if family == "llama" else {}
    if dtype is torch.float16:
        # Wide, so that both errors are averages of many roundings: of tiny models the one is up to 1.12 times the other by chance.
        changes |= {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 512}
    model = tiny(family, 0, dtype, **changes)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.randn(p.shape))  # float16's `normal_` draws other numbers in each torch
    context = sd.Context.of([[1], list(range(12)), [5, 6, 7]], capacity=32)
    nodes = torch.tensor([[3, 4, 5, 6]] * 3)
    tree = sd.Proposal(nodes, torch.tensor([[-1, -1, 0, 2]] * 3), torch.tensor([4, 3, 4]))
    got, taps = logits(model, LlamaTriton, context, tree, **options)
    own, own_taps = logits(model, lambda _: None, context, tree)
    if dtype is torch.float32:
        torch.testing.assert_close(got, own, rtol=0, atol=5e-6 * float(own.abs().max()))
        for tap, x in own_taps.items():
            torch.testing.assert_close(taps[tap], x, rtol=0, atol=5e-6 * float(x.abs().max()))
        return
    exact = tiny(family, 0, torch.float64, **changes)
    exact.load_state_dict(model.state_dict())
    truth, _ = logits(exact, lambda _: None, context, tree)
    assert (got - truth).norm() <= 1.1 * (own - truth).norm()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_interpreted_products_of_one_input_are_one(family):
    """Two instead of five a block; copies follow their weights, and the model's own parameters stay as they are."""
    model = tiny(family, 0, torch.float32)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    context = sd.Context.of([[1], [5, 6, 7]], capacity=16)
    one = sd.HFModel(model)
    one._path.lean = lean = LlamaTriton(one.clone, merged=True)
    for _ in range(2):
        cache = one.cache(2, 16)
        assert len(lean.ops.merged._copies) == 5 * model.config.num_hidden_layers
        got = one.score(cache, context).logits
        own, _ = logits(model, lambda _: None, context, None)
        torch.testing.assert_close(got[:, 0].double(), own, rtol=0, atol=5e-6 * float(own.abs().max()))
        assert all(
            p.data_ptr() == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters()
        )
        with torch.no_grad():  # in place: the next cache sees it
            for name, p in model.named_parameters():
                p.mul_(1.5 if "proj" in name else 1)
                before[name] = p.data_ptr(), p.clone()
    assert LlamaTriton(one.clone).ops.merged is None  # on a CPU they bring nothing


def test_copies_are_small_beside_the_memory():
    assert small(9 << 30, 80 << 30)
    assert not small(9 << 30, 48 << 30)


@pytest.mark.usefixtures("interpreted")
def test_interpreted_blocks_are_four_launches_beside_products_and_attention(monkeypatch):
    launched = []
    for name in ("add_norm", "apply_rotary", "silu_mul"):
        own = getattr(pointwise, name)
        monkeypatch.setattr(
            pointwise, name, lambda *a, _own=own, _name=name, **k: launched.append(_name) or _own(*a, **k)
        )
    model = tiny("llama", 0, torch.float32)
    logits(model, LlamaTriton, sd.Context.of([[1, 2, 3]], capacity=8), None)
    block = ["add_norm", "apply_rotary", "add_norm", "silu_mul"]
    layers = model.config.num_hidden_layers
    assert launched == 3 * layers * block + [
        "add_norm"
    ]  # a look at the cache's shapes, the prompt, and a step with logits


def spire_chain(model):
    """Logits of a chain of three tokens in two rows, and the entries of its ring, after the target's activations were read."""
    context = sd.Context.of([[1, 2, 3], list(range(4, 17))])
    rows, positions = torch.tensor([0, 0, 1, 1, 1, 1]), torch.tensor([0, 1, 0, 9, 10, 11])
    ring, size = sd.drafts.Spire(model, 3, graphs=False).ring(2, 16), model.body.config.hidden_size
    fed = [draws(6, size, dtype=model.dtype, device=model.device, seed=i) for i in range(2)]
    rotary = model.rotary(positions.to(model.device))
    with torch.no_grad():
        remember(model, ring, ring.at(rows, positions, model.device), fed, rotary)
        steps = SpireSteps(model, ring, context, 3)
        logits = [steps(n, torch.tensor([n, 2 * n], device=model.device)) for n in range(3)]
    return [*logits, *(t for layer in ring.layers for t in layer)]


def spire_model(target):
    """A draft whose norms are not ones, and whose mixtures are not even."""
    model = SpireModel.from_target(target, 2, window=4)
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.dim() == 1):
            p.uniform_(0.5, 1.5)
        model.memory.weights.normal_()
    return model


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_interpreted_layers_of_a_spire_draft(family, merged, monkeypatch):
    """As operator by operator, with two launches beside the products for the keys and values of a memory vector. Mistral's own window of 8 does not
    hide the first position."""
    model = spire_model(tiny(family, 0, torch.float32))
    launches, launched = SpireLaunches(model.body, merged), []
    launches.refresh()
    for name in ("add_norm", "apply_rotary", "silu_mul"):
        own = getattr(pointwise, name)
        monkeypatch.setattr(
            pointwise, name, lambda *a, _own=own, _name=name, **k: launched.append(_name) or _own(*a, **k)
        )
    monkeypatch.setattr(SpireModel, "fast", lambda self, x: None)
    expected = spire_chain(model)
    assert not launched
    monkeypatch.setattr(SpireModel, "launches", launches)
    for a, b in zip(spire_chain(model), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))
    memory, block = ["add_norm", "apply_rotary"] * 2, ["add_norm", "apply_rotary", "add_norm", "silu_mul"] * 2
    assert launched == memory + (block + memory) * 2 + block


def test_who_takes_it():
    model = tiny("llama", 0, torch.bfloat16)
    assert not LlamaTriton.suits(model)  # it is on the CPU
    fused = LlamaTriton(sd.HFModel(model).clone)
    with torch.enable_grad():
        assert not fused.usable  # gradients go through the modules
    with torch.inference_mode():
        assert fused.usable


@pytest.mark.skipif(not GPU, reason="needs triton and a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype, monkeypatch):
    for rows, n in ((1, 4096), (33, 80), (3, 16384)):
        norms_are_right(rows, n, dtype, "cuda")
        products_are_right(n, dtype, "cuda")
    for T, heads, D in ((1, (32, 8), 128), (70, (9, 3), 80)):
        for normed in (False, True):
            turns_are_right(T, heads, D, dtype, "cuda", normed=normed)
    if dtype is not torch.float32:
        model = tiny("llama", 0, dtype).cuda()
        assert type(sd.HFModel(model)._path.lean) is LlamaTriton
        context = sd.Context.of([[1], list(range(20)), [5, 6, 7] * 5], capacity=32)
        got, _ = logits(model, LlamaTriton, context, None)
        own, _ = logits(model, lambda _: None, context, None)
        torch.testing.assert_close(got, own, rtol=0, atol=0.05 * float(own.abs().max()))
        draft = spire_model(model)
        assert draft.launches is not None
        draft.check()
        got = spire_chain(draft)
        monkeypatch.setattr(SpireModel, "launches", None)
        for a, b in zip(got, spire_chain(draft), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0.05 * float(b.abs().max()))


COMPILE = """
    def one(kernel, arch, dtype, warps, names, more=(), **const):
        types = dict.fromkeys(names, "*" + dtype) | {"SLOTS": "*i64", "eps": "fp32"}
        build(kernel, arch, types, ("n", "S", *more), warps, **const)

    for arch in (80, 90):
        for dtype in ("bf16", "fp16"):
            for add in (False, True):
                one(k.add_norm_kernel, arch, dtype, 8, ("X", "Y", "WEIGHT", "OUT"), ADD=add, BLOCK=4096)
            one(k.add_norm_kernel, arch, dtype, 16, ("X", "Y", "WEIGHT", "OUT"), ADD=True, BLOCK=16384)
            for norm in (False, True):
                for keep in (False, True):
                    names = ("Q", "K", "V", "COS", "SIN", "QW", "KW", "KEYS", "VALUES")
                    more = ("k_row", "k_slot", "k_head", "v_row", "v_slot", "v_head", "half")
                    one(k.turn_kernel, arch, dtype, 4, names, more, HALF=64, HEADS=4, NORM=norm, KEEP=keep)
            one(k.silu_mul_kernel, arch, dtype, 4, ("GATE", "UP"), BLOCK=1024)
"""


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_kernels_compile_for_gpus_without_spilling(tmp_path):
    said = compiled(COMPILE, KERNELS, tmp_path)
    assert said.count("turn_kernel") == 16
