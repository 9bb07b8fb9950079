"""Every selector of the package keeps the rules of ``specdec.testing.check_selector``, and learns.

A selector gets here by being exported from ``specdec.selectors``, with no edit of this file.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import specdec as sd
from contracts import build
from specdec import selectors
from specdec.capabilities import SelectorInfo
from specdec.rng import seeds
from specdec.testing import check_selector
from specdec.testing.selector import SUITE
from specdec.types import Feedback

SELECTORS = {name: getattr(selectors, name) for name in selectors.__all__}
LEARNING = {name: cls for name, cls in SELECTORS.items() if name not in ("ByBatch", "Fixed", "Random")}
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


@pytest.mark.parametrize("test", SUITE.names)
@every_selector
def test_every_selector_keeps_the_rules(cls, test):
    found = check_selector(instance(cls), only=[test])
    assert found.rules or found.not_tried or not hasattr(cls, "leave")


@pytest.mark.slow
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
@pytest.mark.slow
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
