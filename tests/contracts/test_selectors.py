"""What every selector promises. A selector gets here by being exported from ``specdec.selectors``, with no edit of this file."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec as sd
from contracts import build
from specdec import selectors
from specdec.capabilities import SelectorInfo
from specdec.rng import seeds
from specdec.types import Feedback

SELECTORS = {name: getattr(selectors, name) for name in selectors.__all__}
LEARNING = {name: cls for name, cls in SELECTORS.items() if name not in ("Fixed", "Random")}
POOLED = {name: cls for name, cls in LEARNING.items() if "pool" in cls.__dataclass_fields__}

every_selector = pytest.mark.parametrize("cls", SELECTORS.values(), ids=SELECTORS.keys())
every_learning = pytest.mark.parametrize("cls", LEARNING.values(), ids=LEARNING.keys())
every_pooled = pytest.mark.parametrize("cls", POOLED.values(), ids=POOLED.keys())

MEANS = torch.tensor([0.15, 0.2, 0.85])  # an easy problem: tokens a second over 10, the last arm far ahead
SECONDS = torch.tensor([0.5, 0.8, 0.4])


def instance(cls):
    return build(cls, None)


def context(requests, length):
    B = len(requests)
    length = torch.as_tensor(length).expand(B).clone()
    return sd.Context(
        torch.zeros(B, 1, dtype=torch.long), length, torch.ones(B, dtype=torch.long), torch.tensor(requests)
    )


def plenty(arms, batch):
    return torch.full((arms,), max(batch, 1))


def feed(selector, requests, arm, noise):
    """Feedback of one round; ``noise [B, arms]`` in [0, 1) decides tokens, the same for every selector."""
    arms = noise.shape[1]
    means = MEANS[:arms]
    tokens = 1 + torch.floor(4 * (means * 10 * SECONDS[:arms] - 1) / 5 + 2 * noise).clamp(0, 5)
    mine = tokens.gather(1, arm[:, None])[:, 0].long()
    seconds = SECONDS[arm]
    reward = tokens / SECONDS[:arms] / 15
    own = reward.gather(1, arm[:, None])[:, 0]
    full = SelectorInfo.of(selector).full_information
    return Feedback(torch.tensor(requests), arm, mine, mine, seconds, reward if full else own)


def play(selector, requests, slots, arms=3, capacities=None, seed=0, state=None, start=1):
    """Arms ``[slots, B]`` and the last state; each slot's feedback comes before the next."""
    state = selector.init(arms) if state is None else state
    rng = sd.Philox(seeds(seed, len(requests)))
    noise = np.random.default_rng(seed)
    chosen = []
    for t in range(slots):
        now = context(requests, start + 3 * t)
        room = plenty(arms, len(requests)) if capacities is None else capacities
        arm, _, state = selector.select(state, now, room, rng)
        chosen.append(arm)
        state = selector.update(
            state, feed(selector, requests, arm, torch.from_numpy(noise.random((len(requests), arms))))
        )
    return torch.stack(chosen), state


def test_all_are_exported():
    assert {"Fixed", "Random", "EpsilonGreedy", "UCB1", "Thompson", "EXP3"} <= SELECTORS.keys()
    assert {"UCBSpec", "EXP3Spec", "Hedge", "Spin"} <= SELECTORS.keys()


@every_selector
def test_shapes_and_types(cls):
    selector = instance(cls)
    state = selector.init(3)
    assert isinstance(state, tuple)
    assert isinstance(SelectorInfo.of(selector).full_information, bool)
    for B in (1, 4, 0):
        arm, prob, state = selector.select(
            state, context(list(range(B)), 5), plenty(3, B), sd.Philox(seeds(0, B))
        )
        assert arm.shape == prob.shape == (B,)
        assert arm.dtype == torch.int64
        assert prob.dtype == torch.float32
        assert ((arm >= 0) & (arm < 3)).all()
        assert ((prob > 0) & (prob <= 1)).all()
        state = selector.update(state, feed(selector, list(range(B)), arm, torch.rand(B, 3)))


@every_selector
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_capacities_hold(cls, data):
    """Micro-batches, arrivals, departures and changing capacities, with and without a slot to spare."""
    selector = instance(cls)
    arms = data.draw(st.integers(1, 6), label="arms")
    state, noise = selector.init(arms), np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    live = list(range(6))
    means = torch.linspace(0.2, 0.8, arms)
    for t in range(12):
        batch = [int(r) for r in noise.permutation(live)[: noise.integers(1, len(live) + 1)]]
        room = torch.from_numpy(noise.multinomial(len(batch) + noise.integers(0, 3), [1 / arms] * arms))
        arm, prob, state = selector.select(
            state, context(batch, 1 + 2 * t), room, sd.Philox(torch.tensor(batch))
        )
        assert (torch.bincount(arm, minlength=arms) <= room).all()
        assert ((prob > 0) & (prob <= 1 + 1e-6)).all()
        seconds = torch.ones(len(batch))
        tokens = torch.from_numpy(noise.integers(1, 5, len(batch)))
        full = SelectorInfo.of(selector).full_information
        reward = means.expand(len(batch), -1) if full else means[arm]
        state = selector.update(state, Feedback(torch.tensor(batch), arm, tokens, tokens, seconds, reward))
        if t % 4 == 3:
            gone = live.pop(0)
            live.append(100 + t)
            if hasattr(selector, "leave"):
                state = selector.leave(state, torch.tensor([gone]))


@every_selector
@pytest.mark.parametrize("tight", [False, True], ids=["room", "tight"])
def test_arm_prob_is_the_frequency(cls, tight):
    """The same state asked under many seeds: each arm as often as its ``arm_prob`` says, the rows before being the same."""
    selector = instance(cls)
    rows = 3
    _, state = play(selector, list(range(rows)), 3)
    room = torch.tensor([1, 1, 1]) if tight else plenty(3, rows)
    count: dict[tuple[int, ...], dict[int, list[float]]] = {}
    for seed in range(800):
        arm, prob, _ = selector.select(
            state, context(list(range(rows)), 40), room, sd.Philox(seeds(seed, rows))
        )
        for b in range(rows):
            before = (b, *arm[:b].tolist()) if tight else (b,)
            count.setdefault(before, {}).setdefault(int(arm[b]), []).append(float(prob[b]))
    for by_arm in count.values():
        total = sum(map(len, by_arm.values()))
        for probs in by_arm.values():
            assert max(probs) - min(probs) < 1e-6
            share = len(probs) / total
            assert abs(share - probs[0]) < 5 * (probs[0] * (1 - probs[0]) / total) ** 0.5 + 1e-6


@every_selector
def test_states_are_not_changed_and_keys_decide(cls):
    selector = instance(cls)
    requests = list(range(5))
    _, state = play(selector, requests, 7)
    now, rng = context(requests, 50), sd.Philox(seeds(3, 5))
    first = selector.select(state, now, plenty(3, 5), rng)
    after = selector.update(first[2], feed(selector, requests, first[0], torch.full((5, 3), 0.5)))
    if hasattr(selector, "leave"):
        selector.leave(after, torch.tensor([0, 3]))
    play(selector, requests, 9, state=after, start=60)
    again = selector.select(state, now, plenty(3, 5), rng)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    one, _ = play(selector, requests, 20)
    two, _ = play(instance(cls), requests, 20)
    assert torch.equal(one, two)


@every_selector
def test_a_row_does_not_depend_on_its_batch_where_there_is_room(cls):
    selector = instance(cls)
    requests = list(range(6))
    _, state = play(selector, requests, 8)
    rng = sd.Philox(seeds(9, 6))
    now = context(requests, [30, 31, 32, 33, 34, 35])
    arm, prob, _ = selector.select(state, now, plenty(3, 6), rng)
    for rows in (torch.tensor([5, 2, 0, 1, 4, 3]), torch.tensor([4, 1]), torch.tensor([3])):
        part, p, _ = selector.select(state, now.select(rows), plenty(3, len(rows)), rng.select(rows))
        assert torch.equal(part, arm[rows])
        assert torch.equal(p, prob[rows])


@every_selector
def test_micro_batches_equal_the_whole_batch(cls):
    """Four micro-batches a slot, feedback after all of them, against one batch."""
    selector = instance(cls)
    rng = sd.Philox(seeds(1, 8))
    noise = torch.rand(30, 8, 3, generator=torch.Generator().manual_seed(0))
    chosen = []
    for parts in (1, 4):
        state = selector.init(3)
        arms = []
        for t in range(30):
            now, got = context(list(range(8)), 1 + 4 * t), []
            for rows in torch.arange(8).chunk(parts):
                arm, _, state = selector.select(state, now.select(rows), plenty(3, 8), rng.select(rows))
                got.append(arm)
            for rows, arm in zip(torch.arange(8).chunk(parts), got):
                state = selector.update(state, feed(selector, rows.tolist(), arm, noise[t, rows]))
            arms.append(torch.cat(got))
        chosen.append(torch.stack(arms))
    assert torch.equal(*chosen)


@every_learning
@pytest.mark.parametrize("late", [0, 3], ids=["prompt", "late"])
def test_the_best_arm_is_found(cls, late):
    """The last arm is four times as good as the others; feedback may come three slots late."""
    selector = instance(cls)
    requests = list(range(4))
    state, rng, noise = selector.init(3), sd.Philox(seeds(2, 4)), np.random.default_rng(5)
    waiting, last = [], []
    slots = 500
    for t in range(slots):
        arm, _, state = selector.select(state, context(requests, 1 + 3 * t), plenty(3, 4), rng)
        waiting.append(feed(selector, requests, arm, torch.from_numpy(noise.random((4, 3)))))
        if len(waiting) > late:
            state = selector.update(state, waiting.pop(0))
        last.append(arm)
    share = (torch.stack(last[slots // 2 :]) == 2).double().mean()
    assert share > 0.6  # EXP3, the slowest; guessing gives 1 / 3


@every_selector
def test_requests_come_and_go(cls):
    """What is remembered of a request goes with it, and feedback that comes after it is no error."""
    selector = instance(cls)
    state, rng = selector.init(3), sd.Philox(seeds(0, 4))
    sizes = []
    for first in range(0, 400, 2):
        requests = list(range(first, first + 4))
        arm, _, state = selector.select(state, context(requests, 5), plenty(3, 4), rng)
        late = feed(selector, requests, arm, torch.full((4, 3), 0.3))
        if hasattr(selector, "leave"):
            state = selector.leave(state, torch.tensor(requests[:2]))
        state = selector.update(state, late)
        sizes.append(size(state))
    assert sizes[-1] == sizes[20]


def size(value):
    """How many numbers a state holds, however nested."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.size if isinstance(value, np.ndarray) else value.numel()
    if isinstance(value, dict):
        return len(value) + sum(map(size, value.values()))
    return sum(map(size, value)) if isinstance(value, tuple) else 1


@every_learning
def test_a_request_that_left_starts_anew(cls):
    selector = instance(cls)
    if getattr(selector, "pool", None) is not None:  # shared by default
        selector = dataclasses.replace(selector, pool=None)
    _, state = play(selector, [0, 1], 40)
    fresh = selector.select(selector.init(3), context([0], 9), plenty(3, 1), sd.Philox(seeds(0, 1)))
    gone = selector.leave(state, torch.tensor([0, 77]))
    anew = selector.select(gone, context([0], 9), plenty(3, 1), sd.Philox(seeds(0, 1)))
    assert torch.equal(fresh[0], anew[0])
    assert torch.equal(fresh[1], anew[1])


@every_pooled
@pytest.mark.parametrize("pool", ["global", "parity"])
def test_a_pool_shares_what_is_learnt(cls, pool):
    """A new request of the pool chooses as one that has seen everything; of another key, as one that has seen nothing."""
    keys = "global" if pool == "global" else lambda now: [r % 2 for r in now.request.tolist()]
    selector = cls(pool=keys)
    old = [0, 2, 4]
    _, state = play(selector, old, 200)
    state = selector.leave(state, torch.tensor([2]))

    def arms(request, state):
        """The arms of a request in its next 12 rounds (no feedback), under 20 seeds."""
        got = []
        for seed in range(20):
            now, rng = state, sd.Philox(seeds(seed, 1))
            for t in range(12):
                arm, _, now = selector.select(now, context([request], 900 + t), plenty(3, 1), rng)
                got.append(int(arm))
        return torch.tensor(got).reshape(20, 12)

    new, alone = arms(100, state), arms(101, state)
    like_an_old_one = torch.equal(new, arms(4, state))
    assert like_an_old_one or (new == 2).double().mean(0).max() > 0.9  # Spin explores first
    if pool == "parity":
        assert torch.equal(alone, arms(101, selector.init(3)))
        assert not torch.equal(alone, new)


@every_selector
def test_one_arm_will_do(cls):
    chosen, _ = play(instance(cls), [0, 1], 12, arms=1)
    assert not chosen.any()


@every_selector
def test_errors_say_what_to_do(cls):
    selector = instance(cls)
    for arms in (0, -1):
        with pytest.raises(ValueError, match=r"arms is|arms 0\.\."):
            selector.init(arms)
    state = selector.init(3)
    now, rng = context([0, 1, 2], 5), sd.Philox(seeds(0, 3))
    with pytest.raises(ValueError, match=r"capacities .* shape .*3 arms"):
        selector.select(state, now, torch.tensor([3, 3]), rng)
    with pytest.raises(ValueError, match=r"serve 2 rows but 3"):
        selector.select(state, now, torch.tensor([1, 1, 0]), rng)
    with pytest.raises(ValueError, match="capacity 0"):
        selector.select(state, now, torch.tensor([-1, 3, 3]), rng)
    _, _, state = selector.select(state, now, plenty(3, 3), rng)
    for wrong in (3, -1):
        arm = torch.tensor([0, 1, wrong])
        reward = torch.ones(3, 3) if SelectorInfo.of(selector).full_information else torch.ones(3)
        with pytest.raises(ValueError, match=r"feedback.arm"):
            selector.update(
                state, Feedback(now.request, arm, torch.ones(3), torch.ones(3), torch.ones(3), reward)
            )
