"""Settings that each request of a stream may have for itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class PerRequest(Sequence[T]):
    """A setting of a stream's requests, by number: ``own`` where a request has one, else ``default``."""

    def __init__(self, default: T):
        self.default, self.own = default, dict[int, T]()

    def __getitem__(self, request: Any) -> Any:
        return self.own.get(request, self.default)

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Any:
        raise TypeError("a stream's requests have no end: take settings[request] of a request's number")

    def __repr__(self) -> str:
        return f"PerRequest({self.default!r})"
