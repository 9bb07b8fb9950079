"""Settings that each request of a stream may have for itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Failure(NamedTuple):
    """A request's own setting failed at ``text`` (with the prompt), which need not be committed; if it is, its first ``kept`` tokens are right."""

    text: list[int]
    kept: int
    error: Exception


Failures = dict[int, list[Failure]]
"""The failures of each request."""


class PerRequest(Sequence[T]):
    """A setting of a stream's requests, by number: ``own`` where a request has one, else ``default``.

    ``failures``: where those of a request end it alone; ``None``: errors are raised.
    """

    def __init__(self, default: T, failures: Failures | None = None):
        self.default, self.own, self.failures = default, dict[int, T](), failures

    def __getitem__(self, request: Any) -> Any:
        return self.own.get(request, self.default)

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Any:
        raise TypeError("a stream's requests have no end: take settings[request] of a request's number")

    def __repr__(self) -> str:
        return f"PerRequest({self.default!r})"


def note(setting: Any, request: int, text: list[int], kept: int, error: Exception) -> None:
    """Note that a ``setting`` failed for a request; raises the error unless it is a ``PerRequest`` that keeps failures."""
    if not keeps(setting):
        if isinstance(setting, PerRequest):
            error.add_note(
                f"This is of the sampling of request {request}: serve(errors='yield') ends it alone."
            )
        raise error
    setting.failures.setdefault(request, []).append(Failure(text, kept, error))


def keeps(setting: Any) -> bool:
    """Whether failures of a setting end their requests alone."""
    return isinstance(setting, PerRequest) and setting.failures is not None
