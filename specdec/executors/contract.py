"""The contract of executors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from specdec.composition import Composition
from specdec.rng import Rng
from specdec.stop_rules import StopRules
from specdec.types import Context, Round


class Executor(Protocol):
    """Runs rounds until every row is finished. No other part decides when something runs."""

    def run(
        self, composition: Composition, context: Context, rng: Rng, limits: StopRules
    ) -> Iterator[Round]: ...


@runtime_checkable
class Checks(Protocol):
    """What an executor that cannot run every composition defines as well."""

    def check(self, composition: Composition) -> None:
        """Raise ValueError for one that it cannot run; called by ``build``."""
        ...
