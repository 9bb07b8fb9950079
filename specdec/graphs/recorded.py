"""A graph on the CPU: every operator of a function with its tensors, replayed without the function's Python.

It has the same requirements as a CUDA graph and names the operator that breaks one: nothing may wait for the device, no shape may depend
on data, no tensor may come from the host during the step, and nothing may depend on Python state that changes between calls. A step that
is recorded and replays to equal results can therefore be captured on a GPU. Replaying is slow; it is for tests.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Body = Callable[[], Any]

_stance = threading.RLock()

_WAITS = "waits for the device: its result, or the shape of it, is needed on the host"
_HOST = (
    "copies values from the host: put them into a tensor that exists before and is written for every replay"
)
_RANDOM = "draws random numbers: draw them on the host by their keys, and pass them in"
_WAITING = [
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "bincount",
    "repeat_interleave",
]
_WAITING += ["_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"]
_DRAWING = ["rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "multinomial"]
_DRAWING += ["bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "native_dropout"]
FORBIDDEN: dict[str, str] = {
    **dict.fromkeys(_WAITING, _WAITS),
    **dict.fromkeys(["lift_fresh", "lift_fresh_copy"], _HOST),
    **dict.fromkeys(_DRAWING, _RANDOM),
}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_UNSEEN = {"tolist", "numpy", "cpu", "data_ptr", "__array__", "__dlpack__"}  # no operators on the CPU


class NotCapturable(RuntimeError):
    """A function does something that a graph cannot contain; the message names the operator and the remedy."""


def record(body: Body) -> Body:
    """Call ``body`` twice, recording the second time; returns a function that replays what was recorded.

    Raises:
        NotCapturable: ``body`` cannot be captured, or its two calls differ.
    """
    first, second = Recording(), Recording()
    with _uncompiled():
        with _Guard(), first:
            body()
        with _Guard(), second:
            out = body()
    second.compare(first)

    def replay(_: Any = first) -> Any:
        second.replay()
        return out

    return replay


class _Guard(TorchFunctionMode):
    """Refuses functions that read values of a tensor without an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _UNSEEN:
            raise NotCapturable(f"Tensor.{func.__name__} in a captured step {_WAITS}")
        return func(*args, **(kwargs or {}))


def watch(body: Body) -> Any:
    """``body()``.

    Raises:
        NotCapturable: an operator of it cannot be captured; the message names it.
    """
    with _uncompiled(), Watching():
        return body()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Without ``torch.compile``, which under a dispatch mode would give up what it has compiled, for good. One thread at a time: the stance is the process's."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and an import takes seconds
        yield
        return
    with _stance, torch.compiler.set_stance("force_eager"):
        yield


class Watching(TorchDispatchMode):
    """Runs operators, and refuses those that cannot be captured."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "lift_fresh" and not args[0].dim():  # a number in the code
            return args[0]
        out = self.by_parts(func, args, kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out

    def by_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a composite operator returns, whose parts come here in turn; otherwise ``NotImplemented``, after a check (``refuse``)."""
        self.refuse(func, args, kwargs)
        if not _composite(func):
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)

    def refuse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise NotCapturable for an operator that cannot be captured."""
        name = func.overloadpacket.__name__
        why = FORBIDDEN.get(name)
        if name == "repeat_interleave" and isinstance(args[0], Tensor) and "self_int" in func._overloadname:
            why = None
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and len(args) > 1:
            masks = [t for t in args[1] if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)]
            why = f"has an index of {masks[0].dtype}, which {_WAITS}" if masks else why
        if name in ("_to_copy", "copy_", "to"):
            devices = {t.device for t in _tensors((args, kwargs))}
            if kwargs.get("device") is not None:
                to = torch.device(kwargs["device"])
                devices |= {to} - {torch.device(d.type) for d in devices}  # "cuda" is any of them
            if len(devices) > 1:
                why = f"copies from one device to another ({', '.join(sorted(map(str, devices)))}): copy before the step"
        if why is not None:
            raise NotCapturable(f"{func} in a captured step {why}")


class Recording(Watching):
    """Records the operators that run while it is active, and their outputs.

    Attributes:
        calls: operators with their arguments and the tensors that their outputs are copied to, in order; no tensors (``None``) where nothing is
            to be computed again: outputs are views, or have no values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor] | None]] = []
        self.made: set[int] = set()  # storages of intermediate tensors
        self.kept: list[Any] = []  # all outputs: they stay alive, so that no storage is taken for another
        self.outside: dict[int, Tensor] = {}  # tensors that existed before, by storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "lift_fresh" and not args[0].dim():  # a number in the code
            self.made.add(_storage(args[0]))
            self.calls.append((func, args, {"value": args[0].item()}, None))
            return args[0]
        out = self.by_parts(func, args, kwargs)
        if out is not NotImplemented:
            return out
        given = _tensors((args, kwargs))
        for t in given:
            if _storage(t) not in self.made:
                self.outside.setdefault(_storage(t), t)
        out = func(*args, **kwargs)
        there = {_storage(t) for t in given}
        places = _tensors(out)
        new = {_storage(t) for t in places} - there
        self.made |= new
        again = new and func.overloadpacket.__name__ not in _EMPTY
        self.kept.append(out)
        self.calls.append((func, args, kwargs, [] if func._schema.is_mutable else places if again else None))
        return out

    def compare(self, other: Recording) -> None:
        """Raise ``NotCapturable`` unless ``other`` holds the same operators on the same earlier tensors."""
        mine, theirs = ([_shown(call) for call in r.calls] for r in (self, other))
        for i in range(max(len(mine), len(theirs))):
            a, b = (s[i] if i < len(s) else "nothing" for s in (theirs, mine))
            if a != b:
                raise NotCapturable(
                    f"operator {i} of a captured step is {a} in one call and {b} in the next: a step must not depend on what Python "
                    "remembers, nor shapes on data"
                )
        fresh = [t for key, t in self.outside.items() if key not in other.outside]
        if fresh:
            raise NotCapturable(
                f"a captured step reads a tensor {list(fresh[0].shape)} of {fresh[0].dtype} that was made during the step but not by its "
                f"operators; it {_HOST}"
            )

    def replay(self) -> None:
        """Run the operators again; outputs go to the tensors of the recording."""
        for func, args, kwargs, places in self.calls:
            if places is None:
                continue
            out = func(*args, **kwargs)
            if places:
                for place, new in zip(places, _tensors(out), strict=True):
                    place.copy_(new)


@cache
def _composite(func: Any) -> bool:
    """Whether an operator is defined by others."""
    return bool(func._can_decompose())


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _leaves(x: Any) -> list[Any]:
    """What lists, tuples and dictionaries hold, in order."""
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return [x]
    found: list[Any] = []
    for part in x:
        if isinstance(part, (list, tuple, dict)):
            found += _leaves(part)
        else:
            found.append(part)
    return found


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(x) if isinstance(leaf, Tensor)]


def _shown(call: tuple[Any, ...]) -> str:
    """An operator with the shapes of its tensors and its other arguments."""
    func, args, kwargs = call[:3]
    show: Callable[[Any], str] = lambda x: str(list(x.shape)) if isinstance(x, Tensor) else str(x)  # noqa: E731
    return f"{func}({', '.join(show(x) for x in _leaves((args, kwargs)))})"
