"""How many micro-batches to use: a first guess from profiled rounds, then one more while throughput rises (SPIN, arXiv 2503.15921, section 6)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar, Protocol, runtime_checkable

from specdec.cost.pipeline import TimeModel
from specdec.executors.pipelined import Pipelined
from specdec.executors.serial import Serial
from specdec.prompts import Prompts, rows_of
from specdec.protocols import LanguageModel
from specdec.types import Round


class Decodes(Protocol):
    """What ``tune`` needs of a ``Decoder``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def target(self) -> LanguageModel: ...

    @property
    def length(self) -> int: ...

    def generate(self, prompts: Any, max_new_tokens: int = ..., **settings: Any) -> Any: ...


@runtime_checkable
class Builds(Protocol):
    """A ``Builder``."""

    def build(self) -> Decodes: ...


@dataclass(frozen=True)
class Tuned:
    """The ``executor`` to use, the time ``model`` of profiled rounds, and ``observed``: micro-batches -> tokens/s (1: serial)."""

    executor: Serial | Pipelined
    model: TimeModel
    observed: dict[int, float]


def profile(decoder: Decodes | Builds, prompts: Prompts, rounds: int = 12, seed: int = 0) -> TimeModel:
    """Time serial rounds of all prompts, of half, and of a quarter of them, and fit d(b) and v(b).

    Raises:
        ValueError: fewer than 2 prompts.
    """
    built, rows = _given(decoder, prompts)
    samples: list[tuple[int, float, float]] = []
    serial = replace(built, executor=Serial())
    sizes = sorted({max(1, len(rows) // part) for part in (1, 2, 4)})
    if len(sizes) < 2:
        raise ValueError("prompts has one row: give at least 2, like the batches to come")

    def take(round: Round) -> None:
        if round.number > 1 and not bool(round.finished.any()):  # the first round includes warm-up
            s = round.seconds
            samples.append((len(round.committed), s["draft"], s["target"] + s["verify"]))

    for size in sizes:
        serial.generate(rows[:size], built.length * rounds, seed=seed, eos_token_id=(), on_round=take)
    return TimeModel.fit(samples)


def _given(decoder: Decodes | Builds, prompts: Prompts) -> tuple[Decodes, list[list[int]]]:
    """A built decoder, and rows of ids."""
    built = decoder.build() if isinstance(decoder, Builds) else decoder
    return built, rows_of(built.target, prompts)


def tune(
    decoder: Decodes | Builds,
    prompts: Prompts,
    max_new_tokens: int = 64,
    *,
    executor: Pipelined | None = None,
    repeats: int = 1,
    seed: int = 0,
) -> Tuned:
    """The best executor for a decoder and a batch like ``prompts``: ``Pipelined`` with the best number of micro-batches, or ``Serial``.

    Args:
        executor: a ``Pipelined`` whose other settings are used. repeats: runs of each candidate, of which the fastest counts.
    Raises:
        ValueError: fewer than 2 prompts, or repeats below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: each candidate runs at least once")
    how = executor or Pipelined()
    built, rows = _given(decoder, prompts)
    model = profile(built, rows, seed=seed)
    observed: dict[int, float] = {}

    def observe(m: int) -> float:
        if m not in observed:
            run = replace(built, executor=Serial() if m == 1 else replace(how, micro_batches=m))
            observed[m] = max(_speed(run, rows, max_new_tokens, seed) for _ in range(repeats))
        return observed[m]

    best = model.best(len(rows))
    observe(1)
    while best < len(rows) and observe(best + 1) > observe(best):
        best += 1
    while best > 1 and observe(best - 1) > observe(best):
        best -= 1
    return Tuned(Serial() if best == 1 else replace(how, micro_batches=best), model, observed)


def _speed(decoder: Decodes, prompts: list[list[int]], tokens: int, seed: int) -> float:
    """Tokens a second after the prefill."""
    marks: list[tuple[float, int, int]] = []

    def mark(round: Round) -> None:
        marks.append((perf_counter(), round.number, int(round.committed.sum())))

    decoder.generate(prompts, tokens, seed=seed, eos_token_id=(), on_round=mark)
    start = max((at for at, number, _ in marks if number == 0), default=0.0)
    spent = marks[-1][0] - start
    return sum(made for at, number, made in marks if at > start) / spent if spent else 0.0
