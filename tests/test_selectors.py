"""Selectors' formulas against numbers worked out by hand, SPIN's schedule, matchings against brute force, rewards and charges."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import specdec as sd
from specdec.rng import seeds
from specdec.selectors import (
    EXP3,
    UCB1,
    ByBatch,
    EpsilonGreedy,
    EXP3Spec,
    Fixed,
    Hedge,
    Random,
    Spin,
    Thompson,
    UCBSpec,
    rewards,
)
from specdec.selectors.banditspec import radius
from specdec.selectors.matching import assign, draw, scatter, within
from specdec.selectors.statistics import OUTSTANDING, Index, Pending, goodput
from specdec.selectors.thompson import best_of
from specdec.selectors.ucb import bounds
from specdec.types import Feedback, Proposal, Round, Scores, Verdict


def context(requests, length=5):
    B = len(requests)
    return sd.Context(
        torch.zeros(B, 1, dtype=torch.long),
        torch.as_tensor(length).expand(B).clone(),
        torch.ones(B, dtype=torch.long),
        torch.tensor(requests),
    )


def feedback(requests, arm, tokens=1.0, seconds=1.0, reward=1.0):
    B = len(requests)

    def column(value):
        return torch.as_tensor(value, dtype=torch.float64).expand(B)

    reward = torch.as_tensor(reward, dtype=torch.float64)
    reward = reward if reward.dim() == 2 else reward.expand(B)
    return Feedback(
        torch.tensor(requests), torch.as_tensor(arm), column(tokens), column(tokens), column(seconds), reward
    )


class Given:
    """Answers as told, and keeps the distributions it was asked for."""

    def __init__(self, answers):
        self.answers, self.asked = torch.tensor(answers), []

    def categorical(self, probs, key):
        self.asked.append((probs, key))
        return self.answers

    def select(self, rows):
        return Given(self.answers[rows].tolist())


def distribution(selector, state, request=0, arms=2):
    """What the selector's one decision is drawn from."""
    rng = Given([0])
    selector.select(state, context([request]), torch.full((arms,), 1), rng)
    return rng.asked[0][0][0].tolist()


# matching


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_assign_is_the_best_matching(data):
    B, arms = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    noise = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    weights = noise.integers(0, 4, (B, arms)) if noise.random() < 0.5 else noise.normal(size=(B, arms))
    room = noise.multinomial(B + noise.integers(0, 3), [1 / arms] * arms)
    arm = assign(torch.from_numpy(weights), torch.from_numpy(room))
    assert (np.bincount(arm, minlength=arms) <= room).all()
    feasible = [
        a
        for a in product(range(arms), repeat=B)
        if (np.bincount(np.array(a, dtype=int), minlength=arms) <= room).all()
    ]
    best = max(weights[np.arange(B), list(a)].sum() for a in feasible)
    assert weights[np.arange(B), arm].sum() == pytest.approx(best, abs=1e-6)


def test_ties_go_to_the_first_arm():
    assert assign(np.ones((3, 4)), [9, 9, 9, 9]).tolist() == [0, 0, 0]
    assert sorted(assign(np.ones((3, 4)), [1, 0, 1, 9]).tolist()) == [0, 2, 3]
    assert sorted(assign(np.full((3, 4), -7.0), [2, 2, 2, 2]).tolist()) == [0, 0, 1]


def test_assign_gives_a_scarce_arm_to_the_row_that_loses_most_without_it():
    weights = np.array([[5.0, 4.0], [5.0, 1.0], [3.0, 2.9]])
    assert assign(weights, [1, 2]).tolist() == [1, 0, 1]
    assert assign(np.zeros((0, 2)), [1, 1]).tolist() == []
    with pytest.raises(ValueError, match="finite"):
        assign(np.array([[np.inf, 1.0]]), [1, 1])


def test_within_moves_only_what_does_not_fit():
    scores = np.array([[9.0, 1.0, 0.0], [5.0, 0.0, 2.0], [7.0, 3.0, 0.0], [0.0, 0.0, 4.0]])
    assert within([0, 0, 0, 2], scores, [3, 0, 1]).tolist() == [0, 0, 0, 2]
    assert within([0, 0, 0, 2], scores, [2, 1, 1]).tolist() == [0, 1, 0, 2]
    assert within([0, 0, 0, 2], scores, [1, 1, 2]).tolist() == [0, 2, 1, 2]
    assert within([0, 0], np.zeros((2, 2)), [1, 1]).tolist() == [0, 1]  # ties: the first row stays


@pytest.mark.parametrize("scored", [False, True])
def test_draws_have_the_probability_that_they_say(scored):
    """Every outcome of every number: its probability is the product of the rows' conditional ones."""
    probs = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.25, 0.5]])
    scores = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 3.0, 2.0]]) if scored else None
    mass, said = {}, {}
    for wanted in product(range(3), repeat=3):
        arm, prob = draw(probs, np.array([1, 1, 2]), Given(list(wanted)), torch.tensor([1, 2, 3]), scores)
        arm = tuple(arm.tolist())
        mass[arm] = mass.get(arm, 0) + probs[np.arange(3), list(wanted)].prod()
        said.setdefault(arm, prob.prod())
        assert said[arm] == pytest.approx(prob.prod())
    assert sum(mass.values()) == pytest.approx(1)
    assert mass == pytest.approx(said)
    assert (0, 0, 1) not in mass


@pytest.mark.parametrize(("arms", "room"), [(2, [1, 1]), (3, [2, 1, 1]), (4, [0, 1, 1, 1])])
def test_scatter_is_uniform_over_what_is_free(arms, room):
    room = np.array(room)
    rng = Given([0] * 2)
    scatter(room, rng, torch.tensor([1, 2]))
    parts = rng.asked[0][0].shape[-1]
    count = {}
    for part in product(range(parts), repeat=2):
        arm, prob = scatter(room, Given(list(part)), torch.tensor([1, 2]))
        free = int((room > 0).sum())
        left = room - np.bincount(arm[:1], minlength=arms)
        assert prob == pytest.approx([1 / free, 1 / (left > 0).sum()])
        count[tuple(arm.tolist())] = count.get(tuple(arm.tolist()), 0) + 1
    for arm, times in count.items():
        left = room - np.bincount(arm[:1], minlength=arms)
        assert times / parts**2 == pytest.approx(1 / (room > 0).sum() / (left > 0).sum())


def test_scatter_of_many_arms_says_its_exact_probability():
    room = np.ones(13, dtype=int)
    room[4] = 0
    rng = Given([0] * 2)
    scatter(room, rng, torch.tensor([1, 2]))
    parts = rng.asked[0][0].shape[-1]
    count, said = np.zeros(13), np.zeros(13)
    for part in range(parts):
        arm, prob = scatter(room, Given([part, 0]), torch.tensor([1, 2]))
        count[arm[0]] += 1
        said[arm[0]] = prob[0]
    assert said == pytest.approx(count / parts)
    assert said.max() - said[said > 0].min() <= 1.01 / parts


def test_choices_are_those_of_ample_capacities_until_an_arm_is_full():
    rng, length = sd.Philox(seeds(0, 6)), torch.arange(6)
    ample, _ = scatter(np.full(5, 6), rng, length)
    tight, _ = scatter(np.full(5, 2), rng, length)
    counts = np.cumsum(ample[:, None] == np.arange(5), 0).max(1)
    first_full = int((counts >= 2).argmax()) + 1
    assert 1 < first_full < 6
    assert tight[:first_full].tolist() == ample[:first_full].tolist()


# formulas


def test_ucb1():
    sums = np.array([[[4, 0, 0, 2.0], [1, 0, 0, 0.25]]])
    assert bounds(sums)[0].tolist() == pytest.approx([0.5 + 0.897061, 0.25 + 1.794123], abs=1e-6)
    unseen = bounds(np.array([[[4, 0, 0, 2.0], [0, 0, 0, 0]]]))[0]
    assert unseen[1] > unseen[0]
    selector = UCB1(scale=4.0)
    state = selector.init(2)
    _, _, state = selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))
    state = selector.update(state, feedback([0], [0], reward=2.0))
    state = selector.update(state, feedback([0], [1], reward=9.0))  # cut to 1
    assert state.sums[state.keys.of[0], :, 3].tolist() == [0.5, 1.0]


def test_full_information_is_more_than_enough():
    """A selector that needs one reward takes the chosen arm's of ``[B, arms]``, and no other shape."""
    selector = UCB1(scale=4.0)
    state = selector.init(2)
    _, _, state = selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))
    state = selector.update(state, feedback([0], [1], reward=[[1.0, 3.0]]))
    assert state.sums[state.keys.of[0], :, 3].tolist() == [0.0, 0.75]
    with pytest.raises(ValueError, match=r"\[1, 3\].*\[1, 2\]"):
        selector.update(state, feedback([0], [1], reward=[[1.0, 3.0, 2.0]]))


def test_ucbspec():
    assert radius(np.array([[4.0, 1.0]]), 4, 0.1)[0].tolist() == pytest.approx([4.33570, 10.62915], abs=1e-4)
    selector = UCBSpec(length=4)
    state = selector.init(2)
    _, _, state = selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))
    state = selector.update(state, feedback([0], [0], tokens=2, reward=0.0))
    for tokens in (4, 4, 5, 5):
        state = selector.update(state, feedback([0], [1], tokens=tokens, reward=0.0))
    # 2 + 10.62915 against 4.5 + 4.33570: arm 0 is to be tried again, whatever the rewards are
    assert int(selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))[0]) == 0
    for _ in range(3):
        state = selector.update(state, feedback([0], [0], tokens=2, reward=9.0))
    assert int(selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))[0]) == 1


def test_exp3():
    selector = EXP3(gamma=0.2, scale=2.0)
    state = selector.init(2)
    assert distribution(selector, state) == pytest.approx([0.5, 0.5])
    _, _, state = selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))
    state = selector.update(state, feedback([0], [0], reward=1.0))
    assert distribution(selector, state) == pytest.approx([0.519983, 0.480017], abs=1e-6)


def test_exp3spec():
    selector = EXP3Spec(length=4)
    state = selector.init(2)
    _, _, state = selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))
    state = selector.update(state, feedback([0], [0], tokens=2))
    assert distribution(selector, state) == pytest.approx([0.348778, 0.651222], abs=1e-5)


def test_hedge():
    selector = Hedge(scale=2.0)
    state = selector.init(2)
    _, _, state = selector.select(state, context([0]), torch.tensor([1, 1]), Given([1]))
    state = selector.update(state, feedback([0], [1], reward=[[2.0, 1.0]]))
    assert distribution(selector, state) == pytest.approx([0.696894, 0.303106], abs=1e-5)
    assert distribution(Hedge(rate=2.0, scale=2.0), state) == pytest.approx([0.731059, 0.268941], abs=1e-6)
    with pytest.raises(ValueError, match="every arm"):
        selector.update(state, feedback([0], [1], reward=1.0))


def test_epsilon_greedy():
    selector = EpsilonGreedy(epsilon=0.3)
    state = selector.init(3)
    _, _, state = selector.select(state, context([0]), torch.ones(3).long(), Given([0]))
    for arm, tokens in ((0, 2), (1, 3), (2, 1)):
        state = selector.update(state, feedback([0], [arm], tokens=tokens))
    assert distribution(selector, state, arms=3) == pytest.approx([0.1, 0.8, 0.1])


def test_thompson_is_the_chance_of_being_best():
    mean, deviation = np.array([[0.5, 0.6]]), np.array([[0.3, 0.4]])
    assert best_of(mean, deviation)[0, 1] == pytest.approx(norm.cdf(0.1 / 0.5), abs=0.008)
    assert best_of(np.zeros((1, 4)), np.ones((1, 4)))[0] == pytest.approx([0.25] * 4)
    narrow = best_of(np.array([[0.5, 0.4, 0.45]]), np.array([[0.001, 0.1, 0.001]]))[0]
    assert narrow == pytest.approx([norm.cdf(1), 1 - norm.cdf(1), 0], abs=0.02)
    noise = np.random.default_rng(0)
    mean, deviation = noise.random((1, 5)), noise.random((1, 5))
    best = (mean + deviation * noise.standard_normal((100_000, 5))).argmax(1)
    assert best_of(mean, deviation)[0] == pytest.approx(np.bincount(best, minlength=5) / 100_000, abs=0.008)
    selector = Thompson(scale=10.0, spread=0.5)
    state = selector.init(2)
    _, _, state = selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))
    for _ in range(3):
        state = selector.update(state, feedback([0], [1], reward=8.0))
    gap, spread = 2.4 / 4, 0.5 * np.sqrt(1 + 1 / 4)
    assert distribution(selector, state)[1] == pytest.approx(norm.cdf(gap / spread), abs=0.008)


def test_the_key_is_the_committed_length_in_the_stream_of_selectors():
    rng = Given([0, 1])
    Random().select(Random().init(2), context([4, 9], [17, 30]), torch.tensor([2, 2]), rng)
    key = rng.asked[0][1]
    assert key.at.tolist() == [17, 30]
    assert key.stream == sd.rng.SELECT


def test_goodput_is_a_ratio_of_sums():
    """Arm 0 alternates slow long rounds and very fast short ones: the mean of its ratios flatters it five times over."""
    greedy, ucb = EpsilonGreedy(epsilon=0.0), UCB1(scale=10.0)
    states = [s.init(2) for s in (greedy, ucb)]
    for i in range(400):
        rounds = ((0, 10.0, 10.0) if i % 2 else (0, 1.0, 0.1), (1, 2.0, 1.0))
        for arm, tokens, seconds in rounds:
            for j, s in enumerate((greedy, ucb)):
                _, _, states[j] = s.select(states[j], context([0]), torch.tensor([1, 1]), Given([0]))
                states[j] = s.update(states[j], feedback([0], [arm], tokens, seconds, tokens / seconds))
    row = states[0].sums[states[0].keys.of[0]]
    assert goodput(row).tolist() == pytest.approx([11 / 10.1, 2.0])
    choice = [
        int(s.select(t, context([0]), torch.tensor([1, 1]), Given([1]))[0])
        for s, t in zip((greedy, ucb), states)
    ]
    assert choice == [1, 0]  # 2 tokens a second beat 1.09; the mean of ratios, 5.5, would not see it


# statistics


def test_rows_are_used_again_and_arrays_grow():
    rows, index = Index.empty(2).enter(["a", "b", "c"])
    assert rows.tolist() == [0, 1, 2]
    assert index.size == 4
    freed, index = index.drop(["b", "never"])
    assert freed.tolist() == [1]
    assert index.find(["a", "b", "c"]).tolist() == [0, -1, 2]
    again, index = index.enter(["d", "d", "a"])
    assert again.tolist() == [1, 1, 0]


def test_feedback_finds_its_own_choice():
    pending = Pending({})
    for arm, value in ((0, 0.1), (1, 0.2), (0, 0.3)):
        pending = pending.remember([7], np.array([arm]), np.array([value]))
    values, pending = pending.recall([7, 7, 7, 8], np.array([0, 0, 0, 1]))
    assert values[:2].tolist() == [0.1, 0.3]  # oldest first
    assert np.isnan(values[2:]).all()
    assert pending.of[7] == ((1, 0.2),)
    for _ in range(OUTSTANDING + 9):
        pending = pending.remember([7], np.array([2]), np.array([0.5]))
    assert len(pending.of[7]) == OUTSTANDING


def test_seconds_must_be_positive_where_they_divide():
    for selector in (EpsilonGreedy(), Spin()):
        state = selector.init(2)
        _, _, state = selector.select(state, context([0]), torch.tensor([1, 1]), Given([0]))
        with pytest.raises(ValueError, match="charge"):
            selector.update(state, feedback([0], [0], seconds=0.0))


def test_fixed_overflows_to_the_first_arms_with_room():
    arm, _, _ = Fixed(2).select(Fixed(2).init(4), context([0, 1, 2]), torch.tensor([0, 1, 1, 9]), Given([0]))
    assert arm.tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EpsilonGreedy(1.5), "epsilon"),
        (lambda: EXP3(gamma=0.0), "gamma"),
        (lambda: UCB1(scale=0.0), "scale"),
        (lambda: UCBSpec(delta=1.0), "delta"),
        (lambda: Spin(exploration=0), "exploration"),
        (lambda: Spin(growth=0.5), "growth"),
        (lambda: Spin(prior=-1.0), "prior"),
        (lambda: Spin(warm=3), "warm"),
        (lambda: Spin(learn="sometimes"), "learn"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pool_gives_one_key_a_row():
    selector = UCB1(pool=lambda now: ["only one"])
    with pytest.raises(ValueError, match="1 keys for 2 rows"):
        selector.select(selector.init(2), context([0, 1]), torch.tensor([2, 2]), Given([0, 0]))


# SPIN


def run(selector, slots, means, capacities=None, state=None, requests=(0,), start=1, seed=0):
    """Arms and probabilities ``[slots, B]`` with noise-free feedback: ``means [B, arms]`` tokens a round of one second."""
    means = torch.as_tensor(means, dtype=torch.float64).expand(len(requests), -1)
    state = selector.init(means.shape[1]) if state is None else state
    room = torch.full((means.shape[1],), len(requests)) if capacities is None else torch.tensor(capacities)
    rng = sd.Philox(seeds(seed, len(requests)))
    arms, probs = [], []
    for t in range(slots):
        arm, prob, state = selector.select(state, context(list(requests), start + t), room, rng)
        tokens = means.gather(1, arm[:, None])[:, 0]
        state = selector.update(state, feedback(list(requests), arm, tokens))
        arms.append(arm.tolist())
        probs.append(prob.tolist())
    return np.array(arms), np.array(probs), state


@pytest.mark.parametrize(
    ("selector", "lengths"),
    [
        (Spin(exploration=3), [(3, 2), (3, 4), (3, 8), (3, 16)]),
        (Spin(exploration=1, growth=3.0), [(1, 3), (1, 9), (1, 27)]),
        (Spin(exploration=2, growth=1.5), [(2, 1), (2, 2), (2, 3), (2, 5), (2, 7)]),
    ],
)
def test_epochs_explore_then_exploit_twice_as_long(selector, lengths):
    explores = [e for n, m in lengths for e in [True] * n + [False] * m]
    arms, probs, _ = run(selector, len(explores), [[1.0, 2.0, 3.0]])
    assert (probs[:, 0] < 0.5).tolist() == explores
    at = 0
    for n, m in lengths:
        phase = arms[at + n : at + n + m, 0]
        assert len(set(phase.tolist())) == 1
        # Best of what was seen.
        assert phase[0] == max(arms[:at, 0].max(initial=0), arms[at : at + n, 0].max())
        at += n + m


def test_each_request_has_its_own_epochs():
    selector = Spin(exploration=2)
    _, _, state = run(selector, 2, [[1.0, 2.0]])
    _, probs, _ = run(selector, 3, [[1.0, 2.0]], state=state, requests=(0, 1), start=50)
    assert (probs < 1).tolist() == [[False, True], [False, True], [True, False]]


def test_the_paper_learns_from_exploration_only():
    for learn, pulls in (("exploration", 3), ("always", 5)):
        _, _, state = run(Spin(exploration=3, learn=learn), 5, [[1.0, 2.0]])
        assert state.own.sums[..., 0].sum() == pulls


def test_the_matching_is_of_the_largest_total():
    """Row 1 would lose more without arm 0, although row 0 likes it as much."""
    means = [[5.0, 4.0], [5.0, 1.0]]
    arms, probs, _ = run(Spin(exploration=12), 14, means, capacities=[1, 1], requests=(0, 1))
    assert (probs[12:] == 1).all()
    assert arms[12:].tolist() == [[1, 0], [1, 0]]


def test_explorers_choose_first_and_the_displaced_go_back():
    selector = Spin(exploration=12)
    _, _, state = run(selector, 12, [[5.0, 4.0]], requests=(0,))
    seen = set()
    for seed in range(20):
        arms, probs, _ = run(
            selector, 2, [[5.0, 4.0]], state=state, requests=(0, 1), start=100, seed=seed, capacities=[1, 1]
        )
        assert (probs[:, 0] == 1).all()
        assert (probs[:, 1] == 0.5).all()
        seen.update(map(tuple, arms.tolist()))
        alone, _, _ = run(selector, 2, [[5.0, 4.0]], state=state, start=100)
        assert alone.tolist() == [[0], [0]]
    assert seen == {(0, 1), (1, 0)}


def test_a_row_that_exploits_keeps_its_arm_when_others_begin():
    """Other rows' matchings move it only for capacity's sake, even when its estimates have changed since."""
    selector = Spin(exploration=4, learn="always", pool="global")
    means = [[3.0, 2.0]]
    _, _, state = run(selector, 4 + 2 + 4, means)  # into the second epoch's exploitation of 4
    state = state._replace(own=state.own.add(np.array([0]), np.array([1]), np.array([[1, 900.0, 1, 0]])))
    arms, probs, _ = run(selector, 1, means, state=state, start=40)
    assert arms[0, 0] == 1 or probs[0, 0] == 1  # the matching is made here
    first = arms[0, 0]
    _, _, state = run(selector, 1, means, state=state, start=40)
    state = state._replace(own=state.own.add(np.array([0]), np.array([0]), np.array([[1, 1e6, 1, 0]])))
    arms, probs, _ = run(selector, 3, means * 2, state=state, requests=(0, 9), start=60)
    assert (probs[:, 0] == 1).all()
    assert (arms[:, 0] == first).all()


def test_late_feedback_lengthens_exploration_until_something_is_known():
    selector = Spin(exploration=1)
    state, rng, room = selector.init(2), sd.Philox(seeds(0, 1)), torch.tensor([1, 1])
    for t in range(4):
        arm, prob, state = selector.select(state, context([0], t + 1), room, rng)
        assert float(prob) == 0.5
    state = selector.update(state, feedback([0], arm, 3.0))
    chosen, prob, state = selector.select(state, context([0], 9), room, rng)
    assert float(prob) == 1
    assert torch.equal(chosen, arm)


def test_a_prior_begins_from_the_pool_and_gives_way():
    others, mine = [[1.0, 4.0]], [[4.0, 1.0]]
    spin = Spin(exploration=6, prior=4.0, warm=3)
    _, _, state = run(spin, 30, others, requests=(0, 1, 2, 3))
    arms, probs, _ = run(spin, 2, mine, state=state, requests=(9,), start=90)
    assert (probs == 1).all()  # no exploration of its own
    assert arms[:, 0].tolist() == [1, 1]
    patient = Spin(exploration=12, prior=4.0)
    arms, probs, _ = run(patient, 14, mine, state=state, requests=(9,), start=90)
    assert (probs[:12] < 1).all()
    assert arms[12:, 0].tolist() == [0, 0]  # its own observations outweigh four rounds of the others'
    stubborn = Spin(exploration=12, prior=1000.0)
    arms, _, _ = run(stubborn, 14, mine, state=state, requests=(9,), start=90)
    assert arms[12:, 0].tolist() == [1, 1]


def test_a_prior_is_of_the_requests_key():
    spin = Spin(exploration=6, prior=4.0, warm=3, pool=lambda now: (now.request % 2).tolist())
    _, _, state = run(spin, 40, [[1.0, 4.0]], requests=(0, 2))
    _, even, _ = run(spin, 1, [[1.0, 4.0]], state=state, requests=(4,), start=90)
    _, odd, _ = run(spin, 1, [[1.0, 4.0]], state=state, requests=(5,), start=90)
    assert even.tolist() == [[1.0]]
    assert odd.tolist() == [[0.5]]


# rewards


def one_round(probs, proposal, committed, arm=None, seconds=None):
    B = len(committed)
    zeros = torch.zeros(B, dtype=torch.long)
    verdict = Verdict(torch.full_like(proposal.tokens, -1), zeros, zeros, torch.zeros(B, proposal.nodes + 1))
    return Round(
        context(list(range(B))),
        proposal,
        Scores(probs),
        probs,
        verdict,
        torch.tensor(committed),
        zeros.bool(),
        zeros,
        zeros.bool(),
        zeros if arm is None else torch.tensor(arm),
        torch.ones(B),
        1,
        seconds or {},
    )


def test_block_divergence():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.2, 0.8, 0.0], [0.6, 0.2, 0.2]])
    tokens, size = torch.tensor([[1, 0], [1, 0], [0, 0]]), torch.tensor([2, 1, 0])
    probs = p.expand(3, 3, 3)
    sampled = one_round(probs, Proposal.chain(tokens, size, q.expand(3, 2, 3), "sampled"), [1, 2, 1])
    assert rewards.block_divergence(sampled).tolist() == pytest.approx([(0.7 + 0.6) / 2, 0.7, 0.0])
    point = one_round(probs, Proposal.chain(tokens, size), [1, 2, 1])
    assert rewards.block_divergence(point).tolist() == pytest.approx([(0.5 + 0.2) / 2, 0.5, 0.0])
    assert not rewards.block_divergence(one_round(probs[:, :1], Proposal.none(3), [1, 1, 1])).any()
    target_argmax = torch.tensor([[1, 2, 0], [0, 0, 0], [0, 0, 0]])  # at temperature 0
    distributions = torch.nn.functional.one_hot(target_argmax, 3).float()
    for proposal in (
        Proposal.chain(tokens, size),
        Proposal.chain(tokens, size, q.expand(3, 2, 3), "sampled"),
    ):
        made = replace(one_round(distributions, proposal, [1, 2, 1]), probs=None, target_argmax=target_argmax)
        expected = rewards.block_divergence(one_round(distributions, proposal, [1, 2, 1]))
        assert rewards.block_divergence(made).tolist() == pytest.approx(expected.tolist())
    tree = Proposal(tokens, torch.tensor([[-1, -1]] * 3), size)
    with pytest.raises(ValueError, match="chains"):
        rewards.block_divergence(one_round(probs, tree, [1, 1, 1]))


def test_tokens_and_goodput():
    some = one_round(
        torch.ones(2, 1, 1), Proposal.none(2), [3, 1], arm=[1, 0], seconds={"draft": 1.0, "target": 3.0}
    )
    assert rewards.tokens_per_round(some).tolist() == [3, 1]
    assert rewards.Goodput()(some).tolist() == [1.5, 0.5]
    with_total = one_round(
        torch.ones(2, 1, 1), Proposal.none(2), [3, 1], seconds={"draft": 1.0, "total": 8.0}
    )
    assert rewards.measured(with_total).tolist() == [4.0, 4.0]
    modelled = rewards.Goodput(rewards.Modelled((1.0, 2.0), 4.0))
    assert modelled(some).tolist() == [3 / (2 + 2), 1 / (1 + 2)]


@pytest.mark.parametrize("parallel", [False, True])
def test_charges_add_up_to_the_round(parallel):
    draft = torch.tensor([1.0, 4.0, 100.0])
    arm = torch.tensor([0, 0, 1, 0])
    charged = rewards.charge(arm, draft, 2.0, parallel)
    assert float(charged.sum()) == pytest.approx((4 if parallel else 5) + 2)
    scale = 4 / 5 if parallel else 1
    assert charged.tolist() == pytest.approx([scale / 3 + 0.5] * 2 + [scale * 4 + 0.5, scale / 3 + 0.5])
    assert rewards.charge(torch.tensor([1, 1]), torch.zeros(2), 3.0, parallel).tolist() == [1.5, 1.5]
    with pytest.raises(ValueError, match=r"arms 0\.\.2"):
        rewards.charge(torch.tensor([3]), draft, 2.0)


def test_marginal_seconds_are_a_difference_of_rounds():
    fixed, per_row = torch.tensor([2.0, 5.0, 9.0]), torch.tensor([0.5, 0.25, 1.0])
    arm = torch.tensor([0, 0, 1])
    serial = rewards.marginal(arm, fixed, per_row, 3.0, 0.125)
    assert serial.tolist() == pytest.approx([0.625, 0.625, 5.375])
    parallel = rewards.marginal(arm, fixed, per_row, 3.0, 0.125, parallel=True)
    assert parallel.tolist() == pytest.approx([0.125, 0.125, (5.25 - 3.0) + 0.125])
    alone = rewards.marginal(torch.tensor([1]), fixed, per_row, 3.0, 0.125)
    assert alone.tolist() == pytest.approx([5.25 + 3.125])


def asked_for(monkeypatch, selector, budgets):
    """The rows of every choice that a pool's selector makes."""
    asked, select = [], type(selector).select
    monkeypatch.setattr(
        type(selector), "select", lambda self, *given: asked.append(given[1].batch) or select(self, *given)
    )
    target = sd.TableModel.random(5, 1, seed=1)
    arms = {"none": None, "draft": sd.Arm(sd.TableModel.random(5, 1, seed=2), 2)}
    out = sd.decoder(target).pool(arms, selector).build().generate([[0]] * len(budgets), budgets, seed=0)
    assert [len(ids) for ids in out.ids] == budgets
    assert out.stats.arms == {1: sum(row.rounds for row in out.row_stats)}
    return asked, out


@pytest.mark.parametrize("selector", [Fixed(1), ByBatch({1: 1})])
def test_a_choice_by_the_rows_alone_stands_while_they_stay(selector, monkeypatch):
    asked, out = asked_for(monkeypatch, selector, [40])
    assert out.stats.rounds > 10
    assert asked == [1]
    asked, out = asked_for(monkeypatch, selector, [200])
    assert len(asked) == -(-out.stats.rounds // 32) > 2


def test_a_choice_by_the_rows_alone_ends_when_a_row_leaves(monkeypatch):
    asked, _ = asked_for(monkeypatch, Fixed(1), [40, 12, 40])
    assert asked[:2] == [3, 2]


def test_a_class_of_ones_own_is_asked_in_every_round(monkeypatch):
    class Mine(Fixed):
        def update(self, state, feedback):
            told.append(len(feedback.arm))
            return super().update(state, feedback)

    told = []
    asked, out = asked_for(monkeypatch, Mine(1), [40])
    assert len(asked) == len(told) == out.stats.rounds
    plain = sd.decoder(sd.TableModel.random(5, 1, seed=1))
    told.clear()
    out = plain.pool({"none": None}, Mine(0)).build().generate([[0]], 12, seed=0)
    assert len(told) == 11, "of plain rounds, too"
