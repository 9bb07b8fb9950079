"""Steps of a model, of fixed shapes; recorded graphs on the CPU stand for CUDA graphs."""

from __future__ import annotations

import gc
import importlib.util
import inspect

import pytest
import torch
from stepped import rounds, same
from tiny import tiny

import specdec as sd
from specdec.builder import default_verifier
from specdec.graphs.programs import capture_named
from specdec.graphs.static import ALL, bucket_of
from specdec.kernels.native import library
from specdec.sampling import Sampling
from specdec.verifiers import FusedRejection


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gpt2", "gpt_oss"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma2", "mistral", "qwen3_moe")),
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
    assert capture_named("auto", gpu, torch.float64) is None  # for which there is no kernel
    with pytest.raises(ValueError, match=r"graphs is True but the model is torch.float64.*give graphs=False"):
        capture_named(True, gpu, torch.float64)
    assert capture_named("eager", torch.device("cpu"), torch.float64) == "eager"
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
