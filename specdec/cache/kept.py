"""Memory that lasts between calls: a limit, what was found, and that it is dropped when the model's weights change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

SAMPLES = 8  # values of each parameter by which changed weights are noticed, at least
Signs = tuple[list[tuple[int, int]], list[Tensor]]
K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound="HasBytes")


class HasBytes(Protocol):
    """Something that takes ``bytes``."""

    @property
    def bytes(self) -> int: ...


class Kept(Generic[K, S]):
    """What was computed of earlier texts of one model. What was not used for the longest time is dropped first.

    Args:
        limit: bytes, on the devices of the model's memory. weights: returns those of the model: parameters, and buffers that no forward writes.
    Attributes:
        asked: tokens of prompts that were to be read so far. found: how many of them were copied. bytes: of what is kept. stale: whether weights had
            changed at the last call, so that nothing was copied. version: of the weights, another object after each change.
    """

    def __init__(self, limit: int, weights: Callable[[], Iterable[Tensor]]):
        self.limit, self._of_model = limit, weights
        self.asked = self.found = self.bytes = 0
        self._held: OrderedDict[K, S] = OrderedDict()  # the one that was used last is the last
        self._lock = Lock()
        self.version: Signs | None = None
        self.stale = False

    def __reduce__(self) -> Any:  # a copy begins empty
        return type(self), (self.limit, self._of_model)

    def __repr__(self) -> str:
        share = f", {self.found} of {self.asked} prompt tokens found" if self.asked else ""
        return f"{type(self).__name__}({self.bytes / 2**20:.1f} of {self.limit / 2**20:.1f} MiB{share})"

    def clear(self) -> None:
        """Drop everything, and keep nothing of texts that are being decoded."""
        with self._lock:
            self._clear()
            if self.version is not None:
                places, values = self.version
                self.version = places, values  # another object

    def look_at_weights(self) -> None:
        """Drop everything if weights have changed. Models call it where they begin to use changed weights, when a cache is made."""
        with self._lock:
            now = self._signs()
            if not _same(now, self.version):
                self._clear()
                self.version = now
            self.stale = False

    def _changed(self) -> bool:
        """Whether weights have changed since they were looked at; then everything is dropped, as a model may still use copies of the old ones."""
        self.stale = not self._same_weights()
        if self.stale:
            self._clear()
        return self.stale

    def _same_weights(self) -> bool:
        return _same(self._signs(), self.version)

    def _clear(self) -> None:
        self._held.clear()
        self.bytes = 0

    def _put(self, key: K, one: S) -> None:
        """Hold ``one``, in place of what had its key, and drop others until the limit holds."""
        old = self._held.pop(key, None)
        self.bytes += one.bytes - (0 if old is None else old.bytes)
        self._held[key] = one
        while self.bytes > self.limit:
            self.bytes -= self._held.popitem(last=False)[1].bytes

    def _signs(self) -> Signs:
        """By which a change of weights is noticed: versions and addresses, and, of plain parameters, the bytes of a few values."""
        places, values = list[tuple[int, int]](), dict[torch.device, list[Tensor]]()
        for p in self._of_model():
            places.append((0 if p.is_inference() else p._version, p.data_ptr()))
            if type(p) is nn.Parameter and p.numel() and not p.is_meta:
                some = p.detach().flatten()[:: max(1, p.numel() // SAMPLES)].contiguous()
                values.setdefault(p.device, []).append(some.view(torch.uint8))
        return places, [torch.cat(some) for some in values.values()]


def _same(one: Signs | None, other: Signs | None) -> bool:
    if one is None or other is None or one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(map(torch.equal, one[1], other[1]))


def made_by(tensors: Iterable[Tensor]) -> list[torch.cuda.Event]:
    """Events of the GPU streams that make tensors now, for which other threads' streams wait."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def use(tensors: Iterable[Tensor], ready: Iterable[torch.cuda.Event]) -> None:
    """Called before tensors are read that another thread's stream may make, and that may be dropped before they are read."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    for event in ready:
        torch.cuda.current_stream(event.device).wait_event(event)
