"""Pruners, selections and smaller models against their papers' definitions, written out with loops."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tiny import FAMILIES, tiny
from torch.nn.functional import max_pool1d, scaled_dot_product_attention
from transformers import AutoModelForCausalLM

import specdec as sd
from specdec import pruning
from specdec.configs import blocks_of
from specdec.masks import Causal, OriginalText, Sinks, Window, dense
from specdec.pruning import (
    H2O,
    TOVA,
    KeyNorm,
    Random,
    SnapKV,
    StreamingLLM,
    Uniform,
    attention_weights,
    budgets,
)

B, H, HQ, S, D = 3, 2, 6, 16, 8
LENGTH = torch.tensor([16, 11, 7])


def kv(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return (*torch.randn(2, B, H, S, D, dtype=torch.float64), LENGTH)


def queries(count: int) -> torch.Tensor:
    return torch.randn(B, HQ, count, D, dtype=torch.float64) * 2


def padded(slots: list[int], width: int) -> list[int]:
    return sorted(slots) + [-1] * (width - len(slots))


def best(score: dict[int, float], count: int) -> list[int]:
    """The ``count`` slots of the highest scores, of equal ones the earlier."""
    return sorted(sorted(score, key=lambda slot: (-score[slot], slot))[:count])


def weights_of(q: list[float], keys: list[list[float]]) -> list[float]:
    """One query's softmax over keys, in plain Python."""
    dots = [sum(a * b for a, b in zip(q, k)) / math.sqrt(len(q)) for k in keys]
    exps = [math.exp(d - max(dots)) for d in dots]
    return [e / sum(exps) for e in exps]


# -- KV ----------------------------------------------------------------------------------------------------------------


def test_attention_weights():
    keys, _, length = kv()
    q = queries(4)
    weights = attention_weights(q, keys, length)
    assert weights.shape == (B, HQ, 4, S)
    for b in range(B):
        for h in range(HQ):
            for j in range(4):
                own = int(length[b]) - 4 + j
                seen = weights_of(q[b, h, j].tolist(), keys[b, h // 3, : own + 1].tolist())
                assert weights[b, h, j].tolist() == pytest.approx([*seen, *[0] * (S - own - 1)])
    short = attention_weights(q, keys, torch.tensor([2, 3, 0]))  # some queries do not exist
    assert short.sum(-1)[:, 0].tolist() == [
        [0, 0, pytest.approx(1), pytest.approx(1)],
        [0, *[pytest.approx(1)] * 3],
        [0] * 4,
    ]
    for wrong in (q[:1], q[:, :5], q[..., :3], q[:, :0]):
        with pytest.raises(ValueError, match="multiple of the 2 heads"):
            attention_weights(wrong, keys, length)


def test_attention_weights_as_layers_make_them():
    """A scale, a cap on scores, a window, and logits that take weight and belong to no slot."""
    keys, _, length = kv()
    q, logits = queries(4), torch.tensor([0.3, -0.7, 1.1, 0.2, 0.0, float("-inf")], dtype=torch.float64)
    weights = attention_weights(q, keys, length, 0.3, window=5, softcap=2.0, sink_logits=logits)
    for b in range(B):
        for h in range(HQ):
            for j in range(4):
                own = int(length[b]) - 4 + j
                seen = range(max(0, own - 4), own + 1)
                dots = [float(q[b, h, j] @ keys[b, h // 3, s]) * 0.3 for s in seen]
                exps = [math.exp(2 * math.tanh(dot / 2)) for dot in dots]
                total = sum(exps) + math.exp(float(logits[h]))
                expected = dict(zip(seen, (e / total for e in exps)))
                assert weights[b, h, j].tolist() == pytest.approx([expected.get(s, 0) for s in range(S)])


def test_streaming_llm():
    keys, values, length = kv()
    kept = StreamingLLM(sinks=1)(keys, values, length, 4)
    assert kept[:, 0].tolist() == [[0, 13, 14, 15], [0, 8, 9, 10], [0, 4, 5, 6]]
    assert torch.equal(kept[:, 0], kept[:, 1])
    assert StreamingLLM(sinks=0)(keys, values, length, 3)[1, 0].tolist() == [8, 9, 10]
    assert StreamingLLM(sinks=4)(keys, values, length, 9)[2, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, -1, -1]
    few = StreamingLLM(sinks=8)(keys, values, length, 9)[2, 0]  # fewer than the sinks
    assert few.tolist() == [*range(7), -1, -1]
    # A window of its own: what is left of the budget stays free.
    assert StreamingLLM(sinks=2, window=3)(keys, values, length, 7)[1, 0].tolist() == [0, 1, 8, 9, 10, -1, -1]
    assert StreamingLLM(sinks=2, window=20)(keys, values, length, 22)[0, 0].tolist() == list(range(16))


def test_streaming_llm_is_the_mask_of_the_same_name():
    """Attention over the kept slots, moved together, is attention over all with sinks and a window."""
    keys, values, length = kv()
    kept = StreamingLLM(sinks=2)(keys, values, length, 6)
    k, v = pruning.gather(keys, kept), pruning.gather(values, kept)
    q = torch.randn(B, H, 1, D, dtype=torch.float64)  # of the last slot
    mask = Causal() & (Sinks(2) | Window(4))
    last = length[:, None] - 1
    expected = scaled_dot_product_attention(
        q, keys, values, attn_mask=dense(mask, last, torch.arange(S))[:, None]
    )
    compact = OriginalText(mask, kept[:, 0])
    seen = dense(compact, torch.full((B, 1), 5), torch.arange(6))
    assert seen.all()
    assert torch.allclose(
        scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]), expected, atol=1e-12
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda call: StreamingLLM(sinks=-1), "StreamingLLM: sinks is -1"),
        (lambda call: StreamingLLM(window=0), "StreamingLLM: window is 0: keep at least the latest slot"),
        (lambda call: call(StreamingLLM(sinks=4), 4), "budget is 4 and 4 sinks with a window of 1 take 5: raise the budget"),
        (lambda call: call(StreamingLLM(sinks=4, window=3), 6), "budget is 6 and 4 sinks with a window of 3 take 7"),
        (lambda call: call(H2O(recent=-1), 4), "H2O: recent is -1"),
        (lambda call: call(H2O(recent=5), 4), "H2O: budget is 4 and recent is 5: raise"),
        (lambda call: SnapKV(kernel=4), "SnapKV: kernel is 4: an odd number"),
        (lambda call: SnapKV(kernel=0), "kernel is 0: an odd number"),
        (lambda call: call(SnapKV(), 3), "SnapKV: budget is 3 and the observation window alone takes 3: raise"),
        (lambda call: call(SnapKV(), 6, attention=None), r"SnapKV needs attention=: \[B, Hq, Q, S\]"),
        (lambda call: call(SnapKV(), 6, attention=torch.zeros(B, HQ, 0, S)), r"SnapKV: attention is \[3, 6, 0, 16\]"),
        (lambda call: call(TOVA(), 4, attention=torch.zeros(B, 5, 3, S)), r"TOVA: attention is \[3, 5, 3, 16\].*multiple of 2"),
        (lambda call: call(H2O(), 4, attention=torch.zeros(B, HQ, S)), r"H2O: attention is \[3, 6, 16\].*attention_weights"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make, message):
    def call(pruner, budget, **changes):
        extras = {"attention": torch.rand(B, HQ, 3, S), **changes}
        return pruner(*kv(), budget, **extras)

    with pytest.raises(ValueError, match=message):
        make(call)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("budget", [5, 8, 12])
def test_snapkv(kernel, pool, budget):
    """Listing 1 of the paper: votes of the window, pooled along the prefix, top-k, and the window itself."""
    keys, values, length = kv()
    q, window = queries(4), 4
    pruner = SnapKV(kernel) if pool == "avg" else SnapKV(kernel, max_pool1d)
    kept = pruner(keys, values, length, budget, attention=attention_weights(q, keys, length))
    for b, n in enumerate(length.tolist()):
        for h in range(H):
            prefix = n - window
            votes = [0.0] * prefix
            for head in range(3 * h, 3 * h + 3):
                for j in range(window):
                    seen = weights_of(q[b, head, j].tolist(), keys[b, h, : prefix + j + 1].tolist())
                    votes = [v + s / 3 for v, s in zip(votes, seen)]
            smooth = {}
            for slot in range(prefix):
                near = [
                    votes[i] for i in range(slot - kernel // 2, slot + kernel // 2 + 1) if 0 <= i < prefix
                ]
                smooth[slot] = sum(near) / kernel if pool == "avg" else max(near)
            if n <= budget:
                expected = list(range(n))
            else:
                expected = best(smooth, budget - window) + list(range(prefix, n))
            assert kept[b, h].tolist() == padded(expected, budget)


def test_snapkv_averages_over_the_query_heads_of_a_group():
    keys, values, length = kv()
    weights = attention_weights(queries(3), keys, length)
    kept = SnapKV()(keys, values, length, 8, attention=weights)
    order = torch.tensor([2, 0, 1, 4, 5, 3])  # within the groups
    assert torch.equal(SnapKV()(keys, values, length, 8, attention=weights[:, order]), kept)
    assert not torch.equal(SnapKV()(keys, values, length, 8, attention=weights[:, [0, 4, 2, 3, 1, 5]]), kept)


@pytest.mark.parametrize(("budget", "recent"), [(4, None), (5, None), (5, 0), (5, 5), (9, 2), (1, None)])
def test_h2o(budget, recent):
    keys, values, length = kv()
    attention = torch.rand(B, HQ, 3, S, dtype=torch.float64)
    kept = H2O(recent)(keys, values, length, budget, attention=attention)
    latest = math.ceil(budget / 2) if recent is None else recent
    for b, n in enumerate(length.tolist()):
        for h in range(H):
            got = {s: float(attention[b, 3 * h : 3 * h + 3, :, s].sum()) for s in range(n - latest)}
            expected = best(got, budget - latest) + list(range(max(0, n - latest), n))
            assert kept[b, h].tolist() == padded(expected if n > budget else list(range(n)), budget)


def decode(pruner: Any, budget: int, steps: int, accumulate: bool) -> list[list[int]]:
    """Text positions that one head's cache holds after each token, when ``pruner`` is called after every one."""
    torch.manual_seed(3)
    all_keys, all_queries = torch.randn(2, steps, D, dtype=torch.float64) * 2
    held = torch.zeros(1, 1, 0, dtype=torch.long)
    score = torch.zeros(1, 1, 0, dtype=torch.float64)
    history = []
    for t in range(steps):
        held = torch.cat([held, torch.tensor([[[t]]])], -1)
        keys = all_keys[held]
        given = attention_weights(all_queries[t].view(1, 1, 1, D), keys, torch.tensor([held.shape[-1]]))[
            :, :, 0
        ]
        score = torch.nn.functional.pad(score, (0, 1)) + given if accumulate else given
        kept = pruner(keys, keys, torch.tensor([held.shape[-1]]), budget, attention=score[:, :, None])
        held, score = held.gather(-1, kept), score.gather(-1, kept)
        history.append(held[0, 0].tolist())
    return history


@pytest.mark.parametrize("which", ["h2o", "tova"])
def test_called_after_every_token_it_is_the_greedy_eviction(which):
    """H2O: Algorithm 1 with a window of the latest; TOVA: drop what the last query looks at least."""
    budget, steps, recent = 5, 24, 2 if which == "h2o" else 0
    pruner = H2O(recent) if which == "h2o" else TOVA()
    got = decode(pruner, budget, steps, accumulate=which == "h2o")
    torch.manual_seed(3)
    keys, asks = torch.randn(2, steps, D, dtype=torch.float64) * 2
    held: list[int] = []
    total: dict[int, float] = {}
    for t in range(steps):
        held.append(t)
        seen = weights_of(asks[t].tolist(), keys[held].tolist())
        for slot, w in zip(held, seen):
            total[slot] = w + (total.get(slot, 0.0) if which == "h2o" else 0.0)
        if len(held) > budget:
            candidates = held[: len(held) - recent]
            held.remove(min(candidates, key=lambda slot: total[slot]))
        assert got[t] == held
    assert got[-1] != list(range(steps - budget, steps))  # it is not the window by accident


def test_tova_makes_one_choice_for_all_heads():
    keys, values, length = kv()
    attention = torch.rand(B, HQ, 3, S, dtype=torch.float64)
    kept = TOVA()(keys, values, length, 5, attention=attention)
    for b, n in enumerate(length.tolist()):
        mean = {s: sum(attention[b, :, 2, s].tolist()) / HQ for s in range(n)}
        assert kept[b].tolist() == [padded(best(mean, 5), 5)] * H


def test_key_norm():
    keys, values, length = kv()
    kept = KeyNorm()(keys, values, length, 5)
    for b, n in enumerate(length.tolist()):
        for h in range(H):
            norm = {s: -math.sqrt(sum(x * x for x in keys[b, h, s].tolist())) for s in range(n)}
            assert kept[b, h].tolist() == padded(best(norm, 5), 5)
    equal = torch.ones_like(keys)
    assert KeyNorm()(equal, values, length, 3)[0, 0].tolist() == [0, 1, 2]  # of equal ones the earlier


def test_uniform():
    keys, values, length = kv()
    kept = Uniform()(keys, values, length, 4)
    assert kept[:, 1].tolist() == [[0, 5, 10, 15], [0, 3, 6, 10], [0, 2, 4, 6]]
    assert Uniform()(keys, values, length, 1)[:, 0].tolist() == [[15], [10], [6]]
    assert Uniform()(keys, values, torch.tensor([0, 1, 2]), 3)[:, 0].tolist() == [
        [-1, -1, -1],
        [0, -1, -1],
        [0, 1, -1],
    ]


def test_random():
    heads, slots, budget = 400, 8, 3
    keys = torch.zeros(1, heads, slots, 1)
    length = torch.tensor([slots])
    kept = Random(1)(keys, keys, length, budget)
    assert torch.equal(kept, Random(1)(keys, keys, length, budget))
    assert not torch.equal(kept, Random(2)(keys, keys, length, budget))
    counts = kept.flatten().bincount(minlength=slots).double()
    expected = heads * budget / slots
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3  # chi-square, 7 degrees, p = 0.001
    # A longer row's choice among its first slots is the shorter row's: a number belongs to a slot.
    short = Random(1)(keys, keys, torch.tensor([5]), 2)
    assert int(short.max()) == 4


def test_gather():
    keys, _, length = kv()
    kept = KeyNorm()(keys, keys, length, 9)
    got = pruning.gather(keys, kept)
    for b in range(B):
        for h in range(H):
            for i, slot in enumerate(kept[b, h].tolist()):
                assert torch.equal(
                    got[b, h, i], keys[b, h, slot] if slot >= 0 else torch.zeros(D, dtype=torch.float64)
                )


def test_pyramid():
    """Equations of section 4.2, with beta = 20 and the observation window on top."""
    for layers, budget, window in ((32, 128, 8), (8, 64, 8), (80, 2048, 32), (5, 21, 1)):
        each = budgets.pyramid(layers, budget, window=window)
        total = layers * (budget - window)
        last = total / (20 * layers)
        first = 2 * total / layers - last
        for i, n in enumerate(each):
            assert abs(n - window - (first - (first - last) / (layers - 1) * i)) < 1
        assert sum(each) == layers * budget
    assert budgets.pyramid(4, 10, beta=1) == [10, 10, 10, 10]
    assert budgets.pyramid(3, 20, beta=20) == [39, 20, 1]
    assert budgets.pyramid(1, 9) == [9]
    assert budgets.pyramid(4, 100, window=20, most=120) == [120, 107, 93, 80]  # the first cannot use more
    assert budgets.pyramid(4, 100, window=20, most=90) == [90] * 4
    assert budgets.uniform(3, 5) == [5, 5, 5]
    for wrong, message in (
        ({"window": 10}, "window is 10"),
        ({"window": -1}, "window is -1"),
        ({"beta": 0.5}, "beta is 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            budgets.pyramid(4, 10, **wrong)


# -- layers ------------------------------------------------------------------------------------------------------------

TOKENS = 2 + torch.arange(48).view(2, 24) * 5 % 95  # not those that pad, whose embedding is zero
DEPTH = {
    "gpt2": "n_layer",
    "codegen": "n_layer",
    "gptj": "n_layer",
    "mpt": "n_layers",
    "gpt_neo": "num_layers",
}


def deep(family: str, layers: int = 4, **changes: Any) -> Any:
    """A tiny model of four layers, whose kinds of layers alternate where it has kinds."""
    if family == "gpt_neo":
        changes["attention_types"] = [[["global", "local"], layers // 2]]
    return tiny(family, **{DEPTH.get(family, "num_hidden_layers"): layers}, **changes)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def skipping(model: Any, layers: list[int]) -> torch.Tensor:
    """The whole model's logits when all other blocks give back what they are given."""
    hooks = [
        block.register_forward_hook(
            lambda m, args, kwargs, out: (
                (args[0] if args else kwargs["hidden_states"])
                if isinstance(out, torch.Tensor)
                else ((args[0] if args else kwargs["hidden_states"]), *out[1:])
            ),
            with_kwargs=True,
        )
        for i, block in enumerate(blocks_of(model))
        if i not in layers
    ]
    try:
        return logits(model)
    finally:
        for hook in hooks:
            hook.remove()


def test_which_layers():
    assert pruning.last_layers(8, 2) == [6, 7]  # SPIRe's 7 and 8
    assert pruning.first_layers(8, 2) == [0, 1]
    assert pruning.spaced_layers(8, 2) == [0, 7]
    assert pruning.spaced_layers(8, 3) == [0, 3, 7]
    assert pruning.spaced_layers(32, 16) == [*range(0, 29, 2), 31]  # Distil-Whisper's
    assert pruning.spaced_layers(8, 1) == [7]
    assert pruning.influential_layers(torch.tensor([0.3, 0.1, 0.4, 0.1, 0.5]), 3) == [0, 2, 4]
    assert pruning.influential_layers(torch.tensor([0.1, 0.1, 0.1]), 2) == [0, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_keep_layers_is_skipping_the_others(family):
    model = deep(family)
    for layers in ([2, 3], [1], [0, 3], [0, 2, 3]):
        small = pruning.keep_layers(model, layers)
        assert torch.equal(logits(small), skipping(model, layers))
        assert small.config.num_hidden_layers == len(layers) == len(blocks_of(small))


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "gpt_neo", "qwen3_moe"]
)
def test_what_a_config_says_of_its_layers_goes_with_them(family, tmp_path):
    changes: dict[str, Any] = {}
    if family in ("qwen2", "qwen3"):
        changes = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    if family == "qwen3_moe":
        changes = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = deep(family, **changes)
    for layers in ([1, 2], [0, 3], [3], [0, 1, 2, 3]):
        small = pruning.keep_layers(model, layers)
        expected = skipping(model, layers)
        assert torch.equal(logits(small), expected)
        for name in ("layer_types", "attention_layers"):
            if getattr(model.config, name, None) is not None:
                assert getattr(small.config, name) == [getattr(model.config, name)[i] for i in layers]
        if family == "gpt_neo":
            assert small.config.attention_types == [[small.config.attention_layers, 1]]
        small.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        # Gemma's scale of the embedding is not saved, and rounded otherwise in a model that is loaded as float64.
        assert torch.allclose(logits(again), expected, atol=1e-5 if family.startswith("gemma") else 0)
    if family == "qwen2":
        assert [t[:4] for t in model.config.layer_types] == ["full", "full", "slid", "slid"]
        config = pruning.keep_layers(model, [1, 2, 3]).config
        assert config.max_window_layers == 1
        config.layer_types = None  # made anew from the numbers alone, it is the same
        assert type(config)(
            **{k: v for k, v in config.to_dict().items() if k != "layer_types"}
        ).layer_types == [
            "full_attention",
            "sliding_attention",
            "sliding_attention",
        ]


def test_layers_that_do_not_fit_are_refused():
    model = deep("llama")
    for layers in ([], [4], [-1], [2, 1], [1, 1], [0, 1, 2, 3, 4]):
        with pytest.raises(ValueError, match="ascending numbers from 0 to 3"):
            pruning.keep_layers(model, layers)
    with pytest.raises(TypeError, match=r"layers is 2: give the numbers .* last_layers\(4, 2\)"):
        pruning.keep_layers(model, 2)
    with pytest.raises(ValueError, match="'gpt2' models a layer's computation depends on its number"):
        pruning.keep_layers(deep("gpt2", scale_attn_by_inverse_layer_idx=True), [1, 2])


def test_a_block_whose_settings_hang_on_its_number_is_refused():
    model = deep("llama")
    model.model.layers[
        2
    ].self_attn.scaling *= 2  # as a family with a scale of its own for each layer would have it
    with pytest.raises(ValueError, match="layer 2 would not be the same as layer 1"):
        pruning.keep_layers(model, [0, 2])
    pruning.keep_layers(model, [0, 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_block_influence(family):
    """Section 2.2: one minus the mean cosine of a block's input and output, the last one's before the final norm."""
    model = deep(family)
    caught: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        b.register_forward_hook(
            lambda m, a, k, o: caught.append(
                (a[0] if a else k["hidden_states"], o if isinstance(o, torch.Tensor) else o[0])
            ),
            with_kwargs=True,
        )
        for b in blocks_of(model)
    ]
    logits(model)
    for hook in hooks:
        hook.remove()
    expected = []
    for x, y in caught:
        cosines = [
            float(torch.dot(x[b, t], y[b, t]) / (x[b, t].norm() * y[b, t].norm()))
            for b in range(2)
            for t in range(24)
        ]
        expected.append(1 - sum(cosines) / 48)
    got = pruning.layer_influence(model, TOKENS)
    assert got.tolist() == pytest.approx(expected)
    x = torch.randn(5, 7)
    assert float(pruning.block_influence(x, 3 * x)) == pytest.approx(0, abs=1e-6)
    assert float(pruning.block_influence(x, -x)) == pytest.approx(2)
    with pytest.raises(ValueError, match="equal"):
        pruning.block_influence(x, x[:1])


# -- heads and channels ------------------------------------------------------------------------------------------------

LLAMAS = ["llama", "mistral", "qwen2", "qwen3"]


def wide(family: str) -> Any:
    """Three layers, six query heads on three KV heads; with every bias that the family can have."""
    sizes = {
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 48,
        "head_dim": 8,
    }
    biases = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}.get(
        family, {}
    )
    model = tiny(family, **sizes, **biases)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("family", LLAMAS)
def test_keep_heads_is_silencing_the_others(family):
    model = wide(family)
    heads = [[0, 2], [1, 2], [0, 1]]
    small = pruning.keep_heads(model, heads)
    muted = copy.deepcopy(model)
    with torch.no_grad():
        for i, block in enumerate(muted.model.layers):
            for group in {0, 1, 2} - set(heads[i]):
                for head in (2 * group, 2 * group + 1):  # the query heads of a KV head
                    block.self_attn.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
    assert torch.allclose(logits(small), logits(muted), atol=1e-12)
    assert not torch.allclose(logits(small), logits(model), atol=1e-3)
    assert (small.config.num_attention_heads, small.config.num_key_value_heads, small.config.head_dim) == (
        4,
        2,
        8,
    )
    assert sd.HFModel(small).bytes_per_token() * 3 == sd.HFModel(model).bytes_per_token() * 2


@pytest.mark.parametrize("family", LLAMAS)
def test_keep_channels_is_silencing_the_others(family):
    model = wide(family)
    channels = pruning.most_important(torch.rand(3, 48), 20)
    small = pruning.keep_channels(model, channels)
    muted = copy.deepcopy(model)
    with torch.no_grad():
        for i, block in enumerate(muted.model.layers):
            gone = sorted(set(range(48)) - set(channels[i]))
            block.mlp.down_proj.weight[:, gone] = 0
    assert torch.allclose(logits(small), logits(muted), atol=1e-12)
    assert small.config.intermediate_size == 20


def given_to(model: Any, modules: list[Any]) -> list[torch.Tensor]:
    caught: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda m, args: caught.append(args[0])) for m in modules]
    logits(model)
    for hook in hooks:
        hook.remove()
    return caught


@pytest.mark.parametrize("family", LLAMAS)
def test_importance(family):
    """Minitron: the mean norm of a head's output; the mean absolute activation of a channel."""
    model = wide(family)
    heads, channels = pruning.head_importance(model, TOKENS), pruning.channel_importance(model, TOKENS)
    assert heads.shape == (3, 3)
    assert channels.shape == (3, 48)
    for i, x in enumerate(given_to(model, [b.self_attn.o_proj for b in model.model.layers])):
        for group in range(3):
            norms = [float(x[b, t, 16 * group : 16 * group + 16].norm()) for b in range(2) for t in range(24)]
            assert float(heads[i, group]) == pytest.approx(sum(norms) / 48)
    for i, x in enumerate(given_to(model, [b.mlp.down_proj for b in model.model.layers])):
        for c in (0, 7, 47):
            sizes = [abs(float(x[b, t, c])) for b in range(2) for t in range(24)]
            assert float(channels[i, c]) == pytest.approx(sum(sizes) / 48)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(LLAMAS)))
@pytest.mark.parametrize("name", ["keep_heads", "keep_channels", "head_importance", "channel_importance"])
def test_other_families_are_refused(family, name):
    with pytest.raises(ValueError, match=f"{name}: '{family}' models are not supported.*keep_layers"):
        getattr(pruning, name)(deep(family), [[0]] * 4 if name.startswith("keep") else TOKENS)


def test_heads_and_channels_that_do_not_fit_are_refused():
    model = wide("llama")
    for heads, message in (
        ([[0], [1]], "heads has 2 lists and the model 3 layers"),
        ([[0], [1], [3]], r"heads\[2\] is \[3\]: give ascending numbers from 0 to 2"),
        ([[0], [1], []], r"heads\[2\] is \[\]"),
        ([[0], [2, 1], [1]], r"heads\[1\] is \[2, 1\]"),
        ([[0], [1, 2], [1]], r"heads\[1\] has 2 numbers and heads\[0\] 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pruning.keep_heads(model, heads)
    with pytest.raises(ValueError, match=r"channels\[0\] is \[48\]: give ascending numbers from 0 to 47"):
        pruning.keep_channels(model, [[48]] * 3)


# -- vocabulary --------------------------------------------------------------------------------------------------------


def test_frequent_tokens():
    tokens = torch.tensor([[1, 1, 2, 0], [4, 2, 1, 0]])
    assert pruning.token_counts(tokens, 6).tolist() == [2, 3, 2, 0, 1, 0]
    counts = pruning.token_counts(tokens, 6, torch.tensor([3, 2]))
    assert counts.tolist() == [0, 2, 2, 0, 1, 0]
    assert pruning.token_counts(tokens[0], 6).tolist() == [1, 2, 1, 0, 0, 0]
    assert pruning.frequent_tokens(counts, 3) == [1, 2, 4]
    assert pruning.frequent_tokens(counts, 4) == [0, 1, 2, 4]  # of equal ones the lower id
    assert pruning.frequent_tokens(counts, 3, always=[5, 5]) == [1, 2, 5]
    assert counts.tolist() == [0, 2, 2, 0, 1, 0]
    for wrong, message in (
        ({"keep": 1, "always": [1, 2]}, "the 2 of always"),
        ({"keep": 2, "always": [6]}, r"always is \[6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            pruning.frequent_tokens(counts, **wrong)
    with pytest.raises(ValueError, match="tokens go from 0 to 4 and vocab_size is 4"):
        pruning.token_counts(tokens, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_keep_tokens(family):
    model = deep(family)
    ids = [5, 3, 90, 0]
    small = pruning.keep_tokens(model, ids)
    expected, got = logits(model), logits(small.model)
    assert got.shape == (2, 24, 4)
    assert torch.allclose(got, expected[..., ids], atol=1e-6 if expected.dtype == torch.float32 else 1e-12)
    assert small.model.get_input_embeddings().weight.shape[0] == 97
    assert small.model.get_output_embeddings().weight.shape[0] == 4
    full = small.full(got)
    assert full.shape == expected.shape
    assert torch.equal(full[..., ids], got)
    assert (full.isfinite().sum(-1) == 4).all()
    assert small.ids.tolist() == ids
    assert (small.model.config.get_text_config().vocab_size, small.vocab_size) == (4, 97)


def test_a_trimmed_model_is_not_taken_for_a_whole_one():
    """Its token k is ``ids[k]``: as a draft it would propose other tokens than it means."""
    model = deep("llama")
    small = pruning.keep_tokens(model, [5, 3, 90])
    with pytest.raises(ValueError, match="vocab"):
        sd.decoder(sd.HFModel(model)).draft(sd.HFModel(small.model)).build()
    with pytest.raises(ValueError, match="does not follow from its config"):
        pruning.keep_layers(small.model, [3])


def test_tokens_that_do_not_fit_are_refused():
    model = deep("llama")
    for ids in ([], [97], [-1], [3, 3]):
        with pytest.raises(ValueError, match="distinct tokens from 0 to 96"):
            pruning.keep_tokens(model, ids)
    with pytest.raises(ValueError, match="LlamaModel has no linear unembedding"):
        pruning.keep_tokens(model.model, [1])
