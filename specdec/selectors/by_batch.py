"""An arm for each size of the batch: longer blocks for few rows, shorter ones or none for many."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import at_least, whole
from specdec.capabilities import SelectorInfo
from specdec.rng import Rng
from specdec.selectors.fixed import Arms, Steady
from specdec.selectors.matching import checked, within
from specdec.selectors.statistics import at_least_one
from specdec.types import Context


@dataclass(frozen=True)
class ByBatch(Steady):
    """The same arm for all rows of a round, by how many rows a micro-batch has; serving engines call it a table of lengths by batch size.

    Verifying k + 1 tokens of a row costs little where a step only reads weights, and much where many rows keep the processor busy. ``lab.decide`` and
    ``recipes/decide.py`` measure the table; ``sd.auto`` decides by itself, for each row. A request that joins a stream whose arms are chosen a round ahead has the arm of
    the rows that join with it at first.

    Args:
        table: the fewest rows -> the arm from there on, such as ``{1: 0, 8: 1, 32: 2}``; it has 1. Rows beyond an arm's capacity get the first arms
            with room.
    Raises:
        TypeError: ``table`` is no mapping of whole numbers.
        ValueError: it lacks 1, or has a number of rows below it; (``init``) an arm is not one of the arms.
    """

    table: Mapping[int, int]

    info = SelectorInfo(joint=True)

    def __post_init__(self) -> None:
        if not isinstance(self.table, Mapping):
            raise TypeError(
                f"table is {self.table!r}: give a mapping of rows to arms, such as {{1: 0, 8: 1}}"
            )
        for rows, arm in self.table.items():
            at_least(1, "a key of table", rows, "count rows from 1", ", of rows")
            whole("a value of table", arm, ": arms are counted from 0, in the order of the pool's")
        object.__setattr__(self, "table", dict(self.table))
        if 1 not in self.table:
            raise ValueError(f"table is {dict(self.table)}: give an arm for 1 row on, too")

    @staticmethod
    def example(model: object) -> ByBatch:
        """One for tests."""
        return ByBatch({1: 0, 2: 0})

    def init(self, arms: int) -> Arms:
        at_least_one(arms)
        wrong = [arm for arm in self.table.values() if not 0 <= arm < arms]
        if wrong:
            raise ValueError(f"table has arm {wrong[0]}: there are arms 0..{arms - 1}")
        return Arms(arms)

    def select(
        self, state: Arms, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Arms]:
        room, B = checked(capacities, state.arms, context.batch), context.batch
        steps = sorted(self.table)
        arm = self.table[steps[bisect_right(steps, max(B, 1)) - 1]]
        chosen = within(np.full(B, arm), np.zeros((B, state.arms)), room)
        return torch.from_numpy(chosen), torch.ones(B), state
