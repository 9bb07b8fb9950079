"""Drafts and models with keys and values in constant memory, in streams: rows join and leave, and texts and proposals are those of each row alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from test_serving import BUDGETS, PROMPTS, requests, same
from tiny import tiny

import specdec as sd
from specdec import selectors
from specdec.drafts import MagicDec, Spire
from specdec.drafts.spire.model import SpireModel
from specdec.executors import Pipelined, Serial
from specdec.masks import Causal, streaming
from specdec.models import Masked
from specdec.pruning import SnapKV

PRUNED = MagicDec(window=3, pruner=SnapKV(kernel=1), budget=3, observation=2, refresh=2)


def drafts_of(target, small):
    model = SpireModel.from_target(target, layers=1, window=5)
    with torch.no_grad():  # otherwise memory is nothing, and steps are those of a model without it
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 20)
    return {
        "spire": Spire(model),
        "spire, whole text": Spire(SpireModel.from_target(target, layers=1, window=None)),
        "view": MagicDec(window=4),
        "view, in cache": MagicDec(window=4, positions="in_cache"),
        "view, pruned": PRUNED,
        "view, whole text": MagicDec(mask=Causal()),
        "windowed": Masked(small, streaming(4, 1)),
    }


KINDS = (
    "spire",
    "spire, whole text",
    "view",
    "view, in cache",
    "view, pruned",
    "view, whole text",
    "windowed",
)


@pytest.mark.parametrize("how", [Serial(), Pipelined(2)], ids=["serial", "pipelined"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_says_what_generate_says(target, small, kind, how):
    base = sd.decoder(target).draft(drafts_of(target, small)[kind], length=3)
    alone = base.build().generate(PROMPTS, BUDGETS, seed=3)
    decoder = base.executor(how).build()
    for limit, capacity in ((3, None), (5, 60)):
        same(list(decoder.serve(requests(), limit, seed=3, clock="rounds", capacity=capacity)), alone)
    assert alone.stats.tau > 1


def test_a_windowed_target_is_served(target, small):
    decoder = sd.decoder(Masked(target, streaming(5, 1))).draft(small, length=3).build()
    alone = decoder.generate(PROMPTS, BUDGETS, seed=3)
    for limit in (2, 5):
        same(list(decoder.serve(requests(), limit, seed=3, clock="rounds")), alone)


@pytest.mark.parametrize("kind", ["spire", "windowed", "view"])
def test_captured_chains_of_rows_that_come_and_go(kind):
    """Texts are those without graphs, and memory in which there is room is that of whoever joins."""
    said = []
    for how in (False, "recorded"):
        target, small = (
            sd.HFModel(tiny("llama", 0, torch.float32, num_hidden_layers=n), graphs=how) for n in (2, 1)
        )
        draft = drafts_of(target, small)[kind]
        if kind == "spire":
            draft = Spire(draft.model, graphs=how)
        decoder = sd.decoder(target).draft(draft, 3).build()
        served = decoder.serve(requests(), limit=4, seed=2, clock="rounds", capacity=60)
        said.append({one.index: one.ids for one in served})
        if how and kind == "spire":
            programs = decoder.draft.programs
            assert programs.why is None
            assert programs.captured
    assert said[0] == said[1]


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_in_a_pool_a_rows_view_does_not_depend_on_the_arms_of_others(target, limit):
    """A pruner chooses anew after two rounds of the row, when the row is drafted next."""
    pool = {"view": PRUNED, "none": None, "n-gram": sd.drafts.NGram()}
    decoder = sd.decoder(target).pool(pool, selectors.Random(), 3).build()
    alone = decoder.generate(PROMPTS, BUDGETS, seed=3)
    same(list(decoder.serve(requests(), limit, seed=3, clock="rounds")), alone)


@pytest.mark.parametrize("kind", ["view", "spire", "pool"])
def test_a_request_that_is_shorter_than_the_sinks_is_refused_alone(target, kind):
    view = MagicDec(window=4, sinks=4)
    base = sd.decoder(target)
    if kind == "pool":
        base = base.pool({"view": view, "none": None}, selectors.Random(), 3)
    else:
        base = base.draft(
            view if kind == "view" else Spire(SpireModel.from_target(target, layers=1, window=5, sinks=4)), 3
        )
    some = [sd.Request([5, 6, 7, 8, 9][:n], 5, arrival) for n, arrival in ((5, 0), (2, 2), (4, 3))]
    decoder = base.build()
    done = {one.index: one for one in decoder.serve(some, 4, clock="rounds", errors="yield")}
    assert [done[i].finish for i in range(3)] == ["length", "error", "length"]
    said = r"^request 1: its prompt has 2 tokens, and draft '\w+' needs 4 at least: give a longer prompt, or another draft$"
    with pytest.raises(ValueError, match=said):
        raise done[1].error
    with pytest.raises(ValueError, match=r"^prompt 1 has 2 tokens"):
        decoder.generate([[1, 2, 3, 4], [1, 2]], 4)


def test_rows_join_where_others_have_left():
    ring = sd.cache.ring.Ring
    shape = sd.cache.slots.KVShape(1, 2, 2, torch.float64, torch.device("cpu"))
    one, other = (ring([shape], batch, 1, 4, 2) for batch in (3, 1))
    for value, some in ((1.0, one), (2.0, other)):
        some._blocks[0].fill_(value)
    left = one.select(torch.tensor([2, 1]))
    both = left.followed_by(other)
    assert both._blocks[0].data_ptr() == one._blocks[0].data_ptr()
    assert both.layers[0][0][:, 0, 0, 0].tolist() == [1, 1, 2]
    grown = both.followed_by(ring([shape], 1, 1, 4, 2))
    assert grown.layers[0][0][:, 0, 0, 0].tolist() == [1, 1, 2, 0]
    for before, after in pairwise((one, left, both, grown)):
        assert before.slots == after.slots
