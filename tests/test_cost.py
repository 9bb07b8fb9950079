"""The throughput model: every printed value of SPIRe, an independent computation, limits, shapes of real configs, the recipe."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from more_families import LATENT
from one_process import each
from recipe_runs import written
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import cost, zoo
from specdec.cost import (
    H100_PAPER,
    Hardware,
    Investment,
    Load,
    Shape,
    critical_context,
    growing,
    paper,
    terms,
)
from specdec.models import HFModel

BATCHES = [2**i for i in range(8)]
CONTEXTS = [2**i for i in range(3, 14)]

# Fig. 4, contexts 32 ... 8192.
PRINTED = {
    ("vanilla", 1): [1.76, 1.76, 1.75, 1.73, 1.70, 1.65, 1.59, 1.51, 1.44],
    ("magicdec", 1): [0.78, 0.79, 0.79, 0.81, 0.84, 0.90, 1.01, 1.20, 1.46],
    ("spire", 1): [1.71, 1.71, 1.72, 1.75, 1.79, 1.86, 1.99, 2.18, 2.40],
    ("vanilla", 64): [1.59, 1.51, 1.44, 1.39, 1.36, 1.34, 1.33, 1.33, 1.33],
    ("magicdec", 64): [1.00, 1.19, 1.45, 1.76, 2.05, 2.28, 2.42, 2.50, 2.55],
    ("spire", 64): [1.98, 2.17, 2.39, 2.61, 2.78, 2.89, 2.95, 2.99, 3.00],
}


def multiplier(method, batch, context, tau=None, hardware=H100_PAPER, target=paper.TARGET, **load):
    tau = tau or paper.TAU[512][method.name]
    return method.round(target, Load(batch, context, **load)).multiplier(tau, hardware)


# What the paper prints


@pytest.mark.parametrize(("name", "batch"), PRINTED)
def test_the_printed_table(name, batch):
    ours = [multiplier(paper.METHODS[name], batch, context) for context in CONTEXTS[2:]]
    assert [round(m, 2) for m in ours] == PRINTED[name, batch]


def test_the_body_parameters():
    assert paper.TARGET.body == 67_117_056
    assert paper.VANILLA_DRAFT.body == 8_390_656
    assert paper.SPIRE_DRAFT.body == 16_779_264
    assert paper.METHODS["magicdec"].draft == paper.TARGET


def test_the_ablations():
    """All but the last have SPIRe's costs at (64, 512), where memory is the limit, so their multipliers go with tau."""
    ours = {name: multiplier(a.method, 64, 512, a.tau) for name, a in paper.ABLATIONS.items()}
    for name, tau in [
        ("distillation_only", 3.375),
        ("no_feedback", 3.352),
        ("random_init", 3.105),
        ("hard_target_loss", 3.069),
        ("no_feedback_no_activations", 2.959),
    ]:
        assert ours[name] == pytest.approx(ours["spire"] * tau / 3.401, rel=1e-12)
    # no sparse KV: 4 drafts of 1/4 of the weights and 1/4 of the cache each, then one verify pass: as slow as two steps
    assert ours["no_sparse_kv"] == pytest.approx(3.401 / 2, rel=1e-4)


def test_the_cost_analysis():
    spire = Investment(cost.training_share(paper.SPIRE_DRAFT, paper.TARGET), 2.78)
    assert round(spire.share, 2) == 0.25
    assert spire.saved == 10 * (1 - 1 / 2.78)
    assert round(spire.saved, 2) == 6.40
    assert round(Investment(0.25, multiplier(paper.METHODS["spire"], 64, 512)).saved, 2) == 6.40
    assert spire.net == spire.saved - spire.share
    even = replace(spire, serving=spire.break_even)
    assert even.net == pytest.approx(0)
    assert Investment(0.25, 0.9).break_even == math.inf
    assert Investment(0.0, 0.9).saved < 0


# The same, straight from the equations


def plain_multiplier(name, batch, context, tau, target, draft):
    """Section 2 in numbers; shapes are (layers, d_model, kv heads, queries a kv head, d_head, d_ff)."""

    def weights(s):
        n, d, kv, q, h, ff = s
        return n * (2 * d + (q + 2) * kv * d * h + q * kv * h * d + 3 * d * ff)

    def cache(s, length):
        return batch * length * 2 * s[0] * s[2] * s[4]

    def time(flops, memory):
        return max(flops, memory * 600)

    length = context if name == "vanilla" else 1 + context // 8
    flops = 2 * weights(draft) * batch
    if name == "spire":
        flops += 2 * (2 * draft[0] * draft[2] * draft[1] * draft[4]) * batch
    t_draft = time(flops, weights(draft) + cache(draft, length))
    t_target = time(2 * weights(target) * batch, weights(target) + cache(target, context))
    t_verify = time(5 * 2 * weights(target) * batch, weights(target) + cache(target, context))
    return tau / ((4 * t_draft + t_verify) / t_target)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["vanilla", "magicdec", "spire"])
def test_an_independent_computation_of_figures_4_and_6(name, batch):
    tau = {"vanilla": 2.647, "magicdec": 3.891, "spire": 3.401}[name]
    small = (8, 512, 8, 1, 128, 4096)
    drafts = {"vanilla": (4, 256, 8, 1, 64, 2048), "magicdec": small, "spire": (2, *small[1:])}
    for context in CONTEXTS:
        ours = multiplier(paper.METHODS[name], batch, context)
        assert ours == pytest.approx(plain_multiplier(name, batch, context, tau, small, drafts[name]))
    llama = (80, 8192, 8, 8, 128, 28672)
    drafts = {"vanilla": (32, 4096, 8, 4, 128, 14336), "magicdec": llama, "spire": (20, *llama[1:])}
    for context in [2**i for i in range(10, 21)]:
        ours = multiplier(paper.LLAMA_METHODS[name], batch, context, target=paper.LLAMA_70B)
        assert ours == pytest.approx(plain_multiplier(name, batch, context, tau, llama, drafts[name]))


# Distributions and limits

METHODS = st.sampled_from([*paper.METHODS.values(), cost.vanilla(paper.VANILLA_DRAFT, cost.Window(65))])
SIZES = {"batch": st.integers(1, 4096), "context": st.integers(1, 1 << 20), "k": st.integers(1, 16)}


def test_plain_decoding_has_multiplier_one():
    for context, hardware in itertools.product((1, 512), (H100_PAPER, H100_PAPER.not_overlapped)):
        one = cost.AUTOREGRESSIVE.round(paper.TARGET, Load(64, context).full)
        assert one.multiplier(1, hardware) == 1
    assert growing(cost.AUTOREGRESSIVE, paper.TARGET, Load(3, 7), 1, H100_PAPER, 50) == pytest.approx(1)


@given(METHODS, st.booleans(), st.fixed_dictionaries(SIZES))
@settings(max_examples=60, deadline=None)
def test_more_work_is_never_faster(method, full, load):
    target, at = paper.TARGET, Load(**load)
    at = at.full if full else at
    for hardware in (H100_PAPER, replace(H100_PAPER, overhead=1e-5, overhead_per_layer=1e-6)):
        one = method.round(target, at)
        assert one.verify.flops == pytest.approx((at.k + 1) * one.target.flops, rel=0.02 if full else 1e-12)
        for name in ("batch", "context", "k"):
            more = method.round(target, replace(at, **{name: 2 * getattr(at, name)}))
            assert more.seconds(hardware) >= one.seconds(hardware)
        overlapped, separate = one.seconds(hardware), one.seconds(hardware.not_overlapped)
        assert overlapped <= separate <= 2 * overlapped
        assert method.round(target, at.full).seconds(hardware) >= overlapped
        assert one.cost(hardware) > 1  # a round has a verify pass, which is a plain step and more
        assert one.multiplier(at.k + 1, hardware) < at.k + 1


@given(METHODS, st.fixed_dictionaries(SIZES), st.floats(0.1, 10))
@settings(max_examples=40, deadline=None)
def test_only_the_ratio_of_rates_matters(method, load, scale):
    one = method.round(paper.TARGET, Load(**load))
    faster = replace(
        H100_PAPER, flops=scale * H100_PAPER.flops, bytes_per_second=scale * H100_PAPER.bytes_per_second
    )
    assert one.cost(faster) == pytest.approx(one.cost(H100_PAPER))
    assert one.seconds(faster) == pytest.approx(one.seconds(H100_PAPER) / scale)


def test_limits():
    free = Hardware("memory is free", 1.0, 1e30)
    still = Hardware("computing is free", 1e30, 1.0)
    tau, k = 3.401, 4
    spire = paper.METHODS["spire"]
    # Computing alone: a verify pass is five steps, a draft step is its share of the FLOPs, whatever the batch.
    share = (2 * paper.SPIRE_DRAFT.body + 2 * paper.SPIRE_DRAFT.kv_projection) / (2 * paper.TARGET.body)
    assert multiplier(spire, 64, 512, tau, free) == pytest.approx(tau / (k * share + k + 1))
    # Memory alone, one sequence: the weights' share. Many sequences: the cache's, 1/4 of the layers and 65 of 512 positions.
    one = multiplier(spire, 1, 1, tau, still)
    assert one == pytest.approx(tau / (k / 4 + 1), rel=1e-3)
    many = multiplier(spire, 10**9, 512, tau, still)
    assert many == pytest.approx(tau / (k * 65 / 512 / 4 + 1), rel=1e-6)
    # On the roofline, a batch without bound and contexts without keys to speak of are limited by computing.
    assert multiplier(spire, 10**9, 1, tau) == pytest.approx(multiplier(spire, 1, 1, tau, free), rel=1e-9)
    # A draft that costs next to nothing and is always right makes k + 1 tokens of one step.
    nothing = cost.vanilla(Shape(1, 1, 1, 1, 1, 1))
    assert multiplier(nothing, 1, 512, 5.0) == pytest.approx(5, rel=1e-3)
    # A machine of overheads only: k + 1 steps, or layers.
    slow = Hardware("overheads", 1e40, 1e40, overhead=1.0)
    assert multiplier(spire, 1, 512, tau, slow) == pytest.approx(tau / 5)
    slow = Hardware("overheads", 1e40, 1e40, overhead_per_layer=1.0)
    assert multiplier(spire, 1, 512, tau, slow) == pytest.approx(tau / ((4 * 2 + 8) / 8))


def test_growing_contexts():
    spire, load, tau = paper.METHODS["spire"], Load(64, 512), 3.401
    assert growing(spire, paper.TARGET, load, tau, H100_PAPER, 1) == pytest.approx(multiplier(spire, 64, 512))
    rounds = [spire.round(paper.TARGET, replace(load, context=512 + i)) for i in range(300)]
    plain = sum(H100_PAPER.time(r.target) for r in rounds)
    expected = plain / (sum(r.seconds(H100_PAPER) for r in rounds) / tau)
    assert growing(spire, paper.TARGET, load, tau, H100_PAPER, 300) == pytest.approx(expected)
    assert growing(spire, paper.TARGET, load, tau, H100_PAPER, 300, stride=8) == pytest.approx(
        expected, rel=1e-4
    )
    ends = multiplier(spire, 64, 512), multiplier(spire, 64, 512 + 299)
    assert ends[0] < expected < ends[1]


def test_the_critical_context():
    """By the paper's own table of figure 4, and by the definition."""
    tau = paper.TAU[512]
    ours = [
        critical_context(m, paper.TARGET, Load(1, 1), tau[n], H100_PAPER) for n, m in paper.METHODS.items()
    ]
    assert ours == [None, 16, 32]
    spire, batches = paper.METHODS["spire"], [2**i for i in range(8)]
    by_context = [[multiplier(spire, b, c, tau["spire"]) for b in batches] for c in (16, 32)]
    assert [row == sorted(row) for row in by_context] == [False, True]
    assert critical_context(spire, paper.TARGET, Load(1, 1), 3.401, H100_PAPER, (1, 2, 4, 8)) == 2

    class Odd:
        """A method whose multiplier grows with the batch except at a context of 4."""

        def round(self, target, load):
            sign = -1 if load.context == 4 else 1
            return SimpleNamespace(multiplier=lambda tau, hardware: 10 + sign * load.batch)

    for contexts, expected in (((1, 2, 4, 8, 16), 8), ((1, 2, 4), None), ((1, 2), 1)):
        assert critical_context(Odd(), None, Load(1, 1), 3.4, None, contexts=contexts) == expected
    for wrong in ({"batches": (1,)}, {"batches": (2, 1)}, {"contexts": ()}, {"contexts": (8, 8)}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
            critical_context(spire, paper.TARGET, Load(1, 1), 3.4, H100_PAPER, **wrong)


def test_the_definition_of_growing_is_that_of_a_simulation():
    """Rounds of 1 to 5 tokens at random, tau 3.5, long enough for where they start not to matter."""
    vanilla, target = paper.METHODS["vanilla"], paper.TARGET
    length = torch.multinomial(
        torch.tensor([0.1, 0.2, 0.2, 0.1, 0.4]), 6000, True, generator=torch.Generator().manual_seed(0)
    )
    starts = (64 + torch.cumsum(length + 1, 0) - (length + 1)).tolist()
    new_tokens = int((length + 1).sum())
    seconds = sum(vanilla.round(target, Load(8, s)).seconds(H100_PAPER) for s in starts)
    plain = sum(
        H100_PAPER.time(cost.AUTOREGRESSIVE.round(target, Load(8, 64 + i)).target) for i in range(new_tokens)
    )
    ours = growing(vanilla, target, Load(8, 64), new_tokens / 6000, H100_PAPER, new_tokens, stride=16)
    assert ours == pytest.approx(plain / seconds, rel=2e-3)


def test_the_roofline():
    machine = Hardware("", flops=10.0, bytes_per_second=2.0, overhead=3.0, overhead_per_layer=0.5)
    step = cost.Step((cost.Work("a", 40.0, 5.0), cost.Work("b", 10.0, 15.0)), layers=4)
    assert (step.flops, step.bytes, step.intensity, machine.intensity) == (50, 20, 2.5, 5)
    assert machine.time(step) == 20 / 2 + 3 + 4 * 0.5
    assert machine.not_overlapped.time(step) == 50 / 10 + 20 / 2 + 3 + 4 * 0.5
    assert replace(machine, flops=1.0).time(step) == 50 + 3 + 4 * 0.5


# Terms


def test_every_term_by_hand():
    """Two layers, d_model 6, 4 query heads and 2 KV heads of 3, d_ff 5, 7 ids; 3 sequences, 2 tokens each, 10 cached positions."""
    f = terms.Forward(Shape(2, 6, 4, 2, 3, 5, vocab=7), 3, 2, 10, bytes_per_weight=4, bytes_per_kv=2)
    body = 2 * (2 * 6 + 6 * 12 + 2 * 6 * 6 + 12 * 6 + 3 * 6 * 5)
    expected = {
        "body": (2 * body * 6, 4 * body),
        "kv_reads": (0, 3 * 10 * 2 * 2 * 2 * 3 * 2),
        "memory_projection": (2 * 2 * 2 * 6 * 6 * 6, 0),
        "attention": (2 * 2 * 4 * 3 * 2 * (10 + 11) * 3, 0),  # the second token also sees the first
        "kv_writes": (0, 6 * 2 * 2 * 2 * 3 * 2),
        "unembedding": (2 * 7 * 6 * 6, 7 * 6 * 4),
        "embedding": (0, 6 * 6 * 4),
        "kv_refresh": (2 * 2 * 2 * 6 * 6 * 6, 2 * 2 * 6 * 6 * 4 + 6 * (2 * 6 + 2 * 2 * 2 * 3) * 2),
    }
    for name, (flops, moved) in expected.items():
        work = getattr(terms, name)(f)
        assert work == (name, flops, moved)
    assert terms.embedding(replace(f, batch=30)).bytes == 7 * 6 * 4  # no row is read twice
    assert terms.embedding(replace(f, shape=replace(f.shape, tied=True))).bytes == 0
    whole = cost.step(f, cost.FULL)
    assert whole.flops == sum(expected[w.name][0] for w in whole.work)
    assert whole.intensity == whole.flops / whole.bytes
    assert {w.name for w in whole.work} == set(expected) - {"memory_projection", "kv_refresh"}


def test_the_refresh_is_counted_for_spire_alone_and_on_request():
    load = Load(2, 64)
    for name, method in paper.METHODS.items():
        assert method.round(paper.TARGET, load).refresh is None
        assert (method.round(paper.TARGET, load.full).refresh is not None) == (name == "spire")


def test_pocket_shapes_and_a_measured_machine():
    """What the measured study needs: float32, tied pocket models, a fixed window, overheads."""
    target = Shape.of(AutoConfig.from_pretrained(Path(zoo.__file__).parent / "pocket-target"))
    small = Shape.of(AutoConfig.from_pretrained(Path(zoo.__file__).parent / "pocket-vanilla"))
    assert target == Shape(8, 256, 4, 4, 64, 640, vocab=4096, tied=True)
    assert small == Shape(4, 128, 4, 4, 32, 320, vocab=4096, tied=True)
    machine = Hardware("a core", 50e9, 10e9, overhead=2e-4, overhead_per_layer=5e-5)
    load = Load(16, 512, k=3, bytes_per_weight=4, bytes_per_kv=4).full
    window = cost.Window(65)
    for method in (
        cost.vanilla(small),
        cost.vanilla(small, window),
        cost.magicdec(target, window),
        cost.spire(target.with_layers(2), window),
    ):
        one = method.round(target, load)
        assert 0.5 < one.multiplier(2.5, machine) < 2.5
        assert one.draft.bytes % 4 == 0
    assert window(10) == 10
    assert window(4096) == 65


# Shapes of transformers configs

# Families with ways of their own to say which layers are dense, what is shared, or how wide a layer is; at their default sizes.
OTHERS = [
    "afmoe",
    "apertus",
    "aria_text",
    "bloom",
    "cohere2",
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoeshared",
    "hy_v3",
    "nanochat",
    "olmoe",
    "qwen2_moe",
]


# Families of which a Shape is refused, and families with matrices that it leaves out: at tiny sizes they are up to a tenth of the body.
WITHOUT = {"dbrx", "gemma4_text", "gemma4_unified_text", "jetmoe", "laguna", "mimo_v2_flash", *LATENT}
NEARLY = {"afmoe": 0.1, "cohere": 0.01, "modernbert-decoder": 0.1, "qwen2_moe": 0.01}


@pytest.mark.parametrize("family", tiny.slow(f for f in tiny.FAMILIES if f not in WITHOUT))
def test_shapes_of_configs_count_every_matrix(family):
    count_every_matrix(AutoConfig.for_model(family, **tiny.FAMILIES[family]), NEARLY.get(family, 0))


@pytest.mark.parametrize("family", OTHERS)
def test_shapes_of_default_configs_count_every_matrix(family):
    count_every_matrix(AutoConfig.for_model(family), 0.01)  # small gates


@pytest.mark.parametrize("family", sorted(WITHOUT))
def test_families_without_a_shape_are_refused(family):
    with pytest.raises(ValueError, match=r"terms of your own|by hand"):
        Shape.of(AutoConfig.for_model(family, **tiny.FAMILIES[family]))


def count_every_matrix(config, rel):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    matrices = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() > 1
        and not any(p is e for e in ends)
        and not name.endswith("bias")
        and not any(word in name for word in ("wpe", "embed_positions"))
    )
    shape = Shape.of(config)
    assert shape == Shape.of(model)
    ours = shape.body - 2 * shape.d_model * shape.layers
    assert ours == pytest.approx(matrices, rel=rel, abs=0)
    assert shape.unembedding == ends[0].numel()
    assert shape.tied == (ends[0] is ends[1])


def test_windows_and_experts_of_configs():
    gemma = Shape.of(AutoConfig.for_model("gemma3_text", **tiny.FAMILIES["gemma3_text"]))
    assert (gemma.window, gemma.windowed_layers) == (8, 5)
    assert gemma.positions(100) == 100 + 5 * 8
    assert gemma.positions(3) == 6 * 3
    mixtral = Shape.of(AutoConfig.for_model("mixtral"))
    assert mixtral.experts == cost.Experts(8, 2, 14336)
    assert mixtral.body / 1e9 == pytest.approx(46.4, abs=0.1)
    assert mixtral.active / 1e9 == pytest.approx(12.6, abs=0.1)
    qwen = Shape.of(
        AutoConfig.for_model("qwen2_moe", num_hidden_layers=4, mlp_only_layers=[0], num_experts=60)
    )
    assert qwen.experts == cost.Experts(60, 4, 1408, shared_d_ff=5632, layers=3)


def test_experts_touched_by_a_verify_batch():
    experts = cost.Experts(4, 2, 3)
    pairs = list(itertools.combinations(range(4), 2))
    seen = [len({*a, *b, *c}) for a, b, c in itertools.product(pairs, repeat=3)]
    assert experts.distinct(3) == pytest.approx(sum(seen) / len(seen))
    shape = Shape(2, 8, 2, 1, 4, 16, experts=experts)
    assert experts.distinct(1) == 2
    assert shape.touched(1) == shape.active < shape.touched(5) < shape.body
    assert shape.touched(10**6) == shape.body
    assert shape.body - shape.active == 2 * 2 * 3 * 8 * 3  # two experts of two layers
    one = cost.vanilla(Shape(1, 4, 1, 1, 4, 4)).round(shape, Load(1, 8))
    assert one.verify.bytes > one.target.bytes  # what makes verifying dear for sparse models


def test_layers_of_a_draft():
    experts = Shape(8, 8, 2, 1, 4, 16, experts=cost.Experts(4, 2, 3, layers=8), window=16, windowed_layers=8)
    assert experts.with_layers(2).body * 4 == experts.body
    assert experts.with_layers(2).windowed_layers == 2
    with pytest.raises(ValueError, match="more than one kind"):
        replace(experts, windowed_layers=4).with_layers(2)


# Errors


def test_errors_name_the_argument_and_the_remedy():
    method, target = paper.METHODS["spire"], paper.TARGET
    one = method.round(target, Load(1, 8))
    two_layers = {"model_type": "odd", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    uneven = {**tiny.FAMILIES["gemma4_unified_text"], "attention_k_eq_v": False}
    wrong = [
        (lambda: Load(0, 512), "batch is 0: give at least 1"),
        (lambda: Load(1, 0), "context is 0: give at least 1"),
        (
            lambda: Load(1, 512, k=0),
            "k is 0: draft at least 1 token a round, or use the method AUTOREGRESSIVE",
        ),
        (lambda: Load(1, 512, bytes_per_kv=0).forward(target, 1, 1), "bytes_per_kv is 0"),
        (lambda: one.multiplier(5.1, H100_PAPER), r"tau is 5.1 at k = 4: a round produces 1 to 5 tokens"),
        (lambda: one.multiplier(0.9, H100_PAPER), "tau is 0.9"),
        (lambda: one.multiplier(math.nan, H100_PAPER), "tau is nan"),
        (lambda: growing(method, target, Load(1, 8), 6, H100_PAPER, 1), "tau is 6"),
        (lambda: growing(method, target, Load(1, 8), 3, H100_PAPER, 0), "new_tokens is 0"),
        (lambda: growing(method, target, Load(1, 8), 3, H100_PAPER, 5, 0), "stride is 0"),
        (lambda: cost.Window(0), "size is 0"),
        (lambda: cost.step(Load(1, 8).forward(target, 1, 8), ()), "terms is empty"),
        (lambda: cost.spire(target, lambda context: 0).round(target, Load(1, 8)), "kv_length is 0"),
        (lambda: method.round(replace(target, vocab=0), Load(1, 8).full), r"set Shape\(vocab=...\)"),
        (lambda: Hardware("", 0, 1), "flops is 0"),
        (lambda: Hardware("", 1, 1, overhead=-1), "overhead is -1: give seconds"),
        (lambda: Investment(-1, 2), "share is -1"),
        (lambda: Investment(0.25, 0), "multiplier is 0"),
        (lambda: Shape(0, 1, 1, 1, 1, 1), "layers is 0"),
        (lambda: Shape(1, 1, 3, 2, 1, 1), "heads is 3 and kv_heads 2"),
        (lambda: Shape(1, 1, 1, 1, 1, 1, vocab=-1), "vocab is -1"),
        (lambda: Shape(1, 1, 1, 1, 1, 1, window=8), "give both or neither"),
        (lambda: Shape(1, 1, 1, 1, 1, 1, window=0, windowed_layers=1), "window is 0"),
        (
            lambda: Shape(1, 1, 1, 1, 1, 1, experts=cost.Experts(2, 1, 1, layers=2)),
            "experts.layers is 2 of 1",
        ),
        (lambda: cost.Experts(2, 3, 1), "chosen is 3 of 2 experts"),
        (
            lambda: Shape.of(SimpleNamespace(model_type="odd")),
            "'odd' has no num_hidden_layers: make the Shape by hand",
        ),
        (lambda: Shape.of(AutoConfig.for_model("deepseek_v3")), "latent attention"),
        (lambda: Shape.of(AutoConfig.for_model("mamba")), "keep a state"),
        (lambda: Shape.of(AutoConfig.for_model("qwen3_next")), "keep a state"),
        (lambda: Shape.of(AutoConfig.for_model("t5")), "not decoder-only"),
        (lambda: Shape.of(AutoConfig.for_model("bert")), "not decoder-only"),
        (
            lambda: Shape.of(SimpleNamespace(**two_layers, intermediate_size=[8, 16])),
            "intermediate_size .* not one number",
        ),
        (lambda: Shape.of(AutoConfig.for_model("gemma4_text")), "every layer reads an embedding of its own"),
        (
            lambda: Shape.of(AutoConfig.for_model("gemma4_unified_text", **uneven)),
            "head_dim differs from layer to layer",
        ),
        (lambda: Shape.of(AutoConfig.for_model("jetmoe")), "its attention has experts too"),
        (lambda: Shape.of(AutoConfig.for_model("llama4_text")), "chunked_attention"),
    ]
    for call, text in wrong:
        with pytest.raises(ValueError, match=text):
            call()


def test_shapes_are_asked_for_by_name():
    config, load = AutoConfig.for_model("llama"), Load(1, 8)
    method = paper.METHODS["spire"]
    for call, name in ((lambda: cost.spire(config), "draft"), (lambda: method.round(config, load), "target")):
        with pytest.raises(TypeError, match=rf"{name} is a LlamaConfig: .*Shape\.of\(config\)"):
            call()
    for wrong in ("folder", config.to_dict(), None):
        with pytest.raises(
            TypeError, match=rf"config is a {type(wrong).__name__}: give a transformers config"
        ):
            Shape.of(wrong)
    model = tiny.tiny("llama")
    assert Shape.of(HFModel(model)) == Shape.of(model) == Shape.of(model.config)


# The recipe


RECIPE = "recipes/spire_throughput.py"


def found(rows, *key):
    return next(r["multiplier"] for r in rows if (r["method"], r["batch"], r["context"]) == key)


N, SMALL, KV = 67_117_056, 16_779_264, 2 * 8 * 128  # SPIRe's target and draft, keys and values of a layer
WK = 2 * 2 * 512 * 8 * 128  # the draft's key and value projections
B, L, V = 64, 512, 50_304


def not_overlapped_by_hand():
    target = 2 * N * B + 600 * (N + B * L * 8 * KV)
    verify = 10 * N * B + 600 * (N + B * L * 8 * KV)
    draft = 2 * (SMALL + WK) * B + 600 * (SMALL + B * 65 * 2 * KV)
    return 3.401 * target / (4 * draft + verify)


def full_terms_by_hand():
    def time(weights, layers, tokens, length, extra=0):
        flops = 2 * (weights + V * 512 + extra) * B * tokens
        flops += 4 * 8 * 128 * layers * (length + (tokens - 1) / 2) * B * tokens
        memory = weights + V * 512 + B * tokens * 512  # blocks, unembedding, rows of the embedding
        memory += B * (length + tokens) * layers * KV  # read and written
        return max(flops, 600 * memory)

    refresh = max(2 * WK * B * 5, 600 * (WK + B * 5 * (2 * 512 + 2 * KV)))
    rounds = 4 * time(SMALL, 2, 1, 65, WK) + time(N, 8, 5, L) + refresh
    return 3.401 * time(N, 8, 1, L) / rounds


def growing_by_hand():
    plain = rounds = 0.0
    for length in range(L - 64, L):  # the 64th token makes it L
        target = 600 * (N + B * length * 8 * KV)  # memory is the limit throughout
        plain += target
        rounds += 4 * 600 * (SMALL + B * (1 + length // 8) * 2 * KV) + target
    return 3.401 * plain / rounds


@pytest.mark.slow
def test_the_recipe(tmp_path):
    file = tmp_path / "t.json"
    (done,) = each([RECIPE, "--json", str(file), "--plots", str(tmp_path / "plots")])
    assert done.returncode == 0, done.stderr
    said = json.loads(file.read_text())
    assert set(said) == {"meta", "rows"}
    rows = said["rows"]
    figures = [
        "fig1",
        "fig3",
        "fig4",
        "fig5",
        "fig6",
        "growing",
        "growing_llama",
        "l_crit",
        "not_overlapped",
        "full_terms",
        "cost",
    ]
    assert list(dict.fromkeys(r["figure"] for r in rows)) == figures
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {f"{f}.png" for f in figures if f != "l_crit"}
    of = {f: [r for r in rows if r["figure"] == f] for f in figures}
    for r in rows:
        value = {"fig3": "intensity", "cost": "units"}.get(r["figure"], "multiplier")
        assert {"figure", "method", "batch", "context", value} <= set(r)
        assert math.isfinite(r[value])
    everywhere = [(m, b, c) for m in paper.METHODS for b in BATCHES for c in CONTEXTS]
    for figure in ("fig4", "growing", "not_overlapped", "full_terms"):
        there = [at for at in everywhere if figure != "growing" or at[2] > 64]
        assert [(r["method"], r["batch"], r["context"]) for r in of[figure]] == there
    assert {r["shape"]: r["context"] for r in of["l_crit"]} == {"paper": 32, "llama_3_70b": 4096}
    assert {r["context"] for r in of["fig6"]} == {2**i for i in range(10, 21)}
    assert len(of["fig6"]) == len(of["growing_llama"]) == 3 * 8 * 11
    fixed, grows = (found(of[name], "spire", 128, 2**20) for name in ("fig6", "growing_llama"))
    assert grows == pytest.approx(fixed, rel=1e-3)  # 64 tokens change little of a million
    assert found(of["growing_llama"], "spire", 1, 1024) != found(of["fig6"], "spire", 1, 1024)
    fig4 = {(r["method"], r["batch"], r["context"]): r["multiplier"] for r in of["fig4"]}
    for (name, batch), printed in PRINTED.items():
        assert [round(fig4[name, batch, c], 2) for c in CONTEXTS[2:]] == printed
    assert all(
        r["batch"] == 64 and r["multiplier"] == fig4[r["method"], 64, r["context"]] for r in of["fig1"]
    )
    assert found(of["not_overlapped"], "spire", 64, 512) == written(not_overlapped_by_hand())
    assert found(of["full_terms"], "spire", 64, 512) == written(full_terms_by_hand())
    assert found(of["growing"], "spire", 64, 512) == written(growing_by_hand())
    assert {r["method"]: round(r["multiplier"], 2) for r in of["fig5"]} == {
        "spire": 2.78,
        "distillation_only": 2.76,
        "no_feedback": 2.74,
        "random_init": 2.54,
        "hard_target_loss": 2.51,
        "no_feedback_no_activations": 2.42,
        "no_sparse_kv": 1.70,
    }
    units = {(r["method"], r["quantity"]): round(r["units"], 2) for r in of["cost"]}
    assert units["spire", "invested"] == 0.25
    assert units["spire", "saved"] == 6.40
    plain = {
        (r["batch"], r["context"]): r["intensity"] for r in of["fig3"] if r["method"] == "autoregressive"
    }
    assert plain[64, 512] == written(2 * N * 64 / (N + 64 * 512 * 2 * 8 * 8 * 128))


@pytest.mark.slow
def test_the_recipe_without_matplotlib_says_what_to_install(tmp_path):
    (script := tmp_path / "without.py").write_text(
        f"import runpy, sys; sys.modules['matplotlib'] = None; runpy.run_path({RECIPE!r}, run_name='__main__')"
    )
    (done,) = each([str(script), "--plots", str(tmp_path)])
    assert done.returncode == 1
    assert "pip install matplotlib" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_recipe_refuses_and_says_what_and_how():
    wrong = [["--tau-context", "100"], ["--new-tokens", "0"], ["--new-tokens", "512"]]
    *refused, said = each(*([RECIPE, *words] for words in [*wrong, ["--help"]]))
    for words, done in zip(wrong, refused):
        assert done.returncode == 1
        assert words[0] in done.stderr
        assert "Traceback" not in done.stderr
    assert "--json" in said.stdout
    assert "--plots" in said.stdout
    assert len(said.stdout) > 400
