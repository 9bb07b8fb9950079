"""Host and device: small tensors go over without the host waiting, and come back in one copy, since the host waits for every copy back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

Check = Callable[[Tensor], None]


class _Thread(threading.local):
    pending: DeferredChecks | None = None  # the one that is open


_thread = _Thread()


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on a device; the host does not wait for what the device has still to do."""
    if tensor.is_cpu and torch.device(device).type == "cuda":
        # An expanded tensor cannot be pinned.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context with ``device`` as the current device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def own_precision() -> AbstractContextManager[Any]:
    """A context without the caller's ``torch.autocast``, in which products would leave the precision of their model."""
    casts = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not casts:
        return nullcontext()
    off = ExitStack()
    for kind in casts:
        off.enter_context(torch.autocast(kind, enabled=False))
    return off


class DeferredChecks:
    """Deferred checks, copied to the host with the next ``to_host``.

    Until then values may be wrong, so indices made of them must be kept within bounds. An object belongs to one thread at a time and
    may be opened again.
    """

    def __init__(self) -> None:
        self._deferred: list[tuple[Tensor, Check]] = []
        self._outer: DeferredChecks | None = None

    def __enter__(self) -> DeferredChecks:
        self._outer, _thread.pending = _thread.pending, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.pending = self._outer

    def settle(self, *results: Tensor) -> None:
        """Make the checks that are still deferred, and wait until ``results`` are there, in the same copy."""
        _copy_and_check(results, self)


def defer(tensor: Tensor, check: Check) -> None:
    """Show a bool or int64 tensor to ``check``, which raises where it is wrong: at once, or, on a device within ``DeferredChecks``, at the next ``to_host``."""
    pending = _thread.pending
    if pending is None or tensor.is_cpu:
        check(tensor.cpu())
    else:
        pending._deferred.append((tensor, check))


def to_host(*tensors: Tensor) -> list[Tensor]:
    """int64 or bool tensors on the host, in one copy where they are on one device.

    Raises:
        Exception: a deferred check failed.
    """
    pending = _thread.pending
    return _copy_and_check(tensors, None if all(t.is_cpu for t in tensors) else pending)


def _copy_and_check(tensors: tuple[Tensor, ...], pending: DeferredChecks | None) -> list[Tensor]:
    checks: list[tuple[Tensor, Check]] = []
    if pending is not None:
        checks, pending._deferred = pending._deferred, []
    here = _copied([*tensors, *(tensor for tensor, _ in checks)])
    for tensor, (_, check) in zip(here[len(tensors) :], checks):
        check(tensor)
    return here[: len(tensors)]


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    away = [t for t in tensors if not t.is_cpu]
    if len(away) < 2 or len({t.device for t in away}) > 1:
        return [t.cpu() for t in tensors]
    parts = iter(torch.cat([t.reshape(-1).long() for t in away]).cpu().split([t.numel() for t in away]))
    return [t if t.is_cpu else next(parts).view(t.shape).to(t.dtype) for t in tensors]
