"""The rounds of ``executors.Ahead``: whole rounds as captured steps, the next launched before the last one's result is read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.slots import Slots
from specdec.cache.static import StaticStore, held, memory_of
from specdec.cache.token_index import Row
from specdec.composition import Composition
from specdec.executors.captured_drafts import drafting_of, samplings
from specdec.executors.round import staying
from specdec.graphs.drafting import Drafting, Side
from specdec.graphs.row_sampling import RowsKind, kind_of, settings_of
from specdec.graphs.static import SHORTEST, bucket_of, power
from specdec.graphs.tree_round import TreeRound
from specdec.graphs.whole_round import ACCEPTED, DRAWN, FINITE, NEXT, TOKENS, RoundShape, WholeRound
from specdec.kernels.device import to_device
from specdec.stop_rules import StopRules
from specdec.types import Context, Proposal, Round, Scores, Verdict
from specdec.verifiers.coupled import Coupled


def most(limits: StopRules, context: Context) -> np.ndarray:
    """``[B]`` where the rows' texts end at the latest."""
    return limits.max_length.numpy()[context.request.numpy()]


def hold(cache: Any, context: Context, ends: np.ndarray) -> tuple[int, Mapping[int, list[int]] | None]:
    """Have slots for rows up to ``ends [B]``. Pages are taken at once, and stay where they are. Returns as ``cache.static.held``.

    Raises:
        MemoryError: there are too few pages; every row keeps those that it has.
    """
    lengths = enumerate(zip(context.length.tolist(), ends.tolist()))
    return held(cache, [Row(b, n - 1, n, end) for b, (n, end) in lengths])[:2]


class Rows(NamedTuple):
    """The text and the random numbers of the rows that go on."""

    context: Context
    rng: Any

    def select(self, rows: Tensor) -> Rows:
        return Rows(self.context.select(rows), self.rng.select(rows))


class _Flight:
    """A round that was launched: its result goes to the host, into a buffer that no other round in flight uses."""

    def __init__(self, result: Tensor, into: Tensor):
        into.copy_(result, non_blocking=True)  # the next round overwrites ``result``
        self.result, self.event = into, None
        if result.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(result.device))

    def read(self) -> np.ndarray:
        """As ``WholeRound.run``; waits for the round."""
        if self.event is not None:
            self.event.synchronize()
        return self.result.numpy()


class Rounds:
    """The rounds of a batch after its prefill.

    Attributes:
        rows: those that go on. at: ``[B]`` their rows in the caches. cache: the target's. slots: the most of a row there. table: pages of its rows,
            if it has pages. memory: the draft's, ``None`` where there is none.
        carry: ``[B, ...]`` what the draft's rows carry to the round that begins on the host, ``None`` for nothing. part: the draft's in the step,
            ``None`` without a draft. whole: rows when the round in flight was launched. stale: whether the caches know less than ``rows``.
    """

    def __init__(
        self,
        composition: Composition,
        limits: StopRules,
        rows: Rows,
        cache: Any,
        memory: Slots | None,
        carry: Tensor | None,
    ):
        self.composition, self.limits, self.rows = composition, limits, rows
        self.cache, self.memory, self.carry = cache, memory, carry
        self.target: Any = composition.target
        self.part = self._part()
        self.tree = None if self.part is None else self.part.tree(composition.draft, composition.length)
        self.steps = 0 if self.part is None else composition.length
        longest = composition.drafting.info.longest
        if longest is not None:
            self.steps = min(self.steps, longest)
        self.nodes = self.steps if self.tree is None else self.tree.nodes
        self._kind: RowsKind | None = None
        self.at = torch.arange(rows.context.batch)
        self.whole, self.stale = rows.context.batch, False
        self.flight: _Flight | None = None
        self.number = 1
        self.program: WholeRound | None = None
        self._loose: dict[Any, WholeRound] = {}  # not captured yet, over the memory ``_over``
        self._over: Tensor | None = None
        self._host: list[Tensor] = []

    def _part(self) -> Drafting | None:
        draft = self.composition.draft
        kind = drafting_of(draft)
        return None if kind is None else kind(draft, self.memory)

    def start(self) -> None:
        """Launch a round for the rows and lengths of the host, unless one is in flight."""
        if self.flight is None:
            self.compact()
            self.flight = self._launch(fresh=True)

    def step(self, ahead: bool = True) -> Round:
        """Commit the round in flight. ``ahead``: launch the next one before, if it may be wanted."""
        began, flight = perf_counter(), self.flight
        assert flight is not None
        self.flight = self._launch(fresh=False) if ahead and self._goes_on() else None
        round = self._finish(flight, began)
        if not self.rows.context.batch:
            self.flight = None
        return round

    def join(self, rows: Rows, cache: Any, memory: Any, carry: Tensor | None) -> None:
        """Take in rows after ``compact``.

        Args:
            rows, cache: of all rows, the new ones last. memory, carry: the draft's, of the new ones.
        """
        self.rows, self.cache = rows, cache
        if self.memory is not None and self.part is not None:
            self.memory = self.part.join(self.memory, memory, cache)
            self.part = self._part()
        if self.carry is not None and carry is not None:
            self.carry = torch.cat([self.carry, carry])
        self.at = torch.arange(rows.context.batch)
        self.whole = len(self.at)

    def _goes_on(self) -> bool:
        """Whether a round after the one in flight may be wanted: no row has left, and budgets last longer."""
        context = self.rows.context
        return context.batch == self.whole and bool((self._most() - context.length.numpy() > 1).any())

    def _most(self) -> np.ndarray:
        return most(self.limits, self.rows.context)

    @torch.inference_mode()
    def _launch(self, fresh: bool) -> _Flight:
        """Launch the next round. ``fresh``: for the rows and lengths of the host; otherwise after the round in flight."""
        reach = self.rows.context.length.numpy()
        if fresh:
            self.slots, table = hold(self.cache, self.rows.context, self._most() + self.nodes)
            self.table = [] if table is None else [table[b] for b in range(len(reach))]
        else:
            reach = np.minimum(reach + (self.steps + 1), self._most())
        result = self._program(int(reach.max()) + self.nodes, fresh).run()
        if fresh:
            pinned = result.is_cuda
            self._host = [torch.empty(result.shape, dtype=torch.long, pin_memory=pinned) for _ in range(2)]
        self._host.reverse()
        return _Flight(result, self._host[0])

    def _program(self, longest: int, fresh: bool) -> WholeRound:
        """The program of a round whose rows take at most ``longest`` slots, with its inputs up to date."""
        length, before = min(power(longest, SHORTEST), self.slots), self.program
        if not fresh and before is not None and before.captured and before.shape.length == length:
            return before
        settings = self._settings()

        def update(program: Any) -> None:
            most, seed = torch.from_numpy(self._most()), self.rows.rng.seed
            if fresh:
                program.send(most, seed, _ends(self.rows.context), self.carry, self.table, settings)
            elif program is not before:
                assert before is not None
                program.send(most, seed, table=self.table, settings=settings)
                program.follow(before)

        self.program = self._made(self._shape(longest, length), update)
        return self.program

    def _settings(self) -> dict[str, np.ndarray]:
        """The rows' own, if each has settings of its own; the step's ``_kind`` is then for these, too."""
        sampling = self.composition.sampling
        if not sampling.by_request:
            return {}
        settings = settings_of(sampling, self.rows.context)
        self._kind = kind_of(settings, self._kind)
        return settings

    def _shape(self, longest: int, length: int) -> RoundShape:
        sampling, drawing = samplings(self.composition)
        kinds = (
            self._kind or sampling,
            self._kind if self._kind is not None and drawing is sampling else drawing,
        )
        rows = bucket_of([1] * self.rows.context.batch, [1], longest, self.slots).rows
        if self.part is not None and self.part.rows is not None:
            rows = min(rows, self.part.rows)
        return RoundShape(rows, length, self.steps, _verdict(self.composition), *kinds, self.tree)

    def _made(self, shape: RoundShape, update: Callable[[Any], None]) -> WholeRound:
        """The program of a shape after ``update``: captured, unless the shape occurs for the first time or cannot be captured."""
        memory: Any = memory_of(self.cache)
        part, key = self.part, (shape, self._of())

        def make(store: StaticStore) -> WholeRound:
            side = Side(self.target.steps.forward, store, self.target.vocab_size)
            kind: Any = WholeRound if shape.tree is None else TreeRound
            made: WholeRound = kind(side, part, shape, self.target.device, self.carry)
            made.owner = None if part is None else weakref.ref(self.composition.draft)
            return made

        made: Any = self.target.steps.program(memory, key, make, update)
        if memory._whole[0] is not self._over:  # a cache, or a pool of pages, that has grown
            self._loose, self._over = {}, memory._whole[0]
        if made is None:
            made = self._loose.get(key) or make(StaticStore(memory))
            self._loose[key] = made
            update(made)
        return made

    def _of(self) -> object:
        """What names the draft: the memory that a program holds, or, without any, the model that it holds."""
        if self.memory is not None:
            return self.memory.layers[0][0].untyped_storage().data_ptr()
        draft = self.composition.draft
        return None if self.part is None else ("model", id(drafting_of(draft).modules(draft)[1]))

    def _finish(self, flight: _Flight, began: float) -> Round:
        """Commit the round in flight, for the rows that were there when the one before had been committed."""
        found = flight.read()
        arrived = perf_counter()
        found = found[self.at.numpy()]
        _check_finite(found)
        round = self._round(found, arrived - began)
        rows = self.rows._replace(context=round.context.append(round.verdict.tokens, round.committed))
        if bool(round.finished.any()):
            stay, ended = ((round.finished == end).nonzero()[:, 0] for end in (False, True))
            self._keep(rows.context.select(ended), self.at[ended].tolist())
            rows, self.at = rows.select(stay), self.at[stay]
        self.rows, self.number, self.stale = rows, self.number + 1, True
        round.seconds["total"] = perf_counter() - began  # type: ignore[index]
        return round

    def _keep(self, context: Context, rows: list[int]) -> None:
        """As ``protocols.KeepsTexts``. A round in flight writes to slots after those of these texts."""
        if (
            self.composition.keeps is not None and self.composition.notes is None
        ):  # activations stay in the step
            self._tell(context, rows)
            self.composition.keeps.keep_texts(self.cache, context, rows)

    def _tell(self, context: Context, rows: list[int]) -> None:
        """Tell the target's cache what its ``rows`` hold."""
        words = context.tokens.numpy()
        for i, (b, n) in enumerate(zip(rows, context.length.tolist())):
            self.cache.remember(b, words[i], 0, n - 1, 0)

    def _round(self, found: np.ndarray, seconds: float) -> Round:
        """The record of a result, which took ``seconds``."""
        context, composition = self.rows.context, self.composition
        budget = (self.limits.room(context) - 1).clamp(max=composition.length)
        if self.tree is None:
            proposal, verdict = _decisions(found, budget.clamp(max=self.steps) if self.steps else None)
        else:
            proposal, verdict = _of_tree(found, self.nodes, self.steps)
        committed, finished = self.limits.apply(context, verdict)
        return Round.of(
            context,
            proposal,
            Scores(torch.empty(context.batch, 0, composition.target.vocab_size)),
            verdict,
            committed,
            budget,
            finished,
            short=budget < self.steps,
            number=self.number,
            lossless=composition.verifying.lossless,
            seconds={"target": seconds},
        )

    def compact(self) -> None:
        """Move the rows that go on to the first rows of the caches, and tell these what they hold; no round may be in flight."""
        if not self.stale:
            return
        gone = torch.ones(self.whole, dtype=torch.bool)
        gone[self.at] = False
        stay = staying(gone)
        self.rows = self.rows.select(torch.searchsorted(self.at, stay))
        context = self.rows.context
        self._tell(context, stay.tolist())
        self.cache = self.cache.select(stay)
        if self.memory is not None and self.part is not None:
            self.memory = self.part.select(self.memory, stay, context)
            self.part = self._part()
        if self.program is not None and self.program.carry is not None:
            self.carry = self.program.carry[to_device(stay, self.program.carry.device)]
        self.at = torch.arange(context.batch)
        self.whole, self.stale = context.batch, False


def _verdict(composition: Composition) -> Literal["rejection", "fused", "coupled"]:
    """How a round decides, as ``MicroBatch.verify`` chooses."""
    if composition.verifying.takes_logits and composition.sampling.only_temperature:
        return "fused"
    return "coupled" if type(composition.verifier) is Coupled else "rejection"


def _ends(context: Context) -> Tensor:
    """``[B, 3]`` lengths and last two tokens."""
    last = context.length[:, None] + torch.tensor([-2, -1])
    return torch.cat([context.length[:, None], context.tokens.gather(1, last)], 1)


def _check_finite(found: np.ndarray) -> None:
    """Raise ValueError for logits that have no distribution."""
    if found[:, FINITE : DRAWN + 1].all():
        return
    for column, whose in ((FINITE, "logits"), (DRAWN, "the draft's logits")):
        if not found[:, column].all():
            b = int(found[:, column].argmin())
            raise ValueError(
                f"{whose} of row {b} have NaN, +inf or nothing but -inf, which is no distribution: a model in float16 may need bfloat16 or "
                "float32"
            )


def _decisions(found: np.ndarray, budget: Tensor | None) -> tuple[Proposal, Verdict]:
    """Proposal and verdict of a result; ``budget [B]``: drafted tokens of each row, ``None`` without a draft."""
    B = len(found)
    accepted, bonus = found[:, ACCEPTED].copy(), found[:, NEXT].copy()
    N = 0 if budget is None else max(int(budget.max()), 0)
    tokens, nodes = found[:, TOKENS : TOKENS + N], np.arange(N)
    taken = nodes < accepted[:, None]
    path = np.where(taken, nodes, -1)
    new = np.zeros((B, N + 1), dtype=np.int64)
    np.multiply(tokens, taken, out=new[:, :N])
    new[np.arange(B), accepted] = bonus
    if budget is None or not N:
        proposal = Proposal.none(B)
    else:
        proposal = Proposal.chain(torch.from_numpy(tokens.copy()), budget)
    return proposal, Verdict(*map(torch.from_numpy, (path, accepted, bonus, new)))


def _of_tree(found: np.ndarray, nodes: int, steps: int) -> tuple[Proposal, Verdict]:
    """As ``_decisions``, for trees of at most ``nodes`` nodes and paths of at most ``steps``."""
    accepted, bonus, tokens = found[:, ACCEPTED].copy(), found[:, NEXT].copy(), found[:, TOKENS:]
    parents = found[:, TOKENS + nodes + steps :]
    size = (parents > -2).sum(1)
    B, N = len(found), int(size.max())
    taken = found[:, TOKENS + nodes : TOKENS + nodes + min(steps, N)]  # a longer path has more nodes
    path, new = np.full((B, N), -1), np.zeros((B, N + 1), dtype=np.int64)
    D, rows = taken.shape[1], np.arange(B)
    path[:, :D] = taken
    new[:, :D] = np.where(taken < 0, 0, tokens[rows[:, None], taken])
    new[rows, accepted] = bonus
    ids, above = (torch.from_numpy(x[:, :N].copy()) for x in (tokens, parents))
    proposal = Proposal(ids, above, torch.from_numpy(size))
    return proposal, Verdict(*map(torch.from_numpy, (path, accepted, bonus, new)))
