"""Lanes whose drafting halves are in a worker: jobs out, answers in, rounds in the order in which they are verified."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specdec.executors.round import DraftRunner, MicroBatch
from specdec.executors.timeline import Timeline
from specdec.executors.worker import DraftRequest
from specdec.types import Round

if TYPE_CHECKING:
    from specdec.decoder import Decoder
    from specdec.stop_rules import StopRules


class Scheduler:
    """One run. A lane's rounds are ``prefill``, then ``verify``, and ``go_on`` after each: between the two, rows may join it.

    Args:
        worker: takes jobs, gives answers (``executors.worker``). ahead, barrier, timeline: as for ``Pipelined``.
    Attributes:
        running: number -> lane that is being drafted, and its budget. clock: when the last round ended.
    """

    def __init__(
        self, worker: Any, ahead: bool = False, barrier: bool = False, timeline: Timeline | None = None
    ):
        self.worker, self.ahead, self.barrier, self.timeline = worker, ahead, barrier, timeline
        self.running: dict[int, tuple[MicroBatch, Tensor]] = {}
        self.waiting: list[DraftRequest] = []  # behind the barrier
        self.clock = perf_counter()

    def prefill(self, number: int, lane: MicroBatch, limits: StopRules) -> DraftRequest:
        """Round 0 of a lane; returns what ``go_on`` is to tell of it."""
        began = perf_counter()
        round = lane.prefill(limits)
        self._note("prefill", number, began)
        return self._settle(number, lane, round)

    def verify(self, limits: StopRules) -> tuple[MicroBatch, DraftRequest]:
        """Wait for a proposal and verify it; returns its lane, and what ``go_on`` is to tell of the round.

        Raises:
            BaseException: whatever the worker raised; RuntimeError when it died.
        """
        answer = self.worker.answer()
        lane, budget = self.running.pop(answer.lane)
        if self.timeline is not None:
            self.timeline.spans += answer.spans
        began = perf_counter()
        round = lane.verify(limits, answer.drafted, budget)
        self._note("verify", answer.lane, began)
        return lane, self._settle(answer.lane, lane, round)

    def go_on(
        self, lane: MicroBatch, job: DraftRequest, limits: StopRules, joins: DraftRequest | None = None
    ) -> None:
        """Ask for the next proposal of a lane, which some rows (of a job of their own) have joined, or say that it is through."""
        if not lane:
            self.worker.submit(job)
        else:
            lane.choose(ahead=self.ahead)
            budget = lane.budget(limits)
            self.running[job.lane] = lane, budget
            job = job._replace(
                context=lane.context,
                budget=budget,
                rng=lane.rng,
                arm=None if lane.choice is None else lane.choice.arm,
                wanted=None if lane.wish is None else lane.wish.arm,
                target_cache=lane.cache if self.worker.shares else None,
                joins=joins,
            )
            if self.barrier and job.round.number:
                self.waiting.append(job)
            else:
                self.worker.submit(job)
        if self.waiting and len(self.waiting) == len(self.running):  # all are through with this round
            for job in self.waiting:
                self.worker.submit(job)
            self.waiting = []

    def stop(self) -> None:
        """Leave no worker behind."""
        self.worker.stop()

    def _settle(self, number: int, lane: MicroBatch, round: Round) -> DraftRequest:
        shares, half = self.worker.shares, None
        if shares and not round.number and reading(lane.decoder):
            # The draft must see the target's cache before rows leave it or join others, so its state begins in this thread.
            half = DraftRunner(lane.decoder)
            half.start(round.context, lane.cache)
            half.observe(round)
        stay = lane.settle(round)
        if half is not None and stay is not None and lane:
            half.select(stay, lane.cache)
        now = perf_counter()
        round.seconds["total"], self.clock = now - self.clock, now  # type: ignore[index]
        if not round.number:
            round.seconds["prefill"] = round.seconds["total"]  # type: ignore[index]
        cache = lane.cache if shares else None
        return DraftRequest(
            number, round, stay, lane.context, round.budget, lane.rng, target_cache=cache, half=half
        )

    def _note(self, stage: str, lane: int, began: float) -> None:
        if self.timeline is not None:
            self.timeline.add("target", stage, lane, began, perf_counter())


def members(draft: Any) -> tuple[Any, ...]:
    """The drafts of a pool, or the draft itself."""
    return tuple(getattr(draft, "drafts", (draft,)))


def reading(decoder: Decoder) -> list[Any]:
    """The drafts that look at the target's cache or activations."""
    return [d for d in members(decoder.draft) if getattr(d, "taps", ()) or hasattr(d, "follow")]
