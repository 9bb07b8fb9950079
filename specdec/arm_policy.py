"""Arms and their selection: what a selector chooses among, what a choice costs, and the selector's use in a run.

An arm is a draft and a length, or "do not speculate" (SPIN, arXiv 2503.15921, section 4). Selectors see numbers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.cost.arms import ArmCosts
from specdec.protocols import Enters, Holds, Leaves, Selector
from specdec.rng import Rng
from specdec.selectors.rewards import charge
from specdec.types import Context, Feedback, Round

Reward = Callable[[Round], Tensor]


@dataclass(frozen=True)
class Arm:
    """A choice of a selector: a ``draft`` (``None``: do not speculate) and the longest path it drafts.

    Raises:
        ValueError: a length below 1.
    """

    draft: Any
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            remedy = "give at least 1; an arm that does not speculate is None, or Arm(None)"
            at_least(1, "length", self.length, remedy)


@dataclass(frozen=True)
class ArmPolicy:
    """How a decoder chooses arms: the selector, and the arms' names, capacities and costs.

    Attributes:
        names, lengths: of the arms. capacities: rows that each arm may draft at once; ``None``: any number.
        costs: modelled seconds, or ``"wall"`` for measured ones. reward: ``Round -> [B]`` in 0 .. 1 (or ``[B, arms]`` for selectors
            with full information); by default the share of the longest block that was committed.
    """

    selector: Selector[Any]
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    capacities: tuple[int, ...] | None = None
    costs: ArmCosts | Literal["wall"] = "wall"
    reward: Reward | None = None

    @property
    def arms(self) -> tuple[object, ...]:
        """What two policies must share so that a selector's statistics fit both."""
        return self.names, self.lengths, self.capacities

    def begin(self, batch: int) -> ArmAssignment:
        """An assignment for one run of at most ``batch`` rows at a time.

        Raises:
            ValueError: the capacities are too small for the batch.
        """
        if self.capacities is not None and sum(self.capacities) < batch:
            held = ", ".join(f"{name} {n}" for name, n in zip(self.names, self.capacities))
            raise ValueError(
                f"capacities hold {sum(self.capacities)} rows together ({held}) and the batch has {batch}: raise them, add an arm "
                "'do not speculate', or use a smaller batch"
            )
        return ArmAssignment(self)


class Choice(NamedTuple):
    """``arm [B]``, the probability of each ``prob [B]``, and the longest path that each row may draft ``length [B]``."""

    arm: Tensor
    prob: Tensor
    length: Tensor

    def select(self, rows: Tensor) -> Choice:
        return Choice(self.arm[rows], self.prob[rows], self.length[rows])


@dataclass
class _Held:
    """A choice that stands for some more ``rounds`` of the same rows, those of ``request``."""

    request: Tensor | None = None
    choice: Any = None
    rounds: int = 0

    def silent(self, round: Round) -> bool:
        """Whether a round of the held choice says nothing: no row drafted, or left."""
        return (
            self.choice is not None
            and round.arm is self.choice.arm
            and not round.proposal.nodes
            and not self.choice.length.numpy().any()
            and not round.finished.numpy().any()
        )


class ArmAssignment:
    """A run's use of a selector: keeps each row's arm and turns rounds into feedback.

    Attributes:
        seconds: spent in the selector so far, for the overhead.
    """

    def __init__(self, how: ArmPolicy):
        self.how, self.state = how, how.selector.init(len(how.names))
        self.leaves = how.selector if isinstance(how.selector, Leaves) else None
        self.enters = how.selector if isinstance(how.selector, Enters) else None
        self.holds = how.selector if isinstance(how.selector, Holds) else None
        self.held = _Held()
        self.waiting: list[tuple[Tensor, ...]] = []  # feedback of held rounds
        self.lengths, self.longest = torch.tensor(how.lengths), 1 + max(how.lengths)
        self.on: dict[int, int] = {}
        self.seconds = 0.0

    def again(self, batch: int) -> ArmAssignment:
        """The assignment for another run, of at most ``batch`` rows: it keeps what was learned, except about requests of an aborted run."""
        self.how.begin(batch)  # checks the capacities
        self._tell()
        if self.on and self.leaves is not None:
            self.state = self.leaves.leave(self.state, torch.tensor(list(self.on)))
        self.on.clear()
        self.held = _Held()
        return self

    def enter(self, request: Tensor, longest: Tensor) -> None:
        """Tell a selector that wants to know how long the texts of new requests may become, prompts included."""
        if self.enters is not None:
            self.state = self.enters.enter(self.state, request, longest)

    def choose(self, context: Context, rng: Rng) -> Choice:
        """Arms for the rows of ``context``; other rows in flight keep theirs. A choice that the selector holds is not made again.

        Raises:
            ValueError: the selector chose an arm that does not exist, or more rows than an arm may take.
        """
        if self.held.request is context.request and self.held.rounds > 0:  # the same rows: none has left
            self.held.rounds -= 1
            return self.held.choice
        began, how = perf_counter(), self.how
        self._tell()
        requests = context.request.tolist()
        capacities = self._left(requests)
        arm, prob, self.state = how.selector.select(self.state, context, capacities, rng)
        chosen = self._check(context.batch, arm, prob)
        arm = arm.clone()  # a selector may write its next choice into the same tensor
        room = capacities.tolist()
        for a, n in Counter(chosen).items():
            if n > room[a]:
                raise ValueError(
                    f"selector {how.selector!r} gave arm {how.names[a]!r} {n} rows of the {room[a]} that it may take"
                )
        self.on.update(zip(requests, chosen))
        choice = Choice(arm, prob, self.lengths[arm])
        if self.holds is not None:
            rounds = self.holds.hold(self.state)
            self.held = _Held(context.request, choice, rounds) if rounds else _Held()
        self.seconds += perf_counter() - began
        return choice

    def _check(self, batch: int, arm: Any, prob: Any) -> list[int]:
        """The arms as a list; raises ValueError unless there is an arm and a probability for every row."""
        selector, arms = self.how.selector, len(self.how.names)
        said = arm.tolist() if isinstance(arm, Tensor) else arm
        whole = isinstance(arm, Tensor) and arm.dtype == torch.long and arm.shape == (batch,)
        if not whole or not all(0 <= a < arms for a in said):
            raise ValueError(
                f"selector {selector!r} chose arms {said} for {batch} rows: give an int64 tensor [{batch}] of arms 0 to {arms - 1}"
            )
        odds = prob.tolist() if isinstance(prob, Tensor) else prob
        right = isinstance(prob, Tensor) and prob.shape == (batch,) and all(0 < x <= 1 + 1e-6 for x in odds)
        if not right:
            raise ValueError(
                f"selector {selector!r} gave probabilities {odds} of its choices for {batch} rows: give a tensor [{batch}] in (0, 1]"
            )
        return said

    def _left(self, requests: Sequence[int]) -> Tensor:
        """``[arms]`` rows that each arm may still take beside other requests."""
        if self.how.capacities is None:
            return torch.full((len(self.how.names),), len(requests))
        mine = set(requests)
        busy = Counter(arm for request, arm in self.on.items() if request not in mine)
        return torch.tensor([c - busy[arm] for arm, c in enumerate(self.how.capacities)])

    def learn(self, round: Round, spent: Sequence[float] | None = None) -> None:
        """Learn from a round. Rows that a stop or the end of a budget truncated are left out: they say nothing about an arm.

        Args:
            spent: measured seconds of drafting by arm.
        """
        if self.held.silent(round):
            return
        began, how = perf_counter(), self.how
        if not round.truncated.numpy().all():
            drafted, tokens = round.proposal.size, round.verdict.accepted + 1
            parts = [round.context.request, round.arm, tokens, drafted]
            if how.costs == "wall":
                rest = round.seconds.get("target", 0.0) + round.seconds.get("verify", 0.0)
                parts.append(charge(round.arm, torch.tensor(spent or [0.0] * len(how.names)), rest))
            if how.reward:
                parts.append(how.reward(round))
            if round.truncated.numpy().any():
                rows = (~round.truncated).nonzero()[:, 0]
                parts = [part[rows] for part in parts]
            self.waiting.append(tuple(parts))
            if self.holds is None or self.held.rounds == 0:
                self._tell()
        if round.finished.numpy().any():
            self._tell()
            self.held = _Held()  # of other rows, where there are micro-batches: these leave room
            gone = round.context.request[round.finished]
            for request in gone.tolist():
                self.on.pop(request, None)
            if self.leaves is not None:
                self.state = self.leaves.leave(self.state, gone)
        self.seconds += perf_counter() - began

    def _tell(self) -> None:
        """Let the selector learn from the rounds since it was told last."""
        if not self.waiting:
            return
        request, arm, tokens, drafted, *rest = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*self.waiting)
        )
        self.waiting.clear()
        seconds = rest.pop(0) if self.how.costs == "wall" else self.how.costs.seconds(arm, drafted)
        reward = rest.pop(0) if self.how.reward else tokens / self.longest
        self.state = self.how.selector.update(
            self.state, Feedback(request, arm, tokens, drafted, seconds, reward)
        )
