"""Captured steps over pages: the same numbers as over slots, whatever rows and pages do; recorded graphs stand for CUDA graphs.

Pages that nobody holds are NaN in all of these tests, the spare one, too: whoever reads one is found out.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter

import pytest
import torch
from fake_device import FakeDevice, onto
from stepped import LAWS, rounds, same
from tiny import tiny

import specdec as sd
from specdec.cache import paged
from specdec.cache.paged import PagedCache, PagePool
from specdec.cache.static import StaticStore
from specdec.cache.static_pool import StaticPool
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead, Pipelined, Serial, whole_rounds
from specdec.graphs import chain as chains
from specdec.graphs.static import table_of, tabulate
from specdec.graphs.whole_round import WholeRound
from specdec.models import shared_prompts
from specdec.models.stacked import StackedModel
from specdec.rng import Philox
from specdec.types import Verdict

LONG = [n % 90 for n in range(3, 73)]
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Every page is NaN until its row has written to it."""
    move, give = PagePool._move, PagePool.give

    def moves(self, blocks):
        have = self.pages
        move(self, blocks)
        with torch.inference_mode(False):
            for block in self._blocks:
                block[:, have:] = float("nan") if block.is_floating_point() else 0x7F

    def gives(self, pages):
        give(self, pages)
        with torch.inference_mode(False):
            for block in self._blocks:
                gone = [p for p in pages if not self.holders[p]]
                block[:, gone] = float("nan") if block.is_floating_point() else 0x7F

    monkeypatch.setattr(PagePool, "_move", moves)
    monkeypatch.setattr(PagePool, "give", gives)


def pair(page, how="recorded", seed=0, **changes):
    """A model over slots, and the same with captured steps over pages."""
    model = tiny("llama", seed, torch.float32, **{"num_hidden_layers": 1, **changes})
    return sd.HFModel(model), sd.HFModel(model, graphs=how, page=page)


def check(*cached):
    """Every page is free, or held by as many rows as the pool says; no row holds the spare one."""
    pool = cached[0].pool
    held = Counter(p for cache in cached for pages in cache._pages for p in pages)
    assert type(pool) is StaticPool
    assert sorted([*held, *pool.free]) == list(range(pool.pages))
    assert pool.holders == [held[p] for p in range(pool.pages)]


# -- steps -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "page"),
    [
        ("llama", 4),
        *(
            pytest.param(*both, marks=slow)
            for both in (("gemma2", 16), ("llama", 64), ("llama", 3), ("gemma2", 3))
        ),
        *(pytest.param(family, 3, marks=slow) for family in ("gpt2", "gpt_oss", "mistral")),
    ],
)
def test_steps_over_pages_say_what_slots_say(family, page):
    model = tiny(family, 0, torch.float32, num_hidden_layers=1 if family == "llama" else 2)
    eager, recorded = (sd.HFModel(model, graphs=how, page=page) for how in ("eager", "recorded"))
    a, b = rounds(eager), rounds(recorded)
    assert recorded.steps.why is None
    assert len(recorded.steps.captured) == 8
    assert all(program.store.page == page for program in recorded.steps.captured)
    same(a, rounds(sd.HFModel(model)), 5e-5)
    same(b, a, 0)  # the recording is the function, bit for bit
    same(rounds(recorded, 1), rounds(eager, 1), 0)  # other numbers and pages through the same recordings


def test_keys_and_values_of_eight_bits():
    model = tiny("llama", 0, torch.float32)
    plain, static = (
        sd.HFModel(model, kv_dtype=torch.float8_e4m3fn, **more)
        for more in ({}, {"graphs": "eager", "page": 4})
    )
    same(rounds(static), rounds(plain), 5e-5)
    assert len(static.steps.captured) == 8


def test_padding_writes_to_the_spare_page_and_nowhere_else():
    plain, static = pair(4)
    text = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    cache, other = static.cache(3, 32), plain.cache(3, 32)
    for _ in range(4):
        context, size = sd.Context.of(text, 32), torch.tensor([3, 0, 2])
        proposal = sd.Proposal.chain(torch.tensor([[3, 4, 5]] * 3), size)
        before = [block.clone() for block in cache.pool._whole] if cache.pool.pages else None
        out = static.score(cache, context, proposal).logits
        same([out], [plain.score(other, context, proposal).logits], 5e-5)
        if before is not None and before[0].shape == cache.pool._whole[0].shape:
            used = torch.zeros(cache.pool.pages + 1, 4, dtype=torch.bool)
            for b, row in enumerate(text):
                for slot in range(len(row) + int(size[b])):
                    used[cache.table(b)[slot // 4], slot % 4] = True
            used[-1, -1] = True  # the slot that padding goes to
            for now, then in zip(cache.pool._whole, before):
                assert now[:, ~used].nan_to_num(7).equal(then[:, ~used].nan_to_num(7))
        text = [[*row, 1] for row in text]
    (program,) = static.steps.captured
    assert program.store.spare == (cache.pool.pages + 1) * 4 - 1
    check(cache)


def test_a_table_is_written_anew_for_every_replay():
    """Rows that change places get each other's pages in the table, through one recording."""
    plain, static = pair(4)
    texts = [LONG[:9], LONG[20:34], LONG[40:43]]
    cache, other = static.cache(3, 64), plain.cache(3, 64)
    for turn in range(6):
        context = sd.Context.of(texts, 64)
        same([static.score(cache, context).logits], [plain.score(other, context).logits], 5e-5)
        if turn > 2:
            order = torch.tensor([2, 0, 1])
            cache, other = cache.select(order), other.select(order)
            texts = [texts[b] for b in order]
        texts = [[*row, turn] for row in texts]
    assert len(static.steps.captured) == 1
    (program,) = static.steps.captured
    table = program.staged.on["table"]
    assert table.dtype == torch.int32
    assert table.shape == (4, -(-program.bucket.length // 4))
    assert table.is_contiguous()
    assert table.data_ptr() % 16 == 0
    check(cache)


def test_pages_beyond_a_bucket_are_left_out():
    """A row may still hold pages of nodes that are not fed again."""
    plain, static = pair(2, "eager")
    text, parents = [LONG[:6], LONG[30:36]], torch.tensor([[-1, 0, 1, 2, 3, 4]] * 2)
    cache, other = static.cache(2, 300), plain.cache(2, 300)
    context, tokens = sd.Context.of(text, 300), torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 8, 7, 6]])
    proposal = sd.Proposal(tokens, parents, torch.tensor([6, 6]))
    few = sd.Proposal(tokens[:, :3], parents[:, :3], torch.tensor([3, 3]))
    for _ in range(3):
        found = []
        for model, held in ((static, cache), (plain, other)):
            model.score(held, context, proposal)
            found.append(model.score(held, context, few, start=2).logits)
        same(found[:1], found[1:], 5e-5)
    array = torch.ones(2, 3, dtype=torch.int32).numpy()
    tabulate(array, [[5, 6, 7, 8], [9]])
    assert array.tolist() == [[5, 6, 7], [9, 0, 0]]
    for page, pages in ((1, 256), (48, 6), (64, 4)):  # a bucket may end within a page
        pool = StaticPool(static._shapes, page)
        assert table_of(StaticStore(pool), 2, 256) == {"table": ("i4", (2, pages))}


# -- rows and pages that move ------------------------------------------------------------------------------------------------


TREES = {
    (-1, 0, 0, 1, 2, 4): ([0, 2, 4, 5], [0, 1, 3], [0, 2]),
    (-1, -1, 0, 1, 3, 4): ([1, 3, 4, 5], [0, 2], [1]),
}


def verdict(draw, parents, size, tokens):
    """A path of each row's tree, as far as its nodes exist, and a token more."""
    paths = []
    for row, n in zip(parents.tolist(), size.tolist()):
        path = draw.choice(TREES[tuple(row)])
        paths.append(path[: next((d for d, node in enumerate(path) if node >= n), len(path))])
    wide = max(map(len, paths))
    accepted = torch.tensor([len(path) for path in paths])
    path = torch.tensor([[*p, *[-1] * (wide - len(p))] for p in paths]).view(len(paths), wide)
    new = torch.zeros(len(paths), wide + 1, dtype=torch.long)
    for b, p in enumerate(paths):
        bonus = draw.randint(0, 90)
        new[b, : len(p) + 1] = torch.tensor([*(int(tokens[b, node]) for node in p), bonus])
    return Verdict(path, accepted, new.gather(1, accepted[:, None])[:, 0], new)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
def test_rows_that_move_leave_join_and_share(seed, grows, monkeypatch):
    """Trees whose nodes move, rows that leave, join, share a prompt, become copies of others or are rolled back; pools that grow."""
    draw, (plain, static) = random.Random(seed), pair(4, "eager")
    monkeypatch.setattr(shared_prompts, "LEAST", 8)
    if grows:
        monkeypatch.setattr(
            PagePool, "_grow", lambda self, lack, reserve, rows: self._extend(self.pages + lack)
        )
        monkeypatch.setattr(PagePool, "reserve", lambda self, count: None)
    texts = [LONG[:18], LONG[:18], LONG[40:45], [*LONG[:12], 1]]
    cache, other = static.cache(4, 200), plain.cache(4, 200)
    replayed = moved = 0
    for turn in range(40):
        B = len(texts)
        context, size = sd.Context.of(texts, 200), torch.tensor([draw.choice([6, 6, 6, 2]) for _ in texts])
        parents = torch.tensor([draw.choice(list(TREES)) for _ in texts])
        proposal = sd.Proposal(
            torch.tensor([[draw.randint(0, 90) for _ in range(6)] for _ in texts]), parents, size
        )
        if turn % 3 == 2:
            proposal = None
        where, count = cache.pool._whole, len(static.steps.captured)
        said = [m.score(c, context, proposal).logits for m, c in ((static, cache), (plain, other))]
        same(said[:1], said[1:], 5e-5)
        check(cache)
        moved += where is not cache.pool._whole
        replayed += count > 0 and where is cache.pool._whole
        for storage in static.steps._storages:  # nothing is kept of memory that was left
            assert storage.free or storage.whole is cache.pool._whole
        for program in static.steps.captured:
            assert program.store.layers[0][0].data_ptr() in {
                s.whole[0].data_ptr() for s in static.steps._storages
            }
        if proposal is None:
            texts = [[*row, draw.randint(0, 90)] for row in texts]
        else:
            found = verdict(draw, parents, size, proposal.tokens)
            for c in (cache, other):
                c.commit(context, found)
            texts = [
                row + found.tokens[b, : int(found.accepted[b]) + 1].tolist() for b, row in enumerate(texts)
            ]
        event = draw.random()
        if event < 0.15 and B > 2:
            stay = torch.tensor(draw.sample(range(B), B - 1))
            cache, other, texts = cache.select(stay), other.select(stay), [texts[b] for b in stay]
        elif event < 0.3 and B < 5:
            new, twice = [*LONG[:16], draw.randint(0, 90), 4], draw.random() < 0.5
            more, fresh = (cache.beside(2, 200) if twice else static.cache(2, 200)), plain.cache(2, 200)
            for model, c in ((static, more), (plain, fresh)):
                model.prefill(c, sd.Context.of([new, new], 200))
            cache, other, texts = cache.join(more), other.join(fresh), [*texts, new, new]
            del more, c
        elif event < 0.45:
            a, b = draw.sample(range(B), 2)
            for c in (cache, other):
                c.take(a, c, b)
            texts[a] = list(texts[b])
        elif event < 0.6:
            texts[0] = [*texts[0][: max(2, len(texts[0]) - 6)], 5]
        texts = [row if len(row) < 150 else row[:30] for row in texts]
    assert replayed > (5 if grows else 12)
    assert moved > (4 if grows else 0)
    assert static.steps.why is None


def test_a_pool_that_grows_leaves_no_program_and_no_memory_behind(monkeypatch):
    plain, static = pair(4)
    text = [LONG[:6], LONG[30:33]]
    cache, other = static.cache(2, 200), plain.cache(2, 200)
    monkeypatch.setattr(
        PagePool, "_grow", lambda self, lack, reserve, rows: self._extend(self.pages + lack + 2)
    )
    sizes = []
    for turn in range(24):
        context = sd.Context.of(text, 200)
        same([static.score(cache, context).logits], [plain.score(other, context).logits], 5e-5)
        sizes.append((cache.pool.pages, len(static.steps.captured)))
        (storage,) = static.steps._storages
        assert storage.whole is cache.pool._whole
        assert storage.store.layers[0][0].data_ptr() == cache.pool.layers[0][0].data_ptr()
        text = [[*row, turn] for row in text]
    grown = [i for i in range(1, 24) if sizes[i][0] > sizes[i - 1][0]]
    assert len(grown) >= 3
    assert all(sizes[i][1] == 0 for i in grown)  # captured when the shape occurs again
    assert sum(n for _, n in sizes) >= 10


# -- memory ------------------------------------------------------------------------------------------------------------------


def count_captures(model):
    made, capture = [], model.steps.capture
    model.steps.capture = lambda body: made.append(body) or capture(body)
    return made


def test_the_next_text_captures_nothing_again():
    _, static = pair(4, "eager")
    made, decoder = count_captures(static), sd.decoder(static).greedy().build()
    prompts = [LONG[:40], LONG[:5], LONG[30:33]]
    first = decoder.generate(prompts, 12).ids
    assert decoder.generate(prompts, 12).ids == first  # shapes that have occurred once
    once = len(made)
    assert once
    for _ in range(2):
        gc.collect()
        assert all(storage.free for storage in static.steps._storages)
        assert decoder.generate(prompts, 12).ids == first
    assert len(made) == once
    shorter = decoder.generate([LONG[:30], LONG[:5], LONG[30:33]], 8).ids
    assert len(made) == once
    assert (
        shorter == sd.decoder(pair(4)[0]).greedy().build().generate([LONG[:30], LONG[:5], LONG[30:33]], 8).ids
    )
    decoder.generate([LONG[:40] * 3, LONG[:5], LONG[30:33]], 12)  # which needs a larger pool
    assert len(made) > once
    assert len(static.steps._storages) == 1


def test_memory_is_lent_to_one_pool_at_a_time():
    _, static = pair(4, "eager")
    contexts = [sd.Context.of([LONG[:n]], 40) for n in (20, 21, 22)]
    one, two = static.cache(1, 40), static.cache(1, 40)
    for context in contexts:
        for cache in (one, two):
            static.score(cache, context)
    where = {id(cache.pool._whole) for cache in (one, two)}
    assert len(where) == 2
    left = one.select(torch.tensor([0, 0]))  # which has the pool of the first
    del one, cache
    gc.collect()
    three = static.cache(1, 40)
    static.score(three, contexts[0])
    assert id(three.pool._whole) not in where
    del two
    gc.collect()
    for block in static.steps._storages[1].whole:
        block.fill_(3)
    four = static.cache(1, 40)
    assert four.pool.pages == 0  # nothing is taken before rows need it
    static.score(four, contexts[0])
    assert id(four.pool._whole) in where
    assert four.pool.lease is not left.pool.lease
    check(four)
    small = four.pool.pages
    del four, three, left
    gc.collect()
    wide = static.cache(8, 40)
    static.score(wide, sd.Context.of([LONG[:20]] * 8, 40))
    assert wide.pool.pages > small
    (storage,) = static.steps._storages  # free memory goes before more is taken
    assert storage.whole is wide.pool._whole


def test_lent_pages_are_zeros_and_other_page_sizes_are_not_lent(monkeypatch):
    monkeypatch.undo()  # nothing is NaN
    model = tiny("llama", 0, torch.float32)
    static = sd.HFModel(model, graphs="eager", page=4)
    cache = static.cache(1, 40)
    for n in (20, 21):
        static.score(cache, sd.Context.of([LONG[:n]], 40))
    assert any(bool(block.any()) for block in cache.pool._whole)
    steps, pages = static.steps, cache.pool.pages
    assert steps._pages(4, pages) is None  # in use
    del cache
    gc.collect()
    assert len(steps._storages) == 1
    kept = steps._storages[0].whole
    pool = steps._pages(4, pages)
    assert pool._whole is kept
    assert not any(bool(block.any()) for block in kept)
    assert pool.pages == pages
    del pool
    gc.collect()
    assert steps._pages(8, pages) is None
    assert steps._storages == []


def test_kept_memory_needs_no_more_and_the_spare_page_is_counted(monkeypatch):
    _, static = pair(4, "eager")
    each = 4 * static.bytes_per_token()
    asked = []
    monkeypatch.setattr(paged, "free_bytes", lambda device: asked.append(device) or room[0])
    context = sd.Context.of([LONG[:20]], 40)
    for pages, fits in ((10, False), (11, True)):
        room = [pages * each]
        cache = static.cache(1, 40)
        static.score(cache, context)  # 20 tokens and 20 more
        assert (cache.pool.pages == 10) == fits
    assert cache.pool.bytes == 11 * each
    room = [5 * each]
    with pytest.raises(MemoryError, match=r"needs 5 pages.*: 4 pages would fit, 16 tokens"):
        static.score(static.cache(1, 40), context)
    static.score(cache, sd.Context.of([LONG[:21]], 40))
    del cache
    gc.collect()
    asked.clear()
    room = [0]
    cache = static.cache(1, 40)
    static.score(cache, context)
    assert not asked
    assert cache.pool.pages == 10


def test_a_pool_grows_into_kept_memory():
    """A pool that is too small takes memory that is free, with what was captured on it."""
    plain, static = pair(4, "eager")
    large = static.cache(2, 100)
    for n in (20, 21):
        static.score(large, sd.Context.of([LONG[:n]] * 2, 100))
    kept = large.pool._whole
    small, other = static.cache(2, 20), plain.cache(2, 100)
    text = [LONG[:16], LONG[30:37]]
    context = sd.Context.of(text, 20)
    same([static.score(small, context).logits], [plain.score(other, context).logits], 5e-5)
    static.score(small, context)
    old = small.pool._whole
    assert old is not kept
    del large
    gc.collect()
    more = small.beside(3, 40)
    static.score(more, sd.Context.of([LONG[:30]] * 3, 40))
    assert small.pool._whole is kept
    assert {id(s.whole) for s in static.steps._storages if not s.free} == {id(kept)}
    context = sd.Context.of([[*row, 7] for row in text], 20)
    same([static.score(small, context).logits], [plain.score(other, context).logits], 5e-5)
    check(small, more)


def test_memory_is_free_once_its_pool_has_grown_out_of_it():
    """Also where the forward that needed more was no step."""
    _, static = pair(4, "eager", max_position_embeddings=512)
    cache = static.cache(1, 40)
    for n in (20, 21, 22):
        static.score(cache, sd.Context.of([LONG[:n]], 40))
    (storage,) = static.steps._storages
    assert not storage.free
    blocks = weakref.ref(storage.whole[0])
    del storage
    other = cache.beside(1, 200)
    static.prefill(other, sd.Context.of([LONG[:70] * 2], 200))
    assert static.steps._storages == []
    assert blocks() is None
    more = cache.beside(1, 400)
    static.prefill(more, sd.Context.of([LONG[:70] * 5], 400))
    check(cache, other, more)


def test_texts_that_grow_from_call_to_call_are_seldom_captured_again():
    _, static = pair(4, "eager", max_position_embeddings=512)
    decoder, captured, places = sd.decoder(static).build(), set(), set()
    for turn in range(24):
        decoder.generate([LONG[: 20 + 2 * turn], LONG[: 10 + 2 * turn]], 4, seed=0, eos_token_id=())
        captured |= set(static.steps.captured)
        places |= {storage.whole[0].data_ptr() for storage in static.steps._storages}
    assert captured
    assert len(places) < 12


def test_models_are_freed_without_the_collector():
    _, static = pair(4, "eager")
    cache = static.cache(1, 40)
    for n in (20, 21, 22):
        static.score(cache, sd.Context.of([LONG[:n]], 40))
    steps, blocks = weakref.ref(static.steps), weakref.ref(cache.pool._whole[0])
    assert static.steps.captured
    gc.collect()
    gc.disable()
    try:
        del cache, static
        assert steps() is None
        assert blocks() is None
    finally:
        gc.enable()


def test_pools_without_a_spare_page_are_read_without_steps():
    plain, static = pair(4, "eager")
    cache, other = PagedCache(PagePool(static._shapes, 4), 1, 40), plain.cache(1, 40)
    for n in range(20, 25):
        context = sd.Context.of([LONG[:n]], 40)
        same([static.score(cache, context).logits], [plain.score(other, context).logits], 5e-5)
    assert static.steps._storages == []


# -- drafts and executors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "how"),
    [(LAWS[2], "eager"), *(pytest.param(LAWS[i], "recorded", marks=slow) for i in (0, 2))],
)
def test_a_captured_chain_over_pages_is_the_loop(sampling, how, monkeypatch):
    model = tiny("llama", 1, torch.float32, num_hidden_layers=1)
    monkeypatch.setattr(shared_prompts, "LEAST", 4)
    loop, chain = (
        sd.drafts.Model(wrapped).bind(wrapped, sampling)
        for wrapped in (sd.HFModel(model), sd.HFModel(model, graphs=how, page=3))
    )
    text = [LONG[:11], [7, 8], [9, 10, 11], LONG[:11]]
    context, rng = sd.Context.of(text, 64), Philox(torch.tensor([5, 6, 7, 8]))
    one, two = loop.init(context, None), chain.init(context, None)
    replayed = 0
    for step in range(14):
        some = [[3, 3, 3, 3], [3, 1, 2, 3], [0, 2, 3, 1]][step % 3 if step > 5 else 0]
        budget = torch.tensor(some)[: context.batch]
        a, one = loop.propose(one, context, budget, rng)
        b, two = chain.propose(two, context, budget, rng)
        replayed += any(isinstance(p, chains.Chain) for p in chain.model.steps.captured)
        live = torch.arange(a.nodes) < budget[:, None]
        assert a.tokens[live].equal(b.tokens[live])
        if a.probs is not None:
            same([b.probs[live]], [a.probs[live]], 1e-5)
        assert one.cache._lengths == two.cache._lengths
        assert one.cache._fed == two.cache._fed
        check(two.cache)
        text = [row + [int(t)] + ([9] if step % 2 else []) for row, t in zip(text, a.tokens[:, 0])]
        if step == 5:
            stay = torch.tensor([3, 0, 2])
            text, rng = [text[b] for b in stay], rng.select(stay)
            one, two = loop.select(one, stay), chain.select(two, stay)
        context = sd.Context.of(text, 64)
    assert replayed > 6
    assert chain.model.steps.why is None


def test_a_finished_row_at_the_end_of_its_table():
    """The chain goes on for other rows: what it would read of this one is beyond its pages."""
    model = tiny("llama", 1, torch.float32, num_hidden_layers=1, max_position_embeddings=512)
    both = [sd.HFModel(model), sd.HFModel(model, graphs="eager", page=4)]
    parts = [sd.drafts.Model(one).bind(one, LAWS[0]) for one in both]
    text = [[*LONG * 4][:254], [7, 8]]
    states = [part.init(sd.Context.of(text, 300), None) for part in parts]
    for turn in range(3):
        context, tokens = sd.Context.of(text, 300), []
        for i, part in enumerate(parts):
            proposal, states[i] = part.propose(
                states[i], context, torch.tensor([1, 3]), Philox(torch.tensor([5, 6]))
            )
            tokens.append([proposal.tokens[0, 0].item(), *proposal.tokens[1].tolist()])
        assert tokens[0] == tokens[1]
        if turn < 2:
            text = [[*row, 3] for row in text]
    assert len(text[0]) == 256
    (program,) = [p for p in both[1].steps.captured if isinstance(p, chains.Chain)]
    assert program.shape.length == 256


DRAFTS = {
    "none": None,
    "model": sd.drafts.Model,
    "tree": lambda small: sd.drafts.Tree(small, (2, 1, 1)),
    "ngram": lambda small: sd.drafts.NGram(),
}


def decoder_of(draft, how, page, on=lambda model: model):
    target, small = (
        sd.HFModel(on(tiny("llama", seed, torch.float32, num_hidden_layers=1)), graphs=how, page=page)
        for seed in (0, 1)
    )
    if draft == "spire":
        made = sd.drafts.Spire(SpireModel.from_target(target, layers=1, window=8), block=3, graphs=how)
    else:
        made = None if DRAFTS[draft] is None else DRAFTS[draft](small)
    builder = sd.decoder(target)
    return builder if made is None else builder.draft(made, 3)


@pytest.mark.parametrize(
    "draft", ["tree", "spire", *(pytest.param(draft, marks=slow) for draft in DRAFTS if draft != "tree")]
)
def test_decoders_say_the_same(draft):
    prompts = [LONG[:40], LONG[:40], [7, 8], LONG[:30]]
    texts = []
    for how, page in ((False, None), ("eager", 4)):
        decoder = decoder_of(draft, how, page).sampling(temperature=1.0).build()
        texts.append([decoder.generate(prompts, [14, 6, 9, 14], seed=seed).ids for seed in (1, 2)])
    assert texts[0] == texts[1]
    assert decoder.target.steps.captured


@pytest.mark.parametrize(
    ("draft", "executor"),
    [
        ("model", Pipelined(2)),
        *(
            pytest.param(*both, marks=slow)
            for both in (("tree", Pipelined(2)), ("tree", Serial()), ("model", Serial()))
        ),
    ],
)
def test_threads_and_streams_of_requests(draft, executor):
    prompts = [LONG[:9], [7, 8], LONG[:30], [4]]
    expected = decoder_of(draft, False, None).greedy().build().generate(prompts, 10).ids
    decoder = decoder_of(draft, "eager", 4).greedy().executor(executor).build()
    for capacity in (None, 60):  # with it, micro-batches share a pool
        assert decoder.generate(prompts, 10).ids == expected
        stream = decoder.serve([sd.Request(p, 10) for p in prompts], limit=2, capacity=capacity)
        served = {f.index: f.ids for f in stream}
        assert [served[i] for i in range(4)] == expected
    assert decoder.target.steps.captured


def ahead_of(draft, how, page, verifier=sd.Coupled, on=lambda model: model):
    """Whole rounds of a target in pages; a draft has slots."""
    raw = [on(tiny("llama", seed, torch.float32, num_hidden_layers=1)) for seed in (0, 1)]
    target, small = sd.HFModel(raw[0], graphs=how, page=page), sd.HFModel(raw[1], graphs=how)
    made = {
        "none": lambda: None,
        "model": lambda: sd.drafts.Model(small),
        "windowed": lambda: sd.drafts.Model(sd.models.Windowed(target, 16, 2)),
        "spire": lambda: sd.drafts.Spire(
            SpireModel.from_target(target, layers=1, window=8), block=3, graphs=how
        ),
    }[draft]()
    builder = sd.decoder(target).verifier(verifier()).sampling(temperature=1.0)
    return builder if made is None else builder.draft(made, 3)


@pytest.mark.parametrize(
    ("draft", "how"),
    [
        ("model", "eager"),
        *(pytest.param(draft, "recorded", marks=slow) for draft in ("none", "model", "windowed", "spire")),
    ],
)
def test_whole_rounds_over_pages(draft, how, monkeypatch):
    """Rows that share a prompt and leave at different times; a bucket ends within a text."""
    monkeypatch.setattr(shared_prompts, "LEAST", 8)
    monkeypatch.setattr(whole_rounds, "SHORTEST", 16)
    verifier = sd.Rejection if draft == "model" else sd.Coupled
    prompts = [LONG[:21], LONG[:21], [7, 8], LONG[:18]]
    new = [12, 25, 9, 18]
    expected = ahead_of(draft, False, None, verifier).build().generate(prompts, new, seed=4).ids
    decoder = ahead_of(draft, how, 4, verifier).executor(Ahead()).build()
    for turn in range(3):
        said = decoder.generate(prompts, new, seed=4).ids
        assert said == expected
        assert decoder.target.steps.why is None
        if turn == 1:
            made = count_captures(decoder.target)
    assert not made
    rounds = [p for p in decoder.target.steps.captured if isinstance(p, WholeRound)]
    assert len({p.shape.length for p in rounds}) > 1
    assert all("table" in p.staged.on and p.target.store.page == 4 for p in rounds)


@slow
def test_whole_rounds_over_pages_wait_once(monkeypatch):
    monkeypatch.undo()  # to write NaN waits
    prompts = [LONG[:9], [7, 8]]
    expected = ahead_of("model", False, None).build().generate(prompts, 14, seed=3).ids
    seen: list[int] = []
    with FakeDevice() as device:
        decoder = ahead_of("model", "eager", 2, on=onto).executor(Ahead()).build()
        said = decoder.generate(prompts, 14, seed=3, on_round=lambda _: seen.append(device.waits.total())).ids
    middle = len(seen) // 2
    assert said == expected
    assert seen[middle] - seen[middle - 1] == 1, device.waits


def test_whole_rounds_refuse_a_draft_in_pages():
    raw = [tiny("llama", seed, torch.float32, num_hidden_layers=1) for seed in (0, 1)]
    target, small = (sd.HFModel(model, graphs="eager", page=4) for model in raw)
    builder = sd.decoder(target).draft(small, 3).executor(Ahead())
    with pytest.raises(
        ValueError, match=r"Ahead\(\) needs a draft's keys and values in slots.* pages of 4 tokens"
    ):
        builder.build()


@pytest.mark.parametrize(
    ("draft", "how"),
    [
        ("tree", "eager"),
        *(pytest.param(draft, "eager", marks=slow) for draft in ("none", "model", "ngram")),
        *(pytest.param(draft, False, marks=slow) for draft in DRAFTS),
    ],
)
def test_a_round_over_pages_waits_once(draft, how, monkeypatch):
    monkeypatch.undo()  # to write NaN waits
    prompts = [[1, 2, 3, 4], [7, 8]]
    expected = (
        decoder_of(draft, False, None).sampling(temperature=1.0).build().generate(prompts, 12, seed=3).ids
    )
    seen: list[int] = []
    with FakeDevice() as device:
        decoder = decoder_of(draft, how, 2, onto).sampling(temperature=1.0).build()
        said = decoder.generate(prompts, 12, seed=3, on_round=lambda _: seen.append(device.waits.total())).ids
    middle = len(seen) // 2
    assert said == expected
    assert seen[middle] - seen[middle - 1] == 1, device.waits
    assert how is False or decoder.target.steps.captured


def test_a_stack_has_no_steps(monkeypatch):
    """Which member reads a row is known on the host only, also where the default is graphs."""
    monkeypatch.setattr(
        "specdec.graphs.programs.capture_named", lambda graphs, *_: None if graphs is False else "eager"
    )
    members = [sd.HFModel(tiny("llama", seed, torch.float32)) for seed in (0, 1)]
    assert members[0].steps is not None
    assert StackedModel(members).steps is None
