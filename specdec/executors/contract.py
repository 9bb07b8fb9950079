"""The contract of executors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from specdec.composition import Composition
from specdec.rng import Rng
from specdec.stop_rules import StopRules
from specdec.types import Context, Round


class Executor(Protocol):
    """Runs rounds until every row is done; the only part that knows about time."""

    def run(
        self, composition: Composition, context: Context, rng: Rng, limits: StopRules
    ) -> Iterator[Round]: ...


@runtime_checkable
class Checks(Protocol):
    """An executor that cannot run every composition."""

    def check(self, composition: Composition) -> None:
        """Raise ValueError for one that it cannot run; called by ``build``."""
        ...
