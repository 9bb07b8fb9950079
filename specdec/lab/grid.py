"""Wall clock of plain decoding, small drafts, MagicDec and SPIRe over a grid of batches and contexts, beside the throughput model.

Methods alternate at each grid point, with the same prompts and, in each turn, the same fresh random numbers. Turns are short and many: other programs make a
machine faster or slower for a second or so, and what all methods meet alike does not change their ratios. The machine may also be slower for minutes, and not alike for
all steps, so every point is visited several times (``VISITS``): the model is fitted to, and judged by, rounds of the same minutes.

Best k: short runs at k = 4 and at the k farthest from it give the time of a round; the two k with the best estimate are measured, besides k = 4. τ is noise-free
(``lab.multipliers``) or, without texts, that of the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import ceil
from operator import mul
from time import perf_counter

from specdec.lab.bare import timed_steps
from specdec.lab.calibrated import Bare, Calibrated, fit
from specdec.lab.captured import captured
from specdec.lab.clock import middle, shuffled
from specdec.lab.console import progress
from specdec.lab.grid_constants import constants
from specdec.lab.grid_rows import K, Point, Row, grid_rows
from specdec.lab.methods import Methods, MethodSettings
from specdec.lab.multipliers import Taus
from specdec.lab.options import option
from specdec.lab.prefill import Group
from specdec.lab.steady import Measured, Run, steady

VISITS = 6
"""Visits of every point, among which its repeats are shared out."""
SHORT = 8.0
"""The least seconds of a point's measurements, by default: more repeats are run until then, at most ``turns``."""
BARE_REPEATS = 24
UNTIMED = 10**6
"""The first turn of runs that are not counted, whose random numbers occur in no other."""
WARM = 3
"""Runs of a method at each of two k, to find its best; the first warms up."""


@dataclass(frozen=True)
class GridSettings(MethodSettings):
    """Settings of a grid measurement."""

    batches: tuple[int, ...] = option((1, 2, 4, 8, 16, 32), "rows at a time")
    new_tokens: int = option(6, "new tokens per row, on average, of a run")
    repeats: int = option(18, "timed runs of each method")
    seconds: float = option(
        float("inf"),
        "visit no grid point after this time, and each only once; the corners come first (default: no limit)",
    )

    @property
    def visits(self) -> int:
        """How often every point is visited: once with few repeats, or with a limit of ``seconds``."""
        return VISITS if self.repeats >= VISITS and self.seconds == float("inf") else 1

    @property
    def fitted(self) -> list[Point]:
        """The points to which the model is fitted."""
        return self.corners + self.inner

    def order(self, first: Sequence[Point]) -> list[Point]:
        """All points, ``first`` spread evenly among the others: a machine gets faster or slower in minutes, which otherwise is an error of the model that was
        fitted to them. With a limit of ``seconds``, they come first."""
        rest = [p for p in self.points if p not in first]
        if self.seconds < float("inf"):
            return [*first, *rest]
        places = [((i + 0.5) / len(part), p) for part in (first, rest) for i, p in enumerate(part)]
        return [p for _, p in sorted(places)]

    @property
    def points(self) -> list[Point]:
        """All batches and contexts, in order."""
        return list(product(sorted(set(self.batches)), sorted(set(self.contexts))))

    @property
    def corners(self) -> list[Point]:
        """Points with the smallest and the largest batch and context."""
        ends = [{min(v), max(v)} for v in (self.batches, self.contexts)]
        return [p for p in self.points if all(n in some for n, some in zip(p, ends))]

    @property
    def inner(self) -> list[Point]:
        """Every second of the points inside the grid: host work is fitted to their rounds too, and each is left out of a fit once."""
        batches, contexts = (sorted(set(v))[1:-1] for v in (self.batches, self.contexts))
        return [(b, c) for i, b in enumerate(batches) for j, c in enumerate(contexts) if (i + j) % 2]


@dataclass(frozen=True)
class Grid:
    """A run over a grid.

    Args:
        first: points to which the model is fitted, which are measured first if the time is limited; default: corners and ``inner``. replayed: a draft's bare step is
            its share of the captured chain, and all host work is one term; default: on devices other than a CPU. taus: τ of every method,
            context and k; default: as measured in the runs, which is noisy. least: seconds of a point's measurements; default: ``SHORT``.
    """

    s: GridSettings
    methods: Methods
    first: tuple[Point, ...] = ()
    replayed: bool | None = None
    taus: Taus | None = None
    least: float | None = None

    def __post_init__(self) -> None:
        s = self.s
        if min(*s.batches, *s.lengths, s.new_tokens, s.repeats) < 1:
            raise SystemExit("--lengths, --new-tokens, --repeats and --batches must be at least 1")

    def measure(self, told: Callable[[list[Row]], None]) -> list[Row]:
        """The rows of all points measured in time, of the fitted constants and of the bare steps.

        Args:
            told: called with all rows so far after every point.
        """
        s, started = self.s, perf_counter()
        first = list(self.first) or s.fitted
        inner = [p for p in s.inner if p in first]  # rounds, but no bare steps
        points = s.order(first)
        last = max(first, key=points.index)
        found: dict[Point, list[Measured]] = {}
        steps: dict[Point, list[list[Bare]]] = {}
        rows = left_out = self.left_out()
        calibrated: Calibrated | None = None
        bare: list[Bare] = []
        for done, (visit, point) in enumerate(product(range(s.visits), points), 1):
            spent = perf_counter() - started
            if found and spent > s.seconds:
                left = f"{len(points) - len(found)} of {len(points)} grid points are left out"
                progress(f"--seconds {s.seconds:g} are over: {left}", stays=True)
                break
            at = f"[{spent:4.0f} s] {done}/{s.visits * len(points)}"
            progress(f"{at}: batch {point[0]}, context {point[1]}", stays=True)
            groups = self.methods.groups(*point)
            found[point] = self.visit(found.get(point) or self.chosen(groups, point[1]), groups, visit)
            if point in first and point not in inner:
                steps.setdefault(point, []).append(self.bare(groups[0], point[1]))
            del groups
            if point == last:  # all points of the fit were visited as often
                bare = [pooled(some) for visits in steps.values() for some in zip(*visits)]
                calibrated = self.calibrated(bare, {p: found[p] for p in first}, inner)
            if visit and done % len(points):  # intervals take a while
                continue
            measured = {p: kept(cases) for p, cases in found.items()}
            rows = left_out + grid_rows(measured, set(first), calibrated, s.new_tokens, self.taus)
            rows += constants(calibrated, bare)
            told(rows)
        progress(stays=True)
        return rows

    @property
    def replays(self) -> bool:
        """``replayed``, or its default."""
        return self.s.device != "cpu" if self.replayed is None else self.replayed

    def left_out(self) -> list[Row]:
        """A row for each method that the executor cannot run, which is also said."""
        executor, rows = self.s.executor, list[Row]()
        for method, why in self.methods.left_out.items():
            progress(f"{method} is left out: {why}", stays=True)
            rows.append({"part": "left_out", "executor": executor, "method": method, "why": why})
        return rows

    def calibrated(
        self, bare: list[Bare], found: dict[Point, list[Measured]], inner: list[Point]
    ) -> Calibrated | None:
        """The throughput model, fitted to bare steps and to the rounds of points; ``None``, which is said, where it does not fit."""
        half = self.s.new_tokens / 2
        rounds = {(b, c, c + half): kept(cases) for (b, c), cases in found.items()}
        try:
            return fit(self.methods.model, bare, rounds, not self.replays, inner)
        except ValueError as why:  # the measurements are kept without a model
            progress(f"no model: {why}", stays=True)
            return None

    def bare(self, group: Group, context: int) -> list[Bare]:
        """Bare steps at a grid point; they do not depend on the executor."""
        s, methods = self.s, self.methods
        decoders = {m: methods.decoder(m, K if m != "plain" else 0, "serial") for m in methods.names}
        if self.replays and s.executor != "serial":  # which captures no chain by itself
            for decoder in decoders.values():
                for _ in range(3):  # the last two are alike, and shapes are captured when they occur again
                    steady(decoder, [group], s.new_tokens)
        lengths, chain = (K, max(methods.lengths)), K if self.replays else 0
        repeats = ceil(BARE_REPEATS / s.visits)
        return timed_steps(decoders, group, context, lengths, repeats, methods.model, chain)

    def chosen(self, groups: list[Group], context: int) -> list[Measured]:
        """What is measured at a point, without runs: all methods at k = 4 and the two most promising k, which short warm-up runs determine."""
        s, methods = self.s, self.methods
        far = max(methods.lengths, key=lambda k: abs(k - K))
        cases = [Measured("plain", 0, [])]
        for method in methods.names[1:]:
            near, off = (Measured(method, k, []) for k in (K, far))
            if far == K:  # nothing to choose
                cases.append(near)
                continue
            for turn in range(WARM):
                for case in (near, off):
                    run = steady(methods.decoder(method, case.k), groups, s.new_tokens, turn=UNTIMED + turn)
                    if turn:
                        case.runs.append(run)
            taus = None if self.taus is None else [self.taus.tau(method, context, k) for k in methods.lengths]
            ks = {K, *promising(near, off, methods.lengths, taus)}
            cases += [Measured(method, k, []) for k in sorted(ks)]
        return cases

    def visit(self, cases: list[Measured], groups: list[Group], visit: int = 0) -> list[Measured]:
        """Cases with further runs, in turn: their share of the repeats, after runs that warm up: one of each, and two where shapes are captured, when they occur again."""
        s = self.s
        for turn, case in product(range(1 if visit and not s.graphs else 2), cases):
            steady(
                self.methods.decoder(case.method, case.k), groups, s.new_tokens, turn=UNTIMED + WARM + turn
            )
        V, most = s.visits, turns(s.repeats)
        repeats, least = share(s.repeats, visit, V), (SHORT if self.least is None else self.least) / V
        runs: list[list[Run]] = [[] for _ in cases]
        began, turn = perf_counter(), 0
        while turn < repeats or (turn < most // V and perf_counter() - began < least):
            turn += 1
            for case, some in shuffled(
                zip(cases, runs), visit * most + turn, *((c.method, c.k) for c in cases)
            ):
                progress(f"{case.method}, k = {case.k} ({turn})")
                some.append(replace(self.run(case, groups, visit * most + turn), visit=visit))
        return [replace(case, runs=case.runs + some) for case, some in zip(cases, runs)]

    def run(self, case: Measured, groups: list[Group], turn: int) -> Run:
        """One timed run of a method at its k, with the random numbers of a turn."""
        decoder = self.methods.decoder(case.method, case.k)
        parts = (decoder.target, decoder.draft) if case.k else (decoder.target,)
        before = captured(*parts)
        run = steady(decoder, groups, self.s.new_tokens, turn=turn)
        return replace(run, captured=any(all(p is not q for q in before) for p in captured(*parts)))


def kept(cases: Sequence[Measured]) -> list[Measured]:
    """Cases without the runs that captured a shape, unless there are no others."""
    return [replace(case, runs=[r for r in case.runs if not r.captured] or case.runs) for case in cases]


def pooled(some: Sequence[Bare]) -> Bare:
    """One step of several visits; those of another kind than the last, replayed or not, are left out."""
    times = tuple(t for one in some if one.replayed == some[-1].replayed for t in one.times)
    return some[-1]._replace(seconds=float(middle(times)), times=times)


def share(repeats: int, visit: int, visits: int) -> int:
    """How many of the repeats are those of a visit."""
    return repeats * (visit + 1) // visits - repeats * visit // visits


def turns(repeats: int) -> int:
    """The most repeats of a point whose runs are short."""
    return 4 * repeats if repeats > 1 else 1


def promising(
    near: Measured, far: Measured, lengths: Iterable[int], taus: Iterable[float] | None = None, count: int = 2
) -> list[int]:
    """The k with the most tokens a second, estimated from ``taus`` of ``lengths`` and a round's time linear in k.

    Without ``taus`` they follow from the acceptance rate of each position: with k drafted tokens a round has 1 + a1 + a1 a2 + ... tokens,
    a_i being the rate at position i if it is reached.
    """
    acceptance = max(near, far, key=lambda m: m.k).stats.acceptance
    slope = 0.0
    if far.k != near.k:
        slope = max(0.0, (far.round_seconds - near.round_seconds) / (far.k - near.k))
    speed = {}
    lengths = list(lengths)
    for k, tau in zip(lengths, [_tau(acceptance[:k]) for k in lengths] if taus is None else taus):
        # A lower bound for steep lines: a round of one drafted token is at least a draft step and a verification.
        speed[k] = tau / max(near.round_seconds + slope * (k - near.k), near.round_seconds / (near.k + 1))
    return sorted(speed, key=lambda k: -speed[k])[:count]


def _tau(acceptance: Iterable[float]) -> float:
    """Tokens a round of a chain whose positions are accepted at these rates, each given that it is reached."""
    return 1.0 + sum(accumulate(acceptance, mul))
