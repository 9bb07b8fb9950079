"""The arms of all rows with the least seconds for equally many tokens, by measured seconds and by what drafts have accepted so far.

After "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (SmartSpec, arXiv 2406.14066), with arms for every row
instead of one length for the batch. Nothing is random and no clock is read: equal rounds give equal choices.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import at_least, numbers
from specdec.capabilities import SelectorInfo
from specdec.cost.rounds import RoundTable
from specdec.rng import Rng
from specdec.selectors.joint import together
from specdec.selectors.kinds import Kind, kinds_of
from specdec.selectors.matching import checked, within
from specdec.selectors.statistics import TOKENS, seen
from specdec.types import Context, Feedback

FAILED, EXPECTED, ASKED, FOUND, READ, LENGTH = range(6)  # columns of a request's own numbers
KEEP = 1 - 1 / 1024  # of the shared counts, for every row of feedback
WAYS = 1024  # to open drafts up to a length, at most
ROUNDS = 8.0  # of a row's own that say as much about whether a draft proposes anything as all rows do


class Plan(NamedTuple):
    """A choice for all rows and its reasons.

    Attributes:
        request: ``[B]``. arm: ``[B]``. tokens: ``[B, arms]`` expected tokens of a round. plain: seconds of a plain round.
        rate: expected tokens a second, if this and later rows get equally many. why: one word for the batch: ``"faster"``, ``"slower"`` or ``"unmeasured"``. failing: ``[kinds, drafts, K]`` the
            chance that a token is rejected if those before it in its block were not, in all rows of a kind. rows: of each kind. stands: rounds for which the choice is held.
    """

    request: tuple[int, ...]
    arm: np.ndarray
    tokens: np.ndarray
    plain: float
    rate: float
    why: str
    failing: np.ndarray
    rows: np.ndarray
    stands: int = 1


class State(NamedTuple):
    """``shared``: ``[kinds, drafts, 1 + K, 2]``, rounds (asked, with a proposal) and by depth (tested, accepted), of all rows of a kind; ``own``: request ->
    ``[drafts, 6]``; ``kind``: request -> number of its kind; ``ends``: request -> longest length of its text;
    ``used``: request -> the draft of its last choice, -1 for none."""

    shared: np.ndarray
    own: dict[int, np.ndarray]
    kind: dict[int, int]
    ends: dict[int, int]
    used: dict[int, int]
    plan: Plan | None


@dataclass(frozen=True)
class Planner:
    """Chooses for all rows together the arms with the least seconds for equally many tokens (``joint.together``); plain decoding unless these are faster
    by ``margin``.

    Two things are estimated of a draft, for each kind of request, from ``prior`` and all rounds since: how often it proposes anything, and by depth the
    chance that a token is accepted if one was at the depth before. Where a chain or the path of a tree ends early, none is. A row that accepts less or more than that has a factor of its own on the chance of
    failure, drawn to 1 by the draft's ``spread``. Estimates of a row return to those of its kind, with half-life ``memory``.

    Attributes:
        arms: (draft, length) of each arm of the pool, in its order; (-1, 0): do not speculate, which must be among them.
        table: measured seconds. prior: by kind and draft, of a calibration: rounds (asked, with a proposal), then by depth (tested, accepted) rounds.
        spread: by kind and draft, how many failures of a row weigh as much as all rows together; infinite: rows do not differ.
        kinds: what ``kind`` may say, in the order of ``prior``; anything else counts as the first. kind: of the rows of a context, asked once for each request
            (``None``: there is one kind).
        margin: relative gain below which all rows decode plainly. trust: rounds that the prior counts for, at most. memory: tokens.
        hold_rounds: for which a choice stands; one that is made again stands for twice as many as before, up to four times ``hold_rounds``.
        horizon: new tokens in which a draft's reading of a text must pay off, at most; fewer if the request's budget is smaller.
    Raises:
        ValueError: numbers out of range, tables that do not fit the arms, or no arm that does not speculate.
    """

    arms: tuple[tuple[int, int], ...]
    table: RoundTable
    prior: tuple[tuple[tuple[tuple[float, float], ...], ...], ...]
    spread: tuple[tuple[float, ...], ...]
    kinds: tuple[Hashable, ...] = ("all",)
    kind: Kind | None = None
    margin: float = 0.02
    trust: float = 64.0
    memory: float = 64.0
    hold_rounds: int = 8
    horizon: int = 256

    def __post_init__(self) -> None:
        numbers(self, "margin", "trust", "memory")
        at_least(1, "hold_rounds", self.hold_rounds, "give a number of rounds, 1 to choose in each")
        at_least(1, "horizon", self.horizon, "give the new tokens that are expected of a request")
        if self.margin < 0 or self.trust <= 0 or self.memory <= 0:
            raise ValueError(
                f"margin is {self.margin}, trust {self.trust}, memory {self.memory}: give margin >= 0, the others > 0"
            )
        if not len(self.kinds) == len(self.prior) == len(self.spread) >= 1:
            raise ValueError(
                f"there are {len(self.kinds)} kinds, {len(self.prior)} in prior and {len(self.spread)} in spread: give one of both for every kind"
            )
        if len(self.table.idle) not in (0, len(self.kinds)):
            raise ValueError(
                f"table.idle has {len(self.table.idle)} kinds and there are {len(self.kinds)}: give seconds for each, or none"
            )
        drafts = len(self.prior[0])
        held = {len(each) for each in (*self.prior, *self.spread)}
        fits = len(self.table.draft) == len(self.arms) and held == {drafts}
        longest = max((k for _, k in self.arms), default=0)
        if not (drafts and fits) or any(not -1 <= d < drafts or (k < 1) != (d < 0) for d, k in self.arms):
            raise ValueError(
                f"there are {len(self.arms)} arms {self.arms}, {len(self.table.draft)} in table, and {sorted(held)} drafts in "
                "prior and spread: give (draft, length) with length >= 1, or (-1, 0), and all of them for each"
            )
        ways = prod(1 + sum(d == draft for d, _ in self.arms) for draft in range(drafts))
        if ways > WAYS:
            raise ValueError(
                f"there are {ways} ways to open the drafts up to a length, and each choice tries all: give fewer drafts or lengths, for at most {WAYS}"
            )
        if (-1, 0) not in self.arms:
            raise ValueError("no arm is (-1, 0): add one that does not speculate, None in the pool")
        if any(len(counts) <= longest for each in self.prior for counts in each):
            raise ValueError(
                f"prior has too few positions for a length of {longest}: give (asked, with a proposal), and (tested, accepted) for each position"
            )

    @property
    def info(self) -> SelectorInfo:
        return SelectorInfo(arms=len(self.arms), joint=True)

    @staticmethod
    def example(model: object = None) -> Planner:
        """Arms that do not speculate, and draft one token and four (for the contract tests)."""
        draft, verify = ((0.0, 0.0), (0.1, 0.2), (0.2, 0.4)), ((0.0, 0.0), (0.2, 0.05), (0.3, 0.1))
        table = RoundTable((1, 64), (1.0, 4.0), draft, verify, (0.0,) * 3)
        return Planner(((-1, 0), (0, 1), (0, 4)), table, ((((8.0, 8.0), *((8.0, 6.0),) * 4),),), ((8.0,),))

    def init(self, arms: int) -> State:
        if arms != len(self.arms):
            raise ValueError(f"arms is {arms}: the selector is made for {len(self.arms)}")
        return State(np.zeros((len(self.kinds), self._drafts, 1 + self._longest, 2)), {}, {}, {}, {}, None)

    def enter(self, state: State, request: Tensor, length: Tensor) -> State:
        """Learn how long the texts of requests may become, prompts included."""
        return state._replace(ends=state.ends | dict(zip(request.tolist(), length.tolist())))

    def hold(self, state: State) -> int:
        """How many more rounds the last choice stands."""
        return 0 if state.plan is None else state.plan.stands - 1

    def select(
        self, state: State, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, State]:
        B = context.batch
        room = checked(capacities, len(self.arms), B)
        requests, length = context.request.tolist(), context.length.numpy()
        own = np.array([state.own.get(r, self._unknown) for r in requests]).reshape(B, self._drafts, 6)
        passed = (length[:, None, None] - own[..., LENGTH:]).clip(0)  # tokens since the row's last choice
        own[..., :READ] *= 0.5 ** (passed / self.memory)
        own[..., LENGTH] = length[:, None]
        last = state.plan
        if last is not None and not (self._draft[last.arm] >= 0).any():
            # Nothing was learned: the shared counts fade, and the estimates return to the prior. A plain round is a token of each row,
            # and fewer rounds passed than the choice stands for where rows joined or left.
            rounds = max(
                (int(passed[b, 0, 0]) for b, r in enumerate(requests) if r in state.own), default=last.stands
            )
            state = state._replace(shared=faded(state.shared, last.rows * min(rounds, last.stands)))
        for b, r in enumerate(requests):
            if r in state.own and (d := state.used.get(r, -1)) >= 0:
                own[b, d, READ] = length[b]  # it has read on
        state = state._replace(kind=state.kind | self._named(state, context, requests))
        plan = self._plan(state, requests, own, length)
        arm = within(plan.arm, plan.tokens, room)
        same = last is not None and last.request == plan.request and np.array_equal(last.arm, arm)
        same = same and all(r in state.own for r in requests)
        stands = min(2 * last.stands, 4 * self.hold_rounds) if last and same else self.hold_rounds
        state = state._replace(
            own=state.own | dict(zip(requests, own)),
            used=state.used | dict(zip(requests, self._draft[arm].tolist())),
            plan=plan._replace(arm=arm, stands=stands),
        )
        return torch.from_numpy(arm), torch.ones(B), state

    def update(self, state: State, feedback: Feedback) -> State:
        arm, columns = seen(feedback, len(self.arms))
        accepted = columns[:, TOKENS] - 1
        draft, length = self._draft[arm], self._length[arm]
        if state.plan is None or not (draft >= 0).any():
            return state
        requests = feedback.request.tolist()
        kind = np.array([state.kind.get(r, 0) for r in requests])
        drafted, all_rows = (
            np.bincount(some, minlength=len(self.kinds)) for some in (kind[draft >= 0], kind)
        )
        # Nothing is learned of a kind that is decoded plainly, so its estimates return to the prior.
        shared = faded(state.shared, np.where(drafted > 0, drafted, all_rows))
        failing = state.plan.failing
        proposed = (draft >= 0) & (feedback.drafted.numpy() > 0)
        depth = np.where(proposed, length, 0)
        taken = np.minimum(accepted, depth).astype(np.int64)
        tested = np.minimum(taken + 1, depth)
        place = np.arange(self._longest)
        was = np.stack([place < tested[:, None], place < taken[:, None]], -1)  # [R, K, 2]
        rounds = np.stack([draft >= 0, proposed], -1)[:, None]
        np.add.at(shared, (kind, draft), np.concatenate([rounds, was], 1) * (draft >= 0)[:, None, None])
        expected = np.pad(failing.cumsum(-1), ((0, 0), (0, 0), (1, 0)))[kind, draft, tested]
        mine = np.stack([taken < depth, expected, draft >= 0, proposed], -1)
        own = dict(state.own)
        for request, d, counts in zip(requests, draft.tolist(), mine):
            if d >= 0 and request in own:
                own[request] = own[request].copy()
                own[request][d, :READ] += counts
        return state._replace(shared=shared, own=own)

    def leave(self, state: State, requests: Tensor) -> State:
        gone = set(requests.tolist())
        return state._replace(
            own={r: mine for r, mine in state.own.items() if r not in gone},
            kind={r: kind for r, kind in state.kind.items() if r not in gone},
            ends={r: end for r, end in state.ends.items() if r not in gone},
            used={r: draft for r, draft in state.used.items() if r not in gone},
        )

    def explain(self, state: State, request: int, names: Sequence[str] = ()) -> str:
        """Why the request has its arm: what the last choice expected of each arm.

        Args:
            names: of the arms; by default their numbers.
        Raises:
            ValueError: the request was not among the rows of the last choice.
        """
        plan = state.plan
        if plan is None or request not in plan.request:
            raise ValueError(f"request {request} is not among the rows of the last choice")
        b, labels = plan.request.index(request), list(names) or [f"arm {a}" for a in range(len(self.arms))]
        said = ", ".join(f"{name} {tokens:.2f}" for name, tokens in zip(labels, plan.tokens[b]))
        reason = {
            "faster": f"the batch is expected to be {plan.rate * plan.plain / len(plan.request):.2f} times as fast as plain decoding",
            "slower": f"no choice is expected to be faster than plain decoding by {self.margin:.0%}",
            "unmeasured": f"rounds of {len(plan.request)} rows were not measured: at most {self.table.sizes[-1]} were",
        }[plan.why]
        return f"{labels[plan.arm[b]]}: {reason}; tokens a round expected of this row: {said}"

    # -- the plan -----------------------------------------------------------------------------------------------------

    @property
    def _drafts(self) -> int:
        return len(self.prior[0])

    def _named(self, state: State, context: Context, requests: list[int]) -> dict[int, int]:
        """The kinds of requests that are new."""
        new = [b for b, r in enumerate(requests) if r not in state.kind]
        if self.kind is None or not new:
            return {}
        said = kinds_of(self.kind, context.select(torch.tensor(new)))
        return {requests[b]: self._number.get(one, 0) for b, one in zip(new, said)}

    @cached_property
    def _number(self) -> dict[Hashable, int]:
        return {kind: i for i, kind in enumerate(self.kinds)}

    @cached_property
    def _draft(self) -> np.ndarray:
        return np.array([d for d, _ in self.arms])

    @cached_property
    def _length(self) -> np.ndarray:
        return np.array([k for _, k in self.arms])

    @cached_property
    def _longest(self) -> int:
        return max(1, int(self._length.max()))

    @cached_property
    def _unknown(self) -> np.ndarray:
        return np.zeros((self._drafts, 6))

    @cached_property
    def _counts(self) -> np.ndarray:
        """The prior ``[kinds, drafts, 1 + K, 2]``, worth at most ``trust`` rounds."""
        counts = np.array(
            [[each[: 1 + self._longest] for each in drafts] for drafts in self.prior], dtype=np.float64
        )
        return counts * np.minimum(1, self.trust / counts[:, :, :1, :1].clip(1e-9))

    @cached_property
    def _caps(self) -> tuple[np.ndarray, np.ndarray]:
        """All ways to open drafts up to a length: the longest arm of each draft ``[M, drafts]`` (-1: closed), and the arms that are open ``[M, arms]``."""
        of = [[-1, *np.flatnonzero(self._draft == d)] for d in range(self._drafts)]
        caps = np.array(list(product(*of)), dtype=np.int64).reshape(-1, self._drafts)
        upto = np.where(caps >= 0, self._length[caps], 0)
        opened = (self._draft < 0) | (self._length <= upto[:, self._draft])
        return caps, opened

    @cached_property
    def _costs(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """By batch: what does not change from plan to plan (``_cost``)."""
        return {}

    def _cost(self, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """``[M, arms]`` seconds that one more row adds to a plain round and to drafting, ``[M]`` those that rows share, ``[arms]`` seconds that a row
        with a proposal adds to verification, and ``[kinds, arms]`` a row's share of what the batch loses later."""
        if batch not in self._costs:
            caps, table = self._caps[0], self.table
            row = max(table.plainly(batch) - table.plainly(1), 0.0) / max(batch - 1, 1)
            once, each = (part[caps] for part in table.using(batch))
            self._costs[batch] = (
                row + np.where(self._draft >= 0, each[:, self._draft], 0.0),
                table.plainly(batch) - row * batch + np.where(caps >= 0, once, 0.0).sum(-1),
                table.verifying(batch),
                table.idling(batch) / max(batch, 1),
            )
        return self._costs[batch]

    def _plan(self, state: State, requests: list[int], own: np.ndarray, length: np.ndarray) -> Plan:
        B, table, (_, opened) = len(requests), self.table, self._caps
        counts = self._counts + state.shared
        asked, found = counts[..., 0], counts[..., 1]
        share = (found[..., 0] + 0.5) / (asked[..., 0] + 0.5)  # 1 for a draft that always proposes
        failing = 1 - (found[..., 1:] + 0.5) / (asked[..., 1:] + 1)  # [kinds, drafts, K]
        kind = np.array([state.kind.get(r, 0) for r in requests], dtype=np.int64)
        of_kind = np.bincount(kind, minlength=len(self.kinds))
        spread = np.array(self.spread)[kind]  # [B, drafts]
        with np.errstate(invalid="ignore"):
            factor = (spread + own[..., FAILED]) / (spread + own[..., EXPECTED])
        factor[~np.isfinite(factor)] = 1.0
        proposes = (ROUNDS * share[kind] + own[..., FOUND]) / (ROUNDS + own[..., ASKED])  # [B, drafts]
        standing = np.cumprod(1 - (failing[kind] * factor[..., None]).clip(0, 1), -1)  # [B, drafts, K]
        speculates, none = self._draft >= 0, self.arms.index((-1, 0))
        often = np.where(speculates, proposes[:, self._draft], 0.0)
        tokens = 1 + often * standing.cumsum(-1)[:, self._draft, self._length - 1]
        plain, idle, keys = table.plainly(B), np.full(B, none), tuple(requests)
        if not B or table.sizes[-1] < B:
            return Plan(keys, idle, tokens, plain, B / plain, "unmeasured", failing, of_kind)
        # What a row's draft has not read is charged to the rounds that are left.
        ends = np.array([state.ends.get(r, n + self.horizon) for r, n in zip(requests, length.tolist())])
        left = np.minimum(ends - length, self.horizon)
        unread = length[:, None] - own[..., READ]
        reading = np.array(table.read) * unread[:, self._draft] / np.maximum(left, 1)[:, None]
        reading[:, none] = 0.0
        each, shared, verifying, losing = self._cost(B)
        drafting = np.where(opened, each, np.inf)[:, None]
        later = losing[kind] if table.idle else None
        seconds, best = together(1 / tokens, drafting + often * verifying, shared, reading, later)
        rate = B / seconds
        if rate <= B / plain * (1 + self.margin):
            return Plan(keys, idle, tokens, plain, B / plain, "slower", failing, of_kind)
        return Plan(keys, best, tokens, plain, rate, "faster", failing, of_kind)


def faded(shared: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The counts ``[kinds, ...]`` after ``rows [kinds]`` more rows."""
    return shared * (KEEP**rows)[:, None, None, None]
