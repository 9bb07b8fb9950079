"""Selectors replayed on recorded requests: batches with arrivals and departures, the feedback of a real run, seconds of a time model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.arm_policy import ArmAssignment, ArmPolicy
from specdec.capabilities import SelectorInfo
from specdec.lab.selection import Requests, RoundOracle, RoundTimes
from specdec.rng import Philox, seeds
from specdec.selectors.matching import within
from specdec.selectors.rewards import charge
from specdec.types import Context, Proposal, Round, Scores, Verdict


@dataclass(frozen=True)
class Played:
    """What R replays of C requests took.

    Attributes:
        seconds: ``[R, C]``, each round charged as in a batch of its own arm (``RoundTimes.alone``), reading included: what the oracles
            of ``lab.selection`` are charged, too. elapsed: ``[R, C]`` shares of the batch's own rounds, in which every arm in use has
            its fixed costs and the last rounds have few rows. rounds: ``[R, C]``.
        arms: ``[C, A]`` share of each request's rounds by arm, over all repeats.
        last: the last repeat's selector with its state, from which another replay can go on (``start``).
    """

    seconds: np.ndarray
    elapsed: np.ndarray
    rounds: np.ndarray
    arms: np.ndarray
    last: ArmAssignment


@dataclass(frozen=True)
class SelectorReplay:
    """A setting in which selectors are compared: requests wait in a random order, and one starts when another of the batch ends.

    Attributes:
        batch: rows at a time. repeats: replays, each with its own order and random numbers, which all selectors share. seed: of them.
        capacities: rows that each arm may take at once; ``None``: all.
        reward: of a round, in 0 .. 1: ``"goodput"``, tokens a second over the largest possible; ``"tokens"``, the decoder's default.
            Selectors with full information get the expected reward of every arm's block, when the text that it needs is committed.
        costs: seconds in the feedback: ``"modelled"`` (``RoundTimes.alone``, without reading) or ``"wall"``, shares of the batch's round.
        refilled: as said; ``False``: the next batch starts when all requests of one have ended, as in calls of ``generate``.
    Raises:
        ValueError: a batch or a number of repeats below 1.
    """

    requests: Requests
    times: RoundTimes
    batch: int
    repeats: int = 20
    seed: int = 0
    capacities: tuple[int, ...] | None = None
    reward: Literal["goodput", "tokens"] = "goodput"
    costs: Literal["modelled", "wall"] = "modelled"
    refilled: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "repeats"):
            whole(name, vars(self)[name])
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}: give at least 1")

    def __call__(self, selector: Any, start: ArmAssignment | None = None) -> Played:
        """Replay a selector. ``start``: an earlier replay's ``last``, whose state every repeat begins with."""
        runs = [_Run(self, selector, start, turn) for turn in range(self.repeats)]
        for run in runs:
            run.play()
        arms = np.sum([run.arms for run in runs], 0)
        seconds, elapsed, rounds = (
            np.stack(x) for x in zip(*((r.seconds, r.elapsed, r.rounds) for r in runs))
        )
        return Played(seconds, elapsed, rounds, arms / arms.sum(1, keepdims=True), runs[-1].assignment)

    def taught(self, selector: Any, lessons: int) -> ArmAssignment:
        """A selector's state after ``lessons`` replays, each of which goes on from the one before with other random numbers."""
        last: ArmAssignment | None = None
        for lesson in range(lessons):
            once = replace(self, repeats=1, seed=self.seed + lesson)
            last = once(selector, last).last
        assert last is not None
        return last

    def rewards(self) -> tuple[np.ndarray, np.ndarray]:
        """Reward of a block by arm and tokens ``[A, K + 2]``, and every arm's expected reward ``[C, n, A]``."""
        longest = max(self.requests.lengths)
        worth = np.full(len(self.requests.lengths), 1 / (longest + 1))
        if self.reward == "goodput":
            lengths = torch.tensor(self.requests.lengths)
            seconds = self.times.alone(self.batch).seconds(torch.arange(len(lengths)), lengths).numpy()
            worth = 1 / seconds / ((lengths.numpy() + 1) / seconds).max()
        tokens = np.arange(longest + 2)
        return worth[:, None] * tokens, (worth[:, None, None] * self.requests.expected).transpose(1, 2, 0)


class _Run:
    """One replay. Arrays over requests: ``at`` new tokens so far, ``seen [C, A]`` tokens of the text that each arm has read."""

    def __init__(self, how: SelectorReplay, selector: Any, start: ArmAssignment | None, turn: int):
        A, C, n, _ = how.requests.accept.shape
        self.how, self.full = how, SelectorInfo.of(selector).full_information
        noise = np.random.default_rng((how.seed, turn))
        self.waiting, self.uniform = noise.permutation(C).tolist(), noise.random((C, n))
        self.keyed = Philox(seeds(int(noise.integers(2**62)), C))
        costs = how.times.alone(how.batch)
        policy = ArmPolicy(
            selector,
            how.requests.names,
            how.requests.lengths,
            how.capacities,
            "wall" if how.costs == "wall" else costs,
            lambda round: self.reward,
        )
        self.assignment, self.costs = policy.begin(how.batch), costs
        if start is not None:
            self.assignment.state = start.again(how.batch).state
        self.by_tokens, self.by_start = how.rewards()
        self.reward = torch.empty(0)
        self.later = np.zeros((0, 5), dtype=np.int64)  # blocks whose text is not committed yet
        tokens = how.requests.tokens
        self.tokens = torch.zeros(C, 1, dtype=torch.long) if tokens is None else tokens
        self.prompt = torch.from_numpy(np.asarray(how.requests.prompt, dtype=np.int64))
        self.accept = how.requests.accept.numpy()
        self.at, self.seen = np.zeros(C, dtype=np.int64), np.zeros((C, A), dtype=np.int64)
        self.seconds, self.elapsed, self.rounds = np.zeros(C), np.zeros(C), np.zeros(C, dtype=np.int64)
        self.arms = np.zeros((C, A))

    def play(self) -> None:
        running: list[int] = []
        while running or self.waiting:
            if self.how.refilled or not running:
                room = self.how.batch - len(running)
                running += [self.waiting.pop() for _ in range(min(room, len(self.waiting)))]
            self.round(np.array(running))
            running = [c for c in running if self.at[c] < self.how.requests.new_tokens[c]]

    def round(self, rows: np.ndarray) -> None:
        requests, times, at = self.how.requests, self.how.times, self.at[rows]
        request = torch.from_numpy(rows)
        prompt = self.prompt[request]
        context = Context(self.tokens[request], prompt + 1 + torch.from_numpy(at), prompt, request)
        choice = self.assignment.choose(context, self.keyed.select(request))
        arm = choice.arm.numpy()
        drafted, unread = (
            requests.drafted[arm, rows, at],
            self.prompt[request].numpy() + at - self.seen[rows, arm],
        )
        accepted = np.zeros(len(rows), dtype=np.int64)
        for j in range(int(drafted.max())):  # the text's token is accepted if all before it were
            place = np.minimum(at + j, self.uniform.shape[1] - 1)
            taken = self.uniform[rows, place] < self.accept[arm, rows, at, j]
            accepted += taken & (accepted == j) & (j < drafted)
        spent, verify = times.round(arm, drafted, unread)
        alone = self.costs.seconds(choice.arm, torch.from_numpy(drafted)).numpy()
        self.seconds[rows] += alone + np.array(times.read)[arm] * unread
        self.elapsed[rows] += charge(choice.arm, torch.from_numpy(spent), verify).numpy()
        self.rounds[rows] += 1
        self.arms[rows, arm] += 1
        self.at[rows] = at + accepted + 1
        self.seen[rows, arm] = prompt.numpy() + self.at[rows]
        ends = requests.new_tokens[rows]
        finished = self.at[rows] >= ends
        if not self.full:
            self.reward = torch.from_numpy(self.by_tokens[arm, accepted + 1])
            whole = ends - at > np.array(requests.lengths)[arm]  # no block that the end has shortened
            self.learn(np.stack([rows, arm, accepted, drafted, whole, finished], 1), spent, verify)
            return
        K = max(requests.lengths)
        blocks = np.stack([rows, arm, accepted, drafted, at], 1)[ends - at > K]
        self.later = np.concatenate([self.later, blocks])
        known = self.at[self.later[:, 0]] >= self.later[:, 4] + K
        ready, self.later = self.later[known], self.later[~known]
        gone = np.pad(rows[finished, None], ((0, 0), (0, 4)))  # their ends are told, and no block
        starts = np.concatenate([ready[:, 4], gone[:, 4]])
        told = np.concatenate([ready, gone])
        ended = np.arange(len(told)) >= len(ready)
        told = np.stack([*told.T[:4], ~ended, ended], 1)
        self.reward = torch.from_numpy(self.by_start[told[:, 0], starts])
        if len(told):
            self.learn(told, spent, verify)

    def learn(self, blocks: np.ndarray, spent: np.ndarray, verify: float) -> None:
        """Pass blocks to the selector as a decoder does.

        Args:
            blocks: ``[N, 6]``: request, arm, accepted, drafted, whether the block was whole, whether the request ended.
        """
        request, arm, accepted, drafted, whole, finished = torch.from_numpy(blocks).long().unbind(1)
        B, none = len(blocks), torch.zeros(len(blocks), 0, dtype=torch.long)
        prompt = self.prompt[request]
        round = Round(
            context=Context(none, prompt + 1, prompt, request),
            proposal=Proposal(none, none, drafted),
            scores=Scores(torch.empty(B, 0)),
            probs=None,
            verdict=Verdict(none, accepted, torch.zeros_like(accepted), none),
            committed=accepted + 1,
            finished=finished == 1,
            budget=drafted,
            truncated=whole == 0,
            arm=arm,
            arm_prob=torch.ones(B),
            number=1,
            seconds={"target": verify},
        )
        self.assignment.learn(round, spent.tolist())


@dataclass(frozen=True)
class Follow:
    """Follows an oracle's plan: the selector whose seconds show how near ``RoundOracle.seconds`` can be reached."""

    oracle: RoundOracle
    prompt: np.ndarray

    def init(self, arms: int) -> dict[int, int]:
        return {}

    def select(
        self, state: dict[int, int], context: Context, capacities: Tensor, rng: Any
    ) -> tuple[Tensor, Tensor, dict[int, int]]:
        request = context.request.numpy()
        read = np.array([state.get(r, 0) for r in request.tolist()])
        start = context.length.numpy() - 1 - self.prompt[request]
        arm = self.oracle.plan[start, request, read].astype(np.int64)
        scores = np.zeros((len(arm), len(capacities)))
        arm = within(arm, scores, capacities)
        now = read | np.array(self.oracle.bit)[arm]
        state = {**state, **dict(zip(request.tolist(), now.tolist()))}
        return torch.from_numpy(arm), torch.ones(len(arm)), state

    def update(self, state: dict[int, int], feedback: Any) -> dict[int, int]:
        return state

    def leave(self, state: dict[int, int], requests: Tensor) -> dict[int, int]:
        return {r: read for r, read in state.items() if r not in set(requests.tolist())}
