"""The speculation-verification pipeline: while the target verifies one micro-batch, the drafts work on others.

SPIN, arXiv 2503.15921, section 6. No token is guessed: each micro-batch is drafted, verified and drafted again, and there is
no barrier between rounds. Draws are keyed, so that the output equals the serial executor's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch

from specdec.arguments import at_least
from specdec.capabilities import ModelInfo
from specdec.composition import Composition
from specdec.executors.forked import ProcessWorker
from specdec.executors.round import MicroBatch
from specdec.executors.scheduler import Scheduler, reading
from specdec.executors.timeline import Timeline
from specdec.executors.worker import ThreadWorker
from specdec.rng import Rng
from specdec.stop_rules import StopRules
from specdec.types import Context, Round

WORKERS: dict[str, Any] = {"threads": ThreadWorker, "processes": ProcessWorker}


@dataclass(frozen=True)
class Pipelined:
    """Micro-batches whose drafting runs in a worker beside the target's verification.

    Args:
        micro_batches: how many, at most the number of rows. ``None``: 2; ``executors.tune`` finds the best number.
        workers: ``"threads"`` (on a GPU with a stream of its own; on a CPU two threads share Python's lock, for which small models
            wait) or ``"processes"`` (forked, CPU only: each on a core of its own).
        ahead: with a selector, arms are chosen a round ahead, and the draft that a row changes to reads the row's text while the old
            one still drafts for it. barrier: all micro-batches of a round are verified before the next is drafted (for comparison).
        timeline: collects when each worker ran.
    Raises (in ``build`` or at the start of a run):
        ValueError: more micro-batches than rows, unknown workers, a draft in another process that reads its target's cache or
            activations, or one in a thread that runs on a target that serves one call at a time (one with captured steps).
    """

    micro_batches: int | None = None
    workers: Literal["threads", "processes"] = "threads"
    ahead: bool = True
    barrier: bool = False
    timeline: Timeline | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.workers, str) or self.workers not in WORKERS:
            raise ValueError(f"workers is {self.workers!r}: there are {', '.join(map(repr, WORKERS))}")
        if self.timeline is not None and not isinstance(self.timeline, Timeline):
            raise TypeError(f"timeline is {self.timeline!r}: give a Timeline() to fill, or None")
        if self.micro_batches is not None:
            at_least(1, "micro_batches", self.micro_batches, "need at least 1", ", or None for two")

    def check(self, composition: Composition) -> None:
        """Called by ``build``; raises ValueError for drafts that cannot run beside the target."""
        reads = reading(composition)
        name = ", ".join(part.info.name for part in reads)
        drafts = [part.info.model for part in composition.drafting.parts if part.info.model is not None]
        models = [ModelInfo.of(model) for model in (composition.target, *drafts)]
        if self.workers == "processes":
            if reads:
                raise ValueError(
                    f"draft {name!r} reads the target's cache or activations, which are in another process: use "
                    "Pipelined(workers='threads')"
                )
            if not sys.platform.startswith("linux"):
                raise ValueError(
                    "workers='processes' forks, which is safe on Linux only: use workers='threads'"
                )
            if any(m.device is not None and m.device.type != "cpu" for m in models):
                raise ValueError("workers='processes' cannot use a GPU in the worker: use workers='threads'")
            return
        if models[0].concurrent:
            return
        for info in (part.info for part in composition.drafting.parts):
            if info.reads_cache:
                raise ValueError(
                    f"draft {info.name!r} runs the target on its own cache, and the target serves one call at a time, as captured steps "
                    "do: use HFModel(..., graphs=False), or executor Serial()"
                )
            if info.model is composition.target or ModelInfo.of(info.model).shares_with(models[0]):
                raise ValueError(
                    f"draft {info.name!r} runs on the target's own object, which serves one call at a time: give the draft a wrapper of its own, "
                    "HFModel(model.model, model.tokenizer), or use workers='processes'"
                )

    def run(self, composition: Composition, context: Context, rng: Rng, limits: StopRules) -> Iterator[Round]:
        count = self.count(context.batch)
        if count > context.batch:
            rows = "is 1 row" if context.batch == 1 else f"are {context.batch} rows"
            raise ValueError(
                f"micro_batches is {count} and there {rows}: each micro-batch needs a row; use at most {context.batch}, or Pipelined() without "
                "a number: two micro-batches, one of a single row"
            )
        selection = composition.begin(context.batch)
        parts = [torch.arange(context.batch)[i::count] for i in range(count)]
        micro_batches = [
            MicroBatch(composition, context.select(rows), rng.select(rows), selection) for rows in parts
        ]
        scheduler = self.scheduler(composition, count, len(parts[0]))
        try:
            for number, micro_batch in enumerate(micro_batches):
                request = scheduler.prefill(number, micro_batch, limits)
                scheduler.go_on(micro_batch, request, limits)
                yield request.round
                scheduler.clock = perf_counter()  # the consumer's time belongs to no round
            while scheduler.running:
                micro_batch, request = scheduler.verify(limits)
                scheduler.go_on(micro_batch, request, limits)
                yield request.round
                scheduler.clock = perf_counter()
        finally:
            scheduler.stop()

    def count(self, rows: int) -> int:
        """How many micro-batches so many rows make."""
        return min(2, rows) if self.micro_batches is None else self.micro_batches

    def scheduler(self, composition: Composition, micro_batches: int, rows: int) -> Scheduler:
        """A scheduler of so many micro-batches of at most ``rows`` rows each; its worker starts now and ends with ``stop``."""
        worker = WORKERS[self.workers](composition, micro_batches, rows)
        return Scheduler(worker, ahead=self.ahead, barrier=self.barrier, timeline=self.timeline)
