"""What captures a step: recordings on the CPU, and CUDA graphs, whose calls are tested on a stand-in for ``torch.cuda``."""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stepped import rounds, same
from tiny import tiny

import specdec as sd
from specdec.graphs import capture
from specdec.graphs.recorded import NotCapturable, record, watch
from specdec.kernels import streams

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


class FakeCuda(SimpleNamespace):
    """A stand-in for ``torch.cuda``, whose calls are in ``log``. ``broken``: where the first capture fails."""

    def __init__(self, monkeypatch, broken=None):
        self.log = log = []
        self.now = current = "current"
        self.handles = self.ends = 0
        self.free, self.cached = 9, 5
        fake = self

        class Graph:
            def capture_begin(self, pool=None, capture_error_mode=None):
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
        monkeypatch.setattr(capture, "_broken", [])
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

    def drop():
        with capture.quiet(torch.device("cuda")):
            log.append("drop")

    waiting = threading.Thread(target=drop)

    def body():
        if not waiting.is_alive():
            waiting.start()
        waiting.join(0.05)
        log.append("captured")

    fourth = graphs(body)
    waiting.join()
    assert log[-2:] == ["all of it", "drop"]
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
    """A pool that was being recorded is not used again, and the allocator and the generator are told that the capture is over."""
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
    assert cuda.ends == 2  # an empty capture tells the generator of random numbers that the first is over
    assert ("ended", "pool 1") in cuda.log
    assert len(capture._broken) == 1  # the allocator of pinned memory may ask it
    kept = [graphs(body), graphs(body)]
    assert [entry[1] for entry in cuda.log if entry[0] == "capture"] == ["pool 1", None, "pool 2", "pool 2"]
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
        __slots__ = ("__dict__", "cuda_stream", "device_index")  # weak references to it are errors

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
def test_streams_come_back_on_a_gpu():
    """PyTorch frees a stream without clearing weak references to it."""
    held, device = len(streams._held), torch.device("cuda", torch.cuda.current_device())
    for _ in range(3 * streams.STREAMS):
        assert len(streams._held) == held
        mine = streams.own_stream(device)
        assert len(streams._held) == held + 1
        del mine


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_on_a_gpu(dtype):
    models = [tiny("llama", i, dtype).cuda() for i in (0, 1)]
    out = rounds(sd.HFModel(models[0], graphs=False))
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
