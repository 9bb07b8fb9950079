"""An arm for each size of the batch: where it changes, what it refuses, and that its output is the target's."""

from __future__ import annotations

import pytest
import torch
from test_selectors import context

import specdec as sd
from specdec.audit.certify import certify
from specdec.selectors import ByBatch


def chosen(selector, rows, arms=3, capacities=None):
    room = torch.full((arms,), rows) if capacities is None else torch.tensor(capacities)
    arm, prob, _ = selector.select(selector.init(arms), context(list(range(rows))), room, None)
    assert prob.tolist() == [1.0] * rows
    return arm.tolist()


def test_the_arm_changes_where_the_table_says():
    selector = ByBatch({8: 1, 1: 0, 32: 2})
    for rows, arm in [(1, 0), (7, 0), (8, 1), (31, 1), (32, 2), (100, 2)]:
        assert chosen(selector, rows) == [arm] * rows
    assert chosen(ByBatch({1: 2}), 4, capacities=[1, 9, 2]) == [2, 2, 0, 1]


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ([0, 1], TypeError, "table is .* mapping of rows"),
        ({2: 0}, ValueError, "an arm for 1 row on"),
        ({0: 0, 1: 0}, ValueError, "a key of table is 0: count rows from 1"),
        ({1: "plain"}, TypeError, "a value of table is 'plain': give a whole number: arms are"),
        ({1.5: 0}, TypeError, r"a key of table is 1\.5: give a whole number, of rows"),
    ],
)
def test_wrong_tables_are_refused(table, error, message):
    with pytest.raises(error, match=message):
        ByBatch(table)


def test_an_arm_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"table has arm 3: there are arms 0\.\.2"):
        ByBatch({1: 0, 2: 3}).init(3)


def test_blocks_get_longer_as_rows_leave():
    target = sd.TableModel.random(vocab_size=7, order=1, seed=0)
    arms = {"long": sd.Arm(sd.TableModel.random(vocab_size=7, order=1, seed=1), 4), "plain": None}
    decoder = sd.decoder(target).pool(arms, ByBatch({1: 0, 3: 1}), length=4).build()
    seen = []
    decoder.generate(
        [[1], [2], [3]],
        max_new_tokens=[4, 9, 14],
        on_round=lambda round: (
            seen.append((round.context.batch, set(round.arm.tolist()))) if round.number else None
        ),
    )
    assert {batch for batch, _ in seen} >= {3, 2}
    assert all(arm == ({1} if batch == 3 else {0}) for batch, arm in seen)


def test_the_output_is_the_targets():
    target, small = (sd.TableModel.random(vocab_size=3, order=1, seed=n) for n in range(2))
    arms = {"two": sd.Arm(small, 2), "one": sd.Arm(small, 1)}
    decoder = sd.decoder(target).pool(arms, ByBatch({1: 0, 2: 1})).build()
    assert certify(decoder, prompts=[[0], [1]], max_new_tokens=3).lossless
