"""bfloat16 copies of float32 weights: the same products, and nobody reads an old copy."""

from __future__ import annotations

import copy
import ctypes
import pickle
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny

import specdec as sd
from specdec.drafts.spire import SpireModel
from specdec.kernels.native import library, ops, reason
from specdec.kernels.native import narrow as module
from specdec.kernels.native.narrow import Narrow
from specdec.kernels.native.ops import unchecked_linear
from specdec.masks import Causal, Strided
from specdec.models import Masked, StackedModel, Windowed
from specdec.models.fingerprint import fingerprint
from specdec.types import Context

pytestmark = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")

PROMPTS = [[5], [7, 8, 9], [1, 2, 3, 4, 5, 6] * 3, [50] * 9, [3, 1], [90, 4, 5, 6]]
SIZES = {"vocab_size": 96, "hidden_size": 64, "head_dim": 16}


def rounded(family="llama", seed=0, **changes):
    """A float32 model whose weights are bfloat16 numbers."""
    return tiny(family, seed, **{**SIZES, **changes}).to(torch.bfloat16).float()


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("E", "O"), [(16, 16), (80, 48), (32, 16), (256, 64), (640, 176), (2080, 32)])
def test_products_are_those_of_float32(E, O):
    w, b, x = numbers(O, E).bfloat16().float(), numbers(O, seed=1), numbers(300, E, seed=2)
    x *= torch.logspace(-6, 6, 300)[:, None]  # all 24 bits count, whatever the exponent
    made = Narrow([w])[w]
    for bias in (b, None):
        out = unchecked_linear(x, made, bias)
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        scale = F.linear(x.double().abs(), w.double().abs()) + 1
        error = ((out - exact).abs() / scale).max()
        assert error < 4e-7, error
        for T in (1, 2, 5, 6, 7, 15, 16, 17, 31, 33, 257):
            assert torch.equal(unchecked_linear(x[:T], made, bias), out[:T])


def test_two_threads_change_nothing():
    w, x = numbers(1024, 256).bfloat16().float(), numbers(40, 256, seed=1)
    made, before = Narrow([w])[w], torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(unchecked_linear(x, made, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.slow
def test_without_matrix_units_products_are_the_same_to_the_bit(tmp_path):
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    assert compiler, "the C kernels are there, so a compiler was"
    folder, made = Path(module.__file__).parent, tmp_path / "vectors.so"
    sources = [str(folder / f"{name}.c") for name in ("linear", "split", "tiles")]
    subprocess.run(
        [compiler, "-O1", "-w", "-shared", "-fPIC", "-DNO_TILES", *sources, "-o", str(made)], check=True
    )
    lib = ctypes.CDLL(str(made))
    lib.linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 2
    lib.narrow.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    for O, E in ((48, 96), (16, 2080)):
        w, x, bias = numbers(O, E).bfloat16().float(), numbers(20, E, seed=1), numbers(O, seed=2)
        small, seen = torch.empty(O, E, dtype=torch.bfloat16), ctypes.c_uint64()
        assert lib.narrow(w.data_ptr(), small.data_ptr(), O, E, ctypes.byref(seen)) == 0
        assert torch.equal(small.float(), w)
        for T in (1, 6, 7, 20):
            outs = [torch.empty(T, O), torch.empty(T, O)]
            for out, weight, kind in zip(outs, (w, small), (0, 2)):
                lib.linear(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), T, O, E, kind, 1)
            assert torch.equal(*outs)


def test_every_changed_bit_is_noticed():
    weight = numbers(16, 64).bfloat16().float()
    narrow = Narrow([weight])
    copy = narrow._copies[id(weight)]
    seen = {copy.seen.value}
    bits = weight.view(torch.int32).view(-1)
    for i in range(bits.numel()):
        for change in (*(1 << bit for bit in range(16, 31)), -(1 << 31)):  # every bit of bfloat16
            bits[i] ^= change
            assert narrow.refresh()
            seen.add(copy.seen.value)
            bits[i] ^= change
    assert len(seen) == 1 + 16 * bits.numel()
    assert narrow.refresh()
    assert copy.seen.value in seen
    first, second = weight[0].clone(), weight[1].clone()  # a permutation is a change
    weight[0], weight[1] = second, first
    assert narrow.refresh()
    assert copy.seen.value not in seen


def test_what_has_not_changed_is_not_copied():
    weight = numbers(16, 64).bfloat16().float()
    narrow = Narrow([weight])
    narrow[weight].zero_()
    assert narrow.refresh()
    assert not narrow[weight].any()


def test_numbers_that_are_lost_are_found_again():
    weight = numbers(16, 64).bfloat16().float()
    narrow = Narrow([weight])
    weight[3, 4] = 1 + 2**-20
    assert not narrow.refresh()
    assert not narrow.refresh()
    weight[3, 4] = 1
    assert narrow.refresh()
    assert 1 in narrow[weight]


def test_what_is_not_finite_stays_so():
    w, x = numbers(32, 64).bfloat16().float(), numbers(3, 64, seed=1)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    out = unchecked_linear(x, Narrow([w])[w], None)
    assert not out[:2].isfinite().any()
    assert out[2].isfinite().all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("page", [None, 16])
def test_a_model_says_the_same(family, page):
    model = rounded(family)
    before = fingerprint(model)
    plain, narrow = (sd.HFModel(model, page=page, bf16_weights=b) for b in (False, True))
    context = Context.of(PROMPTS, capacity=64)
    logits = []
    for wrapped in (plain, narrow):
        cache = wrapped.cache(6, 64)
        wrapped.prefill(cache, context)
        logits.append(wrapped.score(cache, context).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * logits[0].abs().max()
    assert not torch.equal(*logits) or not ops.tiles(), "the copies were not read"
    texts = [sd.decoder(m).greedy().build().generate(PROMPTS, max_new_tokens=12).ids for m in (plain, narrow)]
    assert texts[0] == texts[1]
    assert fingerprint(model) == before


def drafts(narrow):
    vanilla = sd.drafts.Model(sd.HFModel(rounded(seed=3), bf16_weights=narrow))
    torch.manual_seed(1)
    spire = SpireModel.from_target(rounded(), 1, window=6)
    spire.to(torch.bfloat16).float()
    return {"vanilla": vanilla, "spire": sd.drafts.Spire(spire, bf16_weights=narrow)}


@pytest.mark.parametrize("name", ["vanilla", "spire"])
def test_coupled_texts_are_those_of_plain_decoding(name):
    target = sd.HFModel(rounded(), bf16_weights=True)
    base = sd.decoder(target).verifier(sd.Coupled())
    plain = base.build().generate(PROMPTS, max_new_tokens=20, seed=3)
    some = base.draft(drafts(True)[name], length=3).build()
    assert some.generate(PROMPTS, max_new_tokens=20, seed=3).ids == plain.ids


def test_a_stack_reads_its_members_copies():
    members = [sd.HFModel(rounded(seed=seed), bf16_weights=True) for seed in (0, 3)]
    stack, context = StackedModel(members), Context.of(PROMPTS, capacity=64)
    assert all(native.narrow is not None for native in stack._path.natives)
    member = [0, 1, 1, 0, 1, 0]
    stack.read_as(torch.tensor(member))
    cache = stack.cache(6, 64)
    stack.prefill(cache, context)
    got = stack.score(cache, context).logits
    for b, m in enumerate(member):
        own = members[m].cache(6, 64)
        members[m].prefill(own, context)
        assert torch.equal(members[m].score(own, context).logits[b, 0], got[b, 0])
    mixed = StackedModel([members[0], sd.HFModel(rounded(seed=5), bf16_weights=False)])._path.natives
    assert mixed[0].narrow is not None
    assert mixed[1].narrow is None
    head = members[0].clone.lm_head.weight
    assert mixed[0].narrow[head] is members[0]._path.lean.narrow[head], "copied twice"


def counted(weight):
    with torch.no_grad():
        weight.mul_(2)


def through_data(weight):
    weight.data.mul_(2)


def fused(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()


def cast(weight):
    weight.data = weight.data.to(torch.bfloat16)


def one_number(weight):
    weight.data[5, 7] = 1.5


def other_storage(weight):
    weight.data = weight.data * 2


def weight_of(model, name):
    return next(p for n, p in model.named_parameters() if n.endswith(name))


def logits_of(wrapped):
    cache, context = wrapped.cache(6, 64), Context.of(PROMPTS, capacity=64)
    wrapped.prefill(cache, context)
    return wrapped.score(cache, context).logits


@pytest.mark.parametrize("change", [counted, through_data, one_number, other_storage])
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("setting", [None, True])
def test_copies_follow_their_weights(change, name, setting):
    model = rounded()
    wrapped, before = sd.HFModel(model, bf16_weights=setting), None
    before = logits_of(wrapped)
    change(weight_of(model, name))
    changed = logits_of(wrapped)
    assert wrapped.engine.bf16_weights
    assert not torch.equal(changed, before)
    assert torch.equal(changed, logits_of(sd.HFModel(model, bf16_weights=True)))
    assert (
        changed - logits_of(sd.HFModel(model, bf16_weights=False))
    ).abs().max() < 1e-4 * changed.abs().max()


@pytest.mark.parametrize("change", [fused, cast])
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_that_bfloat16_would_round_are_noticed(change, name):
    model = rounded()
    given, automatic, plain = (sd.HFModel(model, bf16_weights=b) for b in (True, None, False))
    window = Windowed(automatic, 8, 1)
    given.cache(1, 8), window.cache(1, 8)
    change(weight_of(model, name))
    with pytest.raises(RuntimeError, match="wrap the model again"):
        given.cache(1, 8)
    window.cache(1, 8)  # shares the engine, and gives up the copies of both
    assert not automatic.engine.bf16_weights
    if change is fused:
        assert torch.equal(logits_of(automatic), logits_of(plain))
    else:  # as without copies
        for wrapped in (automatic, plain):
            with pytest.raises(RuntimeError, match="cast"):
                logits_of(wrapped)


@pytest.mark.parametrize("change", [through_data, one_number, fused])
@pytest.mark.parametrize("setting", [None, True])
def test_copies_of_a_spire_draft_follow_its_weights(change, setting):
    spire = SpireModel.from_target(rounded(), 1, window=6).to(torch.bfloat16).float()
    base = sd.decoder(sd.HFModel(rounded()))
    make = lambda setting: base.draft(sd.drafts.Spire(spire, bf16_weights=setting)).build()  # noqa: E731
    decoder, plain = make(setting), make(False)
    assert (decoder.draft.model.narrow is not None, plain.draft.model.narrow) == (True, None)
    before = decoder.generate(PROMPTS, max_new_tokens=8, seed=0)
    assert before.ids == plain.generate(PROMPTS, max_new_tokens=8, seed=0).ids
    change(spire.body.lm_head.weight)
    if setting and change is fused:
        with pytest.raises(RuntimeError, match="wrap the model again"):
            decoder.generate(PROMPTS, max_new_tokens=4)
        return
    after = decoder.generate(PROMPTS, max_new_tokens=8, seed=0)
    assert after.ids == plain.generate(PROMPTS, max_new_tokens=8, seed=0).ids != before.ids
    assert (decoder.draft.model.narrow is None) == (change is fused)
    assert spire.narrow is None, "the user's draft is as it was"


@pytest.mark.parametrize(
    ("make", "reads"),
    [
        (rounded, True),
        (lambda: tiny(dtype=torch.float32, **SIZES), False),  # bfloat16 would round
        (lambda: tiny().to(torch.bfloat16).float(), False),  # sizes are no multiples of 16
        (lambda: rounded().double(), False),
        (lambda: rounded().to(torch.bfloat16), False),
        (lambda: tiny("gpt2").to(torch.bfloat16).float(), False),
    ],
)
def test_copies_are_made_where_they_are_exact(make, reads):
    model = make()
    automatic, plain = sd.HFModel(model), sd.HFModel(model, bf16_weights=False)
    assert (automatic.engine.bf16_weights, plain.engine.bf16_weights) == (reads, False)
    texts = [
        sd.decoder(m)
        .draft(sd.drafts.NGram())
        .sampling(temperature=1)
        .build()
        .generate(PROMPTS, 12, seed=2)
        .ids
        for m in (automatic, plain)
    ]
    assert texts[0] == texts[1]


class Weaker(sd.HFModel):
    """A subclass with a forward of its own."""

    def score(self, *given, **options):
        scores = super().score(*given, **options)
        return replace(scores, logits=scores.logits / 2)


@pytest.mark.parametrize(
    "make",
    [
        Weaker,
        lambda model, **options: Windowed(sd.HFModel(model, **options), 8, 1),
        lambda model, **options: Masked(sd.HFModel(model, **options), Causal() & Strided(2)),
    ],
)
def test_subclasses_and_views_read_the_copies(make):
    model = rounded(seed=3)
    drafts = [make(model), make(model, bf16_weights=False)]
    assert [d.engine.bf16_weights for d in drafts] == [True, False]
    base = sd.decoder(sd.HFModel(rounded()))
    built = [base.draft(sd.drafts.Model(d), length=3).build() for d in drafts]
    one, other = (d.generate(PROMPTS, max_new_tokens=12, seed=1) for d in built)
    assert (one.ids, one.stats.tau) == (other.ids, other.stats.tau)


def test_a_draft_that_is_cast_or_gets_a_new_head_is_refused():
    spire = SpireModel.from_target(rounded(), 1, window=6).to(torch.bfloat16).float()
    narrowed, x = spire.narrowed(), numbers(3, 64)
    with torch.no_grad():
        narrowed.logits(x)
        spire.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="cast"):
            narrowed.logits(x.bfloat16())
        with pytest.raises(RuntimeError, match="cast"):
            narrowed.fast(x.bfloat16()).table(torch.bfloat16)
        spire.float()
        spire.body.lm_head = torch.nn.Linear(64, 96, bias=False)
        with pytest.raises(RuntimeError, match="wrap the model again"):
            narrowed.logits(x)


@pytest.mark.parametrize("make", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_copies_go_to_other_processes_with_their_weights(make):
    layer = torch.nn.Linear(32, 16).to(torch.bfloat16).float()
    layer, copies = make((layer, Narrow([layer.weight])))
    x = numbers(2, 32)
    expected = F.linear(x.double(), layer.weight.double())
    assert (unchecked_linear(x, copies[layer.weight], None) - expected).abs().max() < 1e-5
    assert copies.bytes == 2 * 16 * 32


@pytest.mark.parametrize("change", [one_number, fused])
def test_a_copied_model_has_copies_of_its_own_weights(change):
    wrapped = sd.HFModel(rounded())
    change(wrapped.clone.lm_head.weight)
    other = copy.deepcopy(wrapped)
    assert torch.equal(logits_of(other), logits_of(wrapped))
    assert other.engine.bf16_weights == wrapped.engine.bf16_weights == (change is one_number)


def spire_of(model, **settings):
    draft = sd.drafts.Spire(SpireModel.from_target(model, 1), bf16_weights=True, **settings)
    return sd.decoder(sd.HFModel(model)).draft(draft).build()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: sd.HFModel(tiny(dtype=torch.float32, **SIZES), bf16_weights=True), "bfloat16 would round"),
        (lambda: sd.HFModel(tiny().to(torch.bfloat16).float(), bf16_weights=True), "multiples of 16"),
        (lambda: sd.HFModel(rounded().double(), bf16_weights=True), "leave it None"),
        (lambda: sd.HFModel(rounded().to(torch.bfloat16), bf16_weights=True), "leave it None"),
        (lambda: sd.HFModel(tiny("gpt2"), bf16_weights=True), "leave it None"),
        (lambda: sd.HFModel(rounded(), bf16_weights=True, graphs="eager"), "leave it None"),
        (lambda: sd.HFModel(rounded(), bf16_weights=True, compile=True), "leave it None"),
        (
            lambda: spire_of(tiny(dtype=torch.float32, **SIZES)),
            "would round",
        ),
        (lambda: spire_of(tiny()), "leave it None"),
        (lambda: spire_of(rounded(), graphs="eager"), "give only one of them"),
    ],
)
def test_what_cannot_be_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()


def test_copies_that_were_asked_for_are_not_given_up_for_graphs(monkeypatch):
    """On a GPU ``graphs="auto"`` captures, and there are no copies."""
    monkeypatch.setattr("specdec.drafts.spire.draft.capture_named", lambda *_: "eager")
    with pytest.raises(ValueError, match="leave it None"):
        spire_of(tiny())
