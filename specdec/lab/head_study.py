"""A comparison of draft heads: its settings, and its parts at one temperature."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from specdec.lab import contenders, contest
from specdec.lab.console import progress, short_errors
from specdec.lab.contenders import Contender, Way
from specdec.lab.contest import Row
from specdec.lab.options import option
from specdec.lab.prompt_file import pieces, prompt_entries, shipped
from specdec.lab.ranks import accuracies
from specdec.lab.replays import Verification
from specdec.lab.turns import TimedWay, Turns, taus_of
from specdec.models.hf import HFModel
from specdec.sampling import Sampling

PARTS = ("tau", "depth", "tree", "equal", "speed", "window")
METHODS = (
    "pocket-eagle3", "pocket-mtp", "pocket-medusa", "pocket-dflash", "pocket-dspark", "pocket-spire-equal", "pocket-vanilla-equal",
    "pocket-spire", "pocket-vanilla", "pocket-900k",
)  # fmt: skip


@dataclass(frozen=True)
class StudySettings:
    """Settings of a comparison of heads."""

    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    methods: tuple[str, ...] = option(
        METHODS, "drafts: NAME or NAME=DRAFT, a folder, a hub id or mtp", metavar="DRAFT"
    )
    reference: str = option("pocket-vanilla-equal", "the draft that ratios of tau are to, if it is there")
    budget: str = option("pocket-spire-equal", "the draft whose drafting time is the budget, if it is there")
    parts: tuple[str, ...] = option(PARTS, "what to measure", metavar="PART")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "of target and drafts", metavar="T")
    contexts: tuple[int, ...] = option((256, 512, 960), "prompt tokens", metavar="N")
    at: int = option(512, "the context of depth, tree, equal and speed")
    k: int = option(8, "the longest chain; a head that proposes fewer at most is asked for those")
    trees: tuple[int, ...] = option((12,), "nodes of trees", metavar="N")
    batches: tuple[int, ...] = option((1, 4, 16), "rows decoded together", metavar="N")
    repeats: int = option(6, "timed runs of each method; fewer than 5 give no interval")
    run_tokens: int = option(10, "tokens a row of a timed run, on average")
    new_tokens: int = option(32, "positions of each text at which rounds start")
    count: int = option(48, "test prompts, of 72; half as many of the validation packages")
    window: int = option(64, "positions that a windowed head sees")
    sinks: int = option(1, "first positions that it sees")
    seed: int = option(0, "random seed (default: 0)")
    kinds: bool = option(True, "tau of each kind of text, too")
    prompts: str | None = option(None, "JSON-lines file of more prompts (docs/lab.md)", metavar="FILE")


@dataclass(frozen=True)
class Known:
    """What holds at every temperature.

    Attributes:
        checked: drafts that need not be checked again (``contenders.replay``). accuracies: of the ranks of marginal heads, by name.
    """

    checked: set[str] = field(default_factory=set)
    accuracies: dict[str, list[list[float]]] = field(default_factory=dict)


class Study:
    """All parts at one temperature."""

    def __init__(
        self,
        s: StudySettings,
        target: HFModel,
        contestants: list[Contender],
        temperature: float,
        known: Known,
    ):
        self.s, self.target, self.field, self.known = s, target, contestants, known
        self.names = [one.name for one in contestants]
        self.sampling, self.at = Sampling(temperature=temperature), {"temperature": temperature}
        self.chains = [one.chain for one in contestants]
        self.trees: list[Way] = []
        self.reference = s.reference if s.reference in self.names else self.names[0]
        self.began = perf_counter()

    def tell(self, line: str) -> None:
        """Print what begins, with the seconds since the start at this temperature."""
        t = self.at["temperature"]
        progress(f"temperature {t:g} [{perf_counter() - self.began:4.0f} s]: {line}", stays=True)

    @contextmanager
    def replays(self, entries: Any, ways: list[Way], what: str) -> Any:
        """The replays of ``ways`` on texts after the prompts."""
        s = self.s
        self.tell(f"tau, {what}")
        with tempfile.TemporaryDirectory() as folder:
            how = (folder, self.sampling, s.new_tokens, s.k, s.seed)
            with short_errors():
                trace = contenders.record(self.target, ways, entries, *how)
                found = contenders.replay(trace, ways, self.target, self.known.checked)
            yield found

    def cut(self, split: str, context: int) -> list[Any]:
        """Prompts of a split, cut to a length."""
        count = self.s.count if split == "test" else -(-self.s.count // 2)
        entries = contenders.by_package(shipped(count, split))
        return pieces(entries, self.target.tokenizer, context, 1)

    def turns(self, ways: list[Way], split: str, context: int) -> Turns:
        """The clock of ``ways`` after prompts of a split."""
        prompts = [entry.given for entry in self.cut(split, context)]
        s = self.s
        return Turns(self.target, ways, prompts, context, self.sampling, s.run_tokens, s.k, s.seed)

    def grow(self) -> None:
        """Make the trees; static ones by the accuracies of ranks on the development prompts."""
        s, marginal = self.s, [one for one in self.field if one.head is not None and one.head.marginal]
        if marginal and not self.known.accuracies:
            self.tell("accuracies of ranks, development prompts")
            with tempfile.TemporaryDirectory() as folder:
                ways, entries = [one.chain for one in marginal], self.cut("validation", s.at)
                how = (folder, Sampling(), s.new_tokens, s.k, s.seed)
                trace = contenders.record(self.target, ways, entries, *how)
                for one in marginal:
                    assert one.head is not None
                    self.known.accuracies[one.name] = accuracies(trace, one.head, one.longest, self.target)
        self.trees = [
            way for one in self.field for way in one.trees(s.trees, self.known.accuracies.get(one.name))
        ]

    def chosen(self) -> tuple[dict[int, list[TimedWay]], list[Row]]:
        """By batch, what is worth timing, by the development prompts; and rows that say so."""
        s, ways = self.s, self.chains + self.trees
        verifiers: tuple[Verification, ...] = (
            ("rejection",) if self.sampling.greedy else ("rejection", "block")
        )
        cases, rows, turns = {}, [], self.turns(ways, "validation", s.at)
        with self.replays(self.cut("validation", s.at), ways, "development prompts") as replays:
            for batch in s.batches:
                self.tell(f"choosing k at batch {batch}")
                cases[batch] = turns.chosen(replays, batch, verifiers)
                rows += contest.choice_rows(cases[batch], replays, batch, self.at | {"context": s.at})
        return cases, rows

    def rows(self) -> list[Row]:
        """The rows of all parts."""
        s = self.s
        if {"tree", "speed"} & set(s.parts):
            self.grow()
        cases, rows = self.chosen() if "speed" in s.parts else ({}, [])
        longest = max(s.contexts)
        narrow = [one.windowed(s.window, s.sinks) for one in self.field] if "window" in s.parts else []
        for context in sorted(
            {*(s.contexts if "tau" in s.parts else ()), s.at, *([longest] if narrow else [])}
        ):
            windows = [way for way in narrow if way is not None and context == longest]
            ways = self.chains + (self.trees if context == s.at else []) + windows
            with self.replays(self.cut("test", context), ways, f"context {context}") as replays:
                here = self.at | {"context": context}
                if "tau" in s.parts:
                    taus = contest.tau_rows(self.field, replays, self.reference, here)
                    rows += [row for row in taus if s.kinds or row["domain"] == "all"]
                if context == s.at:
                    rows += self.there(replays, cases, here)
                if windows:
                    rows += self.windows(windows, replays, here)
        if s.prompts:
            entries = prompt_entries(s.prompts, self.target.tokenizer, longest)[: s.count]
            with self.replays(entries, self.chains, "outside prompts") as replays:
                rows += contest.tau_rows(self.field, replays, self.reference, self.at, "outside")
        return rows

    def there(self, replays: Any, cases: dict[int, list[TimedWay]], here: Row) -> list[Row]:
        """The parts at one context."""
        s, rows = self.s, []
        if "depth" in s.parts:
            rows += contest.depth_rows(self.field, replays, here)
        if "tree" in s.parts:
            rows += contest.tree_rows(self.field, self.trees, replays, here)
        turns = self.turns(self.chains + self.trees, "test", s.at)
        if "equal" in s.parts and self.at["temperature"] == max(s.temperatures):
            self.tell("time of drafting")
            times = turns.lengths(-(-s.repeats // 2), progress)
            budget = s.budget if s.budget in self.names else self.reference
            rows += contest.equal_rows(self.field, times, replays, budget, here | {"batch": 1})
        for batch, some in cases.items():
            self.tell(f"speed at batch {batch}")
            measured, taus = turns.measure(some, batch, s.repeats, progress), taus_of(replays, some, s.at)
            rows += contest.speed_rows(self.field, some, measured, taus, batch, here)
        return rows

    def windows(self, windows: list[Way], replays: Any, here: Row) -> list[Row]:
        """What windows cost and save at the longest context, at batch 1 and k = 4."""
        turns, rows = self.turns(self.chains + windows, "test", here["context"]), []
        pairs = [(one, way) for way in windows for one in self.field if one.name == way.method]
        cases = [TimedWay(way, min(4, one.longest)) for one, narrow in pairs for way in (narrow, one.chain)]
        self.tell(f"windows at context {here['context']}")
        times = {m.method: m for m in turns.measure([TimedWay(None), *cases], 1, self.s.repeats, progress)}
        for one, way in pairs:
            rows.append(
                contest.window_row(one, way, min(4, one.longest), replays, times, here | {"batch": 1})
            )
        return rows
