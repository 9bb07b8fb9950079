"""The arguments of ``Decoder.serve``, and what cannot be served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specdec.arguments import at_least, function, listed, whole
from specdec.composition import Composition
from specdec.executors.ahead import Ahead
from specdec.executors.contract import Executor
from specdec.executors.pipelined import Pipelined
from specdec.executors.serial import Serial
from specdec.prompts import stop_rules
from specdec.protocols import JoinableCache
from specdec.rng import seeds
from specdec.serving.arrivals import Admission, InOrder
from specdec.stop_rules import StopRules
from specdec.types import Round

CLOCKS = ("wall", "rounds")


@dataclass(frozen=True, eq=False)
class Settings:
    """Arguments of ``Decoder.serve``."""

    limit: int = 16
    seed: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] = ()
    clock: Literal["wall", "rounds"] = "wall"
    capacity: int | None = None
    on_round: Callable[[Round], None] | None = None
    errors: Literal["raise", "yield"] = "raise"
    admission: Admission = InOrder()
    own_sampling: bool = False


def check(composition: Composition, executor: Executor, settings: Settings) -> None:
    """Refuse what cannot be served, before any work is done.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a limit or a capacity below 1, an unknown clock, a seed out of range, a stop that never comes, an executor that is not ``Serial``, ``Pipelined`` or ``Ahead``,
            settings of requests' own with drafts in another process, more micro-batches than rows, or a part whose state cannot take in new rows.
    """
    at_least(1, "limit", settings.limit, "give the number of rows in flight, at least 1")
    if settings.capacity is not None:
        at_least(1, "capacity", settings.capacity, "give the tokens of a row, or None to grow as needed")
    function("on_round", settings.on_round)
    if settings.seed is not None:
        whole("seed", listed(settings.seed), ", from which every request gets its own")
        seeds(settings.seed, 1)
    rules_of(composition, settings)
    if settings.clock not in CLOCKS:
        raise ValueError(f"clock is {settings.clock!r}: give 'wall' (seconds) or 'rounds'")
    if settings.errors not in ("raise", "yield"):
        raise ValueError(
            f"errors is {settings.errors!r}: give 'raise', or 'yield' for requests that are refused one by one"
        )
    if not isinstance(settings.admission, Admission) or isinstance(settings.admission, type):
        raise TypeError(
            f"admission is {settings.admission!r}: give serving.ByKind(kind), or an object with held, kind(request) and "
            "next(waiting, running, last)"
        )
    at_least(1, "held of the admission", settings.admission.held, "give a number of requests, 1 or more")
    if not isinstance(executor, (Serial, Pipelined, Ahead)):
        raise ValueError(
            f"rows cannot join those in flight under the executor {executor}: build with Serial(), Pipelined(micro_batches) or Ahead()"
        )
    if micro_batches_of(executor, settings) > settings.limit:
        raise ValueError(
            f"micro_batches is {micro_batches_of(executor, settings)} and limit is {settings.limit}: each micro-batch needs a row; use at most "
            f"{settings.limit}, or raise limit"
        )
    if settings.own_sampling and isinstance(executor, Pipelined) and executor.workers == "processes":
        raise ValueError(
            "own_sampling is set and the drafts run in another process, which does not see settings that come later: give workers='threads'"
        )
    for part in composition.drafting.parts:
        if part.joins is None:
            raise ValueError(
                f"draft {part.info.name!r} cannot take in rows during a run: give it a method join(state, other), or generate() a fixed batch"
            )
        if part.info.model is not None and not part.info.taps:
            _joinable(f"the model of draft {part.info.name!r},", part.info.model)
    _joinable("the target", composition.target)


def rules_of(composition: Composition, settings: Settings) -> StopRules:
    """The stop rules of requests that have none of their own, without budgets; raises TypeError and ValueError for wrong ones."""
    shortest = max((part.info.shortest for part in composition.drafting.parts), default=1)
    return stop_rules(composition, [[0] * shortest], 1, settings.eos_token_id, settings.stop_strings, (), 1)


def _joinable(name: str, model: Any) -> None:
    """Raise ValueError for a model whose cache other rows cannot join."""
    if not isinstance(model.cache(1, 1), JoinableCache):
        raise ValueError(
            f"{name} {model!r} cannot take in rows during a run (its cache has no join): use an HFModel, give the cache a method "
            "join(other), or generate() a fixed batch"
        )


def micro_batches_of(executor: Executor, settings: Settings) -> int:
    """How many micro-batches share the rows in flight."""
    return executor.count(settings.limit) if isinstance(executor, Pipelined) else 1
