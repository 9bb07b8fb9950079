"""What every ``KVStore`` promises: entries come back where they were put, and nothing else moves."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, NamedTuple

import pytest
import torch
from tiny import tiny

import specdec
from specdec import HFModel
from specdec.cache.contiguous import SlotCache
from specdec.cache.contract import KVStore
from specdec.cache.paged import PagedCache, PagePool
from specdec.cache.ring import Ring
from specdec.cache.ring_cache import RingCache, Stage
from specdec.cache.slots import KVShape, Slots
from specdec.cache.static import StaticStore
from specdec.cache.static_pool import StaticPool
from specdec.cache.token_index import Row
from specdec.drafts.magicdec.observation import _Reader
from specdec.drafts.magicdec.rotation import _Alone
from specdec.drafts.magicdec.view import View, ViewCache
from specdec.forward.probe import Probe
from specdec.masks import streaming
from specdec.models.masked import MaskedCache
from specdec.types import Context

LAYERS, H, D, DV = 2, 2, 4, 6
SHAPES = [KVShape(H, D, DV, torch.float32, torch.device("cpu"))] * LAYERS


class Case(NamedTuple):
    """A store, and the slots of two calls that may follow each other (``None``: it takes one call a layer)."""

    store: Any
    first: list[int]
    then: list[int] | None
    value_size: int = DV


def paged() -> Case:
    pool = PagePool(SHAPES, 4)
    pool.take(2)  # the rows' pages do not begin at the pool's
    cache = PagedCache(pool, 2, 16)
    table = cache.hold([Row(0, 0, 6, 6), Row(1, 0, 3, 3)])
    flat = [table[0][s // 4] * 4 + s % 4 for s in range(6)]
    return Case(cache, flat[:5], [flat[5], *(table[1][0] * 4 + s for s in range(3))])


def staged() -> Case:
    ring = RingCache(SHAPES, 2, 32, sinks=1, window=3, block=2)
    store, plan = ring.place([Row(0, 0, 7, 7), Row(1, 0, 4, 4)], torch.device("cpu"))
    assert isinstance(store, Stage)
    return Case(store, plan.slots.tolist(), None)


def view(extra: int) -> tuple[Any, Any]:
    model = HFModel(tiny("llama", 0, torch.float32))
    context = Context.of([[1, 2, 3, 4, 5], [6, 7, 8]], capacity=16)
    cache = model.cache(2, 16)
    model.score(cache, context)
    made: ViewCache = View(model, streaming(3, 1), block=2, extra=extra).of(cache)
    return made.place([Row(0, 4, 5, 5), Row(1, 2, 3, 3)], torch.device("cpu"))


def of_a_view(extra: int) -> Case:
    store, plan = view(extra)
    return Case(store, plan.slots.tolist()[:1], plan.slots.tolist()[1:], value_size=8)


def reader() -> Case:
    """Fed again what the cache holds already, which is all that it may be asked for."""
    source = SlotCache(SHAPES, 2, 8)
    for layer in range(LAYERS):
        source.append(layer, torch.tensor([0, 1, 8]), *entries(3, layer))
    return Case(_Reader(source), [0, 1, 8], None)


CASES = {
    Slots: lambda: Case(Slots(SHAPES, 3, 8), [0, 1, 2, 17], [3, 8, 16]),
    SlotCache: lambda: Case(SlotCache(SHAPES, 3, 8, 1), [0, 1, 2, 18], [3, 9, 10]),
    PagedCache: paged,
    PagePool: lambda: Case(grown(PagePool), [4, 5, 0], [6, 1]),
    StaticPool: lambda: Case(grown(StaticPool), [4, 5, 0], [6, 1]),
    Ring: lambda: Case(Ring(SHAPES, 2, 1, 3, 2), [0, 1, 5], [2, 7, 9]),
    RingCache: lambda: Case(RingCache(SHAPES, 2, 32, 1, 3, 2), [0, 1, 5], [2, 7, 9]),
    Stage: staged,
    ViewCache: lambda: of_a_view(0),
    "PrunedView": lambda: of_a_view(2),
    MaskedCache: lambda: Case(MaskedCache(SHAPES, 3, 8), [0, 1, 2, 17], [3, 8, 16]),
    StaticStore: lambda: Case(StaticStore(SlotCache(SHAPES, 3, 7, 1)), [0, 1, 2, 17], [3, 8, 16]),
    "StaticStore of pages": lambda: Case(StaticStore(grown(StaticPool)), [4, 5, 0], [6, 1, 11]),
    Probe: lambda: Case(Probe(4), [0], None),
    _Alone: lambda: Case(_Alone(), [0, 1, 2, 3], None),
    _Reader: reader,
}
PASSING = {Stage, Probe, _Alone, _Reader}  # they show a layer what is appended, and keep nothing of their own


def over(kinds: Any) -> Any:
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in kinds]
    return pytest.mark.parametrize("case", [CASES[kind] for kind in kinds], ids=names)


every_store = over(CASES)


def grown(kind: Any) -> PagePool:
    pool: PagePool = kind(SHAPES, 4)
    pool.take(2)
    return pool


def entries(count: int, seed: int, value_size: int = DV, size: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    """``[1, H, T, D]`` and ``[1, H, T, Dv]``, transposed as a forward makes them."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, count, H, n, generator=g).transpose(1, 2) for n in (size, value_size))


def at(buffer: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """``[T, H, D]`` of flat slots."""
    return buffer.reshape(-1, *buffer.shape[2:])[slots]


def append(store: Any, layer: int, slots: list[int], value_size: int, seed: int) -> tuple[Any, Any]:
    """What was appended ``[T, H, ·]``, and what came back."""
    new = entries(len(slots), seed, value_size, 8 if value_size == 8 else D)
    shown = store.append(layer, torch.tensor(slots), *new)
    return [t[0].transpose(0, 1) for t in new], shown


@every_store
def test_entries_come_back_where_they_were_put(case):
    store, first, then, size = case()
    for layer in range(LAYERS):
        if isinstance(store, StaticStore):
            store.begin()
        mine, shown = append(store, layer, first, size, layer)
        for new, buffer in zip(mine, shown):
            assert buffer.dim() == 4
            assert buffer.dtype == new.dtype
            assert torch.equal(at(buffer, first), new)
        if then is None:
            continue
        if isinstance(store, StaticStore):
            store.begin()
        more, shown = append(store, layer, then, size, 10 + layer)
        for old, new, buffer in zip(mine, more, shown):
            assert torch.equal(at(buffer, then), new)
            assert torch.equal(at(buffer, first), old), "what was there has moved"


@over([kind for kind in CASES if kind not in PASSING])
def test_layers_do_not_share(case):
    store, first, _, size = case()
    if isinstance(store, StaticStore):
        store.begin()
    mine, shown = append(store, 0, first, size, 0)
    append(store, 1, first, size, 1)
    for new, buffer in zip(mine, shown):
        assert torch.equal(at(buffer, first), new)


@every_store
def test_where_kernels_may_write(case):
    """Into ``direct`` as good as by ``append``; C is given the same tensors."""
    store, first, _, size = case()
    if store.direct is None:
        assert store.buffers is None, "C kernels would write where append does more"
        return
    mine, shown = append(store, 0, first, size, 0)
    for new, buffer, direct in zip(mine, shown, store.direct[0]):
        assert direct.data_ptr() == buffer.data_ptr()
        assert direct.shape == buffer.shape
        assert torch.equal(at(direct, first), new)
    if store.buffers is not None:
        there = [(keys.data_ptr(), values.data_ptr()) for keys, values in store.direct]
        assert [(keys.data_ptr(), values.data_ptr()) for keys, values in store.buffers.layers] == there


@pytest.mark.parametrize("kind", [SlotCache, PagedCache])
def test_nothing_writes_past_an_append_that_does_more(kind):
    class Other(kind):
        def append(self, *args):
            return super().append(*args)

    store = Other(SHAPES, 2, 8) if kind is SlotCache else Other(grown(PagePool), 2, 8)
    assert store.direct is None
    assert store.buffers is None


ELSEWHERE = {"specdec.lab.harness"}  # modules that need a package which is no extra of this one


def test_every_store_is_here():
    for module in pkgutil.walk_packages(specdec.__path__, "specdec."):
        if not module.name.startswith("specdec.kernels") and module.name not in ELSEWHERE:
            importlib.import_module(module.name)
    found, todo = set[str](), [KVStore]
    while todo:
        new = todo.pop().__subclasses__()
        todo += new
        found |= {cls.__name__ for cls in new if cls.__module__.startswith("specdec.")}
    named = {key if isinstance(key, str) else key.__name__ for key in CASES}
    assert found <= named, f"give CASES an example of {sorted(found - named)}"
