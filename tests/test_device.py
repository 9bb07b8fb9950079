"""What goes to a device, and the device that kernels are launched on, as far as a CPU can tell."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import contextmanager

import pytest
import torch
from interpreted import interpreted  # noqa: F401 (a fixture)

from specdec.executors.worker import work
from specdec.kernels.device import to_device
from specdec.kernels.philox.reference import Key


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3).expand(2, 3),
        torch.zeros(1, 1).expand(1, 4),
        torch.zeros(2, 0),
        torch.arange(6).view(2, 3).t(),
    ],
)
def test_memory_that_is_pinned_is_the_tensors_own(tensor, monkeypatch):
    """Pinning an expanded tensor would copy to memory with several elements in one place, which PyTorch refuses."""
    pinned = []

    def pin_memory(self):
        pinned.append(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype).copy_(self))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: self)
    assert to_device(tensor, "cuda").equal(tensor)
    assert len(pinned) == 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("pointwise", name) for name in ("add_norm", "apply_rotary", "silu_mul")),
        *(("philox", name) for name in ("uniforms", "race")),
        ("rejection", "decisions"),
    ],
)
def test_kernels_are_launched_on_the_device_of_their_tensors(module, name, interpreted, monkeypatch):  # noqa: F811
    """Triton launches on the current device, which is another one for a model on a second GPU."""
    where = importlib.import_module(f"specdec.kernels.{module}.{'fused' if module == 'rejection' else 'api'}")
    kernels = importlib.import_module(f"specdec.kernels.{module}.triton_kernels")
    here, launched = [], []

    @contextmanager
    def current(device):
        here.append(device)
        yield
        here.pop()

    class Launched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append(list(here))
            return self.kernel[grid]

    monkeypatch.setattr(where, "current", current)
    for kernel in [k for k in vars(kernels) if k.endswith("_kernel")]:
        monkeypatch.setattr(kernels, kernel, Launched(getattr(kernels, kernel)))
    x, one = torch.ones(2, 4), torch.ones(2, dtype=torch.long)
    arguments = {
        "add_norm": (x, None, x[0], 1e-6),
        "apply_rotary": (x[:, None].clone(), x[:, None].clone(), x, x),
        "silu_mul": (x, x.clone()),
        "uniforms": (one, Key(one, one, one, 0), "cpu"),
        "race": (x, one, one),
        "decisions": (x[:, None], one[:, None][:, :0], one - 1, x[:, :0].double(), x[:, :1].double() / 2),
    }[name]
    more = {"backend": "triton"} if module == "rejection" else {}
    getattr(where, name)(*arguments, **more)
    assert launched
    assert all(inside == [torch.device("cpu")] for inside in launched)


def test_a_worker_waits_for_the_device_before_it_answers_and_before_it_ends(monkeypatch):
    """A proposal on the host says nothing of what the worker reads on the device."""
    log, requests = [], iter(["one", "two", None])

    class Drafts:
        def __init__(self, composition):
            pass

        def draft(self, request):
            log.append(f"draft {request}")
            if request == "broken":
                raise RuntimeError(request)
            return request

        def prepare(self, request):
            log.append(f"prepare {request}")

    monkeypatch.setattr("specdec.executors.worker.DraftWorker", Drafts)
    work(None, lambda: next(requests), lambda said: log.append(f"send {said}"), lambda: log.append("wait"))
    of = [[f"draft {n}", "wait", f"send {n}", f"prepare {n}"] for n in ("one", "two")]
    assert log == [*of[0], *of[1], "wait"]
    log.clear()
    work(None, lambda: "broken", lambda said: log.append(f"send {said}"), lambda: log.append("wait"))
    assert log == ["draft broken", "wait", "send broken"]
