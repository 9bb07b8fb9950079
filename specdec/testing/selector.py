"""``check_selector``: tries the rules of ``docs/selectors.md`` on a selector, the library's or your own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.capabilities import SelectorInfo
from specdec.protocols import Leaves
from specdec.rng import Philox, seeds
from specdec.testing.rules import Kept, NotTried, Rule, Suite, instance, lacks
from specdec.testing.states import changed, no_global_draws, snapshot
from specdec.types import Context, Feedback

DECLARATION = Rule(
    "declaration", "define init(arms), select(state, context, capacities, rng) and update(state, feedback)"
)
FORM = Rule(
    "form", "return arm [B] int64 from 0 to arms - 1, its probability [B] float32 above 0, and the state"
)
CAPACITIES = Rule(
    "capacities",
    "give arm a at most capacities[a] rows; selectors.matching.draw draws within them and knows the probabilities",
)
PROBABILITY = Rule(
    "arm_prob", "return the probability with which each arm was drawn, given the rows before it"
)
STATE = Rule("state", "return a new state and leave the given one as it is")
KEYS = Rule("keys", "draw by rng with keys of the request's length, and take numbers from nowhere else")
MATES = Rule(
    "mates", "choose for a row by its request's statistics and its own key, where the capacities leave room"
)
LATE = Rule("late feedback", "let update take feedback of rows of any micro-batch, after further choices")
LEAVES = Rule(
    "leave", "forget finished requests in leave(state, requests), and let feedback that comes after it pass"
)
JOINT = Rule(
    "joint",
    "declare info = sd.SelectorInfo(joint=True) if rows share what update learns, or keep it for each feedback.request",
)
ONE_ARM = Rule("one arm", "choose arm 0 with probability 1 where there is only one")
SUITE = Suite("selector")
SECONDS, REWARDS = torch.tensor([0.5, 0.8, 0.4]), torch.tensor([0.2, 0.25, 0.8])


def check_selector(selector: Any, *, only: Collection[str] | None = None) -> Kept:
    """Try the rules of selectors on ``selector``, with up to 6 arms, or as many as ``SelectorInfo.arms`` says.

    Whether it learns is not tried: see ``specdec.lab`` for what a selector is worth.

    Args:
        selector: an object with the methods of ``protocols.Selector``. only: some tests (``SUITE.names``); ``None``: all.
    Returns:
        the rules that are kept, and what was not tried.
    Raises:
        BrokenRule: the first rule that is broken, and the remedy. TypeError: a class is given.
    """
    part = instance(selector, "selector")
    return SUITE.run(part, Case(part), only)


@dataclass(frozen=True)
class Case:
    """A selector."""

    selector: Any

    @property
    def arms(self) -> int:
        return SelectorInfo.of(self.selector).arms or 3

    @property
    def full(self) -> bool:
        return SelectorInfo.of(self.selector).full_information

    def select(self, state: Any, now: Context, room: Tensor, rng: Any) -> tuple[Tensor, Tensor, Any]:
        """A choice of arms; checks that the state and the global generators are not changed."""
        before = snapshot(state)
        with no_global_draws(KEYS, "select()"):
            arm, prob, after = self.selector.select(state, now, room, rng)
        other = changed(before, snapshot(state))
        STATE.require(
            not other, f"select() changed {', '.join(other[:3])} of the state that it was given in place"
        )
        return arm, prob, after

    def update(self, state: Any, requests: Sequence[int], arm: Tensor, noise: Tensor) -> Any:
        """The state after feedback; ``noise [B, arms]`` in [0, 1) decides what was committed."""
        A = noise.shape[1]
        means, seconds = REWARDS.repeat(A)[:A], SECONDS.repeat(A)[:A]
        tokens = 1 + (8 * means * noise).floor()
        reward = (means + 0.2 * noise).float().clamp(max=1)
        mine = arm[:, None]
        given = Feedback(
            torch.tensor(requests, dtype=torch.long),
            arm,
            tokens.gather(1, mine)[:, 0].long(),
            tokens.gather(1, mine)[:, 0].long(),
            seconds[arm],
            reward if self.full else reward.gather(1, mine)[:, 0],
        )
        before = snapshot(state)
        with no_global_draws(KEYS, "update()"):
            after = self.selector.update(state, given)
        other = changed(before, snapshot(state))
        STATE.require(
            not other, f"update() changed {', '.join(other[:3])} of the state that it was given in place"
        )
        return after

    def play(
        self, requests: Sequence[int], slots: int, arms: int | None = None, state: Any = None, start: int = 1
    ) -> tuple[Tensor, Any]:
        """The arms ``[slots, B]`` that were chosen, and the last state; the feedback of each slot comes before the next slot."""
        A, B = arms or self.arms, len(requests)
        state = self.selector.init(A) if state is None else state
        rng, noise, chosen = Philox(seeds(0, B)), np.random.default_rng(0), []
        for t in range(slots):
            arm, _, state = self.select(state, context(requests, start + 3 * t), plenty(A, B), rng)
            chosen.append(arm)
            state = self.update(state, requests, arm, torch.from_numpy(noise.random((B, A))))
        return torch.stack(chosen), state


def context(requests: Sequence[int], length: int | Sequence[int]) -> Context:
    """A context with a row for each request, after ``length`` tokens."""
    B = len(requests)
    at = torch.as_tensor(length).expand(B).clone()
    one = torch.ones(B, dtype=torch.long)
    return Context(torch.zeros(B, 1, dtype=torch.long), at, one, torch.tensor(requests, dtype=torch.long))


def plenty(arms: int, batch: int) -> Tensor:
    """Capacities so large that they limit nothing."""
    return torch.full((arms,), max(batch, 1))


@SUITE.test(DECLARATION)
def declares(case: Case) -> None:
    missing = lacks(case.selector, "init", "select", "update")
    DECLARATION.require(not missing, f"it has no {', '.join(missing)}")
    DECLARATION.require(isinstance(case.full, bool), f"full_information is {case.full!r}")


@SUITE.test(FORM, also=(STATE, KEYS))
def form(case: Case) -> None:
    state, A = case.selector.init(case.arms), case.arms
    for B in (1, 4, 0):
        arm, prob, state = case.select(state, context(list(range(B)), 5), plenty(A, B), Philox(seeds(0, B)))
        shapes = arm.shape == prob.shape == (B,)
        FORM.require(
            shapes and arm.dtype == torch.int64, f"arms are {list(arm.shape)} {arm.dtype} for {B} rows"
        )
        FORM.require(prob.dtype == torch.float32, f"probabilities are {prob.dtype}")
        FORM.require(bool(((arm >= 0) & (arm < A)).all()), f"arms are {arm.tolist()} of {A}")
        FORM.require(bool(((prob > 0) & (prob <= 1 + 1e-6)).all()), f"probabilities are {prob.tolist()}")
        state = case.update(state, list(range(B)), arm, torch.full((B, A), 0.5))


@SUITE.test(CAPACITIES)
def capacities(case: Case) -> None:
    """Micro-batches, arrivals, departures and changing capacities, with and without a slot to spare."""
    made_for = SelectorInfo.of(case.selector).arms
    for seed, A in enumerate([made_for] * 4 if made_for else [2, 3, 4, 5, 6]):
        assert A is not None
        state, noise, live = case.selector.init(A), np.random.default_rng(seed), list(range(6))
        for t in range(12):
            batch = [int(r) for r in noise.permutation(live)[: noise.integers(1, len(live) + 1)]]
            room = torch.from_numpy(noise.multinomial(len(batch) + noise.integers(0, 3), [1 / A] * A))
            arm, prob, state = case.select(
                state, context(batch, 1 + 2 * t), room, Philox(torch.tensor(batch))
            )
            taken = torch.bincount(arm, minlength=A)
            CAPACITIES.require(
                bool((taken <= room).all()), f"{taken.tolist()} rows on arms with room for {room.tolist()}"
            )
            CAPACITIES.require(
                bool(((prob > 0) & (prob <= 1 + 1e-6)).all()),
                f"within capacities, probabilities are {prob.tolist()}",
            )
            state = case.update(state, batch, arm, torch.from_numpy(noise.random((len(batch), A))))
            if t % 4 == 3:
                gone = live.pop(0)
                live.append(100 + t)
                if isinstance(case.selector, Leaves):
                    state = case.selector.leave(state, torch.tensor([gone]))


@SUITE.test(KEYS, STATE)
def keys_decide(case: Case) -> None:
    requests, A = list(range(5)), case.arms
    _, state = case.play(requests, 7)
    now, rng = context(requests, 50), Philox(seeds(3, 5))
    first = case.select(state, now, plenty(A, 5), rng)
    after = case.update(first[2], requests, first[0], torch.full((5, A), 0.5))
    if isinstance(case.selector, Leaves):
        before = snapshot(after)
        case.selector.leave(after, torch.tensor([0, 3]))
        other = changed(before, snapshot(after))
        STATE.require(
            not other, f"leave() changed {', '.join(other[:3])} of the state that it was given in place"
        )
    case.play(requests, 9, state=after, start=60)
    again = case.select(state, now, plenty(A, 5), rng)
    KEYS.require(
        torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]),
        "the same state and keys, after other choices, give another choice",
    )
    one, two = case.play(requests, 20)[0], case.play(requests, 20)[0]
    KEYS.require(torch.equal(one, two), "a second run with the same keys and feedback makes other choices")


@SUITE.test(PROBABILITY)
def arm_prob_is_the_frequency(case: Case) -> None:
    """The same state under many seeds: each arm is chosen as often as its probability says, given the choices for the rows before."""
    rows, A, many = 3, case.arms, 800
    _, state = case.play(list(range(rows)), 3)
    for tight in (False, True):
        room = torch.ones(A, dtype=torch.long) if tight else plenty(A, rows)
        if int(room.sum()) < rows:
            continue
        count: dict[tuple[int, ...], dict[int, list[float]]] = {}
        for seed in range(many):
            arm, prob, _ = case.selector.select(
                state, context(list(range(rows)), 40), room, Philox(seeds(seed, rows))
            )
            for b in range(rows):
                before = (b, *arm[:b].tolist()) if tight else (b,)
                count.setdefault(before, {}).setdefault(int(arm[b]), []).append(float(prob[b]))
        for before, by_arm in count.items():
            total = sum(map(len, by_arm.values()))
            for arm_number, probs in by_arm.items():
                said, share = probs[0], len(probs) / total
                PROBABILITY.require(
                    max(probs) - min(probs) < 1e-6,
                    f"row {before[0]} gets arm {arm_number} with several probabilities",
                )
                near = abs(share - said) < 5 * (said * (1 - said) / total) ** 0.5 + 1e-6
                PROBABILITY.require(
                    near,
                    f"row {before[0]} gets arm {arm_number} in {share:.3f} of {total} draws, and arm_prob says {said:.3f}",
                )


@SUITE.test(MATES)
def mates(case: Case) -> None:
    if SelectorInfo.of(case.selector).joint:
        raise NotTried("it chooses for rows together")
    A, rng = case.arms, Philox(seeds(9, 6))
    _, state = case.play(list(range(6)), 8)
    now = context(list(range(6)), [30, 31, 32, 33, 34, 35])
    arm, prob, _ = case.select(state, now, plenty(A, 6), rng)
    for rows in (torch.tensor([5, 2, 0, 1, 4, 3]), torch.tensor([4, 1]), torch.tensor([3])):
        part, p, _ = case.select(state, now.select(rows), plenty(A, len(rows)), rng.select(rows))
        same = torch.equal(part, arm[rows]) and torch.equal(p, prob[rows])
        MATES.require(
            same, f"rows {rows.tolist()} get arms {part.tolist()}, and {arm[rows].tolist()} in a batch of 6"
        )


@SUITE.test(LATE)
def micro_batches(case: Case) -> None:
    """Four micro-batches a slot, feedback after all of them, against one batch."""
    if SelectorInfo.of(case.selector).joint:
        raise NotTried("it chooses for rows together")
    A, rng = case.arms, Philox(seeds(1, 8))
    noise = torch.rand(30, 8, A, generator=torch.Generator().manual_seed(0))
    chosen = []
    for parts in (1, 4):
        state, arms = case.selector.init(A), []
        for t in range(30):
            now, got = context(list(range(8)), 1 + 4 * t), []
            for rows in torch.arange(8).chunk(parts):
                arm, _, state = case.select(state, now.select(rows), plenty(A, 8), rng.select(rows))
                got.append(arm)
            for rows, arm in zip(torch.arange(8).chunk(parts), got):
                state = case.update(state, rows.tolist(), arm, noise[t, rows])
            arms.append(torch.cat(got))
        chosen.append(torch.stack(arms))
    LATE.require(torch.equal(*chosen), "four micro-batches get other arms than one batch")


@SUITE.test(JOINT)
def learns_from_own_feedback(case: Case) -> None:
    """A request's arms, alone and among others whose feedback comes with its own."""
    if SelectorInfo.of(case.selector).joint:
        raise NotTried("it chooses for rows together")
    A, every = case.arms, torch.arange(6)
    noise = torch.rand(30, 6, A, generator=torch.Generator().manual_seed(1))
    chosen, probs = [], []
    for rows in (every, every[2:3]):
        state, rng, arms, drawn = case.selector.init(A), Philox(seeds(4, 6)[rows]), [], []
        for t in range(30):
            arm, prob, state = case.select(state, context(rows.tolist(), 1 + 4 * t), plenty(A, 6), rng)
            state = case.update(state, rows.tolist(), arm, noise[t, rows])
            arms.append(int(arm[rows == 2]))
            drawn.append(prob[rows == 2])
        chosen.append(arms)
        probs.append(torch.cat(drawn))
    JOINT.require(
        chosen[0] == chosen[1],
        f"request 2 gets the arms {chosen[0]} if other requests have feedback, and {chosen[1]} alone, with the same keys and feedback of its own",
    )
    JOINT.require(
        torch.allclose(probs[0], probs[1], atol=1e-5),
        "request 2 gets its arms with other probabilities if other requests have feedback",
    )


@SUITE.test(LEAVES)
def requests_come_and_go(case: Case) -> None:
    """What is remembered of a request is dropped with the request, and feedback that comes after it is no error."""
    selector: Any = case.selector
    if not isinstance(selector, Leaves):
        raise NotTried("it has no leave(state, requests)")
    A = case.arms
    state, rng, sizes = case.selector.init(A), Philox(seeds(0, 4)), []
    for first in range(0, 400, 2):
        requests = list(range(first, first + 4))
        arm, _, state = case.selector.select(state, context(requests, 5), plenty(A, 4), rng)
        state = case.selector.leave(state, torch.tensor(requests[:2]))
        state = case.update(state, requests, arm, torch.full((4, A), 0.3))
        sizes.append(size(state))
    LEAVES.require(
        sizes[-1] == sizes[20],
        f"its state holds {sizes[20]} numbers after 40 requests and {sizes[-1]} after 400",
    )


def size(value: Any) -> int:
    """How many numbers a state holds, however nested."""
    if isinstance(value, np.ndarray | Tensor):
        return int(np.prod(value.shape))
    if isinstance(value, dict):
        return len(value) + sum(map(size, value.values()))
    return sum(map(size, value)) if isinstance(value, tuple | list) else 1


@SUITE.test(ONE_ARM)
def one_arm(case: Case) -> None:
    if SelectorInfo.of(case.selector).arms not in (None, 1):
        raise NotTried("it is made for more arms")
    chosen, _ = case.play([0, 1], 12, arms=1)
    ONE_ARM.require(not chosen.any(), f"of one arm it chooses {sorted(set(chosen.flatten().tolist()))}")
