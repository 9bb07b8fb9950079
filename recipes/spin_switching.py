"""What a change of draft costs: the stall of the rows that change, with their text read beforehand and without.

    python recipes/spin_switching.py --json docs/results/spin_switching.json

A batch in two micro-batches decodes with one draft; at a known round all rows of one micro-batch change to the other draft, which has
read nothing of their texts. The stall is the time from the end of that micro-batch's verification to its next proposal (of the serial
executor: the time of the draft stage), beyond what the same takes in the ordinary rounds of the same run. Prepared: the new draft
reads while the old one still works for the rows (`ahead=True`). Runs are interleaved; figures are medians. All ways give the same
text, which is checked (`Coupled`). Workers are processes of one thread, so that two free cores are needed for figures.

Rows: `executor, prepared, context, stall_milliseconds, ordinary_milliseconds, repeats`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from _measure import quiet, table
from _report import write
from torch import Tensor

import specdec as sd
from specdec import zoo
from specdec.data.prompts import prompts
from specdec.executors import Pipelined, Serial, Timeline
from specdec.pruning.layers import keep_layers
from specdec.types import Context, Round

WAYS: tuple[tuple[str, bool], ...] = (("pipelined", True), ("pipelined", False), ("serial", False))
FIRST = 2  # the first round that counts as ordinary: the ones before it warm up


@dataclass
class Settings:
    """Every setting of a run."""

    target: str = "pocket-target"
    draft: str = "pocket-vanilla"
    second: str = "layers"
    contexts: str = "256,512,960"
    batch: int = 8
    k: int = 4
    switch: int = 6
    repeats: int = 7
    threads: int = 1
    seed: int = 0
    quick: bool = False
    json: str | None = None


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
            # PrunedView ahead, the n-th choice is of round n + 1 (the first serves two rounds).
            arm.append(int(request % 2 == 0 and n + self.ahead >= self.switch))
        return torch.tensor(arm), torch.ones(context.batch), state

    def update(self, state: dict[int, int], feedback: Any) -> dict[int, int]:
        return state


@dataclass
class Sample:
    """Seconds of one run: the stall of the change, an ordinary wait, and the text."""

    stall: float
    ordinary: float
    ids: list[list[int]]


def main(s: Settings) -> list[dict[str, Any]]:
    torch.set_num_threads(s.threads)
    quiet()
    target = sd.HFModel(*zoo.load(s.target))
    contexts = [int(n) for n in s.contexts.split(",")]
    tokens = (s.k + 1) * (s.switch + 4)  # no row is through before the change has been seen
    samples: dict[tuple[str, bool, int], list[Sample]] = {}
    drafts = {"first": sd.drafts.Model(sd.HFModel(*zoo.load(s.draft))), "second": second(s)}
    for repeat in range(s.repeats + 1):  # the first is a warm-up
        for context in contexts:
            texts = prompts("prose", s.batch, context, target.tokenizer)
            for executor, prepared in WAYS:
                base = (
                    sd.decoder(target).pool(drafts, Scripted(s.switch, prepared), s.k).verifier(sd.Coupled())
                )
                took = run(base, executor, prepared, texts, tokens, s)
                if repeat:
                    samples.setdefault((executor, prepared, context), []).append(took)
    for context in contexts:
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
    if s.json:
        write(s.json, rows, s.seed)
    return rows


def second(s: Settings) -> sd.drafts.Model:
    """The draft that is changed to: ``layers`` (the first draft's first and last layer) or a name in the zoo."""
    model, tokenizer = zoo.load(s.draft if s.second == "layers" else s.second)
    if s.second == "layers":
        model = keep_layers(model, [0, model.config.num_hidden_layers - 1])
    return sd.drafts.Model(sd.HFModel(model, tokenizer))


def run(base: sd.Builder, executor: str, ahead: bool, texts: list[Any], tokens: int, s: Settings) -> Sample:
    """One run, and the waits of the rows that change (micro-batch 0)."""
    line = Timeline()
    how = Serial() if executor == "serial" else Pipelined(2, "processes", ahead=ahead, timeline=line)
    rounds: list[Round] = []
    decoder = base.executor(how).build()
    out = decoder.generate(texts, tokens, seed=s.seed, eos_token_id=(), on_round=rounds.append)
    mine = [r for r in rounds if r.number and bool((r.context.request % 2 == 0).any())]
    if executor == "serial":
        waits = [r.seconds["draft"] for r in mine]
    else:
        ended = [p.ended for p in line.spans if p.lane == 0 and p.worker == "target"]
        drafted = [p.ended for p in line.spans if p.lane == 0 and p.stage == "draft"]
        waits = [b - a for a, b in zip(ended, drafted)]
    first = next(i for i, r in enumerate(mine) if bool((r.arm[r.context.request % 2 == 0] == 1).any()))
    if mine[first].number != s.switch:
        raise RuntimeError(f"the change came in round {mine[first].number} and not in {s.switch}")
    # Ordinary rounds are those before the change and those after it, once the new draft is at work.
    after = waits[first + 1 : -1]
    before = waits[FIRST - 1 : first]
    ordinary = median([*before, *after])
    return Sample(waits[first] - ordinary, ordinary, out.ids)


def settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument("--target", default=d.target, help="name in the zoo (default %(default)s)")
    parser.add_argument("--draft", default=d.draft, help="the first draft (default %(default)s)")
    parser.add_argument(
        "--second",
        default=d.second,
        help="the draft that is changed to: a name in the zoo, or layers: two of the first draft's",
    )
    parser.add_argument("--contexts", default=d.contexts, help="prompt tokens (default %(default)s)")
    parser.add_argument("--batch", type=int, default=d.batch)
    parser.add_argument("--k", type=int, default=d.k, help="drafted tokens a round")
    parser.add_argument(
        "--switch", type=int, default=d.switch, help="the round of the change (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=d.repeats)
    parser.add_argument("--threads", type=int, default=d.threads)
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument(
        "--quick", action="store_true", help="one short context, one repeat: to see that it runs"
    )
    parser.add_argument("--json")
    s = Settings(**vars(parser.parse_args()))
    if s.quick:
        s.contexts, s.repeats, s.batch = "64", 1, 4
    return s


if __name__ == "__main__":
    main(settings())
