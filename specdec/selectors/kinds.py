"""Kinds of requests: what ``Spin(pool=...)`` and ``Planner(kind=...)`` take to keep statistics apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.types import Context


@dataclass(frozen=True)
class ByTemperature:
    """A request's kind is its temperature. ``temperatures``: of the requests, by number, as ``Sampling`` has them."""

    temperatures: tuple[float, ...]

    def __call__(self, context: Context) -> Sequence[float]:
        return [self.temperatures[request] for request in context.request.tolist()]
