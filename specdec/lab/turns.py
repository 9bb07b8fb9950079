"""Whole rounds of several ways to draft, in turn, after prompts that are fed once; and the k at which each is worth timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from specdec import drafts
from specdec.audit.rounds import Efficiency
from specdec.builder import decoder
from specdec.capabilities import DraftInfo
from specdec.decoder import Decoder
from specdec.lab.clock import shuffled
from specdec.lab.contenders import Way
from specdec.lab.grid import promising
from specdec.lab.multipliers import Taus
from specdec.lab.prefill import Group, group, prefilled
from specdec.lab.replays import Replay, Verification
from specdec.lab.steady import Measured, capacity, steady
from specdec.models.hf import HFModel
from specdec.sampling import Sampling
from specdec.verifiers import BlockVerification, Rejection

PLAIN = "plain"
CHOICE = 3  # runs at each of two lengths, by which k is chosen
LEAST_ROWS = 4  # smaller batches decode several groups of prompts
OF_MODEL = (drafts.Model, drafts.Parallel)  # what reads prompts by itself


class TimedWay(NamedTuple):
    """What is timed: a way to draft, how many tokens, and the verifier; ``way`` is ``None`` for plain decoding."""

    way: Way | None
    k: int = 0
    verifier: Verification = "rejection"

    @property
    def label(self) -> str:
        """The name of its ``Measured``."""
        return PLAIN if self.way is None else f"{self.way.label}, {self.verifier}"

    @property
    def nodes(self) -> int:
        """The most nodes that a round verifies."""
        return 0 if self.way is None else DraftInfo.of(self.way.draft).nodes(self.k)


@dataclass(frozen=True, eq=False)
class Turns:
    """A target and the ways to draft for it, at one temperature.

    Attributes:
        prompts: ids, each at least ``context`` long, taken in turn. new_tokens: of each row in a run, on average. longest: the longest chain.
    """

    target: HFModel
    ways: Sequence[Way]
    prompts: Sequence[Sequence[int]]
    context: int
    sampling: Sampling
    new_tokens: int
    longest: int
    seed: int = 0

    @cached_property
    def _fed(self) -> tuple[Any, dict[int, Any]]:
        """The target whose prompts are fed, and the drafts' models, by the identity of the model."""
        taps = {tap for way in self.ways for tap in DraftInfo.of(way.draft).taps}
        models = {
            id(way.draft.model): way.draft.model for way in self.ways if isinstance(way.draft, OF_MODEL)
        }
        return prefilled(self.target, sorted(taps)), {one: prefilled(model) for one, model in models.items()}

    @cached_property
    def _decoders(self) -> dict[tuple[str, int], Decoder]:
        return {}

    def decoder(self, case: TimedWay) -> Decoder:
        """The decoder of a case, cached."""
        key = case.label, case.k
        if key not in self._decoders:
            target, models = self._fed
            base = decoder(target).sampling(self.sampling)
            if case.way is not None:
                draft = case.way.draft
                if isinstance(draft, OF_MODEL):
                    draft = replace(draft, model=models[id(draft.model)])
                verifier = BlockVerification() if case.verifier == "block" else Rejection()
                base = base.draft(draft, case.k).verifier(verifier)
            self._decoders[key] = base.build()
        return self._decoders[key]

    def groups(self, batch: int) -> list[Group]:
        """Prompts for a batch, fed to the target and to the drafts that read it by themselves."""
        target, models = self._fed
        nodes = max((way.nodes for way in self.ways), default=0)
        room = capacity(self.context, self.new_tokens, self.longest) + nodes
        made = []
        for g in range(max(1, LEAST_ROWS // batch)):
            numbers = range(g * batch, (g + 1) * batch)
            rows = [self.prompts[n % len(self.prompts)][: self.context] for n in numbers]
            made.append(group(rows, [self.seed + n for n in numbers], room, target, list(models.values())))
        return made

    def measure(
        self,
        cases: Sequence[TimedWay],
        batch: int,
        repeats: int,
        tell: Callable[[str], None] = lambda line: None,
    ) -> list[Measured]:
        """Steady runs of all cases in turn; a shorter first run of each, which warms up, is not counted.

        Args:
            repeats: counted runs of each; each turn has random numbers of its own, the same for all cases.
        """
        groups = self.groups(batch)
        made = [Measured(case.label, case.k, []) for case in cases]
        for turn in range(repeats + 1):
            for case, measured in shuffled(zip(cases, made), turn, batch):
                tell(f"{case.label}, k = {case.k}, batch {batch}, turn {turn} of {repeats}")
                count = self.new_tokens if turn else max(1, self.new_tokens // 4)
                run = steady(self.decoder(case), groups, count, turn=turn)
                if turn:
                    measured.runs.append(run)
        return made

    def lengths(
        self, repeats: int, tell: Callable[[str], None] = lambda line: None
    ) -> dict[tuple[str, int], Measured]:
        """Every chain at every length, one row at a time, by method and k; plain decoding has k = 0."""
        chains = [way for way in self.ways if way.drafting == "chain"]
        cases = [TimedWay(None), *(TimedWay(way, k) for way in chains for k in range(1, way.longest + 1))]
        names = [PLAIN if case.way is None else case.way.method for case in cases]
        return {(name, m.k): m for name, m in zip(names, self.measure(cases, 1, repeats, tell))}

    def chosen(
        self, replays: Mapping[str, Replay], batch: int, verifiers: Sequence[Verification]
    ) -> list[TimedWay]:
        """For each method, drafting and verifier the case with the most tokens a second by τ over a round's time.

        Of a chain, a few runs at two lengths give the time of a round, which is taken as linear in k. Trees of a method are timed as they are, and
        its best one is kept.

        Args:
            replays: of every way, by its label.
        """
        groups, made = self.groups(batch), [TimedWay(None)]
        trees: dict[str, tuple[float, TimedWay]] = {}
        for way in self.ways:
            replay = replays[way.label]
            if replay.chains:
                lengths = (min(4, way.longest), _far(way.longest))
                near, far = self._short([TimedWay(way, k) for k in lengths], groups)
                for verifier in verifiers:
                    taus = [replay.efficiency(k, verifier).tau for k in range(1, way.longest + 1)]
                    best = promising(near, far, range(1, way.longest + 1), taus, 1)[0]
                    made.append(TimedWay(way, best, verifier))
            else:
                case = TimedWay(way, way.longest)
                speed = replay.tau / self._short([case], groups)[0].round_seconds
                if speed > trees.get(way.method, (0.0, case))[0]:
                    trees[way.method] = speed, case
        return made + [case for _, case in trees.values()]

    def _short(self, cases: Sequence[TimedWay], groups: Sequence[Group]) -> list[Measured]:
        """``CHOICE`` counted runs of half the length of each, in turn, after one that warms up."""
        count, made = max(1, self.new_tokens // 2), [Measured(case.label, case.k, []) for case in cases]
        for turn in range(CHOICE + 1):
            for case, measured in zip(cases, made):
                run = steady(self.decoder(case), groups, count if turn else max(1, count // 4), turn=turn)
                if turn:
                    measured.runs.append(run)
        return made


def _far(longest: int) -> int:
    """The length that is farthest from 4."""
    return longest if longest >= 7 else 1


def drafting_ms(case: Measured, plain: Measured) -> float:
    """Milliseconds a round that drafting adds to plain decoding outside the target and the verifier: proposing, and reading what was committed."""
    return 1e3 * sum(case.stage(name) - plain.stage(name) for name in ("draft", "other"))


def taus_of(replays: Mapping[str, Replay], cases: Sequence[TimedWay], context: int) -> Taus:
    """The noise-free τ of cases, as ``multipliers`` takes it; clusters are the trace's sources."""
    trace = next(iter(replays.values())).trace
    scores: dict[tuple[str, int, int], Efficiency] = {}
    for case in cases:
        if case.way is not None:
            replay = replays[case.way.label]
            k = case.k if replay.chains else None
            scores[case.label, context, case.k] = replay.efficiency(k, case.verifier)
    return Taus(scores, {context: np.array(trace.sources)})
