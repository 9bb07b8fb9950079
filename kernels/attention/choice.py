"""Which backend serves a call: the backends that there are, what each cannot do, and which is tried first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.attention.contract import Backend
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, Streaming, reach

SMALL = 64  # queries of a row up to which a call is decoding or verification, and not a prompt

_MODULES = {
    "packed": "packed",
    "padded": "padded",
    "decomposed": "decomposed",
    "reference": "reference",
    "native": "native",
    "cpu": "cpu",
    "torch_flash": "torch_flash",
    "flash_attn": "flash_attn",
    "triton": "triton_backend",
}
EIGHT_BITS = frozenset({"triton"})  # they read keys and values of eight bits; others are given wider copies
_HERE = __package__
UNORDERED = (
    "initial counts positions, and this plan says slot by slot what is seen: let it say so of the first ones"
)

# Tried in this order by "auto", and why. Others are served by name only.
_CPU = {
    "native": "C kernels: each slot is read once, nothing is padded (prompts run packed)",
    "packed": "PyTorch's fused attention, on views of the slots",
    "reference": "serves every call, row by row",
}
_DECODE = {
    "triton": "one launch for ragged rows, trees and windows",
    "torch_flash": "splits keys over the device for decoding, nothing to install",
    "flash_attn": "splits keys over the device for decoding, knows soft caps",
    "packed": "PyTorch's fused attention, any dtype",
    "reference": "serves every call, row by row",
}
_PROMPT = {
    "torch_flash": "made for many queries, one call for ragged rows",
    "flash_attn": "made for many queries, knows soft caps; a call for each row",
    "triton": "serves ragged rows of any length in one launch",
    "packed": "PyTorch's fused attention, any dtype",
    "reference": "serves every call, row by row",
}


class _Backends(Mapping[str, Backend]):
    """Name -> backend, imported when it is asked for; an ImportError says what to install."""

    def __init__(self) -> None:
        self._names = [name for name, module in _MODULES.items() if find_spec(f"{_HERE}.{module}")]
        self.registered: dict[str, Backend] = {}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._names, *self.registered])

    def __len__(self) -> int:
        return len(self._names) + len(self.registered)

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self.registered

    def __getitem__(self, name: str) -> Backend:
        if name not in self:
            raise KeyError(name)
        return _load(name)


_backends = _Backends()
BACKENDS: Mapping[str, Backend] = _backends
"""Ways to compute the same, by name; modules are imported when they are asked for."""


def register(name: str, backend: Backend) -> None:
    """Let ``backend`` be asked for by ``name``; ``conformance.check`` says whether it keeps the contract. ``"auto"`` does not take it.

    Raises:
        ValueError: the library has a backend of this name.
    """
    if name == "auto" or name in _MODULES:
        raise ValueError(f"name is {name!r}, which the library uses: give another one")
    _backends.registered[name] = backend


@contextmanager
def lent(backend: Backend | str) -> Iterator[str]:
    """A name by which ``backend`` may be asked for in here; its own if it is a name already."""
    if isinstance(backend, str):
        yield backend
        return
    name = f"lent {id(backend)}"
    _backends.registered[name] = backend
    try:
        yield name
    finally:
        del _backends.registered[name]


def _load(name: str) -> Backend:
    return _backends.registered.get(name) or _module(name)


@lru_cache(maxsize=32)
def _module(name: str) -> Any:
    if name == "triton" and find_spec("triton") is None:
        raise ImportError("triton is not installed: pip install triton")
    module = import_module(f"{_HERE}.{_MODULES[name]}")
    if name == "flash_attn":
        module.package()
    return module


def check(backend: str, name: str = "backend") -> None:
    """Refuse an argument ``name`` that is not ``"auto"`` or one of ``BACKENDS``, or that is not installed.

    Raises:
        ValueError: there is no such backend.
        ImportError: it needs a package that is not there; the message says which.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"{name} is {backend!r}: there are auto, {', '.join(BACKENDS)}")
    if backend != "auto":
        try:
            _load(backend)
        except ImportError as error:
            raise ImportError(f"{name} is {backend!r} but {error}") from error


def why_not(
    backend: str,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lse: bool = False,
) -> str | None:
    """Why a backend cannot serve a call, or ``None``. Arguments as for ``api.attention``, ``initial`` within ``window``."""
    if isinstance(window, Streaming) and not plan.ordered:
        return UNORDERED
    if (
        sink_logits is not None
        and sink_logits.requires_grad
        and torch.is_grad_enabled()
        and backend != "reference"
    ):
        return "it has no gradient of sink logits: call it under torch.no_grad(), or take 'reference'"
    try:
        module = _load(backend)
    except ImportError as error:
        return str(error)
    return module.refuses(query, keys, values, plan, window, softcap, sink_logits, lse)


def _reach(window: Reach, initial: int) -> Reach:
    return window if isinstance(window, Streaming) else reach(window, initial)


def order(device: torch.device, plan: AttentionPlan) -> dict[str, str]:
    """What ``"auto"`` tries, in order: name -> why it is there."""
    if device.type != "cuda":
        tried = _CPU
    else:
        tried = _DECODE if max(plan.counts) <= SMALL else _PROMPT
    return {name: reason for name, reason in tried.items() if name in BACKENDS}


def choose(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lse: bool = False,
    initial: int = 0,
) -> str:
    """The backend that ``"auto"`` takes: the first in ``order`` that can serve the call."""
    window = _reach(window, initial)
    for name in order(query.device, plan):
        if why_not(name, query, keys, values, plan, window, softcap, sink_logits, lse) is None:
            return name
    why = explain(query, keys, values, plan, window, softcap, sink_logits, lse)
    raise ValueError("no backend can serve this call: " + why)


def explain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lse: bool = False,
    initial: int = 0,
) -> str:
    """A line for each backend: chosen and why, could serve the call, or why not. To be printed."""
    window = _reach(window, initial)
    tried, chosen, lines = order(query.device, plan), False, []
    for name in [*tried, *(n for n in BACKENDS if n not in tried)]:
        why = why_not(name, query, keys, values, plan, window, softcap, sink_logits, lse)
        if why is not None:
            lines.append((name, "cannot", why))
        elif name in tried and not chosen:
            chosen = True
            lines.append((name, "chosen", tried[name]))
        else:
            lines.append((name, "could", tried.get(name, "by name only")))
    wide = max(len(name) for name, *_ in lines)
    return "\n".join(f"{name:<{wide}}  {state:<6}  {reason}" for name, state, reason in lines)


def available(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> list[str]:
    """Names of the backends that can serve a plain call on a device.

    Args:
        dtype: by default float32 on a CPU and bfloat16 elsewhere.
    Raises:
        ValueError: a CUDA device where PyTorch sees none.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device} and PyTorch sees no CUDA device")
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    query = torch.zeros(1, 1, 1, 64, dtype=dtype, device=device)
    plan = AttentionPlan([0], [0], [1], 1)
    return [name for name in BACKENDS if why_not(name, query, query, query, plan) is None]
