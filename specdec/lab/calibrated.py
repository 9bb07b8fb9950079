"""The throughput model with constants fitted to a machine's bare steps and to rounds of some grid points."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from specdec.cost import AUTOREGRESSIVE, Fitted, Host, Load, Method, Round, Shape, Step, calibrate
from specdec.cost.calibrate import CACHED
from specdec.lab.steady import Measured, executor_of

Pair = tuple[str, str]


@dataclass(frozen=True)
class Model:
    """The shapes of the measured models, and the steps of a round that follow from them.

    Attributes:
        methods: without plain decoding. bytes: per cached value. weight_bytes: per weight.
    """

    target: Shape
    methods: Mapping[str, Method]
    bytes: int
    weight_bytes: int

    def round(self, method: str, batch: int, context: float, k: int) -> Round:
        load = Load(batch, context, max(k, 1), self.weight_bytes, self.bytes).full
        return self.methods.get(method, AUTOREGRESSIVE).round(self.target, load)

    def step(self, what: str, batch: int, context: int, tokens: int) -> Step:
        """A bare step: one token of a method's draft, or ``tokens`` of the target (``"target"``)."""
        if what != "target":
            draft = self.round(what, batch, context, 1).draft
            assert draft is not None
            return draft
        one = self.round(next(iter(self.methods)), batch, context, max(tokens - 1, 1))
        return one.verify if tokens > 1 else one.target

    def seconds(
        self, machine: Fitted, method: str, batch: int, context: float, k: int
    ) -> tuple[float, float]:
        """Seconds of a round's refresh and draft steps together, and of its other steps.

        The target's step and a draft's first step run once a round, so the whole round's bytes pass through the cache between two of
        them; later steps of a draft follow each other.
        """
        one = self.round(method, batch, context, k)
        if one.draft is None or not k:
            return 0.0, machine.time(one.target)
        around = one.verify.bytes + one.draft.bytes
        if self.methods[method].draft == self.target:  # the target drafts with its own weights
            around -= sum(w.bytes for w in one.draft.work if w.name not in CACHED)
        drafting = machine.time(one.draft, around) + (k - 1) * machine.time(one.draft)
        refresh = machine.time(one.refresh) if one.refresh else 0.0
        return drafting + refresh, machine.time(one.verify, around)


class Bare(NamedTuple):
    """A timed step: ``what`` is a method's name for its draft step, or ``"target"``."""

    what: str
    batch: int
    context: int
    tokens: int
    step: Step
    seconds: float
    replayed: bool = False  # a forward's share of a captured chain, draws included
    times: tuple[float, ...] = ()  # of the repeats, whose middle is ``seconds``


class Around(NamedTuple):
    """A method's host work: while drafting k tokens, and in the rest of a round.

    Under ``executors.Ahead`` the host works while the device does. There it is what a round takes beyond its forwards: the kernels of drawing
    and of the verdict, and what of the host's work is not hidden.
    """

    draft: Host
    rest: Host


@dataclass(frozen=True)
class Calibrated:
    """A model with fitted constants.

    Attributes:
        executor: of the rounds to which host work was fitted, and which it describes.
        error: the model's error of the logarithm of a ratio of two methods' round times, at points left out of the fit (root mean square
            over all pairs of methods); ``None``: not known. errors: the same by pair, names in order, with ``error`` counted as one more
            point; methods of one shape err alike, so their ratio is known better.
    """

    model: Model
    machine: Fitted
    hosts: Mapping[str, Around]
    error: float | None = None
    errors: Mapping[Pair, float] = field(default_factory=dict)
    executor: str = "serial"

    def seconds(self, method: str, batch: int, context: float, k: int) -> float:
        """Seconds of a round."""
        host = self.hosts[method]
        drafting = host.draft.seconds(batch, k) if k else 0.0
        return (
            sum(self.model.seconds(self.machine, method, batch, context, k))
            + drafting
            + host.rest.seconds(batch, k + 1)
        )

    def multiplier(self, method: str, batch: int, context: float, k: int, tau: float) -> float:
        """Tokens a second over plain decoding's; ``tau`` is an input."""
        plain = self.seconds("plain", batch, context, 0)
        return tau * plain / self.seconds(method, batch, context, k)


Rounds = Mapping[tuple[int, int, float], Sequence[Measured]]
"""Rounds measured at ``(batch, context, mean context while decoding)``."""


def fit(
    model: Model,
    bare: Iterable[Bare],
    rounds: Rounds,
    apart: bool = True,
    leave_out: Collection[tuple[int, int]] = (),
) -> Calibrated:
    """Fits constants to bare steps, and then each method's host work to the rest of its rounds' seconds.

    With ``leave_out``, the fit counts that predicts the ratios of round times best, among those with different sizes of the processor's
    cache, with and without overlap: bare steps repeat one model, and find it in a cache that the models of a round share.

    Args:
        apart: fit host work while drafting separately from the rest; not possible on an asynchronous device, where only the seconds of
            the whole round include the device's work, nor under ``executors.Ahead``, where a round is one step.
        leave_out: batches and contexts of ``rounds``, without bare steps, each of which is left out in turn to find the model's own
            error. Points inside the others' range show the error of what the model is for; at its corners it would have to extrapolate.
    Raises:
        ValueError: too few steps, no pair of methods at the points left out, or rounds of several executors.
    """
    executor = executor_of(m for some in rounds.values() for m in some)
    apart = apart and executor != "ahead"

    def squares(machine: Fitted) -> dict[Pair, list[float]]:
        """Of every pair of methods: the mean square of its error at each point left out."""
        found: dict[Pair, list[float]] = {}
        for point in leave_out:
            rest = {at: some for at, some in rounds.items() if at[:2] != point}
            without = Calibrated(model, machine, _hosts(model, machine, rest, apart))
            for at, some in rounds.items():
                for pair, square in _squares(without, at, some).items() if at[:2] == point else ():
                    found.setdefault(pair, []).append(square)
        if not found:
            raise ValueError(
                f"leave_out is {sorted(leave_out)}: give points at which two methods were measured"
            )
        return found

    samples = [(b.step, b.seconds) for b in bare]
    rank = (lambda made: _pooled(squares(made))) if leave_out else None
    machine = calibrate(samples, "this machine", cached_apart=True, cache=True, rank=rank)
    made = Calibrated(model, machine, _hosts(model, machine, rounds, apart), executor=executor)
    if not leave_out:
        return made
    found = squares(machine)
    error = _pooled(found)
    errors = {pair: math.sqrt((sum(some) + error**2) / (len(some) + 1)) for pair, some in found.items()}
    return replace(made, error=error, errors=errors)


def _pooled(squares: Mapping[Pair, Sequence[float]]) -> float:
    return math.sqrt(fmean(square for some in squares.values() for square in some))


def _squares(
    calibrated: Calibrated, at: tuple[int, int, float], some: Sequence[Measured]
) -> dict[Pair, float]:
    """The mean square of the error of the logarithm of a ratio of two methods' round times, over their k, for every pair of methods."""
    batch, _, context = at
    errors: dict[str, list[float]] = {}
    for m in some:
        if m.method in calibrated.hosts:
            error = math.log(calibrated.seconds(m.method, batch, context, m.k) / m.round_seconds)
            errors.setdefault(m.method, []).append(error)
    return {
        (one, other): fmean((a - b) ** 2 for a in errors[one] for b in errors[other])
        for one, other in combinations(sorted(errors), 2)
    }


def _hosts(model: Model, machine: Fitted, rounds: Rounds, apart: bool) -> dict[str, Around]:
    """Each method's host work, from the rest of its rounds' seconds."""
    drafting: dict[str, list[tuple[int, int, float, float]]] = {}
    rest: dict[str, list[tuple[int, int, float, float]]] = {}
    for (batch, _, context), some in rounds.items():
        for m in some:
            drawn, others = model.seconds(machine, m.method, batch, context, m.k)
            if not apart:
                rest.setdefault(m.method, []).append((batch, m.k + 1, m.round_seconds, drawn + others))
                continue
            if m.k:
                drafting.setdefault(m.method, []).append((batch, m.k, m.stage("draft"), drawn))
            left = m.round_seconds - (m.stage("draft") if m.k else 0.0)
            rest.setdefault(m.method, []).append((batch, m.k + 1, left, others))
    return {
        method: Around(Host.fit(drafting[method]) if method in drafting else Host(), Host.fit(samples))
        for method, samples in rest.items()
    }
