"""Draft heads compared with each other, with SPIRe and with small language models, on the pocket target.

    python recipes/heads.py --json docs/results/heads.json
    python recipes/heads.py --report docs/results/heads.json --markdown tables.md --plots docs/figures

tau: expected tokens a round on texts of the target (docs/lab.md), for every k from one replay, by context and domain, with intervals by a
bootstrap over packages and paired ratios to --reference. depth: acceptance at each depth. tree: EAGLE-2's tree or DDTree beside the chain. equal:
tau at equal milliseconds of drafting, which are measured at batch 1. speed: tau times rows over the time of whole rounds, which all methods run in
turn with fresh random numbers. window: heads that see --sinks first positions and the latest --window only, at the longest context. outside: tau
on the texts of --prompts.

The k and the tree of each method in "speed" are chosen on prompts of the validation packages; everything else is measured on the test packages. Rows:
`part, method, parameters, tokens_trained, drafting, verifier, temperature, context, domain, k, nodes, tau, tau_low, tau_high, ratio, draft_ms, round_ms,
batch, tokens_per_second, ratio_to_plain, ...` (docs/heads_compared.md). Drafts that are not there are named and left out; recipes/train_heads.py
trains them. Use one thread on a quiet machine.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch

import specdec as sd
from specdec.lab import contenders, contest, head_tables
from specdec.lab.console import progress, short_errors
from specdec.lab.contenders import Contender, Way
from specdec.lab.contest import Row
from specdec.lab.loading import load
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import pieces, prompt_entries, shipped
from specdec.lab.recipe import Plotted
from specdec.lab.turns import Case, Turns, taus_of

PARTS = ("tau", "depth", "tree", "equal", "speed", "window")
METHODS = (
    "pocket-eagle3", "pocket-mtp", "pocket-medusa", "pocket-dflash", "pocket-dspark", "pocket-spire-equal", "pocket-vanilla-equal",
    "pocket-spire", "pocket-vanilla", "pocket-900k",
)  # fmt: skip


@dataclass(frozen=True)
class Settings(Plotted):
    target: str = option("pocket-target", "a pocket model or a folder")
    methods: tuple[str, ...] = option(METHODS, "drafts: NAME or NAME=FOLDER", metavar="DRAFT")
    reference: str = option("pocket-vanilla-equal", "the draft that ratios of tau are to, if it is there")
    budget: str = option("pocket-spire-equal", "the draft whose drafting time is the budget, if it is there")
    parts: tuple[str, ...] = option(PARTS, "what to measure", metavar="PART")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "of target and drafts", metavar="T")
    contexts: tuple[int, ...] = option((256, 512, 960), "prompt tokens", metavar="N")
    at: int = option(512, "the context of depth, tree, equal and speed")
    k: int = option(8, "the longest chain; a head that proposes fewer at most is asked for those")
    trees: tuple[int, ...] = option((8, 16), "nodes of trees", metavar="N")
    batches: tuple[int, ...] = option((1, 4, 16), "rows decoded together", metavar="N")
    repeats: int = option(7, "timed runs of each method; fewer than 6 give no interval")
    run_tokens: int = option(12, "tokens a row of a timed run, on average")
    new_tokens: int = option(48, "positions of each text at which rounds start")
    count: int | None = option(None, "use the first prompts of each split only", metavar="N")
    window: int = option(64, "positions that a windowed head sees")
    sinks: int = option(1, "first positions that it sees")
    prompts: str | None = option(None, "JSON-lines file of more prompts (docs/lab.md)", metavar="FILE")
    report: str | None = option(None, "show this finished report instead of measuring", metavar="FILE")
    markdown: str | None = option(None, "write the documentation's tables", metavar="FILE")


class Study:
    """All parts at one temperature."""

    def __init__(self, s: Settings, target: sd.HFModel, field: list[Contender], temperature: float):
        self.s, self.target, self.field, self.names = s, target, field, [one.name for one in field]
        self.sampling, self.at = sd.Sampling(temperature=temperature), {"temperature": temperature}
        self.chains = [one.chain for one in field]
        trees = s.trees if {"tree", "speed"} & set(s.parts) else ()
        self.trees = [way for one in field for way in one.trees(trees)]
        self.reference = s.reference if s.reference in self.names else self.names[0]
        self.checked: set[str] = set()

    @contextmanager
    def replays(self, entries: Any, ways: list[Way], what: str) -> Any:
        """The replays of ``ways`` on texts after the prompts."""
        s, t = self.s, self.at["temperature"]
        progress(f"temperature {t:g}: tau, {what}", stays=True)
        with tempfile.TemporaryDirectory() as folder:
            how = (folder, self.sampling, s.new_tokens, s.k, s.seed)
            with short_errors():
                trace = contenders.record(self.target, ways, entries, *how)
                found = contenders.replay(trace, ways, self.target, self.checked)
            yield found

    def cut(self, split: str, context: int) -> list[Any]:
        """Prompts of a split, cut to a length."""
        entries = contenders.by_package(shipped(self.s.count, split))
        return pieces(entries, self.target.tokenizer, context, 1)

    def turns(self, ways: list[Way], split: str, context: int) -> Turns:
        """The clock of ``ways`` after prompts of a split."""
        prompts = [entry.given for entry in self.cut(split, context)]
        s = self.s
        return Turns(self.target, ways, prompts, context, self.sampling, s.run_tokens, s.k, s.seed)

    def chosen(self) -> tuple[dict[int, list[Case]], list[Row]]:
        """By batch, what is worth timing, by the development prompts; and rows that say so."""
        s, ways = self.s, self.chains + self.trees
        verifiers = ("rejection",) if self.sampling.greedy else ("rejection", "block")
        cases, rows, turns = {}, [], self.turns(ways, "validation", s.at)
        with self.replays(self.cut("validation", s.at), ways, "development prompts") as replays:
            for batch in s.batches:
                progress(f"choosing k at batch {batch}", stays=True)
                cases[batch] = turns.chosen(replays, batch, verifiers)
                rows += contest.choice_rows(cases[batch], replays, batch, self.at | {"context": s.at})
        return cases, rows

    def rows(self) -> list[Row]:
        """The rows of all parts."""
        s = self.s
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
                    rows += contest.tau_rows(self.field, replays, self.reference, here)
                if context == s.at:
                    rows += self.there(replays, cases, here)
                if windows:
                    rows += self.windows(windows, replays, here)
        if s.prompts:
            entries = prompt_entries(s.prompts, self.target.tokenizer, longest)[: s.count]
            with self.replays(entries, self.chains, "outside prompts") as replays:
                rows += contest.tau_rows(self.field, replays, self.reference, self.at, "outside")
        return rows

    def there(self, replays: Any, cases: dict[int, list[Case]], here: Row) -> list[Row]:
        """The parts at one context."""
        s, rows = self.s, []
        if "depth" in s.parts:
            rows += contest.depth_rows(self.field, replays, here)
        if "tree" in s.parts:
            rows += contest.tree_rows(self.field, replays, s.trees, here)
        turns = self.turns(self.chains + self.trees, "test", s.at)
        if "equal" in s.parts:
            progress("time of drafting", stays=True)
            times, one = turns.lengths(-(-s.repeats // 2), progress), here | {"batch": 1}
            budget = s.budget if s.budget in self.names else self.reference
            rows += contest.time_rows(self.field, times, replays, one)
            rows += contest.equal_rows(self.field, times, replays, budget, one)
        for batch, some in cases.items():
            progress(f"speed at batch {batch}", stays=True)
            measured, taus = turns.measure(some, batch, s.repeats, progress), taus_of(replays, some, s.at)
            rows += contest.speed_rows(self.field, some, measured, taus, batch, here)
        return rows

    def windows(self, windows: list[Way], replays: Any, here: Row) -> list[Row]:
        """What windows cost and save at the longest context, at batch 1 and k = 4."""
        turns, rows = self.turns(self.chains + windows, "test", here["context"]), []
        pairs = [(one, way) for way in windows for one in self.field if one.name == way.method]
        cases = [Case(way, min(4, one.longest)) for one, narrow in pairs for way in (narrow, one.chain)]
        progress(f"windows at context {here['context']}", stays=True)
        times = {m.method: m for m in turns.measure([Case(None), *cases], 1, self.s.repeats, progress)}
        for one, way in pairs:
            rows.append(
                contest.window_row(one, way, min(4, one.longest), replays, times, here | {"batch": 1})
            )
        return rows


def main(s: Settings) -> None:
    s.begin()
    if s.report:
        show(s, json.loads(Path(s.report).read_text())["rows"])
        return
    unknown = set(s.parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"--parts {min(unknown)}: there are {', '.join(PARTS)}")
    target, rows = sd.HFModel(*load(s.target, torch.float32)), []
    field, missing = contenders.contenders(s.methods, target, s.k)
    for name, why in missing.items():
        print(f"left out: {name}: {why} (recipes/train_heads.py trains heads)")
    if not field:
        raise SystemExit("--methods: none of these drafts is there")
    for temperature in s.temperatures:
        rows += Study(s, target, field, temperature).rows()
        s.save(rows)
    show(s, rows)


def show(s: Settings, rows: list[Row]) -> None:
    """Print the tables, and write the documentation's and the figures where asked."""
    print(head_tables.shown(rows))
    if s.markdown:
        Path(s.markdown).write_text(
            head_tables.documented(rows, Path(s.report or s.json or "heads.json").name)
        )
    s.draw(head_tables.figures(rows))


if __name__ == "__main__":
    main(parse(Settings, __doc__))
