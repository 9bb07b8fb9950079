"""``Ahead`` for a stream of requests: rows join a batch whose rounds are launched before the last result is read."""

from __future__ import annotations

from time import perf_counter
from typing import Any, cast

from specdec.cache.contiguous import check_memory
from specdec.composition import Composition
from specdec.executors.captured_drafts import drafting_of
from specdec.executors.round import DraftRunner, MicroBatch
from specdec.executors.whole_rounds import Rounds, Rows, hold, most
from specdec.executors.worker import DraftRequest
from specdec.stop_rules import StopRules


class AheadScheduler:
    """One micro-batch, with the interface of ``executors.scheduler.Scheduler``.

    Rows join between two rounds of which neither is in flight. While requests wait, no round is launched ahead, so they wait for the one
    that is being read, and for one in flight.

    Args:
        rows: the draft's memory has room for so many when the first ones join; ``None``: for those that there are.
    Attributes:
        running: the number of the micro-batch while a round of it is wanted. clock: when the last round ended.
        only_fresh: launch rounds from the host's rows only, none ahead, so that rows can join.
    """

    def __init__(self, composition: Composition, rows: int | None = None):
        self.composition, self.kind, self.room = composition, drafting_of(composition.draft), rows
        if self.kind is not None:  # the target's programs run the draft's model, too
            cast(Any, composition.target).steps.check(*self.kind.modules(composition.draft))
        self.running: dict[int, MicroBatch] = {}
        self.rounds: Rounds | None = None
        self.only_fresh = False
        self.clock = perf_counter()

    def prefill(self, number: int, micro_batch: MicroBatch, limits: StopRules) -> DraftRequest:
        """As ``Scheduler.prefill``; the request holds the draft's state, and the rows have all pages that they may need."""
        half, round = DraftRunner(self.composition), micro_batch.prefill(limits)
        half.start(micro_batch.context, micro_batch.cache)
        half.observe(round)
        stay = micro_batch.settle(round)
        if micro_batch and stay is not None:
            half.select(stay, micro_batch.cache)
        if micro_batch:
            drafted = 0 if self.kind is None else self.composition.nodes
            hold(micro_batch.cache, micro_batch.context, most(limits, micro_batch.context) + drafted)
        now = perf_counter()
        round.seconds["total"] = round.seconds["prefill"] = now - self.clock  # type: ignore[index]
        self.clock = now
        return DraftRequest(
            number, round, stay, micro_batch.context, round.budget, micro_batch.rng, half=half
        )

    def verify(self, limits: StopRules) -> tuple[MicroBatch, DraftRequest]:
        """Read the round in flight, after the launch of the next one; returns its micro-batch and the request for ``go_on``."""
        ((number, micro_batch),) = self.running.items()
        rounds = self.rounds
        assert rounds is not None
        rounds.limits = limits
        round = rounds.step(ahead=not self.only_fresh)
        micro_batch.context, micro_batch.rng = rounds.rows
        micro_batch.cache = rounds.cache
        micro_batch.number += 1
        now = perf_counter()
        round.seconds["total"], self.clock = now - self.clock, now  # type: ignore[index]
        if not micro_batch:
            del self.running[number]
            self.rounds, self.only_fresh = None, False
        return micro_batch, DraftRequest(
            number, round, None, micro_batch.context, round.budget, micro_batch.rng
        )

    def take_rows(self, micro_batch: MicroBatch) -> bool:
        """Make room for rows to join, and return whether they may join now. If not, a round is in flight, and none will be after it."""
        rounds = self.rounds
        assert rounds is not None
        self.only_fresh = rounds.flight is not None
        if not self.only_fresh:
            rounds.compact()
            micro_batch.context, micro_batch.rng = rounds.rows
            micro_batch.cache = rounds.cache
        return not self.only_fresh

    def go_on(
        self,
        micro_batch: MicroBatch,
        request: DraftRequest,
        limits: StopRules,
        joins: DraftRequest | None = None,
    ) -> None:
        """Launch the next round unless it is in flight. ``joins``: the prefill of rows that have joined the micro-batch."""
        if not micro_batch:
            return
        rows, cache = Rows(micro_batch.context, micro_batch.rng), micro_batch.cache
        if self.rounds is None:
            memory, carry = self._memory(request, cache)
            if memory is not None and self.room is not None:
                check_memory(memory.shapes, self.room, memory.slots)
                memory = self.kind.programs(self.composition.draft).kept(memory.widened(self.room))
            self.rounds = Rounds(self.composition, limits, rows, cache, memory, carry)
            self.rounds.number = micro_batch.number
        elif joins is not None:
            self.rounds.join(rows, cache, *self._memory(joins, cache))
        self.running[request.micro_batch], self.rounds.limits = micro_batch, limits
        self.only_fresh = self.only_fresh and joins is None
        self.rounds.start()

    def stop(self) -> None:
        """Let go of the rows and their memory."""
        self.running.clear()
        self.rounds = None

    def _memory(self, request: DraftRequest, cache: Any) -> tuple[Any, Any]:
        """The draft's memory after a prefill, and what its rows carry; ``cache``: the target's, which they are in by now."""
        half = request.half
        if half is None or self.kind is None:
            return None, None
        state, half.state = half.part.follow(half.state, cache), None  # its memory is the rounds' alone
        return self.kind.memory(state), self.kind.carry(state)
