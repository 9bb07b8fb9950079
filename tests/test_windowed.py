"""Constant-size KV: the ring's arithmetic by brute force, and logits equal to the plain model's under a dense mask."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_masked import decoded, plain, seen_by
from tiny import tiny

import specdec as sd
from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.masks import streaming
from specdec.models.windowed import Windowed

SHAPE = KVShape(1, 1, 1, torch.float64, torch.device("cpu"))
LIKE_LLAMA = ["llama", "mistral", "qwen2", "qwen3"]
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


@cache
def shown(window: int, sinks: int) -> torch.Tensor:
    return seen_by(streaming(window, sinks), 120)


def dense(model: Any, text: list[int], window: int, sinks: int) -> torch.Tensor:
    """``[L, V]``: the plain model under a dense mask of its own window (mistral), the sinks and the window."""
    return plain(model, text, shown(window, sinks)[: len(text), : len(text)])


# -- the ring ----------------------------------------------------------------------------------------------------------


def survives(sinks: int, window: int, block: int, size: int, seed: int) -> bool:
    """Write blocks ahead, take back some of each, and look whether every query found what it sees."""
    draw = np.random.default_rng(seed)
    ring = Ring([SHAPE], 1, sinks, window, block)
    ring.size = size
    content: dict[int, int] = {}
    first = 0  # the earliest position that may be asked
    while first < 60:
        last = first + int(draw.integers(1, block + 1))
        for p in range(first, last):
            content[int(ring.slot(np.array(p)))] = p
        for q in range(first, last):
            wanted = {p for p in range(q + 1) if p > q - window or p < sinks}
            seen = ring.visible(np.array([q]))[0].nonzero()[0].tolist()
            if {content.get(s) for s in seen} != wanted or len(seen) != len(wanted):
                return False
        first = int(draw.integers(first + 1, last + 1))
    return True


@pytest.mark.parametrize(
    ("sinks", "window", "block"), [(0, 1, 1), (1, 4, 3), (2, 3, 5), (3, 1, 2), (1, 8, 1), (5, 2, 4)]
)
def test_the_ring_is_as_large_as_it_must_be_and_no_larger(sinks, window, block):
    enough = window + block - 1
    assert all(survives(sinks, window, block, enough, seed) for seed in range(40))
    assert enough == 1 or not all(survives(sinks, window, block, enough - 1, seed) for seed in range(40))


@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_safe_says_whether_all_that_a_query_sees_is_there(sinks, window, block, data):
    ring = Ring([SHAPE], 1, sinks, window, block)
    highest = data.draw(st.integers(0, 40))
    query = data.draw(st.integers(min(sinks, highest), highest))
    content = {int(ring.slot(np.array(p))): p for p in range(highest + 1)}
    wanted = {p for p in range(query + 1) if p > query - window or p < sinks}
    assert ring.safe(highest, query) == (wanted <= set(content.values()))


def test_entries_written_at_positions_are_seen_there():
    ring = Ring([SHAPE] * 2, 3, 1, 4, 2)
    for position in range(9):
        rows, positions = torch.arange(3), torch.tensor([position, position + 1, position + 2])
        at = ring.at(rows, positions)
        for layer in range(2):
            value = (100.0 * layer + 10 * positions + rows)[:, None, None].double()
            ring.put(layer, at, value, -value)
    assert ring.layers[0][0].shape == (3, 1 + 4 + 2 - 1, 1, 1)
    seen = ring.visible(np.array([8, 9, 10]))
    held = ring.held(np.array([8, 9, 10]))
    for b, q in enumerate((8, 9, 10)):
        at = seen[b].nonzero()[0]
        assert sorted(held[b, at].tolist()) == [0, *range(q - 3, q + 1)]
        late = at[held[b, at] >= max(b, 1)]  # rows 1 and 2 were not given position 0
        assert ring.layers[1][0][b, late, 0, 0].tolist() == [100 + 10 * p + b for p in held[b, late]]
        assert ring.layers[1][1][b, late, 0, 0].tolist() == [-100 - 10 * p - b for p in held[b, late]]
    swapped = ring.select(torch.tensor([2, 0]))
    assert swapped.layers[0][0][0, 1:, 0, 0].tolist() == ring.layers[0][0][2, 1:, 0, 0].tolist()


@pytest.mark.parametrize(
    ("window", "sinks", "block", "what"),
    [
        (0, 1, 4, "window is 0"),
        (-3, 1, 4, "window is -3"),
        (4, -1, 4, "sinks is -1"),
        (4, 1, 0, "block is 0"),
    ],
)
def test_numbers_that_leave_nothing_to_see_are_refused(window, sinks, block, what):
    with pytest.raises(ValueError, match=what):
        Ring([SHAPE], 1, sinks, window, block)
    with pytest.raises(ValueError, match=what):
        Windowed(sd.HFModel(tiny("llama")), window, sinks, block=block)


# -- the model ---------------------------------------------------------------------------------------------------------


PROMPTS = [[5], [7, 3, 1, 8, 8, 2, 40, 41], list(range(50, 85)), [9, 9, 1]]


@pytest.mark.parametrize(
    ("family", "window", "sinks"),
    [
        pytest.param(family, *seen, marks=() if (i + j) % 4 == 1 else pytest.mark.slow)
        for i, family in enumerate(LIKE_LLAMA)
        for j, seen in enumerate(((1, 0), (2, 1), (5, 1), (12, 3)))
    ],
)
def test_logits_are_the_plain_models_under_a_dense_mask(family, window, sinks):
    llama = tiny(family, num_hidden_layers=3)
    model = Windowed(sd.HFModel(llama, prefill_chunk=16), window, sinks, block=4)
    llama.set_attn_implementation("sdpa")  # eager attention rounds to float32
    decoded(model, llama, shown(window, sinks), rounds=15)


@pytest.fixture(scope="module")
def llama() -> Any:
    model = tiny("llama", num_hidden_layers=3)
    model.set_attn_implementation("sdpa")
    return model


def last_logits_match(model: Windowed, plain: Any, cache: Any, texts: list[list[int]]) -> None:
    logits = model.score(cache, sd.Context.of(texts, capacity=200)).logits[:, -1]
    for b, text in enumerate(texts):
        torch.testing.assert_close(logits[b], dense(plain, text, model.window, model.sinks)[-1], **TIGHT)


def test_a_long_text_and_its_nodes_can_be_fed_at_once_and_the_nodes_taken_back(llama):
    model = Windowed(sd.HFModel(llama, prefill_chunk=16), 6, 1, block=4)
    texts = [PROMPTS[2], PROMPTS[1]]
    cache, context = model.cache(2, 200), sd.Context.of(texts, capacity=200)
    nodes = sd.Proposal.chain(torch.full((2, 4), 11), torch.tensor([4, 4]))
    logits = model.score(cache, context, nodes).logits
    for b, text in enumerate(texts):
        want = dense(llama, text + [11] * 4, 6, 1)[len(text) - 1 :]
        torch.testing.assert_close(logits[b], want, **TIGHT)
    nothing = torch.zeros(2, dtype=torch.long)
    cache.commit(context, sd.Verdict.of(nodes, torch.full((2, 4), -1), nothing, nothing))
    last_logits_match(model, llama, cache, [[*text, 3] for text in texts])
    assert cache.sync(sd.Context.of([[*text, 3] for text in texts])).tolist() == [35, 8]


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_text_may_change_anywhere_and_rows_may_leave_and_move(llama, data):
    """What the ring no longer has is fed again; what it has is not."""
    model = Windowed(sd.HFModel(llama, prefill_chunk=16), 5, 2, block=4)
    texts = [list(range(3, 40)), [7] * 9, [5, 6, 7] * 8]
    cache = model.cache(3, 200)
    model.prefill(cache, sd.Context.of(texts, capacity=200))
    for token in range(1, 4):
        order = data.draw(st.permutations(range(len(texts))))[: data.draw(st.integers(1, len(texts)))]
        cuts = [data.draw(st.integers(max(1, len(texts[b]) - 8), len(texts[b]))) for b in order]
        if data.draw(st.booleans()):
            cuts[0] = data.draw(st.integers(1, len(texts[order[0]])))
        cache = cache.select(torch.tensor(order))
        texts = [texts[b][:cut] + [token] * data.draw(st.integers(0, 6)) for b, cut in zip(order, cuts)]
        last_logits_match(model, llama, cache, texts)


def test_what_was_taken_back_within_the_block_is_not_fed_again(llama):
    model = Windowed(sd.HFModel(llama), 5, 2, block=4)
    cache = model.cache(1, 200)
    text = list(range(3, 40))
    model.score(cache, sd.Context.of([text]))
    assert cache.sync(sd.Context.of([[*text[:-3], 1]])).tolist() == [len(text) - 3]
    assert cache.sync(sd.Context.of([[*text[:-9], 1]])).tolist() == [0]


def test_rows_that_move_keep_what_they_know_of_their_ring(llama):
    """After rows change places, the long one, taken back further than its ring reaches, is fed again; the short one is not."""
    model = Windowed(sd.HFModel(llama), 5, 2, block=4)
    long, short = list(range(3, 40)), [7] * 9
    cache = model.cache(2, 200)
    model.score(cache, sd.Context.of([long, short]))
    cache = cache.select(torch.tensor([1, 0]))
    assert cache.sync(sd.Context.of([short[:-1], [*long[:-9], 1]])).tolist() == [7, 0]


def test_memory_does_not_grow_with_the_text(llama):
    model = Windowed(sd.HFModel(llama), 64, 1, block=4)
    short, long = model.cache(2, 100), model.cache(2, 100_000)
    assert [k.shape for k, _ in short.layers] == [k.shape for k, _ in long.layers] == [(2, 68, 2, 8)] * 3


def test_what_cannot_be_windowed_is_refused(llama):
    whole = sd.HFModel(llama)
    with pytest.raises(ValueError, match="'gptj' runs padded"):
        Windowed(sd.HFModel(tiny("gptj")), 4)
    with pytest.raises(TypeError, match="has a mask already"):
        Windowed(Windowed(whole, 4), 4)
    with pytest.raises(TypeError, match="give an HFModel"):
        Windowed(sd.TableModel.random(5), 4)  # type: ignore[arg-type]
    model = Windowed(whole, 4, block=2)
    cache, context = model.cache(1, 20), sd.Context.of([[1, 2, 3]], capacity=20)
    with pytest.raises(ValueError, match="make it with block=3"):
        model.score(cache, context, sd.Proposal.chain(torch.tensor([[1, 2, 3]]), torch.tensor([3])))
    tree = sd.Proposal(torch.tensor([[1, 2]]), torch.tensor([[-1, -1]]), torch.tensor([2]))
    with pytest.raises(ValueError, match="chains only"):
        model.score(cache, context, tree)


def test_a_windowed_target_is_decoded_like_any_other(llama):
    """Its distribution is that of the windowed model: plain decoding and speculation agree on it."""
    target = Windowed(sd.HFModel(llama), 6, 1)
    small = Windowed(sd.HFModel(tiny("llama", seed=1)), 4, 1)
    for sampling, verifier in (({"temperature": 0.0}, sd.Rejection()), ({"temperature": 0.7}, sd.Coupled())):
        base = sd.decoder(target).sampling(**sampling).verifier(verifier)  # type: ignore[arg-type]
        plain = base.build().generate(PROMPTS, [20, 5, 30, 9], seed=[1, 2, 3, 4]).ids
        assert (
            base.draft(small, length=4).build().generate(PROMPTS, [20, 5, 30, 9], seed=[1, 2, 3, 4]).ids
            == plain
        )
    text = [*PROMPTS[1], *plain[1]]
    assert len(text) == 13


def test_taps_come_from_the_windowed_forward(llama):
    model = Windowed(sd.HFModel(llama, prefill_chunk=16), 5, 1)
    fed = model.score(model.cache(4, 60), sd.Context.of(PROMPTS), taps=(0, 3)).fed
    assert fed is not None
    assert fed.layers[3].shape == (len(fed.row), 32) == (sum(map(len, PROMPTS)), 32)
    with torch.inference_mode():
        norm, head = llama.model.norm, llama.lm_head
        logits = head(norm(fed.layers[3]))
    at = [i for i, b in enumerate(fed.row.tolist()) if b == 2]
    torch.testing.assert_close(logits[at], dense(llama, PROMPTS[2], 5, 1), **TIGHT)
