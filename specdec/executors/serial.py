"""One round after another: draft, score, verify, commit. The other executors are tested against this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

from specdec.composition import Composition
from specdec.executors.round import DraftRunner, MicroBatch
from specdec.rng import Rng
from specdec.stop_rules import StopRules
from specdec.types import Context, Round


@dataclass(frozen=True)
class Serial:
    """All rows draft, then all rows verify; rows that finish leave the batch."""

    def run(self, composition: Composition, context: Context, rng: Rng, limits: StopRules) -> Iterator[Round]:
        micro_batch = MicroBatch(composition, context, rng, composition.begin(context.batch))
        drafting = DraftRunner(composition)
        while micro_batch:
            began = perf_counter()
            first = not micro_batch.number
            if first:
                round = micro_batch.prefill(limits)
                drafting.start(micro_batch.context, micro_batch.cache)
            else:
                budget = micro_batch.budget(limits)
                arm = None if micro_batch.choice is None else micro_batch.choice.arm
                drafted = drafting.propose(micro_batch.context, budget, micro_batch.rng, arm, settle=False)
                round = micro_batch.verify(limits, drafted, budget)
            drafting.observe(round)
            stay = micro_batch.settle(round)
            if micro_batch:
                if stay is not None:
                    drafting.select(stay, micro_batch.cache)
                micro_batch.choose()
                # A draft that reads the prompt counts as prefill.
                if first and micro_batch.choice is not None:
                    drafting.prepare(micro_batch.context, micro_batch.choice.arm)
            round.seconds["total"] = perf_counter() - began  # type: ignore[index]
            if first:
                round.seconds["prefill"] = round.seconds["total"]  # type: ignore[index]
            yield round
