"""Optimistic drafting: while the target verifies a block, the draft goes on as if all of it were accepted (PEARL, arXiv 2408.11850).

While round r is verified, a worker thread guesses the bonus token (a proposal of one token after the whole block) and drafts the
block after it (a second proposal). A row whose block was accepted as a whole and whose bonus token was guessed has its next block
already; the other rows draft again.

**Why the output keeps the target's distribution under ``Rejection``.** Number the blocks that are drafted for a row at
committed length ``a`` as its tries 0, 1, ... at ``a``. A block that was drafted ahead and dropped is one try; the block drafted instead
is another (both start at ``a`` when only the guess was wrong, or when later rounds happen to end there). Try c draws with attempt 2c,
and the guess before it with attempt 2c + 1, so that no uniform is used twice. Whether a block is kept depends on the uniforms of the
round before (its acceptances and its bonus) and on the guess, never on the block itself. Given that a block is kept, its tokens are
therefore draws from the probabilities that they carry, with uniforms that nothing else has used, as if they were drafted now. A draft
may remember dropped blocks and guesses, but their uniforms are not used again. Verification uses every key once, as always, because the
rounds of a row start at different lengths.

**Under ``Coupled``** draws are races keyed by position, and all committed tokens equal those of the serial run. The guess of the bonus
token is then drawn with the target's own uniforms and is right as often as a node is accepted. Under ``Rejection`` try 0 has the serial
executor's keys, and greedy output equals the serial executor's.

**Arms** of a pool are chosen one round ahead for all rows, before the verdict tells whose guess was right: if only the other rows
chose again, an arm would be kept exactly when it did well. Capacities hold in every round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import ModelInfo
from specdec.composition import Composition
from specdec.drafts.pool import merged
from specdec.executors.round import Drafted, DraftRunner, MicroBatch
from specdec.kernels.streams import own_stream
from specdec.rng import Key, Rekeyed, Rng
from specdec.stop_rules import StopRules
from specdec.types import Context, Proposal, Round

OWN = 64  # a draft may use the attempt numbers below this for itself (below 8 inside an ``Attempt``)


@dataclass(eq=False)
class Guesses:
    """How often drafting ahead paid, over all runs of the executor that fills this counter.

    Attributes:
        made: blocks drafted ahead, one a row and round. accepted: those whose round was accepted as a whole and was not the row's last, so
            that only the guess of the bonus token decided. held: those that became the next proposal.
    """

    made: int = 0
    accepted: int = 0
    held: int = 0

    @property
    def rate(self) -> float:
        """The share of blocks drafted ahead that were used. NaN when there was none."""
        return self.held / self.made if self.made else float("nan")


@dataclass(frozen=True)
class Optimistic:
    """The draft works for the next round while the target verifies this one; all rows are one micro-batch.

    This is for drafts that propose chains and are ``revocable``. Draft and target run at the same time; what this saves is the negative
    ``"overlapped"`` in ``stats.seconds``. A draft that forgets old tokens (``Windowed``) must be able to go back over two blocks:
    give it ``block=2 * length``, or it reads its prompt again.

    Args:
        threads: draft ahead on a thread (with a stream of its own on CUDA). ``False`` drafts between two steps, with the same
            output and no gain, for debugging and timing.
        guesses: a counter to fill, as in ``Optimistic(guesses=(counter := Guesses()))``.
    """

    threads: bool = True
    guesses: Guesses | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.guesses is not None and not isinstance(self.guesses, Guesses):
            raise TypeError(f"guesses is {self.guesses!r}: give a Guesses() to fill, or None")

    def check(self, composition: Composition) -> None:
        """Called by ``build``.

        Raises:
            ValueError: a draft is not revocable, proposes trees, or runs on the target's own object where that serves one call at a
                time.
        """
        target = ModelInfo.of(composition.target)
        for info in (part.info for part in composition.drafting.members):
            if info.trees:
                raise ValueError(
                    f"draft {info.name!r} proposes trees, and Optimistic goes on from a chain: use drafts.Model, or executor Serial()"
                )
            if not info.revocable:
                raise ValueError(
                    f"draft {info.name!r} cannot take back a block that it drafted ahead (it does not declare "
                    "revocable=True): use drafts.Model, NGram or a function, or executor Serial()"
                )
        for info in (part.info for part in composition.drafting.parts):
            if self.threads and ModelInfo.of(info.model).shares_with(target):
                raise ValueError(
                    f"draft {info.name!r} runs on the target's own object, which serves one call at a time: give the draft a "
                    "wrapper of its own, HFModel(model.model, model.tokenizer), or use Optimistic(threads=False)"
                )

    def run(self, composition: Composition, context: Context, rng: Rng, limits: StopRules) -> Iterator[Round]:
        micro_batch = MicroBatch(composition, context, rng, composition.begin(context.batch))
        drafting = DraftRunner(composition)
        tries: Counter[tuple[int, int]] = Counter()  # (request, length): blocks drafted ahead from there
        ready: _Ready | None = None
        # Leaving this block waits for the worker, however the run ends.
        with ThreadPoolExecutor(1, "specdec-optimistic") as worker:
            while micro_batch:
                began = perf_counter()
                if micro_batch.number:
                    micro_batch.choose(ahead=True)
                    budget = micro_batch.budget(limits)
                    drafted = _draft(micro_batch, drafting, budget, ready, tries)
                    bet = _Bet.on(micro_batch, drafted.proposal, limits, tries)
                    later = worker.submit(bet.draft, drafting) if self.threads and bet else None
                    round = micro_batch.verify(limits, drafted, budget)
                    ready = later.result() if later else bet.draft(drafting) if bet else None
                    if ready is not None:
                        round.seconds["draft"] += ready.drafted.seconds  # type: ignore[index]
                        ready = self._keep(ready, round)
                else:
                    round = micro_batch.prefill(limits)
                    drafting.start(micro_batch.context, micro_batch.cache)
                    round.seconds["prefill"] = perf_counter() - began  # type: ignore[index]
                drafting.observe(round)
                stay = micro_batch.settle(round)
                if stay is not None and micro_batch:
                    drafting.select(stay, micro_batch.cache)
                    ready = ready and ready.select(stay)
                round.seconds["total"] = perf_counter() - began  # type: ignore[index]
                yield round

    def _keep(self, ready: _Ready, round: Round) -> _Ready:
        """What was drafted ahead, kept for the rows whose guess was right."""
        verdict = round.verdict
        whole = ready.good & (verdict.accepted == round.proposal.size) & ~round.finished
        good = whole & (verdict.bonus == ready.guess)
        if self.guesses is not None:
            self.guesses.made += int(ready.good.sum())
            self.guesses.accepted += int(whole.sum())
            self.guesses.held += int(good.sum())
        return ready._replace(good=good)


class _Ready(NamedTuple):
    """Blocks drafted ahead for the rows ``good [B]``, after the guessed bonus tokens ``guess [B]``."""

    drafted: Drafted
    guess: Tensor
    good: Tensor

    def select(self, rows: Tensor) -> _Ready:
        proposal = self.drafted.proposal.select(rows)
        return _Ready(self.drafted._replace(proposal=proposal), self.guess[rows], self.good[rows])


class _Bet(NamedTuple):
    """What to draft ahead: ``context`` with all of the block accepted, and ``budget [B]``, the longest block after it and its bonus token."""

    context: Context
    budget: Tensor
    arm: Tensor | None
    guess: _Attempts
    block: _Attempts
    inference: bool
    stream: Any

    def __bool__(self) -> bool:
        return bool((self.budget > 0).any())

    @staticmethod
    def on(
        micro_batch: MicroBatch, proposal: Proposal, limits: StopRules, tries: Counter[tuple[int, int]]
    ) -> _Bet:
        """Rows that would be finished, or whose next block would be empty, get no budget."""
        if not bool(tree.is_chain(proposal.parents, proposal.size).all()):
            raise ValueError(
                "the draft proposed a tree, and Optimistic goes on from a chain: declare DraftInfo(..., trees=True), so that build() refuses "
                "it, and use executor Serial()"
            )
        context = micro_batch.context.append(proposal.tokens.cpu(), proposal.size)
        longest = (
            micro_batch.composition.length if micro_batch.next_arms is None else micro_batch.next_arms.length
        )
        budget = (limits.room(context) - 2).clamp(min=0).clamp(max=longest)
        starts = [*zip(context.request.tolist(), (context.length + 1).tolist())]
        attempt = 2 * torch.tensor([tries[start] for start in starts])
        tries.update(start for start, n in zip(starts, budget.tolist()) if n)
        device = micro_batch.composition.device
        stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
        arm = None if micro_batch.next_arms is None else micro_batch.next_arms.arm
        guess, block = _Attempts(micro_batch.rng, attempt + 1), _Attempts(micro_batch.rng, attempt)
        return _Bet(context, budget, arm, guess, block, torch.is_inference_mode_enabled(), stream)

    def draft(self, drafting: DraftRunner) -> _Ready:
        """Guess the bonus token, then draft the block after it. Any thread may call this while no other uses ``drafting``."""
        began = perf_counter()
        with torch.inference_mode(self.inference), self._own_stream():  # both are settings of a thread
            first = drafting.propose(self.context, (self.budget > 0).long(), self.guess, self.arm)
            good = first.proposal.size > 0  # an n-gram draft may have no guess
            guess = torch.zeros_like(self.budget)
            if first.proposal.nodes:
                guess = torch.where(good, first.proposal.tokens[:, 0].cpu(), guess)
            context = self.context.append(guess[:, None], good.long())
            second = drafting.propose(context, self.budget * good, self.block, self.arm)
            drafting.forget()  # the next round to be observed is that of an earlier proposal
        seconds = perf_counter() - began
        return _Ready(Drafted(second.proposal, seconds, _sum(first.spent, second.spent)), guess, good)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On CUDA, a stream beside the target's: it starts after the work queued there so far, and its work is done on exit."""
        if self.stream is None:
            yield
            return
        own = own_stream(self.stream.device)
        own.wait_event(self.stream.record_event())
        try:
            with torch.cuda.stream(own):
                yield
        finally:  # the memory that it uses may be used again then
            own.synchronize()


class _Attempts(Rekeyed):
    """The rows' decisions under attempt numbers ``attempt [B]``, which are added to the draft's own."""

    def __init__(self, rng: Rng, attempt: Tensor):
        super().__init__(rng)
        self.attempt = attempt

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        return self._ask(lambda rng, p, k: rng.categorical(p, k), probs, key, probs.shape[:-1])

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        return self._ask(lambda rng, p, k: rng.accept(p, k), prob, key, prob.shape)

    def select(self, rows: Tensor) -> _Attempts:
        return _Attempts(self.rng.select(rows), self.attempt[rows])

    def _ask(
        self, ask: Callable[[Rng, Tensor, Key], Tensor], probs: Tensor, key: Key, shape: torch.Size
    ) -> Tensor:
        """Ask for the rows of one attempt number at a time, because a key has one number for all its rows."""
        groups = self.attempt.unique().tolist()
        if len(groups) == 1:
            return ask(self.rng, probs, key._replace(attempt=key.attempt + OWN * groups[0]))
        names = [torch.as_tensor(part).expand(shape) for part in key[:3]]
        answer: Tensor | None = None
        for attempt in groups:
            rows = (self.attempt == attempt).nonzero()[:, 0]
            at, depth, sibling = (name[rows] for name in names)
            mine = Key(at, depth, sibling, key.stream, key.attempt + OWN * attempt)
            part = ask(self.rng.select(rows), probs[rows.to(probs.device)], mine)
            answer = part.new_zeros(shape) if answer is None else answer
            answer[rows.to(part.device)] = part
        assert answer is not None
        return answer


def _draft(
    micro_batch: MicroBatch,
    drafting: DraftRunner,
    budget: Tensor,
    ready: _Ready | None,
    tries: Mapping[tuple[int, int], int],
) -> Drafted:
    """The next proposal: the blocks that are ready, and new ones for the other rows."""
    context, arm = micro_batch.context, None if micro_batch.choice is None else micro_batch.choice.arm
    good = torch.zeros(context.batch, dtype=torch.bool) if ready is None else ready.good
    anew = budget.masked_fill(good, 0)
    old = Drafted(Proposal.none(context.batch), 0.0, None if ready is None else ready.drafted.spent)
    if ready is not None and bool(good.any()):
        kept = ready.drafted.proposal
        old = old._replace(proposal=replace(kept, size=kept.size.masked_fill(~good, 0)))
    if ready is not None and not bool((anew > 0).any()):
        return old
    starts = zip(context.request.tolist(), context.length.tolist())
    attempt = 2 * torch.tensor([tries.get(start, 0) for start in starts])
    new = drafting.propose(context, anew, _Attempts(micro_batch.rng, attempt), arm)
    proposal = new.proposal
    if bool(good.any()):
        parts = [(old.proposal, good.nonzero()[:, 0]), (new.proposal, (~good).nonzero()[:, 0])]
        proposal = merged(parts, context.batch)
    return Drafted(proposal, new.seconds, _sum(old.spent, new.spent))


def _sum(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """Seconds of each arm, together."""
    return other if one is None else one if other is None else tuple(a + b for a, b in zip(one, other))
