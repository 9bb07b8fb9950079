"""Keys and values of eight bits: rounded once when they are stored, and read as what they were rounded to, on every path."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from interpreted import interpreted  # noqa: F401
from tiny import tiny
from transformers import DynamicCache

import specdec as sd
from specdec.cache.contiguous import SlotCache
from specdec.cache.paged import PagePool
from specdec.cache.slots import KVShape, Slots
from specdec.cache.static import StaticStore
from specdec.configs import cache_name
from specdec.drafts import MagicDec, Tree
from specdec.forward.llama_eager import LlamaEager
from specdec.forward.llama_triton import LlamaTriton
from specdec.graphs.programs import steps_for
from specdec.kernels.attention import AttentionPlan, api, attention, available, triton_backend
from specdec.kernels.float8 import DTYPES, bits
from specdec.lab.traces import identity
from specdec.masks import Causal
from specdec.models import HFModel, Masked, Windowed
from specdec.models.stacked import StackedModel

E4M3 = torch.float8_e4m3fn
ROWS = [list(range(20, 44)), [5, 6, 7] * 4]
STEPS = 4
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def call(dtype, wide=torch.float32, page=None):
    """A query, keys and values of eight bits, and a plan: a ragged batch in slots or in pages."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g).transpose(1, 2)  # noqa: E731
    table = None if page is None else [[2, 0], [3, 1]]
    plan = AttentionPlan([0, 1], [28, 9], [2, 3], page or 32, table=table, page=page or 0)
    keys, values = (draw(4, 2, page or 32, 32).to(dtype) for _ in range(2))
    return draw(1, 5, 4, 32).to(wide), keys, values, plan


@every_dtype
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [None, 16])
def test_attention_is_that_of_the_values_read_back(dtype, wide, page):
    query, keys, values, plan = call(dtype, wide, page)
    wider = keys.to(wide), values.to(wide)
    served = 0
    for backend in ["auto", *available("cpu", wide)]:
        if page is None or backend not in ("padded", "decomposed"):
            expected = attention(query, *wider, plan, backend=backend, lse=True)
            made = attention(query, keys, values, plan, backend=backend, lse=True)
            assert all(map(torch.equal, made, expected))
            assert torch.equal(attention(query, keys, values, plan, backend=backend), expected[0])
            served += 1
    assert served >= 3
    with pytest.raises(ValueError, match="give both in one dtype"):
        attention(query, keys.to(torch.float16), values, plan)


@every_dtype
@pytest.mark.parametrize("page", [None, 16])
def test_triton_reads_eight_bits_itself(dtype, page, interpreted, monkeypatch):  # noqa: F811
    for wide in (torch.float32, torch.bfloat16):
        query, keys, values, plan = call(dtype, wide, page)
        expected = attention(query, keys.to(wide), values.to(wide), plan, backend="triton", lse=True)
        with monkeypatch.context() as patch:
            patch.setattr(api, "_widened", None)
            made = attention(query, keys, values, plan, backend="triton", lse=True)
        assert all(map(torch.equal, made, expected))


def test_triton_refuses_what_it_was_not_compiled_for(monkeypatch):
    gpu, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, served in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        why = triton_backend.reads(gpu, half, E4M3, E4M3)
        assert why is None if served else "float8_e4m3fn, which the kernel converts on NVIDIA's sm_89" in why
        assert triton_backend.reads(gpu, half, half) is None
        assert "queries of 16 bits" in triton_backend.reads(gpu, torch.float32, E4M3)
    model = tiny("llama", 0, half)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr("specdec.graphs.programs._why_not", lambda *_: None)
    call = HFModel(model)._path, model, gpu, "auto", E4M3
    assert steps_for("auto", *call) is None
    with pytest.raises(ValueError, match=r"graphs is True but keys or values are .* sm_89.*graphs=False"):
        steps_for(True, *call)


STORES = {
    "slots": lambda shapes: Slots(shapes, 2, 8),
    "cache": lambda shapes: SlotCache(shapes, 2, 8),
    "pages": lambda shapes: PagePool(shapes, 8),
    "static": lambda shapes: StaticStore(SlotCache(shapes, 2, 7, 1)),
}


@every_dtype
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", STORES)
def test_stores_round_to_the_nearest_and_saturate(kind, native, dtype, monkeypatch):
    if not native:
        monkeypatch.setattr("specdec.cache.slots.library", lambda: None)
    store = STORES[kind]([KVShape(2, 4, 4, dtype, torch.device("cpu"))])
    if kind == "pages":
        store.take(2)
    key, value = torch.randn(1, 3, 2, 4).transpose(1, 2), torch.randn(1, 3, 2, 4).transpose(1, 2)
    key[0, 0, :, 0], key[0, 1, 0, 1] = torch.tensor([1e6, -1e6, torch.inf]), torch.nan
    stored = store.append(0, torch.tensor([1, 9, 15]), key, value)
    most = torch.finfo(dtype).max
    expected = key[0].transpose(0, 1).clone()
    expected[:, 0, 0] = torch.tensor([most, -most, most])
    for buffer, new in zip(stored, (expected, value[0].transpose(0, 1))):
        assert buffer.dtype == dtype
        held = buffer.reshape(-1, 2, 4)
        assert torch.equal(bits(held[[1, 9, 15]]), bits(new.to(dtype)))
        assert not bits(held[[0, 2, 8, 14]]).any()
    assert store.direct is None
    assert store.buffers is None


class Rounded(DynamicCache):
    """Transformers' own cache, whose entries are rounded."""

    dtype = E4M3

    def update(self, key, value, *more, **settings):
        return super().update(*(t.to(self.dtype).to(t.dtype) for t in (key, value)), *more, **settings)


@pytest.fixture
def plain():
    """The reference: logits ``[B, STEPS, V]`` by transformers' forward."""

    def logits(model, dtype):
        cache = type("", (Rounded,), {"dtype": dtype}) if dtype is not None else DynamicCache
        with torch.no_grad():
            made = [model(torch.tensor([row]), **{cache_name(model): cache()}).logits[0] for row in ROWS]
        return torch.stack([out[-STEPS:] for out in made])

    return logits


def decoded(model):
    """The same, fed as prompts and then token by token."""
    cache, made = model.cache(2, 32), []
    for left in range(STEPS - 1, -1, -1):
        context = sd.Context.of([row[: len(row) - left] for row in ROWS], capacity=32)
        if not made:
            model.prefill(cache, context)
        made.append(model.score(cache, context).logits[:, 0])
    return torch.stack(made, 1)


def same(made, expected):
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


WAYS = {
    "C": {},
    "C, pages": {"page": 16},
    "packed": {"attention": "packed"},
    "packed, pages": {"attention": "packed", "page": 4},
    "padded": {"attention": "padded"},
    "eager steps": {"graphs": "eager"},
    "recorded steps": {"graphs": "recorded"},
    "triton": {"attention": "triton"},
    "triton, pages": {"attention": "triton", "page": 4},
    "modules": {"compile": {"backend": "eager"}},
}


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        pytest.param(way, dtype, id=f"{way}-{dtype}", marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, way in enumerate(WAYS)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_logits_are_those_of_a_rounded_cache(way, dtype, plain, request):
    if "triton" in way:
        request.getfixturevalue("interpreted")
    model = tiny("llama", 0, torch.float32, head_dim=16)
    full, expected = plain(model, None), plain(model, dtype)
    assert float((full - expected).abs().max()) > 1e-2 * float(full.abs().max())
    wrapped = HFModel(model, kv_dtype=dtype, **WAYS[way])
    same(decoded(wrapped), expected)
    assert (wrapped.steps is not None and bool(wrapped.steps.captured)) == ("steps" in way)
    assert 4 * wrapped.bytes_per_token() == HFModel(model).bytes_per_token()
    lean = {"packed": LlamaEager, "triton": partial(LlamaTriton, merged=False)}.get(way)
    if lean is not None:
        wrapped._path.lean = lean(wrapped.clone, way)
        same(decoded(wrapped), expected)


def test_names_say_how_the_cache_is_kept():
    """Recordings and replays are found by these names, and a rounded cache has others."""
    model = tiny("llama", 0, torch.float32)
    plain, rounded = HFModel(model), HFModel(model, kv_dtype=E4M3)
    assert repr(plain) == repr(rounded).replace(" with KV in float8_e4m3fn", "") != repr(rounded)
    for wrap in (lambda model: model, lambda model: Windowed(model, 4)):
        assert identity(wrap(plain)) == identity(wrap(HFModel(model))) != identity(wrap(rounded))


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma2", "gpt_oss", "gpt2"])
def test_families(family, plain):
    model = tiny(family, 0, torch.float32)
    same(decoded(HFModel(model, kv_dtype=E4M3)), plain(model, E4M3))


def test_windows_and_masks_round_too(plain):
    model = tiny("llama", 0, torch.float32, head_dim=16)
    wrapped, expected = HFModel(model, kv_dtype=E4M3), plain(model, E4M3)
    same(decoded(Windowed(wrapped, 30, 1, block=4)), expected)  # the whole text, through a ring
    same(decoded(Windowed(HFModel(model, kv_dtype=E4M3, graphs="recorded"), 30, 1, block=4)), expected)
    same(decoded(Masked(wrapped, Causal())), expected)
    narrow = [decoded(Windowed(m, 6, 1, block=4)) for m in (wrapped, HFModel(model))]
    assert not torch.equal(*narrow)


def test_a_stack_rounds_as_its_members(plain):
    models = [tiny("llama", seed, torch.float32, head_dim=16) for seed in (0, 1)]
    for dtype in (E4M3, None):
        stack = StackedModel([HFModel(model, kv_dtype=dtype) for model in models])
        stack.read_as(torch.tensor([0, 1]))
        both = [plain(model, dtype) for model in models]
        same(decoded(stack), torch.stack([both[0][0], both[1][1]]))
    with pytest.raises(ValueError, match="another shape"):
        StackedModel([HFModel(models[0], kv_dtype=E4M3), HFModel(models[1])])


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("settings", [{}, {"page": 4}, {"graphs": "eager"}], ids=str)
def test_drafts_do_not_change_the_text(settings, sampled, drafted):
    """A rounded draft of any target, and any draft of a rounded target, whose accepted entries are moved."""
    large, small = tiny("llama", 0, torch.float64), tiny("llama", 0, torch.float64, num_hidden_layers=1)
    target = HFModel(large, kv_dtype=None if drafted else E4M3, **settings)
    draft = HFModel(large if drafted else small, kv_dtype=E4M3 if drafted else None, **settings)
    decoder = sd.decoder(target)
    decoder = decoder.verifier(sd.Coupled()) if sampled else decoder.greedy()
    prompts = [[5, 6, 7], list(range(20, 40))]
    plain = decoder.build().generate(prompts, 24, seed=3).ids
    for part in (draft, draft if sampled else Tree(draft, widths=(2, 2, 1))):
        made = decoder.draft(part, length=3).build().generate(prompts, 24, seed=3)
        assert made.ids == plain
        assert made.stats.tokens > made.stats.rounds
    if not drafted and not sampled:
        assert sd.decoder(HFModel(large)).greedy().build().generate(prompts, 24).ids != plain


@pytest.mark.parametrize(
    "wrong", [torch.int8, torch.float32, torch.bfloat16, torch.float8_e4m3fnuz, "fp8", 8], ids=str
)
def test_other_dtypes_are_refused(wrong):
    with pytest.raises(ValueError, match=r"kv_dtype is .*: give torch\.float8_e4m3fn or .*, or None"):
        HFModel(tiny("llama"), kv_dtype=wrong)


def test_models_that_cannot_round_are_refused():
    with pytest.raises(
        ValueError, match=r"kv_dtype is .* but gptj computes its own attention.*leave it None"
    ):
        HFModel(tiny("gptj"), kv_dtype=E4M3)
    unlisted = tiny("llama")
    unlisted.config.model_type = "unlisted"
    with pytest.raises(ValueError, match=r"kv_dtype is .* but unlisted is not listed, and is compared"):
        HFModel(unlisted, unlisted="packed", kv_dtype=E4M3)
    target = HFModel(tiny("llama"), kv_dtype=E4M3)
    with pytest.raises(ValueError, match="make the target without kv_dtype"):
        sd.decoder(target).draft(MagicDec(window=4)).greedy().build().generate([[5, 6, 7]], 4)
