"""Pruners of keys and values against their papers' definitions, written out with loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import max_pool1d, scaled_dot_product_attention

from specdec import pruning
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
