"""What arms in use cost a batch: the choice, against all assignments; and what a selector makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from specdec import Philox, selectors
from specdec.selectors.opening import Opening
from specdec.types import Context, Feedback

FREE = np.array([99, 99, 99])


def sums(tokens, seconds, pulls=10.0):
    """``[B, arms, 4]`` from tokens and charged seconds of a round, ``[B, arms]``."""
    tokens, seconds = np.broadcast_arrays(np.array(tokens, float), np.array(seconds, float))
    return np.stack([np.full(tokens.shape, pulls), pulls * tokens, pulls * seconds, 0 * tokens], -1)


def by_loops(tokens, seconds, opening):
    """The best of all assignments, by the definition."""
    B, arms = tokens.shape
    own = seconds - np.array(opening.seconds) / opening.batch
    found = {}
    for arm in product(range(arms), repeat=B):
        shared = sum(opening.seconds[a] for a in set(arm)) / B
        found[arm] = sum((own[b, a] + shared) / tokens[b, a] for b, a in enumerate(arm))
    return list(min(found, key=found.__getitem__))


@pytest.mark.parametrize("seed", range(40))
def test_the_arms_are_the_best_of_all_assignments(seed):
    draw = np.random.default_rng(seed)
    tokens, seconds = 1 + 4 * draw.random((4, 3)), 1 + draw.random((4, 3))
    opening = Opening(tuple(draw.choice([0.0, 0.5, 1.0, 3.0], 3)), 4)
    found = opening.assign(sums(tokens, seconds), np.full(3, 4))
    assert found.tolist() == by_loops(tokens, seconds, opening)


def streamed(tokens, own, opening, arm, length=60, requests=400, batch=8):
    """Seconds to serve requests of two kinds in turn, each on its kind's arm, in a batch that stays full."""
    waiting, rows, spent = [kind % 2 for kind in range(requests)], [], 0.0
    while waiting:
        rows += [[waiting.pop(), 0.0] for _ in range(min(batch - len(rows), len(waiting)))]
        spent += sum(own[kind, arm[kind]] for kind, _ in rows) + sum(
            opening.seconds[a] for a in {arm[kind] for kind, _ in rows}
        )
        for row in rows:
            row[1] += tokens[row[0], arm[row[0]]]
        rows = [row for row in rows if row[1] < length]
    return spent


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_fastest_for_a_stream_of_such_requests(seed):
    """Of all choices for two kinds of requests, within what a stream of full batches has over its own tail (3 %)."""
    draw = np.random.default_rng(seed)
    tokens, own = 1 + 4 * draw.random((2, 3)), 0.5 + draw.random((2, 3))
    opening = Opening(tuple(draw.choice([0.0, 1.0, 3.0], 3)), 8)
    fed = sums(np.tile(tokens, (4, 1)), np.tile(own, (4, 1)) + np.array(opening.seconds) / 8)
    arm = opening.assign(fed, np.full(3, 8))[:2].tolist()
    every = {each: streamed(tokens, own, opening, each) for each in product(range(3), repeat=2)}
    assert every[tuple(arm)] <= 1.03 * min(every.values())
    assert max(every.values()) > 1.2 * min(every.values())


def test_a_small_lead_of_a_few_rows_opens_no_arm():
    """Six rows on one arm; two would be 5 % faster on another, which costs half a row's round in every round."""
    tokens = [[2.0, 1.0]] * 6 + [[2.0, 2.1]] * 2
    assert Opening((0.5, 0.5), 8).assign(sums(tokens, 1.0), FREE[:2]).tolist() == [0] * 8
    assert Opening((0.0, 0.0), 8).assign(sums(tokens, 1.0), FREE[:2]).tolist() == [0] * 6 + [1] * 2
    much = [[2.0, 1.0]] * 6 + [[2.0, 6.0]] * 2
    assert Opening((0.5, 0.5), 8).assign(sums(much, 1.0), FREE[:2]).tolist() == [0] * 6 + [1] * 2


def test_an_arm_never_tried_is_not_opened_and_capacities_hold():
    seen = sums([[2.0, 3.0, 1.0]] * 4, 1.0)
    seen[:, 1] = 0
    opening = Opening((0.1, 0.0, 0.1), 4)
    assert opening.assign(seen, FREE).tolist() == [0] * 4
    assert sorted(opening.assign(seen, np.array([3, 0, 9])).tolist()) == [0, 0, 0, 2]
    with pytest.raises(ValueError, match="serve 3 rows"):
        opening.assign(seen, np.array([3, 0, 0]))
    with pytest.raises(ValueError, match="all 3"):
        Opening((0.1, 0.0), 4).assign(seen, FREE)
    for wrong in ({"seconds": (-1.0, 0.0)}, {"seconds": ()}, {"seconds": (0.0,) * 11}, {"batch": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(opening, **wrong)


def test_spin_keeps_a_small_lead_from_opening_an_arm():
    """Two kinds of requests, of which each is a little faster on an arm of its own: with an opening, one arm serves all."""
    context = Context(torch.zeros(8, 1, dtype=torch.long), torch.ones(8), torch.ones(8), torch.arange(8))
    tokens = torch.tensor([[2.0, 1.9], [1.9, 2.0]])[torch.arange(8) % 2]

    def chosen(opening):
        spin = selectors.Spin(
            exploration=8, growth=64, pool=lambda c: (c.request % 2).tolist(), learn="always", opening=opening
        )
        state, rng = spin.init(2), Philox(torch.arange(8))
        for _ in range(10):
            arm, _, state = spin.select(state, context, torch.tensor([8, 8]), rng)
            got = tokens[torch.arange(8), arm]
            state = spin.update(state, Feedback(context.request, arm, got, arm, torch.ones(8), torch.ones(8)))
        return arm.tolist()

    assert chosen(None) == chosen(Opening((0.0, 0.0), 8)) == [0, 1] * 4
    assert len(set(chosen(Opening((2.0, 2.0), 8)))) == 1
    assert not selectors.Spin().joint
    assert selectors.Spin(opening=Opening((0.0,), 1)).joint
