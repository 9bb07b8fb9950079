"""KV in pages against KV in slots: the same texts whatever rows do, in memory that follows the sum of their lengths.

Pages that nobody holds are NaN in all of these tests: whoever reads one is found out.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny

import specdec as sd
from specdec import tree
from specdec.cache import paged
from specdec.cache.paged import PagedCache, PagePool
from specdec.cache.slots import KVShape
from specdec.drafts.spire import SpireModel
from specdec.executors import Optimistic
from specdec.kernels.attention import AttentionPlan, Tree, attention
from specdec.kernels.native import library, reason
from specdec.models import HFModel
from specdec.serving.server import Server
from specdec.serving.settings import Settings
from specdec.types import Context, Proposal, Verdict

LONG = [n % 90 for n in range(3, 153)]
ROWS = [[5], LONG, [7, 8, 9] * 5, [90, 2]]
SHAPE = KVShape(2, 4, 4, torch.float64, torch.device("cpu"))


@pytest.fixture(autouse=True, scope="module")
def poison():
    """Every page is NaN until its row has written to it."""
    become, give = PagePool._become, PagePool.give

    def becomes(self, pages):
        have = self.pages
        become(self, pages)
        for block in self._blocks:
            block[:, have:] = float("nan")

    def gives(self, pages):
        give(self, pages)
        with torch.inference_mode(False):
            for block in self._blocks:
                block[:, [p for p in pages if not self.holders[p]]] = float("nan")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagePool, "_become", becomes)
        patch.setattr(PagePool, "give", gives)
        yield


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def caches_of(model):
    """All caches that a model makes from now on."""
    made, cache = [], model.cache
    model.cache = lambda *args: made.append(cache(*args)) or made[-1]
    return made


def check(*caches):
    """Every page is either free or held, by as many rows as the pool says; rows have pages for all that they hold."""
    pool = caches[0].pool
    held = Counter(p for cache in caches for pages in cache._pages for p in pages)
    assert sorted([*held, *pool.free]) == list(range(pool.pages))
    assert pool.holders == [held[p] for p in range(pool.pages)]
    for cache in caches:
        for b in range(cache.batch):
            assert len(cache.table(b)) * cache.page >= cache._lengths[b] + cache._fed[b]


# -- attention -------------------------------------------------------------------------------------------------------------


def tree_of(roots):
    """Parents -1 0 0 1 for every row."""
    parents = torch.tensor([[-1, 0, 0, 1]] * len(roots))
    return Tree(np.array(roots), tree.ancestors(parents).numpy(), tree.depths(parents).numpy())


PLANS = {  # first, counts, tree
    "decode": ([30, 33, 7], [1, 1, 1], None),
    "verify": ([30, 33, 7], [4, 4, 4], None),
    "ragged": ([30, 0, 7], [4, 9, 1], None),
    "prompt": ([0], [41], None),
    "prompts": ([0, 20], [40, 21], None),
    "tree": ([30, 33, 7], [4, 4, 4], lambda: tree_of([30, 33, 7])),
    "one long": ([400, 3, 3], [2, 2, 2], None),
}


def both(name, page, heads=(4, 2), size=16, dtype=torch.float64, seed=0):
    """A call over slots, and the same over pages in any order; what nobody uses is NaN."""
    first, counts, made = PLANS[name]
    made = made and made()
    g = torch.Generator().manual_seed(seed)
    length = [f + c for f, c in zip(first, counts)]
    S, R = max(length), len(first)
    query = torch.randn(1, sum(counts), heads[0], size, generator=g).to(dtype).transpose(1, 2)
    slots = torch.randn(2, R, S, heads[1], size, generator=g).to(dtype)
    each = [-(-n // page) for n in length]
    order = torch.randperm(sum(each) + 3, generator=g).tolist()
    table = [[order.pop() for _ in range(n)] for n in each]
    pages = torch.full((2, sum(each) + 3, heads[1], page, size), float("nan"), dtype=dtype).transpose(2, 3)
    for r, (row, n) in enumerate(zip(table, length)):
        for s in range(n):
            pages[:, row[s // page], s % page] = slots[:, r, s]
    plain = AttentionPlan(range(R), first, counts, S, made)
    return (query, *slots, plain), (
        query,
        *pages,
        AttentionPlan(range(R), first, counts, S, made, table=table, page=page),
    )


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("name", list(PLANS))
def test_fused_attention_over_pages(name, page, window):
    slots, pages = both(name, page)
    expected = attention(*slots, window=window, backend="reference")
    out = attention(*pages, window=window, backend="packed")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        attention(*pages, window=window, backend="reference"), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")
@pytest.mark.parametrize("prompt", [0, 10**9], ids=["copied", "in place"])
@pytest.mark.parametrize("name", ["prompt", "prompts", "ragged", "one long"])
def test_prompts_over_pages_on_the_cpu(name, prompt, monkeypatch):
    """Short ones are read page by page by the C kernels, long ones copied for PyTorch."""
    from specdec.kernels.attention import native

    monkeypatch.setattr(native, "PAGED_PROMPT", prompt)
    slots, pages = both(name, 16, dtype=torch.float32)
    wide = [t.double() for t in slots[:3]]
    expected = attention(*wide, slots[3], backend="reference")
    out = attention(*pages, backend="native").double()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_pages_are_served_without_a_capacity_in_the_plan():
    slots, pages = both("decode", 3)
    plan = pages[3]
    plan.capacity = 0
    out = attention(*pages, backend="packed")
    torch.testing.assert_close(
        out, attention(*slots, backend="reference"), rtol=1e-12, atol=1e-12
    )  # fmt: skip


# -- texts -----------------------------------------------------------------------------------------------------------------

KINDS = {
    "llama": {},
    "mistral": {},
    "gemma2": {},
    "gpt2": {},
    "qwen3": {},
    "llama, C": {"dtype": torch.float32, "hidden_size": 64},  # heads of 16: the C kernels
    "mistral, C": {"dtype": torch.float32, "hidden_size": 64},
}


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        pytest.param(kind, page, marks=() if page == fast else pytest.mark.slow)
        for kind, fast in zip(KINDS, (1, 16, 24, 16, 24, 16, 24))
        for page in (1, 16, 24)
    ],
)
def test_texts_are_those_over_slots(kind, page):
    """Ragged prompts with one long row, chains and trees, budgets at which rows leave one after the other."""
    family, changes = kind.split(",")[0], KINDS[kind]
    large, small = tiny(family, **changes), tiny(family, 1, **changes)

    def texts(page):
        draft = HFModel(small, page=page, prefill_chunk=50)
        target = HFModel(large, page=page, prefill_chunk=50)
        drafts = [None, draft, sd.drafts.Tree(draft, (2, 2, 1))]
        made = caches_of(target)
        for d in drafts:
            builder = sd.decoder(target)
            decoder = (builder.draft(d, length=3) if d else builder).build()
            yield decoder.generate(ROWS, [12, 5, 1, 24], seed=0).ids
        for cache in made:
            assert isinstance(cache, PagedCache) == (page is not None)

    assert list(texts(page)) == list(texts(None))


@pytest.mark.parametrize("draft", ["model", "spire"])
def test_other_executors_and_drafts(llama, draft):
    small = tiny("llama", 1)
    texts = []
    for page in (None, 16):
        target = HFModel(llama, page=page)
        if draft == "spire":
            parts = sd.decoder(target).draft(sd.drafts.Spire(SpireModel.from_target(target)))
        else:
            parts = sd.decoder(target).draft(HFModel(small, page=page), length=3).executor(Optimistic())
        texts.append(parts.build().generate([[1, 2], *ROWS[1:]], 9, seed=0).ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("capacity", [None, 200])
@pytest.mark.parametrize("limit", [1, 3])
def test_a_stream_takes_and_returns_pages(llama, limit, capacity, monkeypatch):
    small = tiny("llama", 0, num_hidden_layers=1)
    prompts = [[5], LONG, [7, 8, 9], [50] * 9, [3, 1], [90, 4, 5, 6], [11, 12] * 5]
    budgets = [12, 3, 16, 1, 9, 14, 2]
    decoder = sd.decoder(HFModel(llama)).draft(HFModel(small), length=2).build()
    expected = decoder.generate(prompts, budgets, seed=3).ids
    target = HFModel(llama, page=8)
    pools, moved, copy = set(), [], PagePool.copy

    def copies(self, source, into, other=None):
        if len(self.shapes) == 2 and other not in (None, self):  # the target has two layers
            moved.append(len(source))
        copy(self, source, into, other)

    monkeypatch.setattr(PagePool, "copy", copies)
    decoder = sd.decoder(target).draft(HFModel(small, page=8), length=2).build()
    requests = [sd.Request(p, b, arrival=2 * n) for n, (p, b) in enumerate(zip(prompts, budgets))]
    if capacity:  # one pool serves all, and in the end everything is there again
        server = Server(
            decoder, decoder.executor, requests, Settings(limit, 3, clock="rounds", capacity=capacity)
        )
        for one in server.run():
            assert one.ids == expected[one.index]
            if server.places[0].micro_batch:
                pools.add(server.places[0].micro_batch.cache.pool)
        assert len(pools) <= 1
        pool = server.places[0].spare.pool
        assert sorted(pool.free) == list(range(pool.pages))
        assert pool.pages < 1.5 * (170 + limit * 30) / 8 + limit
    else:
        for one in decoder.serve(requests, limit, seed=3, clock="rounds"):
            assert one.ids == expected[one.index]
    assert not moved  # who joins has its pages where they are


# -- memory ----------------------------------------------------------------------------------------------------------------


def test_memory_follows_the_sum_of_lengths():
    """15 rows of 100 tokens and one of 2000."""
    model = tiny("llama", num_hidden_layers=1, max_position_embeddings=2100)
    rows = [[n] * 100 for n in range(15)] + [[3, 4] * 1000]
    slots, pages = HFModel(model), HFModel(model, page=16)
    used = []
    for target in (slots, pages):
        made = caches_of(target)
        decoder = sd.decoder(target).draft(sd.drafts.NGram(), length=4).build()
        texts = decoder.generate(rows, 10, seed=0).ids
        used.append((made[0], texts))
    (plain, expected), (cache, texts) = used
    assert texts == expected
    by_slots = sum(buffer.nbytes for pair in plain.layers for buffer in pair)
    assert by_slots == 16 * plain.slots * slots.bytes_per_token()
    assert cache.pool.bytes == sum(buffer.nbytes for pair in cache.layers for buffer in pair)
    tokens = sum(map(len, rows)) + 16 * (10 + 4)  # and a part of a page a row
    assert tokens <= cache.pool.pages * 16 <= tokens + 16 * 16
    assert by_slots / cache.pool.bytes > 8


def test_a_pool_is_made_for_what_a_call_says_and_grows_by_half_beyond(llama, monkeypatch):
    sizes, become = [], PagePool._become
    monkeypatch.setattr(PagePool, "_become", lambda self, pages: sizes.append(pages) or become(self, pages))
    target = HFModel(llama, page=4)
    decoder = sd.decoder(target).draft(sd.drafts.NGram(), length=2).build()
    decoder.generate(ROWS, 30, seed=0)
    assert len(sizes) == 1  # equal budgets: the longest row's room is everybody's
    sizes.clear()
    decoder.generate(ROWS, [90, 1, 60, 60], seed=0)
    assert sizes == sorted(sizes)
    assert all(2 * b >= 3 * a - 1 for a, b in pairwise(sizes))


def test_what_a_pool_holds_survives_its_growth(llama):
    target, plain = HFModel(llama, page=4), HFModel(llama)
    pool = PagePool(target._shapes, 4)
    caches = [PagedCache(pool, 1, 8) for _ in range(12)]  # each with room for little
    rows = [[n, n + 1, n + 2, n + 3, 7] for n in range(12)]
    for cache, row in zip(caches, rows):
        target.score(cache, Context.of([row], capacity=8))
    check(*caches)
    for cache, row in zip(caches, rows):
        longer = Context.of([[*row, 9]])
        got, fresh = target.score(cache, longer).logits, plain.score(plain.cache(1, 8), longer).logits
        torch.testing.assert_close(got, fresh, rtol=1e-10, atol=1e-10)


def test_too_little_memory_is_said_before_anything_is_taken(llama, monkeypatch):
    target = HFModel(llama, page=4)
    each = 4 * target.bytes_per_token()
    monkeypatch.setattr(paged, "free_bytes", lambda device: 20 * each)
    cache, context = target.cache(4, 200), Context.of(ROWS, capacity=200)
    with pytest.raises(
        MemoryError,
        match=r"of 4 rows with 168 tokens in all needs 44 pages of 4 tokens, .*: 20 pages would fit, 80 tokens .*fewer rows",
    ):
        target.score(cache, context)
    assert cache.pool.pages == 0
    assert cache.length.tolist() == [0, 0, 0, 0]
    few = Context.of([ROWS[0], ROWS[2], ROWS[3]], capacity=40)
    cache = target.cache(3, 40)
    target.score(cache, few)  # what may follow does not fit: just what is there now
    assert cache.pool.pages == 6
    monkeypatch.setattr(paged, "free_bytes", lambda device: 6 * each)
    before = [cache.table(b) for b in range(3)]
    longer = Context.of([[*few.row(0), *range(30)], few.row(1), few.row(2)])
    with pytest.raises(
        MemoryError, match=r"all 6 pages of 4 tokens are taken and .* of 3 rows .* needs 13.*old one"
    ):
        target.score(cache, longer)
    assert [cache.table(b) for b in range(3)] == before
    check(cache)
    # rows that leave make room
    cache = cache.select(torch.tensor([0]))
    short = Context.of([[*few.row(0), *range(15)]])
    fresh = HFModel(llama)
    torch.testing.assert_close(
        target.score(cache, short).logits, fresh.score(fresh.cache(1, 20), short).logits, rtol=0, atol=1e-9
    )


def test_a_pool_that_cannot_grow_by_half_grows_by_what_is_needed(monkeypatch):
    pool = PagePool([SHAPE], 4)
    held = pool.take(10)
    monkeypatch.setattr(paged, "free_bytes", lambda device: 11 * 4 * SHAPE.bytes)
    held += pool.take(1)
    assert (pool.pages, pool.free, sorted(held)) == (11, [], list(range(11)))
    with pytest.raises(MemoryError):
        pool.take(1)


def test_rows_longer_than_the_capacity_are_refused_as_ever(llama):
    target = HFModel(llama, page=4)
    cache = target.cache(1, 6)
    target.score(cache, Context.of([[1, 2, 3, 4, 5, 6]]))
    with pytest.raises(ValueError, match=r"needs 7 slots .* and the cache has 6"):
        target.score(cache, Context.of([[1, 2, 3, 4, 5, 6, 7]]))


# -- rows that come and go -------------------------------------------------------------------------------------------------


def propose(sizes, seed=0):
    g = torch.Generator().manual_seed(seed)
    B = len(sizes)
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4]] * B)
    return Proposal(torch.randint(0, 97, (B, 6), generator=g), parents, torch.tensor(sizes))


def accept(proposal, paths):
    path = torch.full((len(paths), proposal.nodes), -1)
    for b, nodes in enumerate(paths):
        path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
    return Verdict.of(proposal, path, torch.tensor([len(p) for p in paths]), torch.full((len(paths),), 11))


@pytest.mark.parametrize("order", [[3, 1, 1], [0, 3, 2], [0, 1], [3], [2, 0, 1, 3], [], [2, 2, 2, 2]])
def test_rows_may_be_selected_reordered_and_repeated(llama, order):
    target, plain = HFModel(llama, page=4), HFModel(llama)
    context, proposal = Context.of(ROWS, capacity=170), propose([6, 5, 4, 3])
    cache, slots = target.cache(4, 170), plain.cache(4, 170)
    pool = cache.pool
    for model, store in ((target, cache), (plain, slots)):
        model.score(store, context, proposal)
    assert cache.select(torch.arange(4)) is cache
    rows = torch.tensor(order, dtype=torch.long)
    cache, slots = cache.select(rows), slots.select(rows)
    check(cache)
    if not order:
        assert len(pool.free) == pool.pages
        return
    context, proposal = context.select(rows), proposal.select(rows)
    verdict = accept(proposal, [[[0, 2, 4], [0, 2], [0], []][b] for b in order])
    for store in (cache, slots):
        store.commit(context, verdict)
    assert [cache.row(b) for b in range(len(order))] == [slots.row(b) for b in range(len(order))]
    context = context.append(verdict.tokens, verdict.accepted + 1)
    again = propose([6] * len(order), 2)
    torch.testing.assert_close(
        target.score(cache, context, again).logits,
        plain.score(slots, context, again).logits,
        rtol=0,
        atol=1e-9,
    )
    check(cache)


@pytest.mark.parametrize("shared", [True, False])
def test_caches_join(llama, shared, monkeypatch):
    target, plain = HFModel(llama, page=4), HFModel(llama)
    one = target.cache(2, 160)
    two = one.beside(2, 40) if shared else target.cache(2, 40)
    target.score(one, Context.of(ROWS[:2]), propose([6, 2]))
    target.score(two, Context.of(ROWS[2:]), propose([3, 5]))
    copies, copy = [], PagePool.copy
    monkeypatch.setattr(PagePool, "copy", lambda self, *args: copies.append(args) or copy(self, *args))
    theirs = two.pool
    both = one.join(two)
    assert bool(copies) != shared
    check(both)
    del two
    assert shared or len(theirs.free) == theirs.pages
    context = Context.of([[*row, 9] for row in ROWS], capacity=160)
    torch.testing.assert_close(
        target.score(both, context).logits,
        plain.score(plain.cache(4, 160), context).logits,
        rtol=0,
        atol=1e-9,
    )
    assert both.length.tolist() == [2, 151, 16, 3]
    assert both.capacity == 160


def test_pages_are_given_back_when_a_row_shrinks_and_when_a_cache_is_dropped(llama):
    target = HFModel(llama, page=4)
    cache = target.cache(2, 160)
    target.score(cache, Context.of(ROWS[:2]))
    assert [len(cache.table(b)) for b in range(2)] == [1, 38]
    target.score(cache, Context.of([ROWS[0], ROWS[1][:9]]))
    assert [len(cache.table(b)) for b in range(2)] == [1, 3]
    check(cache)
    other, pool = cache.beside(1, 20), cache.pool
    target.score(other, Context.of([[1] * 20]))
    check(cache, other)
    del cache
    check(other)
    del other
    assert len(pool.free) == pool.pages


@pytest.mark.parametrize("graphs", [False, "eager"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_cache_and_its_copy_are_used_beside_each_other(llama, how, graphs):
    target, plain = HFModel(llama, page=4, graphs=graphs), HFModel(llama)
    one, texts = target.cache(2, 160), ([[5, 6], LONG[:9]], [[5, 7, 8], LONG[:10]])
    target.score(one, Context.of([[5], LONG[:7]]))
    two = how(one)
    for _ in range(2):
        for cache, text in zip((one, two), texts):
            context = Context.of(text, capacity=160)
            expected = plain.score(plain.cache(2, 160), context).logits
            torch.testing.assert_close(target.score(cache, context).logits, expected, rtol=0, atol=1e-9)
    check(*[one, two] if one.pool is two.pool else [one])
    pools = one.pool, two.pool
    del one, cache
    if pools[0] is not pools[1]:
        check(two)
    del two
    assert all(len(pool.free) == pool.pages for pool in pools)
    assert all(not holders for pool in pools for holders in pool.holders)


def test_a_forward_that_fails_leaves_rows_their_pages(llama):
    target = HFModel(llama, page=4, prefill_chunk=8)
    cache, context = target.cache(4, 170), Context.of(ROWS)
    target.score(cache, Context.of([[5], ROWS[1][:12], ROWS[2][:3], [1, 2]]), propose([6, 6, 6, 6]))
    forward, calls = target._path.forward, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args)

    target._path.forward = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        target.score(cache, context)
    target._path.forward = forward
    check(cache)
    plain = HFModel(llama)
    torch.testing.assert_close(
        target.score(cache, context).logits,
        plain.score(plain.cache(4, 170), context).logits,
        rtol=0,
        atol=1e-9,
    )


def test_only_some_rows_and_later_nodes(llama):
    target, plain = HFModel(llama, page=3), HFModel(llama)
    cache, context, whole = target.cache(4, 170), Context.of(ROWS), propose([6, 5, 4, 3])
    expected = plain.score(plain.cache(4, 170), context, whole).logits
    logits = target.score(cache, context, whole, rows=torch.tensor([3, 1])).logits
    assert [len(cache.table(b)) for b in range(4)] == [0, 52, 0, 2]
    torch.testing.assert_close(logits[[1, 3]], expected[[1, 3]], rtol=0, atol=1e-9)
    parts, done = [target.score(cache, context).logits], 0
    for upto in (1, 3, 6):
        sofar = Proposal(whole.tokens[:, :upto], whole.parents[:, :upto], whole.size.clamp(max=upto))
        parts.append(target.score(cache, context, sofar, start=done).logits)
        done = upto
        check(cache)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-9)
    step = target.bare_step(cache, context, whole)
    torch.testing.assert_close(step(), step(), rtol=0, atol=0)


text = st.lists(st.integers(0, 3), min_size=1, max_size=12)
moves = st.one_of(
    st.tuples(st.just("score"), text, text, st.integers(0, 3)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
    st.tuples(st.just("join"), text),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 3, 16]), st.lists(moves, min_size=1, max_size=6))
def test_a_paged_cache_follows_anything(llama, page, steps):
    """Contexts that have nothing to do with each other, rows that leave, double and join: slots agree, and pages are accounted for."""
    target, plain = HFModel(llama, page=page), HFModel(llama)
    cache, slots = target.cache(2, 32), plain.cache(2, 32)
    for kind, *move in steps:
        B = cache.batch
        if kind == "score":
            context = Context.of([move[b % 2] for b in range(B)])
            proposal = propose([6, move[2]] * (B // 2) + [6] * (B % 2))
            logits = [m.score(c, context, proposal).logits for m, c in ((target, cache), (plain, slots))]
            torch.testing.assert_close(*logits, rtol=0, atol=1e-9)
            verdict = accept(proposal, [[0, 2, 4][: move[2]] if b % 2 == 0 else [] for b in range(B)])
            cache.commit(context, verdict)
            slots.commit(context, verdict)
        elif kind == "select":
            rows = torch.tensor([b % B for b in move[0]])
            cache, slots = cache.select(rows), slots.select(rows)
        elif B < 4:
            more, other = cache.beside(1, 32), plain.cache(1, 32)
            target.prefill(more, Context.of(move))
            plain.prefill(other, Context.of(move))
            check(cache, more)
            cache, slots = cache.join(more), slots.join(other)
        check(cache)
        assert [cache.row(b) for b in range(cache.batch)] == [slots.row(b) for b in range(cache.batch)]
    pool = cache.pool
    del cache
    assert sorted(pool.free) == list(range(pool.pages))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 5)), max_size=30))
def test_a_pool_never_gives_a_page_twice(steps):
    pool, held = PagePool([SHAPE], 2), []
    for take, count, reserve in steps:
        if take:
            some = pool.take(count, reserve)
            assert len(some) == count
            held.append(some)
        elif held:
            pool.give(held.pop(count % len(held)))
        every = [p for some in held for p in some]
        assert sorted([*every, *pool.free]) == list(range(pool.pages))
        assert pool.bytes == pool.pages * 2 * SHAPE.bytes


# -- refusals --------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_paged_is_refused(llama):
    with pytest.raises(ValueError, match="page is 0: give the slots of a page, at least 1"):
        HFModel(llama, page=0)
    with pytest.raises(ValueError, match="page is 16 but falcon computes its own attention"):
        HFModel(tiny("falcon"), page=16)
    for backend in ("padded", "decomposed"):
        with pytest.raises(ValueError, match="it reads slots, not pages"):
            HFModel(llama, page=16, attention=backend)
    if library() is not None:
        with pytest.raises(ValueError, match="pages of a multiple of 16 slots, not 24"):
            HFModel(tiny("llama", dtype=torch.float32, hidden_size=64), page=24, attention="native")


def test_who_reads_slots_refuses_pages(llama):
    target = HFModel(llama, page=16)
    with pytest.raises(
        ValueError, match="in pages of 16 tokens, and a view of it reads slots: make the target without page"
    ):
        sd.decoder(target).draft(sd.drafts.MagicDec()).build()


def test_a_windowed_model_of_a_paged_one_keeps_its_ring(llama):
    ring, plain = (sd.models.Windowed(HFModel(llama, page=page), 8) for page in (16, None))
    texts = [sd.decoder(model).build().generate(ROWS, 5, seed=0).ids for model in (ring, plain)]
    assert texts[0] == texts[1]
    assert not isinstance(ring.cache(1, 20), PagedCache)


def test_a_stack_of_paged_members_and_a_pipeline(llama):
    """Members of a stack share a cache in pages, whose rows change hands; micro-batches have pools of their own."""
    texts = []
    for page in (None, 8):
        target = HFModel(llama, page=page)
        members = {str(n): HFModel(tiny("llama", n), page=page) for n in (1, 2)}
        builder = sd.decoder(target).verifier(sd.Coupled())
        pool = builder.pool(members, sd.selectors.Random(), 3)
        for parts in (pool, pool.executor(sd.executors.Pipelined(2))):
            texts.append(parts.build().generate(ROWS, 9, seed=0).ids)
    assert texts == [texts[0]] * 4
