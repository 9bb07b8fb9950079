"""CUDA streams that have one user each."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

STREAMS = 32  # PyTorch has so many on each device, and hands them out in turn
_held: weakref.WeakValueDictionary[tuple[int, int], _Use] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class _Use:
    """Exists as long as the stream that holds it.

    PyTorch 2.11 frees streams and events without clearing weak references to them (pytorch#183403), so there must be none.
    """


def own_stream(device: torch.device | None = None) -> Any:
    """A stream of a CUDA device (default: the current one) that no other caller has while this one keeps the object.

    ``torch.cuda.Stream()`` returns the same 32 streams again and again, under new objects. A capture could thus begin on the stream on
    which another thread works, whose launches would become part of the graph.

    Raises:
        RuntimeError: all streams are in use.
    """
    with _lock:
        for _ in range(STREAMS):
            stream: Any = torch.cuda.Stream(device)
            name = (stream.device_index, stream.cuda_stream)
            if name not in _held:
                _held[name] = stream.use = _Use()
                return stream
    raise RuntimeError(
        f"all {STREAMS} streams of {device or 'the device'} are in use, by drafting threads and models with graphs: end some of them, "
        "or give graphs=False"
    )
