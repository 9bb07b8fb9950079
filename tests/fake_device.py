"""A device that is not there: tensors that live on it hold their numbers on the CPU, and every wait for the device is noted.

The tensors say that they are on ``meta``, so that no code takes them for the CPU's. Operators that mix both kinds are refused as on a
GPU (numbers without dimensions may be mixed, indices may be on the CPU, which waits).
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
}


class OnDevice(torch.Tensor):
    @staticmethod
    def __new__(cls, held):
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=META,
            )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on the fake device outside of FakeDevice")


class FakeDevice(TorchDispatchMode):
    """While it is active there is a device ``meta``. ``waits``: (operator, place in the library) -> how often the host waited."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        name = func.overloadpacket.__name__
        tensors = _tensors([*args, *kwargs.values()])
        ours = [t for t in tensors if isinstance(t, OnDevice)]
        plain = [t for t in tensors if not isinstance(t, OnDevice) and t.dim()]
        to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        there = bool(ours) if to is None else to == META
        if not ours and not there:
            return func(*args, **kwargs)
        quick = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if name in ("_to_copy", "copy_") and ours:
            there = to == META or (to is None and isinstance(args[0], OnDevice))
            if len(ours) < len(tensors) or not there:
                quick = quick or not args[0].numel()
                self._wait(
                    "copy to the device" if there else "copy to the host",
                    quick and (there or not args[0].numel()),
                )
        elif name == "_to_copy" and there:
            self._wait("copy to the device", quick or not args[0].numel())
        elif ours and plain:
            if name.startswith(("index", "_index_put")) and isinstance(args[0], OnDevice):
                self._wait("copy of an index to the device", False)
            else:
                raise RuntimeError(f"{func}: tensors on the device and on the CPU")
        if ours and (name in _WAITING or (name == "repeat_interleave" and func._overloadname == "Tensor")):
            self._wait(name, False)
        indices = args[1] if ours and name in ("index", "index_put_", "index_put", "_index_put_impl_") else ()
        if any(isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices):
            self._wait("index of bool", False)
        if there and to is not None:
            kwargs["device"] = torch.device("cpu")
        known = {id(t.held): t for t in ours}
        out = func(*map(_held, args), **{key: _held(x) for key, x in kwargs.items()})
        if not there:
            return out.clone() if name == "_to_copy" and ours and out is ours[0].held else out
        if isinstance(out, (list, tuple)):
            return type(out)(_placed(x, known) for x in out)
        return _placed(out, known)

    def _wait(self, what, quick):
        place, frame = "", sys._getframe(1)
        while frame is not None and not quick:
            code = frame.f_code
            quick = code.co_name == "to_device"  # on a GPU it pins memory first
            if not place and ("/specdec/" in code.co_filename or "/kernels/" in code.co_filename):
                place = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        if not quick:
            self.waits[what, place] += 1


@cache
def _composite(func):
    return func._can_decompose()


def _tensors(x):
    """The tensors in a list, and in lists and tuples in it."""
    found = []
    for part in x:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, (list, tuple)):
            found += _tensors(part)
    return found


def _held(x):
    if isinstance(x, OnDevice):
        return x.held
    return type(x)(map(_held, x)) if isinstance(x, (list, tuple)) else x


def _placed(x, known):
    if not isinstance(x, torch.Tensor):
        return x
    return known[id(x)] if id(x) in known else OnDevice(x)


def onto(model):
    """A model with its parameters and buffers on the fake device, in place."""
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(OnDevice(p.detach()), requires_grad=False)
        for name, b in list(module._buffers.items()):
            if b is not None:
                module._buffers[name] = OnDevice(b)
    return model
