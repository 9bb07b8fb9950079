"""Arms for a batch together, beside a batch that is played to its end."""

import numpy as np
import pytest

from specdec.selectors.joint import together


def played(slow, own, shared, refilled):
    """Seconds for a token of every row with one arm each, round by round: in parts of a round, with what rows share as long as one is left."""
    if refilled:  # a row pays its share as long as it is there
        return float((slow * (own + shared / len(slow))).sum())
    seconds, now = 0.0, 0.0
    for end in sorted(slow):
        seconds += (end - now) * (own[slow >= end].sum() + shared)
        now = end
    return seconds


@pytest.mark.parametrize("refilled", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_all_assignments_is_chosen(seed, refilled):
    draw = np.random.default_rng(seed)
    slow, own, shared = draw.uniform(0.2, 1, (3, 2)), draw.uniform(0.1, 1, (3, 2)), draw.uniform(0.1, 3, 8)
    ways = np.array([[way >> row & 1 for row in range(3)] for way in range(8)])  # the arm of each row
    closed = np.where(np.arange(2) == ways[..., None], own, np.inf)
    row = np.arange(3)
    expected = [played(slow[row, arms], own[row, arms], s, refilled) for arms, s in zip(ways, shared)]
    seconds, arm = together(slow, closed, shared, later=None if refilled else np.zeros((3, 2)))
    assert seconds == pytest.approx(min(expected))
    assert arm.tolist() == ways[int(np.argmin(expected))].tolist()


def test_of_what_is_known_of_rows_and_what_is_of_rows_like_them_the_larger_is_counted():
    slow, own, shared = np.array([[0.5], [1.0]]), np.full((1, 2, 1), 2.0), np.array([3.0])
    known = 0.5 * (2 + 1.5) + 1.0 * (2 + 1.5) + 3 * (1.0 - 0.75)
    for later, seconds in ((0.0, known), (0.25, known), (1.0, known - 0.75 + 1.5)):
        assert together(slow, own, shared, later=np.full((2, 1), later))[0] == pytest.approx(seconds)
    assert together(slow, own, shared)[0] == pytest.approx(known - 0.75)


def test_a_row_is_not_left_behind_where_that_holds_up_what_all_share():
    """Row by row, the first row would be decoded plainly (1.6 instead of 1.75 seconds), and all would wait for it."""
    slow, own = np.array([[1.0, 0.5], [1.0, 0.2]]), np.array([[[0.1, 2.0]] * 2])
    for later, seconds, arms in ((None, 2.3, [0, 1]), (np.zeros((2, 2)), 2.9, [1, 1])):
        found, arm = together(slow, own, np.array([3.0]), later=later)
        assert (found, arm.tolist()) == (pytest.approx(seconds), arms)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_said_of_a_batch_is_what_it_takes(seed):
    draw = np.random.default_rng(seed)
    slow, own, shared = draw.uniform(0.2, 1, (4, 3)), draw.uniform(0.1, 1, (4, 3)), draw.uniform(0.1, 3)
    seconds, arm = together(slow, own[None], np.array([shared]), later=np.zeros((4, 3)))
    row = np.arange(4)
    assert played(slow[row, arm], own[row, arm], shared, False) == pytest.approx(seconds)
    ways = np.stack(np.meshgrid(*[range(3)] * 4), -1).reshape(-1, 4)
    least = min(played(slow[row, arms], own[row, arms], shared, False) for arms in ways)
    assert least - 1e-9 <= seconds <= 1.1 * least
