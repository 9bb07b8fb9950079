"""Host and device: small numbers go over without the host waiting, and come back in one copy, since every copy back is a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

Judge = Callable[[Tensor], None]
_thread = threading.local()  # .later: the ``DeferredChecks`` that is open


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Host numbers on a device; the host does not wait for what the device has still to do."""
    if tensor.is_cpu and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class DeferredChecks:
    """Checks that nobody waits for. What is ``judged`` while it is open goes to the host with what is ``fetched`` next.

    Until then numbers may be wrong, so what they index must be kept within bounds. It belongs to one thread at a time, and may be
    opened again.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Judge]] = []
        self._outer: DeferredChecks | None = None

    def __enter__(self) -> DeferredChecks:
        self._outer, _thread.later = getattr(_thread, "later", None), self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.later = self._outer

    def settle(self) -> None:
        """Make the checks that nothing was fetched with."""
        _fetched((), self)


def defer(tensor: Tensor, judge: Judge) -> None:
    """Show a bool or int64 tensor to ``judge``, which raises where it is wrong: at once, or, on a device within ``DeferredChecks``, later."""
    later: DeferredChecks | None = getattr(_thread, "later", None)
    if later is None or tensor.is_cpu:
        judge(tensor.cpu())
    else:
        later._asked.append((tensor, judge))


def to_host(*tensors: Tensor) -> list[Tensor]:
    """int64 or bool tensors on the host, in one copy where they are on one device.

    Raises:
        Exception: what was to be ``judged`` before is wrong.
    """
    later: DeferredChecks | None = getattr(_thread, "later", None)
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
