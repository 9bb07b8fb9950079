"""Transfers between host and device: small tensors go without the host waiting, and return in one copy, since every copy back is a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

Judge = Callable[[Tensor], None]


class _Thread(threading.local):
    later: DeferredChecks | None = None  # the open one


_thread = _Thread()


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on a device; the host does not wait for the device's queue."""
    if tensor.is_cpu and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class DeferredChecks:
    """Deferred checks: tensors passed to ``defer`` in this context are copied to the host with the next ``to_host``.

    Until then values may be invalid, so indices made from them must be clamped. It belongs to one thread at a time, and may be
    entered again.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Judge]] = []
        self._outer: DeferredChecks | None = None

    def __enter__(self) -> DeferredChecks:
        self._outer, _thread.later = _thread.later, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.later = self._outer

    def settle(self) -> None:
        """Run the checks that are still pending."""
        _fetched((), self)


def defer(tensor: Tensor, judge: Judge) -> None:
    """Check a bool or int64 tensor by ``judge``, which raises if it is invalid: at once, or, on a device within ``DeferredChecks``, later."""
    later = _thread.later
    if later is None or tensor.is_cpu:
        judge(tensor.cpu())
    else:
        later._asked.append((tensor, judge))


def to_host(*tensors: Tensor) -> list[Tensor]:
    """int64 or bool tensors on the host, in one copy where they are on one device.

    Raises:
        Exception: a deferred check failed.
    """
    later = _thread.later
    return _fetched(tensors, None if all(t.is_cpu for t in tensors) else later)


def _fetched(tensors: tuple[Tensor, ...], later: DeferredChecks | None) -> list[Tensor]:
    asked: list[tuple[Tensor, Judge]] = []
    if later is not None:
        asked, later._asked = later._asked, []
    here = _copied([*tensors, *(tensor for tensor, _ in asked)])
    for tensor, (_, judge) in zip(here[len(tensors) :], asked):
        judge(tensor)
    return here[: len(tensors)]


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    away = [t for t in tensors if not t.is_cpu]
    if len(away) < 2 or len({t.device for t in away}) > 1:
        return [t.cpu() for t in tensors]
    parts = iter(torch.cat([t.reshape(-1).long() for t in away]).cpu().split([t.numel() for t in away]))
    return [t if t.is_cpu else next(parts).view(t.shape).to(t.dtype) for t in tensors]
