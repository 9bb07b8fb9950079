"""One round after another: draft, score, verify, commit. The executor that the others must equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from specdec.executors.round import DraftRunner, MicroBatch, check, staying
from specdec.rng import Rng
from specdec.types import Context, Round

if TYPE_CHECKING:
    from specdec.decoder import Decoder
    from specdec.stop_rules import StopRules

__all__ = ["Serial", "check", "staying"]


@dataclass(frozen=True)
class Serial:
    """All rows draft, then all rows verify; rows that finish leave the batch."""

    def run(self, decoder: Decoder, context: Context, rng: Rng, limits: StopRules) -> Iterator[Round]:
        lane, drafting = MicroBatch(decoder, context, rng, decoder.begin(context.batch)), DraftRunner(decoder)
        while lane:
            began = perf_counter()
            first = not lane.number
            if first:
                round = lane.prefill(limits)
                drafting.start(lane.context, lane.cache)
            else:
                budget = lane.budget(limits)
                arm = None if lane.choice is None else lane.choice.arm
                drafted = drafting.propose(lane.context, budget, lane.rng, arm, settle=False)
                round = lane.verify(limits, drafted, budget)
            drafting.observe(round)
            stay = lane.settle(round)
            if lane:
                if stay is not None:
                    drafting.select(stay, lane.cache)
                lane.choose()
                if (
                    first and lane.choice is not None
                ):  # reading the prompt is prefill, whichever draft does it
                    drafting.prepare(lane.context, lane.choice.arm)
            round.seconds["total"] = perf_counter() - began  # type: ignore[index]
            if first:
                round.seconds["prefill"] = round.seconds["total"]  # type: ignore[index]
            yield round
