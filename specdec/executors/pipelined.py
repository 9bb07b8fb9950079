"""The speculation-verification pipeline: while the target verifies one micro-batch, the drafts work on others.

SPIN, arXiv 2503.15921, section 6. Nothing is guessed: a micro-batch (a lane) is drafted, verified and drafted again; there is no
barrier between rounds. Draws are keyed, so that what comes out is what the serial executor gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from specdec.executors.lane import Drafting, Lane
from specdec.executors.timeline import Timeline
from specdec.executors.worker import Answer, Job, ProcessWorker, ThreadWorker
from specdec.rng import Rng
from specdec.types import Context, Round

if TYPE_CHECKING:
    from specdec.decoder import Decoder
    from specdec.limits import Limits

WORKERS: dict[str, Any] = {"threads": ThreadWorker, "processes": ProcessWorker}


@dataclass(frozen=True)
class Pipelined:
    """Micro-batches whose drafting runs in a worker beside the target's verification.

    Args:
        micro_batches: how many; ``None``: 2, or ask ``executors.tune`` for the best. At most the rows.
        workers: ``"threads"`` (on a GPU with a stream of its own; on a CPU two threads share Python's lock, which small models wait
            for) or ``"processes"`` (forked, CPU only: each on a core of its own).
        ahead: with a selector, arms are chosen a round ahead, and a draft that a row will change to reads the row's text while the old
            one still works for it (not between members of a stack, which share a cache). barrier: all micro-batches of a round are
            verified before the next is drafted (for comparison).
        timeline: collects who worked when.
    Raises (in ``build`` or at the start of a run):
        ValueError: more micro-batches than rows, no such workers, or a draft that looks at its target's cache or activations from
            another process.
    """

    micro_batches: int | None = None
    workers: Literal["threads", "processes"] = "threads"
    ahead: bool = True
    barrier: bool = False
    timeline: Timeline | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.workers not in WORKERS:
            raise ValueError(f"workers is {self.workers!r}: there are {', '.join(map(repr, WORKERS))}")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}: need at least 1")

    def check(self, decoder: Decoder) -> None:
        """Called by ``build``: refuse what cannot run beside the target."""
        reads = reading(decoder)
        name = ", ".join(getattr(d, "name", type(d).__name__) for d in reads)
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
            if any(getattr(m, "device", torch.device("cpu")).type != "cpu" for m in models(decoder)):
                raise ValueError("workers='processes' cannot use a GPU in the worker: use workers='threads'")
            return
        for model in models(decoder)[1:]:
            path = getattr(decoder.target, "_path", None)
            if model is decoder.target and not getattr(path, "concurrent", True):
                raise ValueError(
                    "the target drafts for itself and its family runs one call at a time: wrap the model once more, HFModel(model), or "
                    "use workers='processes'"
                )

    def run(self, decoder: Decoder, context: Context, rng: Rng, limits: Limits) -> Iterator[Round]:
        count = min(2, context.batch) if self.micro_batches is None else self.micro_batches
        if count > context.batch:
            raise ValueError(
                f"micro_batches is {count} and there are {context.batch} rows: a micro-batch needs a row; use at most {context.batch}"
            )
        selection = decoder.begin(context.batch)
        parts = [torch.arange(context.batch)[i::count] for i in range(count)]
        lanes = [Lane(decoder, context.select(rows), rng.select(rows), selection) for rows in parts]
        worker = WORKERS[self.workers](decoder, count, len(parts[0]))
        flow = _Flow(self, lanes, limits, worker)
        try:
            yield from flow.rounds()
        finally:
            worker.stop()


class _Flow:
    """One run: jobs out, answers in, rounds in the order in which they are verified."""

    def __init__(self, how: Pipelined, lanes: list[Lane], limits: Limits, worker: Any):
        self.how, self.lanes, self.limits, self.worker = how, lanes, limits, worker
        self.budgets: dict[int, Tensor] = {}
        self.waiting: list[Job] = []  # behind the barrier
        self.clock = perf_counter()

    def rounds(self) -> Iterator[Round]:
        for number, lane in enumerate(self.lanes):
            began = perf_counter()
            round = lane.prefill(self.limits)
            self._note("target", "prefill", number, began)
            yield self._go_on(number, round)
            self._release()
        while self.budgets:
            answer = self.worker.answer()
            lane = self.lanes[answer.lane]
            self._note_all(answer)
            began = perf_counter()
            round = lane.verify(self.limits, answer.drafted, self.budgets.pop(answer.lane))
            self._note("target", "verify", answer.lane, began)
            yield self._go_on(answer.lane, round)
            self._release()

    def _go_on(self, number: int, round: Round) -> Round:
        """Settle a lane's round and ask for its next proposal."""
        lane, shares = self.lanes[number], self.worker.shares
        half = None
        if shares and not round.number and reading(lane.decoder):
            # The draft must see the target's cache before rows leave it, so its state begins in this thread.
            half = Drafting(lane.decoder)
            half.start(round.context, lane.cache)
        stay = lane.settle(round)
        cache = lane.cache if shares else None
        if lane:
            lane.choose(ahead=self.how.ahead)
            budget = self.budgets[number] = lane.budget(self.limits)
            arm = None if lane.choice is None else lane.choice.arm
            wanted = None if lane.wish is None else lane.wish.arm
            job = Job(number, round, stay, lane.context, budget, lane.rng, arm, wanted, cache, half)
            if self.how.barrier and round.number:
                self.waiting.append(job)
            else:
                self.worker.submit(job)
        else:
            self.worker.submit(Job(number, round, stay, lane.context, round.budget, lane.rng))
        now = perf_counter()
        round.seconds["total"], self.clock = now - self.clock, now  # type: ignore[index]
        if not round.number:
            round.seconds["prefill"] = round.seconds["total"]  # type: ignore[index]
        return round

    def _release(self) -> None:
        """Behind a barrier: let the next round begin when all lanes are through with this one."""
        if self.waiting and len(self.waiting) == len(self.budgets):
            for job in self.waiting:
                self.worker.submit(job)
            self.waiting = []

    def _note(self, worker: str, stage: str, lane: int, began: float) -> None:
        if self.how.timeline is not None:
            self.how.timeline.add(worker, stage, lane, began, perf_counter())

    def _note_all(self, answer: Answer) -> None:
        if self.how.timeline is not None:
            self.how.timeline.spans += answer.spans


def members(draft: Any) -> tuple[Any, ...]:
    """The drafts of a pool, or the draft itself."""
    return tuple(getattr(draft, "drafts", (draft,)))


def reading(decoder: Decoder) -> list[Any]:
    """The drafts that look at the target's cache or activations."""
    return [d for d in members(decoder.draft) if getattr(d, "taps", ()) or hasattr(d, "follow")]


def models(decoder: Decoder) -> list[Any]:
    """The target and the drafts' models."""
    return [
        decoder.target,
        *(m for d in members(decoder.draft) if (m := getattr(d, "model", None)) is not None),
    ]
