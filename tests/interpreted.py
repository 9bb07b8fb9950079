"""Triton's interpreter in a process that has imported Triton without it.

The interpreter is a mode that a process chooses before it imports triton, and torch imports it early. So, without a GPU, tests use
a second copy of triton's modules, which nothing else in the process sees.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from specdec.graphs.recorded import Recording
from specdec.kernels import interpreted as modules
from specdec.kernels.attention import triton_backend

_copies: dict[str, ModuleType] = {}


def _ours(name: str) -> bool:
    return (name == "triton" or name.startswith("triton.") or _kernels(name)) and "._C" not in name


def _kernels(name: str) -> bool:
    return name.startswith("specdec.") and name.endswith(".triton_kernels")


def _exchange(there: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Put other copies in the place of those that are imported now, which are returned."""
    now = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    sys.modules.update(there)
    for name in filter(_kernels, now.keys() | there.keys()):  # a package refers to its modules, too
        package, _, short = name.rpartition(".")
        vars(sys.modules[package]).pop(short, None)
        if name in there:
            setattr(sys.modules[package], short, there[name])
    triton_backend._kernels.cache_clear()
    return now


def _matmul(a: Any, b: Any, dtype: Any, multiply: Any = np.matmul) -> Any:
    """A tile's product with rows that do not depend on their place, as on a GPU; those of some BLAS in float32 do."""
    return multiply(a, b, dtype=np.float64).astype(dtype)


def _patch_once() -> None:
    """Each launch replaces the operators of ``triton.language``, which takes a third of its time; in the copy they stay replaced."""
    from triton.runtime import interpreter as own

    patch, done = own._patch_lang, set[int]()

    def once(fn: Any) -> Any:
        langs = {id(value) for value in fn.__globals__.values() if isinstance(value, ModuleType)}
        if not done or not langs <= done:
            patch(fn)
            done.update(langs)
        return SimpleNamespace(restore=lambda: None)

    if patch.__name__ != "once":
        own._patch_lang = once


@contextmanager
def interpreter() -> Iterator[None]:
    """Everything that imports triton in here gets the interpreting copy."""
    outside = _exchange(_copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(np, "matmul", _matmul)
        try:
            if find_spec("triton") is not None:
                _patch_once()
            yield
        finally:
            _copies.update(_exchange(outside))


@pytest.fixture
def interpreted() -> Iterator[None]:
    """For tests of kernels on tensors of the CPU."""
    pytest.importorskip("triton")
    with interpreter():
        yield


@dataclass(frozen=True)
class Launch:
    """``kernel[grid]`` of the interpreter, which a recording takes for an operator."""

    name: str
    kernel: Any
    grid: Any = None

    def __getitem__(self, grid: Any) -> Launch:
        return replace(self, grid=grid)

    def __call__(self, *args: Any, **options: Any) -> None:
        mode = _get_current_dispatch_mode()
        if isinstance(mode, Recording):
            for t in (a for a in args if isinstance(a, torch.Tensor)):
                storage = t.untyped_storage()._cdata
                if storage not in mode.made:
                    mode.outside.setdefault(storage, t)
            mode.calls.append((self, args, options, []))
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self.kernel[self.grid](*args, **options)

    def __str__(self) -> str:
        return self.name


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of kernels by ``kernels.interpreted`` are recorded."""
    own = modules.kernels

    def wrapped(*args: Any) -> Any:
        found = vars(own(*args)).items()
        return SimpleNamespace(**{name: Launch(name, k) for name, k in found if name.endswith("_kernel")})

    monkeypatch.setattr(modules, "kernels", wrapped)
