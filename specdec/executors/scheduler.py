"""Micro-batches whose drafting halves run in a worker: requests go out, proposals come back and are verified in that order."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch import Tensor

from specdec.capabilities import DraftPart
from specdec.composition import Composition
from specdec.executors.round import DraftRunner, MicroBatch
from specdec.executors.timeline import Timeline
from specdec.executors.worker import DraftRequest
from specdec.stop_rules import StopRules
from specdec.types import Round


class Scheduler:
    """One run. A micro-batch goes through ``prefill``, then ``verify`` every round, with ``go_on`` after each; rows may join it before ``go_on``.

    Args:
        worker: takes requests and answers with proposals (``executors.worker``). ahead, barrier, timeline: as for ``Pipelined``.
    Attributes:
        running: number -> micro-batch whose proposal is awaited, and its budget. clock: when the last round ended.
    """

    def __init__(
        self, worker: Any, ahead: bool = False, barrier: bool = False, timeline: Timeline | None = None
    ):
        self.worker, self.ahead, self.barrier, self.timeline = worker, ahead, barrier, timeline
        self.running: dict[int, tuple[MicroBatch, Tensor]] = {}
        self.waiting: list[DraftRequest] = []  # held back by the barrier
        self.clock = perf_counter()

    def prefill(self, number: int, micro_batch: MicroBatch, limits: StopRules) -> DraftRequest:
        """Round 0 of a micro-batch; returns the request for ``go_on``."""
        began = perf_counter()
        round = micro_batch.prefill(limits)
        self._note("prefill", number, began)
        return self._settle(number, micro_batch, round)

    def verify(self, limits: StopRules) -> tuple[MicroBatch, DraftRequest]:
        """Wait for a proposal and verify it; returns its micro-batch and the request for ``go_on``.

        Raises:
            BaseException: what the worker raised. RuntimeError: the worker died.
        """
        response = self.worker.answer()
        micro_batch, budget = self.running.pop(response.micro_batch)
        if self.timeline is not None:
            self.timeline.spans += response.spans
        began = perf_counter()
        round = micro_batch.verify(limits, response.drafted, budget)
        self._note("verify", response.micro_batch, began)
        return micro_batch, self._settle(response.micro_batch, micro_batch, round)

    def take_rows(self, micro_batch: MicroBatch) -> bool:
        """Whether rows may join a micro-batch now, between ``verify`` and ``go_on``."""
        return True

    def go_on(
        self,
        micro_batch: MicroBatch,
        request: DraftRequest,
        limits: StopRules,
        joins: DraftRequest | None = None,
    ) -> None:
        """Ask for the next proposal of a micro-batch, or report that it is finished. ``joins``: the prefill of rows that have joined it."""
        if not micro_batch:
            self.worker.submit(request)
        else:
            micro_batch.choose(ahead=self.ahead)
            budget = micro_batch.budget(limits)
            self.running[request.micro_batch] = micro_batch, budget
            request = request._replace(
                context=micro_batch.context,
                budget=budget,
                rng=micro_batch.rng,
                arm=None if micro_batch.choice is None else micro_batch.choice.arm,
                wanted=None if micro_batch.next_arms is None else micro_batch.next_arms.arm,
                target_cache=micro_batch.cache if self.worker.shares else None,
                joins=joins,
            )
            if self.barrier and request.round.number:
                self.waiting.append(request)
            else:
                self.worker.submit(request)
        if self.waiting and len(self.waiting) == len(self.running):  # all have verified this round
            for request in self.waiting:
                self.worker.submit(request)
            self.waiting = []

    def stop(self) -> None:
        """End the worker, and let go of the rows and their memory."""
        self.worker.stop()
        self.running.clear()

    def _settle(self, number: int, micro_batch: MicroBatch, round: Round) -> DraftRequest:
        shares, half = self.worker.shares, None
        if shares and not round.number and reading(micro_batch.composition):
            # The draft reads the target's cache before rows leave or join, so its prefill runs in this thread.
            half = DraftRunner(micro_batch.composition)
            half.start(round.context, micro_batch.cache)
            half.observe(round)
        stay = micro_batch.settle(round)
        if half is not None and stay is not None and micro_batch:
            half.select(stay, micro_batch.cache)
        now = perf_counter()
        round.seconds["total"], self.clock = now - self.clock, now  # type: ignore[index]
        if not round.number:
            round.seconds["prefill"] = round.seconds["total"]  # type: ignore[index]
        cache = micro_batch.cache if shares else None
        return DraftRequest(
            number,
            round,
            stay,
            micro_batch.context,
            round.budget,
            micro_batch.rng,
            target_cache=cache,
            half=half,
        )

    def _note(self, stage: str, micro_batch: int, began: float) -> None:
        if self.timeline is not None:
            self.timeline.add("target", stage, micro_batch, began, perf_counter())


def reading(composition: Composition) -> list[DraftPart]:
    """The drafts that read the target's cache or activations."""
    return [part for part in composition.drafting.members if part.reads_target]
