"""Steady decoding for measurements: no row leaves the batch before the clock stops.

A batch whose rows end one after another includes rounds of few stragglers, whereas a server refills the batch. Here every row
continues until the batch as a whole has produced its tokens, as in the throughput models that the figures are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from specdec.decoder import Decoder
from specdec.executors import Ahead
from specdec.lab.clock import middle, sync
from specdec.lab.prefill import Group
from specdec.rng import Philox, seeds
from specdec.stats import Record, Stats
from specdec.stop_rules import StopRules

TURN = 1_000_003
"""The distance of a row's seeds in successive turns: more than there are rows."""


@dataclass(frozen=True)
class Run:
    """One timed run of a method over all groups of prompts.

    Attributes:
        captured: whether a shape was captured while the clock ran. visit: of its grid point. executor: under which the rounds ran, ``"serial"`` or ``"ahead"``.
    """

    tokens: int
    seconds: float
    rounds: int
    stats: Stats
    captured: bool = False
    executor: str = "serial"
    visit: int = 0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def round_seconds(self) -> float:
        return self.seconds / self.rounds

    def stage(self, name: str) -> float:
        """Seconds per round in one stage: ``draft``, ``target``, ``verify`` or ``other``."""
        return self.stats.seconds[name] / self.rounds


@dataclass(frozen=True)
class Measured:
    """Repeats of one method at one k and grid point, each with random numbers of its own, which are those of the other methods."""

    method: str
    k: int
    runs: list[Run]

    @property
    def speed(self) -> float:
        """Tokens a second, as in ``clock.middle``."""
        return float(middle([run.speed for run in self.runs]))

    @property
    def round_seconds(self) -> float:
        """Seconds of a round, as in ``clock.middle``."""
        return float(middle([run.round_seconds for run in self.runs]))

    @property
    def stats(self) -> Stats:
        """Of all repeats together."""
        return sum((run.stats for run in self.runs), Stats())

    @property
    def tau(self) -> float:
        """Tokens per round and row, of all repeats together."""
        return self.stats.tau

    def stage(self, name: str) -> float:
        """Seconds per round in one stage, as in ``clock.middle``."""
        return float(middle([run.stage(name) for run in self.runs]))


def executor_of(measured: Iterable[Measured]) -> str:
    """The executor under which all of them ran.

    Raises:
        ValueError: there were several, whose rounds cannot be compared.
    """
    found = sorted({run.executor for one in measured for run in one.runs})
    if len(found) != 1:
        raise ValueError(
            f"the rounds ran under {' and '.join(found) or 'no executor'}: give rounds of one executor"
        )
    return found[0]


UNCOUNTED = 1
"""Rounds between the prefill and the start of the clock: the first, in which drafts still have to read the prompt's last token, and have no earlier round to read.
Under ``Ahead``, nothing was launched before it."""


def steady(
    decoder: Decoder,
    groups: Sequence[Group],
    new_tokens: int,
    clock: Callable[[bool], None] = lambda runs: None,
    turn: int = 0,
) -> Run:
    """Decode each group until it has ``new_tokens`` more tokens per row on average; the clock starts a round after the prefill.

    The first round is not counted. Under ``executors.Ahead`` the clock runs from its verdict to the last round's. A round is in flight both times.

    Args:
        clock: called with True when the clock starts and False when it stops. turn: chooses the random numbers, together with the
            rows' seeds.
    """
    tokens = rounds = 0
    seconds, records = 0.0, []
    ahead = isinstance(decoder.executor, Ahead)
    for some in groups:
        some.use()
        context, B = some.context, some.context.batch
        room = context.tokens.shape[1] - decoder.length
        stops = StopRules(max_length=torch.full((B,), room))
        left, start = B * new_tokens, 0.0
        fresh = [seed + TURN * turn for seed in some.seed]
        with torch.inference_mode():
            for round in decoder.executor.run(decoder, context, Philox(seeds(fresh, B)), stops):
                if round.number <= UNCOUNTED:
                    if not (ahead and round.number):
                        sync()
                    if round.number == UNCOUNTED:
                        clock(True)
                        start = perf_counter()
                    continue
                records.append(Record.of(round))
                rounds += 1
                made = sum(records[-1].committed)
                tokens, left = tokens + made, left - made
                if left <= 0:
                    break
        if not ahead:  # otherwise this would wait for the round in flight
            sync()
        seconds += perf_counter() - start
        clock(False)
    executor = type(decoder.executor).__name__.lower()
    return Run(tokens, seconds, rounds, Stats.of(records), executor=executor)


def capacity(context: int, new_tokens: int, k: int) -> int:
    """The most tokens of a row, nodes included; every round commits at least one token per row, which bounds the number of rounds."""
    return context + 2 + (new_tokens + UNCOUNTED) * (k + 1) + k
