"""The cost of switching drafts: the stall of the rows that switch, with and without reading their text beforehand.

    python recipes/spin_switching.py --json docs/results/spin_switching.json

A batch in two micro-batches decodes with one draft; at a known round all rows of one micro-batch switch to the other draft, which has
not read their texts. The stall is the time from the end of that micro-batch's verification to its next proposal (for the serial
executor: the time of the draft stage), minus the same in ordinary rounds of the run. Prepared: the new draft reads the text while the
old one still drafts for the rows (`ahead=True`). Runs are interleaved; figures are medians. All variants must give the same text
(`Coupled`), which is checked. Workers are single-threaded processes, so measurements need two free cores.

Rows: `executor, prepared, context, stall_milliseconds, ordinary_milliseconds, repeats`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import checkout  # noqa: F401
import torch
from torch import Tensor

import specdec as sd
from specdec import zoo
from specdec.data.prompts import prompts
from specdec.executors import Pipelined, Serial, Timeline
from specdec.lab.clock import shuffled
from specdec.lab.console import table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe
from specdec.pruning.layers import keep_layers
from specdec.types import Context, Round

WAYS: tuple[tuple[str, bool], ...] = (("pipelined", True), ("pipelined", False), ("serial", False))
FIRST = 2  # the first ordinary round: earlier ones warm up


@dataclass(frozen=True)
class Settings(Recipe):
    target: str = option("pocket-target", "name in the zoo")
    draft: str = option("pocket-vanilla", "the first draft")
    second: str = option(
        "layers", "the draft to switch to: a name in the zoo, or layers: two of the first draft's layers"
    )
    contexts: tuple[int, ...] = option((256, 512, 960), "prompt tokens")
    batch: int = option(8, "rows at a time")
    k: int = option(4, "drafted tokens per round")
    switch: int = option(6, "the round of the switch")
    repeats: int = option(7, "timed repeats")
    quick: bool = option(False, "one short context and one repeat, as a smoke test")


@dataclass(frozen=True)
class Scripted:
    """Arm 0; from the row's round ``switch`` on, arm 1 for rows with even numbers (those of the first micro-batch)."""

    switch: int
    ahead: bool

    def init(self, arms: int) -> dict[int, int]:
        return {}

    def select(
        self, state: dict[int, int], context: Context, capacities: Tensor, rng: Any
    ) -> tuple[Tensor, Tensor, dict[int, int]]:
        arm = []
        for request in context.request.tolist():
            n = state[request] = state.get(request, 0) + 1
            # When choosing ahead, the n-th choice is for round n + 1 (the first is for two rounds).
            arm.append(int(request % 2 == 0 and n + self.ahead >= self.switch))
        return torch.tensor(arm), torch.ones(context.batch), state

    def update(self, state: dict[int, int], feedback: Any) -> dict[int, int]:
        return state


@dataclass
class Sample:
    """One run: seconds of the stall and of an ordinary wait, and the text."""

    stall: float
    ordinary: float
    ids: list[list[int]]


def main(s: Settings) -> list[dict[str, Any]]:
    if s.quick:
        s = replace(s, contexts=(64,), repeats=1, batch=4)
    s.begin()
    target = sd.HFModel(*zoo.load(s.target))
    tokens = (s.k + 1) * (s.switch + 4)  # no row ends before the switch
    samples: dict[tuple[str, bool, int], list[Sample]] = {}
    drafts = {"first": sd.drafts.Model(sd.HFModel(*zoo.load(s.draft))), "second": second(s)}
    for repeat in range(s.repeats + 1):  # the first is a warm-up
        for context in s.contexts:
            texts = prompts("prose", s.batch, context, target.tokenizer)
            for executor, prepared in shuffled(WAYS, repeat, context):
                base = (
                    sd.decoder(target).pool(drafts, Scripted(s.switch, prepared), s.k).verifier(sd.Coupled())
                )
                took = run(base, executor, prepared, texts, tokens, s)
                if repeat:
                    samples.setdefault((executor, prepared, context), []).append(took)
    for context in s.contexts:
        said = [one.ids for way in WAYS for one in samples[(*way, context)]]
        if any(ids != said[0] for ids in said):
            raise RuntimeError(
                f"context {context}: the executors gave different texts, and Coupled promises equal ones"
            )
    rows = [
        {
            "executor": executor,
            "prepared": prepared,
            "context": context,
            "stall_milliseconds": 1e3 * median(one.stall for one in found),
            "ordinary_milliseconds": 1e3 * median(one.ordinary for one in found),
            "batch": s.batch,
            "repeats": len(found),
        }
        for (executor, prepared, context), found in sorted(
            samples.items(), key=lambda item: (item[0][2], item[0])
        )
    ]
    print(table(rows, ("executor", "prepared", "context", "stall_milliseconds", "ordinary_milliseconds")))
    s.save(rows)
    return rows


def second(s: Settings) -> sd.drafts.Model:
    """The draft to switch to: ``layers`` (the first draft's first and last layer) or a name in the zoo."""
    model, tokenizer = zoo.load(s.draft if s.second == "layers" else s.second)
    if s.second == "layers":
        model = keep_layers(model, [0, model.config.num_hidden_layers - 1])
    return sd.drafts.Model(sd.HFModel(model, tokenizer))


def run(base: sd.Builder, executor: str, ahead: bool, texts: list[Any], tokens: int, s: Settings) -> Sample:
    """One run, and the waits of the rows that switch (micro-batch 0)."""
    line = Timeline()
    how = Serial() if executor == "serial" else Pipelined(2, "processes", ahead=ahead, timeline=line)
    rounds: list[Round] = []
    decoder = base.executor(how).build()
    out = decoder.generate(texts, tokens, seed=s.seed, eos_token_id=(), on_round=rounds.append)
    mine = [r for r in rounds if r.number and bool((r.context.request % 2 == 0).any())]
    if executor == "serial":
        waits = [r.seconds["draft"] for r in mine]
    else:
        ended = [p.ended for p in line.spans if p.micro_batch == 0 and p.worker == "target"]
        drafted = [p.ended for p in line.spans if p.micro_batch == 0 and p.stage == "draft"]
        waits = [b - a for a, b in zip(ended, drafted)]
    first = next(i for i, r in enumerate(mine) if bool((r.arm[r.context.request % 2 == 0] == 1).any()))
    if mine[first].number != s.switch:
        raise RuntimeError(f"the switch was in round {mine[first].number} instead of {s.switch}")
    # Ordinary rounds are those before the switch, and those after it once the new draft is drafting.
    after = waits[first + 1 : -1]
    before = waits[FIRST - 1 : first]
    ordinary = median([*before, *after])
    return Sample(waits[first] - ordinary, ordinary, out.ids)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
