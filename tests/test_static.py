"""Steps of fixed shapes and what captures them: recorded graphs on the CPU stand for CUDA graphs, a fake device for a real one."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import itertools
import threading
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, onto
from tiny import tiny

import specdec as sd
from specdec import tree
from specdec.builder import default_verifier
from specdec.cache.ring import Ring
from specdec.cache.ring_cache import RingCache
from specdec.cache.slots import KVShape
from specdec.drafts.spire import SpireModel
from specdec.executors.round import staying
from specdec.graphs import capture
from specdec.graphs import chain as chains
from specdec.graphs.programs import capture_named
from specdec.graphs.recorded import NotCapturable, record, watch
from specdec.graphs.ring_chain import RingChain
from specdec.graphs.ring_plan import RingPlan
from specdec.graphs.staging import Program
from specdec.graphs.static import ALL, StaticPlan, bucket_of
from specdec.kernels import streams
from specdec.kernels.attention import AttentionPlan, Tree, attention, reference, static_reference
from specdec.kernels.attention.lowered import Lowered, RingSight, lower
from specdec.kernels.attention.reach import Streaming, reach
from specdec.kernels.native import library
from specdec.rng import Attempt, Philox
from specdec.sampling import Sampling
from specdec.types import Context
from specdec.verifiers import FusedRejection

PARENTS = [-1, -1, 0, 2, 0]


# -- attention ---------------------------------------------------------------------------------------------------------


def plan_of(kind, paged):
    rows, first, counts = [0, 2, 3], [7, 0, 11], [3, 6, 5]
    shape = None
    if kind == "tree":
        parents = torch.tensor([[-1, 0, 0, 1, 0], PARENTS, PARENTS])
        root = np.array([8, 1, 11])
        shape = Tree(root, tree.ancestors(parents).numpy(), tree.depths(parents).numpy())
    table = [[3, 1, 8, 4], [0, 7], [2, 6, 9, 5]] if paged else None
    return AttentionPlan(rows, first, counts, 20, shape, table=table, page=5 if paged else 0)


def padded(lowered, rows, tokens, length):
    """As many rows without queries, and tokens of no row, as make it so many."""
    more = rows - len(lowered.rows)
    pad = torch.nn.functional.pad
    parts = {name: pad(getattr(lowered, name), (0, more)) for name in ("length", "rows", "root")}
    parts["starts"] = torch.cat([lowered.starts, lowered.starts[-1:].expand(more)])
    for name in ("depth", "table"):
        part = getattr(lowered, name)
        parts[name] = None if part is None else pad(part, (0, 0, 0, more))
    words = None if lowered.words is None else pad(lowered.words, (0, tokens - len(lowered.words)))
    return Lowered(**parts, words=words, seen=None, max_count=8, max_length=length)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize(
    "extras", [{}, {"window": 4}, {"window": Streaming(4, 2)}, {"softcap": 2.0, "sink_logits": True}]
)
def test_attention_from_tensors_alone(kind, paged, extras):
    torch.manual_seed(0)
    plan = plan_of(kind, paged)
    extras = {**extras, "sink_logits": torch.randn(4)} if extras.get("sink_logits") else extras
    query = torch.randn(1, 4, 14, 8)
    keys, values = (torch.randn(10 if paged else 4, 5 if paged else 20, 2, size) for size in (8, 6))
    wanted = reference.attend(query, keys, values, plan, 0.3, **extras)
    low = lower(plan, "cpu")
    wide = torch.cat([query, torch.full((1, 4, 3, 8), float("nan"))], 2)
    seen = torch.zeros(keys.shape[:2], dtype=torch.bool)
    for r, (row, length) in enumerate(zip(plan.rows, plan.length)):
        for s in range(length):
            seen[(plan.table[r][s // 5], s % 5) if paged else (row, s)] = True
    for buffer in (keys, values):
        buffer[~seen] = float("nan")  # nobody sees these
    for q, lowered in ((query, low), (wide, padded(low, 5, 17, 20))):
        out = static_reference.attend(q, keys, values, lowered, 0.3, **extras)
        torch.testing.assert_close(out[:, :14], wanted)
        assert not out[:, 14:].any()
    at = torch.arange(14)[:, None] - low.starts[:-1]  # [T, R] of a token as a query of each row
    own = ((at >= 0) & (torch.arange(14)[:, None] < low.starts[1:])).int().argmax(1)
    queries = torch.arange(14)[None].expand(3, -1)
    said = static_reference.visible(low, queries, extras.get("window"))[own, torch.arange(14)]
    said = torch.nn.functional.pad(said, (0, 20 - said.shape[1])).to(torch.uint8)[None]  # slot by slot
    written = Lowered(**{**vars(low), "words": None, "depth": None, "seen": said, "max_length": 20})
    out = static_reference.attend(query, keys, values, written, 0.3, **extras)
    torch.testing.assert_close(out, wanted)
    with pytest.raises(ValueError, match="seen has 4 heads"):
        heads = SimpleNamespace(**{**vars(written), "seen": said.expand(4, -1, -1)})
        static_reference.attend(query, keys, values, heads, 0.3)


def test_a_step_in_tensors_takes_first_positions():
    """Through ``attention``, as a layer asks."""
    plan = plan_of("chain", False)
    query, keys, values = (torch.randn(*s, 8) for s in ((1, 4, 14), (4, 20, 2), (4, 20, 2)))
    step = StaticPlan(lower(plan, "cpu"), plan.slots)
    for window, initial in ((4, 2), (4, 0), (4, 60)):
        out = attention(query, keys, values, step, window=window, initial=initial)
        wanted = reference.attend(query, keys, values, plan, 8**-0.5, reach(window, initial))
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("sinks", "window", "block"), [(0, 1, 1), (2, 5, 3), (4, 3, 2), (7, 4, 1)])
def test_what_a_ring_shows_by_arithmetic(sinks, window, block):
    ring = Ring([KVShape(1, 4, 4, torch.float32, torch.device("cpu"))], 1, sinks, window, block)
    queries = np.arange(40)
    for own in (None, 2, 30):
        plan = RingPlan(
            RingSight(torch.from_numpy(queries), sinks, ring.size, window, 2**31 - 1), torch.arange(40)
        )
        said = static_reference.visible(plan._lowered(own), torch.arange(40)[:, None])[:, 0]
        behind = queries[:, None] - ring.held(queries)
        expected = ring.visible(queries) & (behind < (own or 99))
        assert np.array_equal(said.numpy(), expected)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_triton_ignores_padding(kind):
    pytest.importorskip("triton")
    from interpreted import interpreter
    from test_triton_attention import DEVICE, triton_backend

    torch.manual_seed(0)
    query, keys, values = (torch.randn(*s, 16) for s in ((1, 4, 17), (4, 20, 2), (4, 20, 2)))
    low = padded(lower(plan_of(kind, False), "cpu"), 5, 17, 20)
    wanted = static_reference.attend(query, keys, values, low, 0.3)
    low = Lowered(**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in vars(low).items()})
    with interpreter() if DEVICE.type == "cpu" else nullcontext():
        out = triton_backend.launch(*(t.to(DEVICE) for t in (query, keys, values)), low, 0.3).cpu()
    torch.testing.assert_close(out[:, :14], wanted[:, :14], rtol=1e-4, atol=1e-5)


# -- recordings --------------------------------------------------------------------------------------------------------

X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda: X.sum().item(), "waits for the device"),
        (lambda: bool(X.any()), "waits for the device"),
        (lambda: X[X > 3], "index of torch.bool"),
        (lambda: X.nonzero(), "waits for the device"),
        (lambda: X.tolist(), "tolist.*waits"),
        (lambda: X.cpu(), "cpu.*waits"),
        (lambda: X.numpy(), "numpy.*waits"),
        (lambda: X.to("meta"), "one device to another"),
        (lambda: X + torch.tensor([1.0]), "copies values from the host"),
        (lambda: X + torch.from_numpy(np.ones(4, "f4")), "copies values from the host"),
        (lambda: X + torch.rand(4), "random"),
        (lambda: torch.repeat_interleave(X, torch.tensor([1, 2, 3]), 0), "lift_fresh"),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_cannot_be_captured_is_refused(body, why, mode):
    with mode(), pytest.raises(NotCapturable, match=why):
        record(body)


def test_a_recording_does_the_work_again():
    x, weight, slots = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 2, 4])
    buffer = torch.zeros(6, 5)
    calls = []

    def body():
        calls.append(1)
        y = torch.nn.functional.linear(x[None], weight)[0]
        buffer.index_copy_(0, slots, y)
        return torch.softmax(buffer.reshape(-1)[:10].view(2, 5), -1) + torch.arange(5), y * 2

    with torch.inference_mode():
        replay = record(body)
        assert len(calls) == 2
        x.normal_()
        slots.copy_(torch.tensor([1, 3, 5]))
        buffer.zero_()
        out = replay()
        mine = [t.clone() for t in (*out, buffer)]
        buffer.zero_()
        assert all(torch.equal(a, b) for a, b in zip(mine, (*body(), buffer)))
        assert all(a is b for a, b in zip(out, replay()))
        assert len(calls) == 3


def test_what_python_remembers_is_noticed():
    known = {}

    def memo():
        if "sum" not in known:
            known["sum"] = X.sum(0)
        return X + known["sum"]

    with pytest.raises(NotCapturable, match="must not depend on what Python"):
        record(memo)


# -- steps of a model --------------------------------------------------------------------------------------------------


SCRIPT = (
    "chain ragged tree none two tree none two chain back ragged leave chain tree none two chain tree none two"
)


def rounds(model, seed=0):
    """Logits of verified chains (ragged, after a rollback, with two new tokens a row), of trees and plain steps; a row leaves."""
    draw = torch.Generator().manual_seed(seed)
    text = [torch.randint(0, 97, (n,), generator=draw).tolist() for n in (20, 3, 9)]
    cache, out = model.cache(3, 64), []
    model.prefill(cache, sd.Context.of(text, 64))
    for step in SCRIPT.split():
        if step == "leave":
            cache, text = cache.select(torch.tensor([0, 2])), [text[0], text[2]]
        if step == "back":
            text[0] = [*text[0][:-4], 1]
        if step == "two":
            text = [row + torch.randint(0, 97, (1,), generator=draw).tolist() for row in text]
        B, N = len(text), 3
        size = torch.tensor([3, 0, 2])[:B] if step == "ragged" else torch.full((B,), N)
        parents = torch.tensor([[-1, 0, 0]] * B) if step == "tree" else torch.arange(-1, N - 1).expand(B, N)
        proposal = sd.Proposal(torch.randint(0, 97, (B, N), generator=draw), parents, size)
        out.append(model.score(cache, sd.Context.of(text, 64), None if step == "none" else proposal).logits)
        text = [row + torch.randint(0, 97, (1,), generator=draw).tolist() for row in text]
    return out


def same(a, b, tolerance):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.shape == y.shape
        assert float((x - y).abs().max()) <= tolerance * max(1.0, float(y.abs().max()))


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma2", "gpt2", "gpt_oss"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("mistral", "qwen3_moe")),
    ],
)
def test_steps_say_what_the_model_says(family):
    model = tiny(family, 0, torch.float32)
    plain = rounds(sd.HFModel(model))
    eager, recorded = (sd.HFModel(model, graphs=how) for how in ("eager", "recorded"))
    a, b = rounds(eager), rounds(recorded)
    assert recorded.steps.why is None
    buckets = [key[0] for key in recorded.steps._storages[0].programs]
    assert {(b.rows, b.queries, b.kept, b.nodes) for b in buckets} == {
        *((4, 4, ALL, 0), (4, 4, ALL, 4), (4, 1, ALL, 0), (4, 5, 4, 0)),
        *((2, 4, ALL, 0), (2, 4, ALL, 4), (2, 1, ALL, 0), (2, 5, 4, 0)),
    }
    same(a, plain, 5e-5)
    same(b, a, 0)  # the recording is the function, bit for bit
    same(rounds(recorded, 1), rounds(eager, 1), 0)  # other numbers through the same recordings


def test_padding_touches_nothing():
    model = sd.HFModel(tiny("llama", 0, torch.float32), graphs="recorded")
    text = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    cache = model.cache(3, 32)
    fresh = sd.HFModel(tiny("llama", 0, torch.float32))
    other = fresh.cache(3, 32)
    for _ in range(4):
        context = sd.Context.of(text, 32)
        for block in cache._whole:  # the spare slots, and all that is not in use
            block[:, :, -1] = float("nan")
            for b, row in enumerate(text):
                block[:, b, len(row) + 3 :] = float("nan")
        proposal = sd.Proposal.chain(torch.tensor([[3, 4, 5]] * 3), torch.tensor([3, 0, 2]))
        before = [[t.clone() for t in pair] for pair in cache.layers]
        out = model.score(cache, context, proposal).logits
        same([out], [fresh.score(other, context, proposal).logits], 5e-5)
        for (a, b), (c, d) in zip(cache.layers, before):
            for now, then in ((a, c), (b, d)):
                for r, row in enumerate(text):
                    end = len(row) + int(proposal.size[r])
                    assert torch.equal(now[r, :end].isnan().any(), torch.tensor(False))
                    rest = slice(end, cache.slots - 1)
                    assert now[r, rest].nan_to_num(7).equal(then[r, rest].nan_to_num(7))
        text = [[*row, 1] for row in text]
    assert model.steps._storages[0].programs


def test_buckets():
    assert bucket_of([1], [1], 3, 500) == (1, 1, ALL, 256, 0)
    assert bucket_of([2, 5, 1], [1, 5, 1], 300, 500, 5) == (4, 5, 5, 500, 8)
    assert bucket_of([1] * 9, [0] * 9, 300, 5000) == (16, 1, 0, 512, 0)
    assert bucket_of([1, 2], [1, 2], 1, 64).tokens == 4


def test_least_recently_used_steps_are_dropped():
    model = sd.HFModel(tiny("llama", 0, torch.float32), graphs="eager")
    model.steps.most = 2
    cache = model.cache(1, 64)

    def score(nodes):
        context = sd.Context.of([[1, 2, 3, 4]], 64)
        proposal = sd.Proposal.chain(torch.ones(1, nodes, dtype=torch.long), torch.tensor([nodes]))
        model.score(cache, context, proposal)
        return [key[0].queries for key in model.steps._storages[0].programs]

    model.prefill(cache, sd.Context.of([[1, 2, 3, 4]], 64))
    assert score(1) == []  # captured when met again
    assert score(1) == [2]
    assert score(2) == [2]
    assert score(2) == [2, 3]
    assert score(1) == [3, 2]
    assert score(3) == [3, 2]
    assert score(3) == [2, 4]  # 3 was used least recently
    assert "2 captured" in repr(model.steps)
    model.steps.release()
    assert score(3) == []


def test_memory_serves_the_next_cache():
    model = sd.HFModel(tiny("llama", 0, torch.float32), graphs="eager")
    first = model.cache(3, 40)
    where = first._whole[0].data_ptr()
    second = model.cache(3, 40)  # the first is in use
    assert second._whole[0].data_ptr() != where
    left = first.select(torch.tensor([0, 2]))
    del first, second
    gc.collect()
    third = model.cache(2, 40)
    assert third._whole[0].data_ptr() != where  # what select made is still there
    del left, third
    gc.collect()
    kept = {s.whole[0].data_ptr() for s in model.steps._storages}
    again = model.cache(2, 30)
    assert again._whole[0].data_ptr() in kept
    assert again.batch == 2
    assert again.capacity == 30
    assert not any(block.any() for block in again._blocks)
    larger = model.cache(5, 400)
    assert larger.capacity == 400
    del again, larger
    gc.collect()
    model.cache(6, 4000)
    assert len(model.steps._storages) == 1  # free memory goes before more is taken
    copied = model.cache(3, 40).select(torch.tensor([2, 2, 0]))
    storage = model.steps._of(copied)
    assert storage.whole is copied._whole


def test_what_cannot_be_captured_runs_without():
    scaled = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    model = tiny("llama", 0, torch.float32, **scaled)
    wrapped = sd.HFModel(model, graphs="recorded")
    with pytest.warns(RuntimeWarning, match="runs without .*: NotCapturable.*waits for the device") as said:
        out = rounds(wrapped)
    assert [("without graphs" in str(one.message)) for one in said] == [False, True]
    assert wrapped.steps.why
    assert "stopped" in repr(wrapped.steps)
    same(out, rounds(sd.HFModel(model)), 5e-5)
    rounds(wrapped)  # and says so once


def test_after_a_release_it_is_tried_again():
    model = sd.HFModel(tiny("llama", 0, torch.float32), graphs="recorded")
    out = rounds(sd.HFModel(model.model))
    model.steps.capture = unlucky(RuntimeError("once"), model.steps.capture, fails=(0, 1))
    with pytest.warns(RuntimeWarning, match="runs without .*: RuntimeError: once"):
        same(rounds(model), out, 5e-5)
    rounds(model)
    assert "0 captured, stopped" in repr(model.steps)
    model.steps.release()
    same(rounds(model), out, 5e-5)
    assert model.steps.why is None
    assert sum(len(s.programs) for s in model.steps._storages) > 1


@pytest.mark.parametrize("memory", [True, False])
def test_a_capture_that_fails_stops_no_other(memory):
    """Nor for the shape in another cache; and it is not tried again and again."""
    model = sd.HFModel(tiny("llama", 0, torch.float32), graphs="recorded")
    out = rounds(sd.HFModel(model.model))
    whole, tries = len(captured_in(model, out)), []
    model = sd.HFModel(model.model, graphs="recorded")
    broken = RuntimeError("a capture was broken")
    if memory:
        broken.__context__ = torch.OutOfMemoryError("full")
    model.steps.capture = unlucky(broken, model.steps.capture, tries)
    what = "too little memory to capture a step of this shape" if memory else "a step of this shape cannot be"
    with pytest.warns(RuntimeWarning, match=f"{what}.*was broken"):
        assert len(captured_in(model, out)) == whole - 1
    assert model.steps.why is None
    assert (len(model.steps.too_large), len(model.steps.failed)) == (int(memory), int(not memory))
    assert len(tries) == whole


def test_what_is_captured_stays_in_use_when_captures_stop():
    model = sd.HFModel(tiny("llama", 0, torch.float32), graphs="recorded")
    out, tries = rounds(sd.HFModel(model.model)), []
    model.steps.capture = unlucky(RuntimeError("again"), model.steps.capture, tries, fails=range(2, 99))
    with pytest.warns(RuntimeWarning, match="RuntimeError: again"):
        assert len(captured_in(model, out)) == 2
    assert len(tries) == 4
    before = len(model.steps.captured)
    same(rounds(model), out, 5e-5)
    assert (model.steps.why, len(model.steps.captured), len(tries)) == ("RuntimeError: again", before, 4)


def unlucky(error, capture, tries=None, fails=(0,)):
    """A capture that fails the first time, or at each of ``fails``."""
    tries = [] if tries is None else tries

    def once(body):
        tries.append(body)
        if len(tries) - 1 in fails:
            raise error
        return capture(body)

    return once


def captured_in(model, out):
    same(rounds(model), out, 5e-5)
    return [key for s in model.steps._storages for key in s.programs]


def test_defaults_follow_the_device(monkeypatch):
    """On a GPU steps are captured and rejection is fused; on the CPU nothing is."""
    triton = importlib.util.find_spec("triton") is not None
    gpu = torch.device("cuda", 1)
    assert capture_named("auto", gpu) == ("cuda" if triton else None)
    assert capture_named("auto", torch.device("cpu")) is None
    for how in (sd.HFModel, sd.HFModel.from_pretrained, sd.drafts.Spire):
        assert inspect.signature(how).parameters["graphs"].default == "auto"
    assert default_verifier(gpu) == FusedRejection()
    assert default_verifier(None) == default_verifier(torch.device("cpu")) == sd.Rejection()
    llama = sd.HFModel(tiny("llama", 0, torch.float32))
    assert llama.steps is None
    assert sd.decoder(llama).build().verifier == sd.Rejection()

    monkeypatch.setattr(Sampling, "probe", lambda *_: None)  # which would use the device
    table = sd.TableModel([0.5, 0.5])
    table.device = gpu
    there = sd.decoder(table)
    assert there.build().verifier == FusedRejection()
    assert there.verifier(sd.Rejection()).build().verifier == sd.Rejection()


def test_defaults_refuse_nothing():
    """What graphs exclude is refused only where they were asked for."""
    llama = tiny("llama", 0, torch.float32)
    dense = sd.masks.Causal() & sd.masks.Strided(2)
    for graphs in ("auto", False):
        model = sd.HFModel(llama, graphs=graphs)
        model.steps = sd.HFModel(llama, graphs="eager").steps if graphs == "auto" else None  # as on a GPU
        assert sd.models.Masked(model, dense, storage="dense").steps is None
    with pytest.raises(ValueError, match="the model has graphs"):
        sd.models.Masked(sd.HFModel(llama, graphs="eager"), dense, storage="dense")


def test_graphs_where_there_can_be_none():
    llama = tiny("llama", 0, torch.float32)
    assert sd.HFModel(llama).steps is None
    assert sd.HFModel(llama, graphs="auto").steps is None
    for how, message in (
        ({"graphs": True}, "model is on cpu"),
        ({"graphs": "cuda"}, "model is on cpu"),
        ({"graphs": "some"}, "graphs is 'some': give False, True"),
        ({"graphs": "eager", "page": 8}, "pages move"),
        ({"graphs": "eager", "attention": "packed"}, "only the Triton kernel"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.HFModel(llama, **how)
    if library() is not None:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96}
        with pytest.raises(ValueError, match="computed in C"):
            sd.HFModel(tiny("llama", 0, torch.float32, **sizes), invariant=True, graphs="eager")
    with pytest.raises(ValueError, match="runs padded"):
        sd.HFModel(tiny("gptj", 0), graphs="eager")
    step = sd.HFModel(llama, graphs="eager")
    assert not step._path.concurrent
    context = sd.Context.of([[1, 2, 3]], 16)
    run = step.bare_step(step.cache(1, 16), context)
    with torch.inference_mode():
        same([run()], [sd.HFModel(llama).score(step.cache(1, 16), context).logits[0]], 5e-5)


# -- drafts ------------------------------------------------------------------------------------------------------------

LAWS = [Sampling(0), Sampling(0.7), Sampling(1.0, top_k=5), Sampling(1.3, top_p=0.8, min_p=0.01)]


@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("how", ["eager", "recorded"])
def test_a_captured_chain_is_the_loop(sampling, how):
    model = tiny("llama", 1, torch.float32)
    loop, chain = (
        sd.drafts.Model(wrapped).bind(wrapped, sampling)
        for wrapped in (sd.HFModel(model, graphs=g) for g in (False, how))
    )
    text = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]
    context = sd.Context.of(text, 64)
    rng = Philox(torch.tensor([5, 6, 7]))
    one, two = loop.init(context, None), chain.init(context, None)
    replayed = 0
    for step in range(12):
        budget = torch.tensor([[3, 3, 3], [3, 1, 2], [0, 2, 3]][step % 3 if step > 5 else 0])[: context.batch]
        if step == 10:
            rng = Attempt(rng, 2)
        a, one = loop.propose(one, context, budget, rng)
        b, two = chain.propose(two, context, budget, rng)
        replayed += any(
            isinstance(p, chains.Chain) for s in chain.model.steps._storages for p in s.programs.values()
        )
        live = torch.arange(a.nodes) < budget[:, None]
        assert a.tokens[live].equal(b.tokens[live])
        assert not b.tokens[~live].any() or a.probs is not None
        assert a.provenance == b.provenance
        assert a.size.equal(b.size)
        if a.probs is not None:
            same([b.probs[live]], [a.probs[live]], 1e-5)
        caches = one.cache, two.cache
        assert caches[0]._lengths == caches[1]._lengths
        assert caches[0]._fed == caches[1]._fed
        text = [row + [int(t)] + ([9] if step % 2 else []) for row, t in zip(text, a.tokens[:, 0])]
        if step == 5:
            stay = torch.tensor([0, 2])
            text, rng = [text[0], text[2]], rng.select(stay)
            one, two = loop.select(one, stay), chain.select(two, stay)
        context = sd.Context.of(text, 64)
    assert replayed > 6
    assert chain.model.steps.why is None


def test_chains_that_are_drawn_one_by_one():
    model = sd.HFModel(tiny("llama", 1, torch.float32), graphs="eager")
    context, cache = sd.Context.of([[1, 2, 3]], 8), model.cache(1, 8)
    rng = Philox(torch.tensor([1]))

    def draws(budget=2, rng=rng, **sampling):
        args = model, cache, context, torch.tensor([budget]), rng, Sampling(**sampling), None
        return [chains.propose(*args) for _ in range(4)][-1]

    assert draws() is not None
    assert draws(0) is None
    assert draws(7) is None  # no room: the loop says so
    assert draws(processors=[lambda ids, scores: scores]) is None
    assert draws(rng=sd.Coupled().for_draft(rng)) is None
    assert draws(rng=sd.Coupled().for_draft(rng), temperature=0) is not None


def spire_of(target, **settings):
    model = SpireModel.from_target(target, 2, **settings)
    if model.memory is not None:
        torch.manual_seed(1)
        torch.nn.init.normal_(model.memory.weights)
    return model


SPIRE = [{"window": 6}, {"window": 5, "sinks": 3, "feedback": False}, {"window": None}]


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        pytest.param(settings, LAWS[j], marks=() if i == j else pytest.mark.slow, id=f"{name}-{j}")
        for i, (name, settings) in enumerate(zip(("feedback", "plain", "no window"), SPIRE))
        for j in range(3)
    ],
)
@torch.no_grad()
def test_a_captured_spire_chain_is_the_loop(sampling, settings):
    """Proposals of three drafts over the same rounds: the loop, steps of fixed shapes, and their recordings."""
    target = tiny("llama", 0, torch.float32, num_hidden_layers=3)
    model = spire_of(target, **settings)
    prompts, rounds = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [9, 10, 11] * 7], []
    ways = [
        sd.drafts.Spire(model, 4, sampling, graphs=how).bind(sd.HFModel(target), sampling)
        for how in (False, "eager", "recorded")
    ]
    decoder = sd.decoder(sd.HFModel(target)).draft(ways[0], 4).sampling(sampling).build()
    decoder.generate(prompts, [36, 16, 36], seed=5, on_round=rounds.append)
    states, seeds, replayed = [], torch.tensor([3, 4, 5]), 0
    for round in rounds:
        if not round.number:
            states = [way.init(round.context, None) for way in ways]
        else:
            rng = Philox(seeds[round.context.request])
            budget = (
                torch.tensor([4, 3, 1][: round.context.batch]) if round.number % 3 else torch.ones(1).long()
            )
            budget = budget.expand(round.context.batch) if len(budget) == 1 else budget
            (a, _), (b, _), (c, _) = (
                way.propose(state, round.context, budget, rng) for way, state in zip(ways, states)
            )
            assert a.provenance == b.provenance == c.provenance
            live = torch.arange(a.nodes) < budget[:, None]
            assert a.tokens[live].equal(b.tokens[live])
            assert b.tokens.equal(c.tokens)
            if a.probs is not None:
                same([b.probs], [a.probs], 1e-5)
                same([c.probs], [b.probs], 0)
        states = [way.observe(state, round) for way, state in zip(ways, states)]
        if round.finished.any():
            stay = staying(round.finished)  # the decoder's order
            turned = torch.arange(len(stay)).flip(0)
            orders = [stay] if round.number % 2 else [stay[turned], turned]  # or by copies
            for order in orders if len(stay) else ():
                states = [way.select(state, order) for way, state in zip(ways, states)]
            states = states if len(stay) else []
        if states and round.number:
            replayed += bool(ways[2].programs._storages[0].programs)
    assert replayed > 6
    assert all(way.programs.why is None for way in ways[1:])


def test_spire_with_graphs():
    """Whole runs, whose memory and captures serve the next; the target's verification brings activations out of its own steps."""
    target = tiny("llama", 0, torch.float32, num_hidden_layers=3)
    model, said = spire_of(target, window=6), []
    for how in (False, "eager", "recorded"):
        wrapped = sd.HFModel(target, graphs=how)
        spire = sd.drafts.Spire(model, 3, graphs=how)
        decoder = sd.decoder(wrapped).draft(spire, 3).sampling(temperature=1.0).build()
        prompts = [[1, 2, 3, 4, 5] * 4, [7, 8], [9] * 11]
        said += [[decoder.generate(prompts, [20, 9, 14], seed=seed).ids for seed in (3, 3, 4)]]
        if how:
            (storage,) = decoder.draft.programs._storages
            assert {(shape.rows, shape.steps) for shape in storage.programs} >= {(3, 3), (2, 3)}
            assert any(taps for _, _, taps in wrapped.steps._storages[0].programs)
            assert wrapped.steps.why is decoder.draft.programs.why is None
            decoder.draft.programs.release()
            assert not decoder.draft.programs._storages
    assert said[0] == said[1] == said[2]
    rng = sd.Coupled().for_draft(Philox(torch.tensor([1])))
    odd = Sampling(processors=[lambda ids, scores: scores])
    bound = sd.drafts.Spire(model, 3, graphs="eager").bind(sd.HFModel(target), Sampling())
    context = Context.of([[1, 2, 3]], 16)
    three = bound.ring(3, 16)
    copied = three.select(torch.tensor([2, 2, 0]))  # which is in other memory
    assert bound.programs._of(copied).whole is copied._whole is copied._blocks
    args = bound.init(context, None).ring, context, torch.tensor([2]), rng
    assert [bound._drawn(*args, Sampling(0)) is None for _ in range(2)] == [True, False]
    assert all(
        bound._drawn(*args, distribution) is None for distribution in (Sampling(), odd) for _ in range(2)
    )
    with pytest.raises(ValueError, match="on cpu: move it"):
        sd.drafts.Spire(model, graphs=True).bind(sd.HFModel(target), Sampling())


@pytest.mark.parametrize("sampling", [LAWS[0], LAWS[2]])
@torch.no_grad()
def test_a_captured_chain_of_a_windowed_model_is_the_loop(sampling):
    """Rows that lack one token of the text, or two."""
    model = tiny("llama", 1, torch.float32)
    ways = [
        sd.drafts.Model(windowed).bind(windowed, sampling)
        for windowed in (
            sd.models.Windowed(sd.HFModel(model, graphs=how), 6, block=4)
            for how in (False, "eager", "recorded")
        )
    ]
    text = [[1, 2, 3, 4, 5, 6], [7, 8], [9] * 12]
    context, rng, seen = Context.of(text, 80), Philox(torch.tensor([5, 6, 7])), set()
    states = [way.init(context, None) for way in ways]
    for step in range(12):
        budget = torch.tensor([[3, 3, 3], [3, 1, 2], [0, 2, 3]][step % 3])
        made = []
        for i, way in enumerate(ways):
            proposal, states[i] = way.propose(states[i], context, budget, rng)
            made.append(proposal)
        a, b, c = made
        live = torch.arange(a.nodes) < budget[:, None]
        assert a.tokens[live].equal(b.tokens[live])
        assert b.tokens.equal(c.tokens)
        if a.probs is not None:
            same([b.probs[live]], [a.probs[live]], 1e-5)
            same([c.probs], [b.probs], 0)
        seen |= {p.shape.earlier for s in ways[2].model.steps._storages for p in s.programs.values()}
        news = ([9, 8], [4], [3, 1]) if step < 8 else ([9], [4], [3])
        for row, new in zip(text, news):
            row += new
        context = Context.of(text, 80)
    assert seen == {False, True}
    assert ways[2].model.steps.why is None


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        *(("llama", LAWS[0]), ("gpt_oss", LAWS[2])),
        *(
            pytest.param(family, LAWS[i], marks=pytest.mark.slow)
            for family, i in (("llama", 2), ("gemma2", 0), ("gemma2", 2), ("gpt_oss", 0))
        ),
    ],
)
@torch.no_grad()
def test_a_captured_chain_over_a_ring_is_the_loop(family, sampling):
    """MagicDec's view of a target, over the same rounds: a layer's own window, soft caps and sinks included."""
    model, rounds = tiny(family, 0, torch.float32), []
    targets = [sd.HFModel(model, graphs=how) for how in (False, "eager", "recorded")]
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [9, 10, 11] * 7]
    drafts = [sd.drafts.MagicDec(window=6, sinks=2, block=4).bind(t, sampling) for t in targets]
    caches, states = [t.cache(3, 96) for t in targets], []
    decoder = sd.decoder(targets[0]).draft(sd.drafts.MagicDec(window=6, sinks=2, block=4), 4)
    budgets = [60, 24, 60] if sampling.greedy else [30, 12, 30]  # greedy rounds are fewer
    decoder.sampling(sampling).build().generate(prompts, budgets, seed=5, on_round=rounds.append)
    seeds, replayed = torch.tensor([3, 4, 5]), 0
    for round in rounds:
        B, proposals = round.context.batch, []
        budget = torch.tensor([[4, 3, 1], [4, 4, 4], [0, 2, 1]][round.number % 3][:B])
        for target, cache, draft, i in zip(targets, caches, drafts, range(3)):
            target.prefill(cache, round.context)
            if not round.number:
                states.append(draft.init(round.context, cache))
                continue
            states[i].cache.catch_up()
            proposal, _ = draft.propose(
                states[i], round.context, budget, Philox(seeds[round.context.request])
            )
            proposals.append(proposal)
        if round.number:
            a, b, c = proposals
            live = torch.arange(a.nodes) < budget[:, None]
            assert a.tokens[live].equal(b.tokens[live])
            assert b.tokens.equal(c.tokens)
            if a.probs is not None:
                same([b.probs[live]], [a.probs[live]], 1e-5)
                same([c.probs], [b.probs], 0)
            replayed += any(
                isinstance(p, RingChain) for s in targets[2].steps._storages for p in s.programs.values()
            )
        if round.finished.any():
            stay = staying(round.finished)
            caches = [cache.select(stay) for cache in caches] if len(stay) else caches
            states = [
                d.follow(d.select(s, stay), c) if len(stay) else s for d, s, c in zip(drafts, states, caches)
            ]
    assert replayed > 6
    assert all(target.steps.why is None for target in targets[1:])


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_constant_size_drafts_with_graphs(temperature):
    """Whole runs, whose memory serves the next; where a chain cannot be captured the loop draws it."""
    target, small = tiny("llama", 0, torch.float32), tiny("llama", 1, torch.float32)
    prompts, said = [[1, 2, 3, 4, 5] * 4, [7, 8], [9] * 11], []
    for how in (False, "eager"):
        t, d = (sd.HFModel(m, graphs=how) for m in (target, small))
        view = {"window": 6, "block": 3}
        drafts = [
            sd.drafts.MagicDec(**view),
            sd.drafts.MagicDec(**view, positions="in_cache"),
            sd.drafts.MagicDec(**view, pruner=sd.pruning.SnapKV(), budget=4, observation=2),
            sd.drafts.Model(sd.models.Windowed(d, 6)),
        ]
        for draft, steps in zip(drafts, (t.steps, None, None, d.steps)):
            decoder = sd.decoder(t).draft(draft, 3).sampling(temperature=temperature).build()
            said.append([decoder.generate(prompts, [20, 9, 14], seed=seed).ids for seed in (3, 4)])
            if how and steps is not None:
                rings = [s for s in steps._storages if isinstance(s._model, RingCache)]
                assert len(rings) == 1  # the second run had the memory of the first
                shapes = [p.shape for p in rings[0].programs.values() if isinstance(p, RingChain)]
                assert shapes
                assert any(shape.earlier for shape in shapes) == (steps is d.steps)
    assert said[:4] == said[4:]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_no_distribution(temperature):
    bad = tiny("llama", 1, torch.float32)
    draft = sd.HFModel(bad, graphs="eager")
    decoder = sd.decoder(sd.HFModel(tiny("llama", 0, torch.float32))).draft(draft, 3)
    decoder = decoder.sampling(temperature=temperature).build()

    def spoil(round):
        if round.number == 6:
            with torch.no_grad():
                bad.lm_head.weight.fill_(float("nan"))

    with pytest.raises(ValueError, match=r"not finite|contain nan"):
        decoder.generate([[1, 2, 3]], 30, seed=0, on_round=spoil)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("draft", ["spire", "magicdec"])
def test_logits_over_a_ring_that_are_no_distribution(draft, temperature):
    decoder = builder_of(draft, "eager").sampling(temperature=temperature).build()
    inner = decoder.draft.model.body if draft == "spire" else decoder.target.model

    def spoil(round):
        if round.number == 4:
            with torch.no_grad():
                inner.lm_head.weight.fill_(float("nan"))

    with pytest.raises(ValueError, match="not finite"):
        decoder.generate([[1, 2, 3], [4, 5]], 40, seed=0, on_round=spoil)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_whole_runs(temperature):
    target, small = tiny("llama", 0, torch.float32), tiny("llama", 1, torch.float32)
    prompts, said = [[1, 2, 3, 4, 5] * 4, [7, 8], [9] * 11], []
    for how in (False, "recorded"):
        t, d = (sd.HFModel(m, graphs=how) for m in (target, small))
        chain = sd.decoder(t).draft(d, 3).sampling(temperature=temperature).build()
        bush = sd.decoder(t).draft(sd.drafts.Tree(d, (2, 1, 1)), 3).sampling(temperature=temperature).build()
        said += [[x.generate(prompts, [20, 9, 14], seed=3).ids for x in (chain, bush, chain)]]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("draft", "of"),
    [
        ("none", "target"),
        ("spire", "draft"),
        *(("ahead", "target"), ("spire ahead", "draft")),
        *(pytest.param(name, "draft", marks=pytest.mark.slow) for name in ("model", "windowed", "ahead")),
    ],
)
def test_weights_whose_storage_was_replaced(draft, of, monkeypatch):
    """``weight.data = ...`` leaves the parameter, and moves the numbers whose address a graph has: no old step is replayed."""
    target, small = (tiny("llama", seed, torch.float32, num_hidden_layers=2) for seed in (0, 1))
    if "spire" in draft:
        small = SpireModel.from_target(target, layers=1, window=8)

    def decoder(graphs):
        builder = sd.decoder(sd.HFModel(target, graphs=graphs)).greedy()
        if "spire" in draft:
            builder = builder.draft(sd.drafts.Spire(small, block=3, graphs=graphs), 3)
        elif draft == "windowed":
            builder = builder.draft(sd.models.Windowed(sd.HFModel(small, graphs=graphs), 6, 1), 3)
        elif draft != "none":
            builder = builder.draft(sd.HFModel(small, graphs=graphs), 3)
        return (builder.executor(sd.executors.Ahead()) if "ahead" in draft and graphs else builder).build()

    def said(decoder):
        rounds = []
        decoder.generate([[1, 2, 3, 4, 5] * 3, [7, 8]], [14, 9], eos_token_id=(), on_round=rounds.append)
        drafted = [
            r.proposal.tokens[b, : r.proposal.size[b]].tolist()
            for r in rounds
            for b in r.context.request.argsort()
        ]
        return drafted, [r.verdict.bonus.tolist() for r in rounds]

    def swap(model):
        for p in model.parameters():
            if p.dim() == 2:
                p.data = p.data.roll(1, 0).clone()

    captured = decoder("recorded")
    before = [said(captured) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    model = getattr(captured.draft, "model", None)
    of_draft = getattr(captured.draft, "programs", None) or getattr(model, "steps", None)
    programs = of_draft if of == "draft" and "ahead" not in draft else captured.target.steps
    stale = set(programs.captured)
    assert stale
    swap(target if of == "target" else small)
    expected, replayed = said(decoder(False)), set()
    assert expected != before[0]
    replay = Program.replay
    monkeypatch.setattr(Program, "replay", lambda self: (replayed.add(self), replay(self))[1])
    assert said(captured) == said(captured) == said(captured) == expected
    assert replayed
    assert not replayed & stale
    assert not stale & set(programs.captured)  # they would keep the old memory


# -- devices -----------------------------------------------------------------------------------------------------------


DRAFTS = {
    "none": None,
    "model": lambda target, small, graphs: small,
    "tree": lambda target, small, graphs: sd.drafts.Tree(small, (2, 1, 1)),
    "ngram": lambda target, small, graphs: sd.drafts.NGram(),
    "magicdec": lambda target, small, graphs: sd.drafts.MagicDec(window=8, block=3),
    "spire": lambda target, small, graphs: sd.drafts.Spire(small, block=3, graphs=graphs),
}


def builder_of(draft, graphs=False, on=lambda model: model):
    """A decoder of tiny models, which ``on`` puts somewhere."""
    target, small = (tiny("llama", seed, torch.float32, num_hidden_layers=1) for seed in (0, 1))
    if draft == "spire":
        small = SpireModel.from_target(target, layers=1, window=8)
        small.body = on(small.body)
        small = SpireModel(small.body, small.layers, window=8)
    else:
        small = sd.HFModel(on(small), graphs=graphs)
    target = sd.HFModel(on(target), graphs=graphs)
    builder = sd.decoder(target)
    return builder if DRAFTS[draft] is None else builder.draft(DRAFTS[draft](target, small, graphs), 3)


@pytest.mark.parametrize(
    ("draft", "verifier", "temperature"),
    [
        *(("none", sd.Coupled, 1.0), ("model", sd.Rejection, 0), ("model", sd.Coupled, 1.0)),
        *(("model", sd.verifiers.FusedRejection, 1.0), ("tree", sd.Rejection, 1.0)),
        *(("model", sd.BlockVerification, 1.0), ("ngram", sd.BlockVerification, 1.0)),
        *(("ngram", sd.Rejection, 1.0), ("magicdec", sd.Rejection, 1.0), ("spire", sd.Rejection, 1.0)),
        *(
            pytest.param(draft, sd.Rejection, temperature, marks=pytest.mark.slow)
            for draft, temperature in (("none", 0), ("none", 1.0), ("model", 1.0), ("tree", 0), ("spire", 0))
        ),
    ],
)
def test_a_round_waits_once(draft, verifier, temperature):
    def decoder(*where):
        return builder_of(draft, *where).verifier(verifier()).sampling(temperature=temperature).build()

    prompts = [[1, 2, 3, 4], [7, 8]]
    expected = decoder().generate(prompts, 10, seed=3).ids
    for graphs in (False, "eager"):
        seen: list[int] = []
        with FakeDevice() as device:

            def note(_, device=device, seen=seen):
                seen.append(device.waits.total())

            said = decoder(graphs, onto).generate(prompts, 10, seed=3, on_round=note).ids
        middle = len(seen) // 2
        assert seen[middle] - seen[middle - 1] == 1, device.waits
        assert said == expected


def test_a_served_round_waits_once():
    seen = []
    with FakeDevice() as device:
        decoder = builder_of("model", "eager", onto).sampling(temperature=1.0).build()
        requests = [sd.Request([1, 2, 3, 4], 10), sd.Request([7, 8], 10)]
        note = lambda _: seen.append(device.waits.total())  # noqa: E731
        served = list(decoder.serve(requests, seed=3, on_round=note))
    middle = len(seen) // 2
    assert len(served) == 2
    assert seen[middle] - seen[middle - 1] == 1


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("graphs", [False, "eager"])
@pytest.mark.parametrize("who", ["target", "model"])
def test_a_device_that_says_nan(who, graphs, temperature):
    with FakeDevice():
        decoder = builder_of("model", graphs, onto).sampling(temperature=temperature).build()
        model = decoder.target if who == "target" else decoder.draft.model
        committed = []

        def spoil(round):
            committed.append(int(round.committed.sum()))
            if round.number == 4:
                with torch.no_grad():
                    model.model.lm_head.weight.fill_(float("nan"))

        with pytest.raises(ValueError, match=r"logits of row 0, entry 0 contain nan|draft proposes -1 where"):
            decoder.generate([[1, 2, 3, 4], [7, 8]], 40, seed=3, on_round=spoil)
    assert len(committed) == 5  # nothing after that


@pytest.mark.parametrize(
    ("tokens", "probs", "why"),
    [(200, None, "outside the target's vocabulary"), (3, 2.0, "row 0, node 0 sum to"), (3, -1.0, "sum to")],
)
def test_what_is_wrong_with_a_draft_on_a_device(tokens, probs, why):
    class Wrong:
        name = "wrong"

        def init(self, context, target_cache):
            return None

        def propose(self, state, context, budget, rng):
            B, N = context.batch, int(budget.max())
            distribution = None if probs is None else torch.full((B, N, 97), probs, device="meta")
            drafted = torch.full((B, N), tokens, device="meta")
            return sd.Proposal.chain(
                drafted, budget, distribution, None if distribution is None else "sampled"
            ), None

        def observe(self, state, round):
            return state

        def select(self, state, rows):
            return state

    with FakeDevice():
        decoder = sd.decoder(sd.HFModel(onto(tiny("llama", 0, torch.float32)))).draft(Wrong(), 2).build()
        with pytest.raises(ValueError, match=why):
            decoder.generate([[1, 2, 3]], 8, seed=0)


class FakeCuda(SimpleNamespace):
    """A stand-in for ``torch.cuda``, whose calls are in ``log``. ``broken``: where the first capture fails."""

    def __init__(self, monkeypatch, broken=None):
        self.log = log = []
        self.now = current = "current"
        self.handles = self.ends = 0
        self.free, self.cached = 9, 5
        fake = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                assert fake.now != current
                log.append(("capture", pool, capture_error_mode))

            def capture_end(self):
                fake.ends += 1
                if broken == "end" and fake.ends == 1:
                    raise RuntimeError("cannot be ended")

            def replay(self):
                log.append("replay")

        @contextmanager
        def on(stream):
            fake.now, before = stream, fake.now
            try:
                yield
            finally:
                fake.now = before

        def handle():
            fake.handles += 1
            log.append("pool")
            return f"pool {fake.handles}"

        super().__init__(
            device=lambda device: nullcontext(), stream=on, graph_pool_handle=handle, CUDAGraph=Graph,
            current_stream=lambda: SimpleNamespace(wait_stream=lambda other: log.append("wait")),
            current_device=lambda: 0, mem_get_info=lambda: (fake.free, 99), memory_reserved=lambda: 20,
            memory_allocated=lambda: 20 - fake.cached, empty_cache=lambda: log.append("empty"),
        )  # fmt: skip
        monkeypatch.setattr(capture.torch, "cuda", self)
        monkeypatch.setattr(capture, "_aside", {})
        monkeypatch.setattr(capture, "own_stream", lambda device: self.current_stream())
        clear = lambda: log.append("clear")  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
        end = lambda device, pool: log.append(("ended", pool))  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)


def test_cuda_graphs_in_the_right_order(monkeypatch):
    """Warm-up beside the stream, one pool, workspaces that belong to the graph, the graph's own replay."""
    cuda = FakeCuda(monkeypatch)
    log = cuda.log
    graphs = capture.CudaGraphs(torch.device("cuda"))
    first = graphs(lambda: log.append("body") or "out")
    began = ("capture", "pool 1", "thread_local")
    assert log == ["wait", "body", "body", "body", "wait", "clear", "pool", began, "body", "clear"]
    assert first() == first() == "out"
    assert log[-2:] == ["replay", "replay"]
    second = graphs(lambda: None)
    other = capture.CudaGraphs(torch.device("cuda"))(lambda: None)
    assert log.count("pool") == 2
    assert len(capture._aside) == 1  # one stream for all captures of a device
    assert "empty" not in log
    cuda.free = 4
    third = graphs(lambda: None)
    assert log.count("empty") == 1  # more is cached than free

    cuda.synchronize = lambda device: log.append("all of it")
    waiting = threading.Thread(target=capture.synchronize, args=(torch.device("cuda"),))

    def body():
        if not waiting.is_alive():
            waiting.start()
        waiting.join(0.05)
        log.append("captured")

    fourth = graphs(body)
    waiting.join()
    assert log[-1] == "all of it"
    assert log[log.index("captured") :].count("all of it") == 1  # a capture is not waited for in its middle
    del first, second, other, third, fourth


def test_a_pool_is_not_used_again_after_its_last_graph(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    graphs = capture.CudaGraphs(torch.device("cuda"), warm_up=0)
    kept = [graphs(lambda: None), graphs(lambda: None)]
    kept.pop(0)
    kept.append(graphs(lambda: None))
    assert cuda.handles == 1
    kept.clear()
    kept.append(graphs(lambda: None))
    assert cuda.handles == 2


@pytest.mark.parametrize("where", ["body", "end"])
def test_a_failed_capture_leaves_the_stream_as_it_was(where, monkeypatch):
    """A pool that was being recorded is not used again, and the allocator is told that the capture is over."""
    cuda = FakeCuda(monkeypatch, where)
    graphs = capture.CudaGraphs(torch.device("cuda"), warm_up=0)
    calls = []

    def body():
        calls.append(cuda.now)
        if where == "body" and len(calls) == 2:  # the first is watched
            raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be"):
        graphs(body)
    assert cuda.now == "current"
    assert cuda.ends == 1
    assert ("ended", "pool 1") in cuda.log
    kept = [graphs(body), graphs(body)]
    assert [entry[1] for entry in cuda.log if entry[0] == "capture"] == ["pool 1", "pool 2", "pool 2"]
    assert len(kept) == 2


def test_what_cannot_be_captured_is_found_before_a_capture_begins(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    graphs = capture.CudaGraphs(torch.device("cuda"))
    with pytest.raises(NotCapturable, match="waits for the device"), torch.inference_mode():
        graphs(lambda: X.sum().item())
    assert not any(entry[0] == "capture" for entry in cuda.log)
    assert cuda.now == "current"
    layer = torch.nn.Linear(4, 4)
    with torch.inference_mode():
        assert torch.equal(watch(lambda: layer(X)), layer(X))


def test_a_stream_has_one_user(monkeypatch):
    """PyTorch hands out its streams in turn, as new objects."""
    turn = itertools.count()

    class Stream:
        def __init__(self, device):
            self.device_index, self.cuda_stream = device.index, next(turn) % streams.STREAMS

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(streams, "_held", weakref.WeakValueDictionary())
    device = torch.device("cuda", 1)
    held = [streams.own_stream(device) for _ in range(3)]
    others = [Stream(device) for _ in range(streams.STREAMS - 3)]  # the next would be the first again
    assert others
    held += [streams.own_stream(device) for _ in range(streams.STREAMS - 3)]
    assert len({stream.cuda_stream for stream in held}) == streams.STREAMS
    with pytest.raises(RuntimeError, match="all 32 streams of cuda:1 are in use"):
        streams.own_stream(device)
    gone = held.pop(7).cuda_stream
    assert streams.own_stream(device).cuda_stream == gone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_on_a_gpu(dtype):
    models = [tiny("llama", i, dtype).cuda() for i in (0, 1)]
    out = rounds(sd.HFModel(models[0]))
    replayed = sd.HFModel(models[0], graphs=True)
    same(rounds(replayed), out, 1e-3 if dtype == torch.float32 else 0.1)
    assert replayed.steps.why is None
    if dtype == torch.float32:
        said = []
        for graphs in (False, True):
            t, d = (sd.HFModel(m, graphs=graphs) for m in models)
            decoder = sd.decoder(t).draft(d, 3).sampling(temperature=1.0).build()
            said.append(decoder.generate([[1, 2, 3] * 5, [4, 5]], 30, seed=1).ids)
        assert said[0] == said[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_round_waits_once_on_a_gpu(draft):
    """As on the fake device, by PyTorch's own watch; and texts are the same with captured steps."""
    said = []
    for graphs in (False, True):
        decoder = builder_of(draft, graphs, lambda model: model.cuda()).sampling(temperature=1.0).build()
        seen: list[int] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            def note(_, caught=caught, seen=seen):
                seen.append(sum("synchronizing" in str(w.message) for w in caught))

            try:
                torch.cuda.set_sync_debug_mode("warn")  # which warns that it is a prototype
                said.append(decoder.generate([[1, 2, 3, 4], [7, 8]], 32, seed=3, on_round=note).ids)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        middle = len(seen) // 2
        assert seen[middle] - seen[middle - 1] == 1
    assert said[0] == said[1]
