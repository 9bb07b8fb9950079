"""Rows that share pages: what they hold is that of rows with copies, and nobody writes to a page that another row holds."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.cache import paged
from specdec.cache.contiguous import SlotCache
from specdec.cache.paged import PagedCache, PagePool
from specdec.cache.slots import KVShape
from specdec.cache.token_index import Row
from specdec.forward.pack import feed, spans
from specdec.models import HFModel, shared_prompts
from specdec.types import Context, Proposal, Verdict

CPU = torch.device("cpu")
SHAPES = [KVShape(2, 4, 4, torch.float64, CPU), KVShape(1, 4, 2, torch.float64, CPU)]  # two kinds of blocks
LONG = [(7 * i + 3) % 90 for i in range(60)]


class Poisoned(PagePool):
    """A page that nobody holds is NaN."""

    def _become(self, pages):
        have = self.pages
        super()._become(pages)
        for block in self._blocks:
            block[:, have:] = float("nan")

    def give(self, pages):
        super().give(pages)
        for block in self._blocks:
            block[:, [p for p in pages if not self.holders[p]]] = float("nan")


class Beside:
    """A paged cache, and what it should hold: for each row a list of numbers, one for each slot, that no other write has."""

    written = 0

    def __init__(self, cache):
        self.cache, self.rows, self.context, self.proposal = (
            cache,
            [[] for _ in range(cache.batch)],
            None,
            None,
        )

    def score(self, context, proposal, rows=None, start=None):
        """As ``HFModel.score``, with a number in place of every key and value."""
        cache = self.cache
        first, end = spans(cache, context, proposal, start, rows)
        packed = feed(context, proposal, first, end)
        for row in packed.rows if start is None else ():
            cache.forget_nodes(row.b)
        table = cache.hold(packed.rows)
        at = [table[r.b][s // cache.page] * cache.page + s % cache.page for r, s in packed._slots()]
        numbers = [Beside.written + n for n in range(len(at))]
        Beside.written += len(at)
        for layer, shape in enumerate(SHAPES):
            entry = torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]
            key, value = (
                (sign * entry).expand(1, shape.heads, -1, size)
                for sign, size in ((1, shape.key_size), (-1, shape.value_size))
            )
            if at:
                cache.append(layer, torch.tensor(at), key, value)
        packed.remember(cache, context)
        for (r, s), number in zip(packed._slots(), numbers):
            del self.rows[r.b][s:]
            self.rows[r.b].append(number)
        self.context, self.proposal = context, proposal
        self.check()

    def check(self):
        cache = self.cache
        for b, numbers in enumerate(self.rows):
            used = cache._lengths[b] + cache._fed[b]
            at = torch.tensor(cache._flat(cache.table(b), range(used)), dtype=torch.long)
            for keys, values in cache.layers:
                expected = torch.tensor(numbers[:used], dtype=torch.float64)
                for sign, buffer in ((1, keys), (-1, values)):
                    held = sign * buffer[at // cache.page, at % cache.page]
                    assert torch.equal(held, expected[:, None, None].expand_as(held)), (b, at)


def count(pool, *caches):
    """Every page is free, or held by as many rows as the pool says."""
    held = Counter(p for cache in caches for pages in cache._pages for p in pages)
    assert sorted([*held, *pool.free]) == list(range(pool.pages))
    assert pool.holders == [held[p] for p in range(pool.pages)]
    for cache in caches:
        assert all(len(set(pages)) == len(pages) for pages in cache._pages)


def contexts(draw, both, most=14):
    """For each row a part of its text and new tokens."""
    texts = []
    for b in range(both.cache.batch):
        row = both.cache.row(b)
        kept = row if draw.random() < 0.6 else row[: draw.randint(0, len(row))]
        texts.append([*kept, *(draw.randint(0, 2) for _ in range(draw.randint(1, 4)))][-most:])
    return Context.of(texts, capacity=24)


TREES = {  # parents -> paths
    (-1, 0, 0, 1, 2, 4): ([0, 2, 4, 5], [0, 1, 3], [0, 2]),
    (-1, -1, 0, 1, 3, 4): ([1, 3, 4, 5], [0, 2], [1, 3]),
}


def proposals(draw, B):
    parents = torch.tensor([draw.choice(list(TREES)) for _ in range(B)])
    tokens = torch.tensor([[draw.randint(0, 2) for _ in range(6)] for _ in range(B)])
    return Proposal(tokens, parents, torch.tensor([draw.randint(0, 6) for _ in range(B)]))


def verdicts(draw, proposal):
    B = len(proposal.size)
    path = torch.full((B, 6), -1)
    accepted = torch.zeros(B, dtype=torch.long)
    for b, size in enumerate(proposal.size.tolist()):
        nodes = [n for n in draw.choice(TREES[tuple(proposal.parents[b].tolist())]) if n < size]
        nodes = nodes[: draw.randint(0, len(nodes))]
        path[b, : len(nodes)], accepted[b] = torch.tensor(nodes, dtype=torch.long), len(nodes)
    return Verdict.of(proposal, path, accepted, torch.ones(B, dtype=torch.long))


def commit(draw, both):
    verdict, cache = verdicts(draw, both.proposal), both.cache
    starts, fed = list(cache._lengths), list(cache._fed)
    cache.commit(both.context, verdict)
    for b, (start, n) in enumerate(zip(starts, fed)):
        path = verdict.path[b, : verdict.accepted[b]].tolist()
        if start == both.context.length[b]:
            taken = [both.rows[b][start + node] for node in path if node < n]
            both.rows[b] = both.rows[b][:start] + taken
        assert cache._lengths[b] == (len(both.rows[b]) if start == both.context.length[b] else start)
    both.proposal = None


def pick(draw, both, rows):
    """Select rows, and the same of what they should hold."""
    both.cache = both.cache.select(torch.tensor(rows, dtype=torch.long))
    both.rows = [list(both.rows[b]) for b in rows]
    if both.proposal is not None:
        both.context, both.proposal = (
            part.select(torch.tensor(rows)) for part in (both.context, both.proposal)
        )


@pytest.mark.parametrize("page", [1, 3, 4, 16])
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n < 2 else pytest.mark.slow) for n in range(40)]
)
def test_any_operations(page, seed):
    draw = random.Random(100 * page + seed)
    pool = Poisoned(SHAPES, page)
    one = Beside(PagedCache(pool, 3, 24))
    other = Beside(one.cache.beside(2, 24))
    saved = 0
    for _ in range(50):
        B, kind = one.cache.batch, draw.choice("ssssccctttpppjJdwf")
        if kind == "s" or (kind == "c" and one.proposal is None):
            rows = torch.tensor(sorted(draw.sample(range(B), draw.randint(1, B))))
            both = one if draw.random() < 0.7 else other
            context, proposal = contexts(draw, both), proposals(draw, both.cache.batch)
            if both is other or draw.random() < 0.6:
                rows = None
            both.score(context, proposal, rows)
            if rows is None and draw.random() < 0.3:  # later nodes are fed again, others stay
                both.score(context, proposal, start=draw.randint(0, 3))
        elif kind == "c":
            commit(draw, one)
        elif kind == "t":  # a row becomes another of the same cache, which may be itself
            b, i = draw.randrange(B), draw.randrange(B)
            one.cache.take(b, one.cache, i)
            one.rows[b] = list(one.rows[i])
            one.proposal = None
        elif kind == "p":
            pick(draw, one, [draw.randrange(B) for _ in range(draw.randint(1, 4))])
        elif kind in "jJ" and B + other.cache.batch <= 5:  # of the same pool, or of another with other pages
            if kind == "J":
                there = Beside(PagedCache(Poisoned(SHAPES, draw.choice([page, 2, 5])), 2, 24))
                there.score(contexts(draw, there), proposals(draw, 2))
                pick(draw, there, [0, 1, 0])
                there.score(contexts(draw, there), proposals(draw, 3))
            else:
                there, other = other, None
            one.cache, one.proposal = one.cache.join(there.cache), None
            one.rows += there.rows
            there = None
            other = other or Beside(one.cache.beside(2, 24))
        elif kind == "d":
            other = Beside(one.cache.beside(2, 24))
        elif kind == "w":  # a row of another cache is swapped in
            b = draw.randrange(B)
            one.cache.take(b, other.cache, 0)
            one.rows[b], one.proposal = other.rows[0], None
            other = Beside(one.cache.beside(2, 24))
        elif kind == "f":
            b = draw.randrange(B)
            one.cache.forget(b)
            one.rows[b], one.proposal = [], None
        both = None
        one.check()
        other.check()
        count(pool, one.cache, other.cache)
        saved += sum(n - 1 for n in pool.holders if n)
    assert saved  # otherwise nothing was tested
    one = other = None
    assert sorted(pool.free) == list(range(pool.pages))
    assert not any(pool.holders)


# -- what must not happen --------------------------------------------------------------------------------------------------


def shared(page=4, texts=((1, 2, 3, 4, 5, 6),) * 3):
    """A cache whose rows share the pages of one text of which the second page is not full."""
    pool = Poisoned(SHAPES, page)
    both = Beside(PagedCache(pool, len(texts), 24))
    both.score(Context.of([list(text) for text in texts], capacity=24), None, torch.tensor([0]))
    for b in range(1, len(texts)):
        both.cache.take(b, both.cache, 0)
        both.rows[b] = list(both.rows[0])
    return pool, both


def test_a_page_that_nobody_holds_cannot_be_returned_or_shared():
    pool = PagePool(SHAPES, 4)
    pages = pool.take(2)
    pool.share(pages[:1])
    pool.give(pages)
    assert pool.free == [pages[1]]
    pool.give(pages[:1])
    for call in (pool.give, pool.share):
        with pytest.raises(AssertionError, match=rf"page {pages[0]} .*no row holds it"):
            call(pages[:1])
    assert sorted(pool.free) == [0, 1]


def test_full_pages_stay_shared_and_the_last_writer_keeps_the_rest():
    pool, both = shared()
    tables = [both.cache.table(b) for b in range(3)]
    assert tables == [tables[0]] * 3
    both.score(Context.of([[1, 2, 3, 4, 5, 6, n] for n in range(3)]), None)
    last = tables[0][1]
    tables = [both.cache.table(b) for b in range(3)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert tables[2][1] == last
    assert pool.pages - len(pool.free) == 4
    count(pool, both.cache)


@pytest.mark.parametrize("kept", [0, 1, 4, 5])
def test_a_row_that_is_rolled_back_writes_to_pages_of_its_own(kept):
    pool, both = shared(page=2)
    text = [1, 2, 3, 4, 5, 6]
    both.score(Context.of([text, [*text[:kept], 9, 9, 9], text]), None, torch.tensor([1]))
    mine, theirs = both.cache.table(1), both.cache.table(2)
    assert both.cache.table(0) == theirs
    assert mine[: kept // 2] == theirs[: kept // 2]
    assert not set(mine[kept // 2 :]) & set(theirs)
    count(pool, both.cache)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_nodes_that_move_after_their_row_was_repeated(length):
    """Where the first node is the last slot of a page, the first, and the second."""
    draw = random.Random(0)
    pool, both = shared(texts=(tuple(range(length)),))
    parents = torch.tensor([[-1, -1, 0, 1, 3, 4]])
    both.score(both.context, Proposal(torch.arange(6)[None], parents, torch.tensor([6])))
    both.cache, both.rows = both.cache.select(torch.tensor([0, 0, 0])), [list(both.rows[0]) for _ in range(3)]
    context, proposal = (part.select(torch.tensor([0, 0, 0])) for part in (both.context, both.proposal))
    paths = [[0, 2], [1, 3, 4, 5], []]
    path = torch.tensor([nodes + [-1] * (6 - len(nodes)) for nodes in paths])
    verdict = Verdict.of(proposal, path, torch.tensor([2, 4, 0]), torch.ones(3, dtype=torch.long))
    both.cache.commit(context, verdict)
    both.rows = [[*row[:length], *(row[length + n] for n in nodes)] for row, nodes in zip(both.rows, paths)]
    both.check()
    count(pool, both.cache)
    both.score(contexts(draw, both), proposals(draw, 3))


@pytest.mark.parametrize("operation", ["score", "commit", "join"])
def test_without_memory_for_copies_nothing_changes(operation, monkeypatch):
    pool, both = shared()
    context = Context.of([[1, 2, 3, 4, 5, 6, n] for n in range(3)])
    if operation == "commit":
        proposal = Proposal(
            torch.zeros(3, 3, dtype=torch.long), torch.tensor([[-1, 0, 0]] * 3), torch.full((3,), 3)
        )
        both.score(context, proposal)
        rows = torch.tensor([0, 0, 1])
        both.cache, both.rows = both.cache.select(rows), [both.rows[b] for b in rows]
        context, proposal = context.select(rows), proposal.select(rows)
        path = torch.tensor([[0, 2, -1]] * 3)
        verdict = Verdict.of(proposal, path, torch.full((3,), 2), torch.zeros(3, dtype=torch.long))
    there = shared(page=2)[1]
    pool.take(len(pool.free))
    monkeypatch.setattr(paged, "free_bytes", lambda device: pool.bytes)
    tables, used = [both.cache.table(b) for b in range(3)], both.cache._used()
    with pytest.raises(MemoryError, match=r"all \d+ pages of 4 tokens are taken"):
        if operation == "score":
            both.score(context, None)
        elif operation == "commit":
            both.cache.commit(context, verdict)
        else:
            both.cache.join(there.cache)
    assert ([both.cache.table(b) for b in range(3)], both.cache._used()) == (tables, used)
    both.check()
    there.check()
    count(there.cache.pool, there.cache)


@pytest.mark.parametrize("operation", ["score", "join"])
def test_pages_are_returned_if_they_cannot_be_filled(operation, monkeypatch):
    """A copy needs memory itself."""
    pool, both = shared()
    there = shared(page=2)[1]
    tables = [both.cache.table(b) for b in range(3)]

    def none(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(pool, "copy", none)
    with pytest.raises(torch.OutOfMemoryError):
        if operation == "score":
            both.score(Context.of([[1, 2, 3, 4, 5, 6, n] for n in range(3)]), None)
        else:
            both.cache.join(there.cache)
    assert [both.cache.table(b) for b in range(3)] == tables
    count(pool, both.cache)


@pytest.mark.parametrize("pages", [True, False])
def test_a_commit_without_memory_can_be_made_again(pages, monkeypatch):
    """It fails between two kinds of blocks: neither entries nor the token index have changed."""
    cache = PagedCache(PagePool(SHAPES, 4), 2, 12) if pages else SlotCache(SHAPES, 2, 12)
    if pages:
        cache.hold([Row(b, 0, 3, 7) for b in range(2)])
    store, text = cache.pool if pages else cache, np.arange(3)
    for block in store._blocks:
        block.normal_()
    for b in range(2):
        cache.remember(b, text, 0, 3, 4)
    proposal = Proposal(torch.arange(4).expand(2, 4), torch.tensor([[-1, -1, 1, 2]] * 2), torch.full((2,), 4))
    path = torch.tensor([[1, 2, 3, -1], [0, -1, -1, -1]])
    verdict = Verdict.of(proposal, path, torch.tensor([3, 1]), torch.zeros(2, dtype=torch.long))
    context = Context.of([[0, 1, 2]] * 2, capacity=12)
    before, selected, select = [block.clone() for block in store._blocks], [], torch.Tensor.index_select

    def fails(*args):
        selected.append(args)
        if len(selected) == 2:
            raise torch.OutOfMemoryError("no memory")
        return select(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", fails)
        with pytest.raises(torch.OutOfMemoryError):
            cache.commit(context, verdict)
    assert all(map(torch.equal, store._blocks, before))
    assert (cache.length.tolist(), cache.fed_nodes.tolist()) == ([3, 3], [4, 4])
    cache.commit(context, verdict)
    assert [cache.row(b) for b in range(2)] == [[0, 1, 2, 1, 2, 3], [0, 1, 2, 0]]
    assert cache.fed_nodes.tolist() == [0, 0]
    slots = cache._flat(cache.table(0), range(7)) if pages else range(7)
    for block, old in zip(store._blocks, before):
        held, was = (b.flatten(1, 2)[:, slots] for b in (block, old))
        assert torch.equal(held[:, :6], was[:, [0, 1, 2, 4, 5, 6]])


def test_a_pool_is_made_larger_for_rows_to_come_only_once_and_if_there_is_memory(monkeypatch):
    cache = PagedCache(PagePool(SHAPES, 4), 4, 40)
    monkeypatch.setattr(paged, "free_bytes", lambda device: 19 * 4 * sum(shape.bytes for shape in SHAPES))
    cache.expect([12, 12, 30], [(2, 9)])
    assert cache.pool.pages == 0
    monkeypatch.undo()
    cache.expect([12, 12, 30], [(2, 9)])  # 10 more tokens each; two full pages are held once
    assert cache.pool.pages == 2 * 6 - 2 + 10
    cache.expect([12, 12], [(2, 9)])
    assert cache.pool.pages == 20
    Beside(cache).score(Context.of([[1, 2]] * 4), None)
    cache.expect([30, 30], [(2, 9)])
    assert cache.pool.pages == 20


def test_rows_that_join_from_another_pool_still_share():
    pool, both = shared()
    there = shared(page=4)[1]
    there.score(Context.of([[1, 2, 3, 4, 5, 6, n] for n in range(3)]), None)
    joined = both.cache.join(there.cache)
    count(pool, joined)
    both.cache, both.rows = joined, both.rows + there.rows
    both.check()
    tables = [joined.table(b) for b in range(6)]
    assert len({table[0] for table in tables[3:]}) == 1
    assert len({table[1] for table in tables[3:]}) == 3
    assert pool.pages - len(pool.free) == 2 + 1 + 3


# -- models ----------------------------------------------------------------------------------------------------------------


def pages_of(model):
    """All caches that a model makes from now on, and the most pages that rows of any held at the end of a call."""
    made, most, cache, run = [], [0], model.cache, model._run

    def runs(*args):
        out = run(*args)
        most[0] = max(most[0], max(c.pool.pages - len(c.pool.free) for c in made))
        return out

    model.cache = lambda *args: made.append(cache(*args)) or made[-1]
    model._run = runs
    return made, most


def test_samples_of_a_prompt_hold_it_once(monkeypatch):
    """16 samples of a prompt of 512 tokens in pages of 32: 15 full pages, and one more for each row."""
    model = HFModel(tiny("llama", num_hidden_layers=1, max_position_embeddings=600), page=32)
    prompt = [n % 90 for n in range(512)]
    context = Context.of([prompt] * 16, capacity=512 + 40)
    held = {}
    for least in (128, 10**9):
        monkeypatch.setattr(shared_prompts, "LEAST", least)
        cache = model.cache(16, 512 + 40)
        model.score(cache, context)
        held[least] = (cache.pool.pages - len(cache.pool.free), cache.pool.pages)
        count(cache.pool, cache)
    assert held == {
        128: (15 + 16, 15 + 16 * 3),
        10**9: (16 * 16, 16 * 18),
    }  # now, and with room for 40 tokens


def test_a_pool_is_made_once_for_samples(monkeypatch):
    sizes, become = [], PagePool._become
    monkeypatch.setattr(PagePool, "_become", lambda self, pages: sizes.append(pages) or become(self, pages))
    target = HFModel(tiny("llama"), page=4)
    made, most = pages_of(target)
    decoder = sd.decoder(target).draft(sd.drafts.NGram(), length=2).build()
    decoder.generate([LONG] * 6 + [[5, 6, 7]] + [LONG[:30]] * 2, 9, seed=0, eos_token_id=())
    assert len(sizes) == 1
    assert made[0].capacity == 71  # 11 tokens more than the longest prompt
    assert 14 + 6 * 3 + 2 + 7 + 2 * 2 <= most[0] <= sizes[0] == 14 + 6 * 4 + 4 + 7 + 2 * 4


def texts(page, draft, least, monkeypatch, sampling):
    monkeypatch.setattr(shared_prompts, "LEAST", least)
    target, small = HFModel(tiny("llama"), page=page), HFModel(tiny("llama", 1), page=page)
    builder = sd.decoder(target)
    if draft == "model":
        builder = builder.draft(small, length=3)
    elif draft == "tree":
        builder = builder.draft(sd.drafts.Tree(small, (2, 2, 1)))
    if sampling == "greedy":
        builder = builder.greedy()
    decoder = builder.build()
    rows = [LONG, LONG, [5, 6, 7], LONG, [9] * 70, [9] * 70]
    text = decoder.generate(rows, [9, 3, 6, 7, 1, 9], seed=3).ids
    requests = [sd.Request(row, n, arrival=n // 4) for row, n in zip(rows, (1, 2, 3, 4, 5, 6))]
    served = {one.index: one.ids for one in decoder.serve(requests, 4, seed=3, clock="rounds")}
    return text, served


@pytest.mark.parametrize(
    ("draft", "sampling"),
    [
        pytest.param(draft, sampling, marks=() if fast == sampling else pytest.mark.slow)
        for draft, fast in (("none", ""), ("model", "sampled"), ("tree", "greedy"))
        for sampling in ("greedy", "sampled")
    ],
)
def test_texts_are_those_of_copies(draft, sampling, monkeypatch):
    """Rows that stop at different lengths, chains and trees, and requests that join: pages that are shared, are not, and slots."""
    shared, apart, slots = (
        texts(page, draft, least, monkeypatch, sampling)
        for page, least in ((8, 128), (8, 10**9), (None, 10**9))
    )
    assert shared == apart == slots


@pytest.mark.parametrize("kind", ["float64", "C"])
def test_logits_are_bit_for_bit_those_of_copies(kind, monkeypatch):
    """The same forwards over pages that rows share, and over pages of their own."""
    changes = {} if kind == "float64" else {"dtype": torch.float32, "hidden_size": 64}
    model = HFModel(tiny("llama", **changes), page=16)
    context = Context.of([LONG, LONG, [5, 6, 7], LONG, LONG], capacity=100)
    logits, take = [], PagedCache.take

    def copies(self, b, other, i):
        take(self, b, other, i)
        self._own({b: 0}, self._used())

    for own in (False, True):
        if own:
            monkeypatch.setattr(PagedCache, "take", copies)
        cache = model.cache(5, 100)
        made = [model.score(cache, context).logits]
        assert (max(cache.pool.holders) == 1) == own
        text = context
        for n in range(3):
            proposal = proposals(random.Random(n), 5)
            made.append(model.score(cache, text, proposal).logits)
            verdict = verdicts(random.Random(n), proposal)
            cache.commit(text, verdict)
            text = text.append(verdict.tokens, verdict.accepted + 1)
        logits.append(made)
    assert all(map(torch.equal, *logits))
