"""Continuous batching: requests join a running batch as they arrive and leave it as they finish (Orca, Yu et al., OSDI 2022).

New rows are prefilled as a micro-batch of their own, which then joins a running one between two of its rounds. ``Serial`` and ``Ahead`` run
one micro-batch, the pipeline several. A row's decisions are keyed by its own seed and length, so that its output does not depend
on the other rows in flight.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from fractions import Fraction
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from specdec.arm_policy import Choice
from specdec.capabilities import ModelInfo
from specdec.composition import Composition
from specdec.executors.ahead import Ahead
from specdec.executors.ahead_joining import AheadScheduler
from specdec.executors.contract import Executor
from specdec.executors.pipelined import Pipelined
from specdec.executors.round import MicroBatch
from specdec.executors.scheduler import Scheduler
from specdec.executors.worker import DraftRequest, InlineWorker
from specdec.kernels.device import own_precision
from specdec.per_request import Failures, PerRequest
from specdec.prompts import by_request, prepared, rows_of
from specdec.protocols import PooledCache
from specdec.rng import Philox, seeds
from specdec.serving.arrivals import Arrivals
from specdec.serving.requests import Finished, Request
from specdec.serving.settings import Settings, micro_batches_of, rules_of
from specdec.serving.states import Due, Open, Place, Ready, let_go, outside
from specdec.stats import Record, Stats
from specdec.texts import added
from specdec.types import Context, Round

POLL = 1e-3
"""Seconds between two questions to a source that had nothing, while no row is in flight."""


class Server:
    """The running micro-batches, and the requests in them.

    Attributes:
        places: of the micro-batches. scheduler: runs them. time: of the stream's clock.
    """

    scheduler: Scheduler | AheadScheduler

    def __init__(
        self, composition: Composition, executor: Executor, requests: Iterable[Request], settings: Settings
    ):
        self.composition, self.executor, self.settings = composition, executor, settings
        self.selection = composition.begin(settings.limit)
        self._by_request = by_request(composition)
        own = composition.sampling.own
        self._tables = {name: table for name, table in own.items() if isinstance(table, PerRequest)}
        noted = next((table.failures for table in self._tables.values()), None)
        self._fails_alone = noted is not None
        self._failures: Failures = {} if noted is None else noted
        self.arrivals = Arrivals(requests, settings.admission, lambda: self.time)
        self.places = [Place(number) for number in range(micro_batches_of(executor, settings))]
        self.rows = -(-settings.limit // len(self.places))  # of a micro-batch at most
        self.limits = replace(rules_of(composition, settings), max_length=torch.zeros(64, dtype=torch.long))
        self.open: dict[int, Open] = {}
        self.tokenizer = ModelInfo.of(composition.target).tokenizer
        self.seeds, self.rounds, self.began = torch.zeros(0, dtype=torch.long), Fraction(0), perf_counter()
        if settings.capacity is not None:
            self._provide(settings.capacity)

    def _provide(self, capacity: int) -> None:
        """Make caches for the rows of all micro-batches; their pages come from one pool."""
        first: Any = None
        for place in self.places:
            if isinstance(first, PooledCache):
                place.spare = first.beside(0, capacity)
            else:
                first = self.composition.target.cache(self.rows, capacity)
                place.spare = first = first.select(torch.arange(0))

    @property
    def time(self) -> float:
        return float(self.rounds) if self.settings.clock == "rounds" else perf_counter() - self.began

    def run(self) -> Iterator[Finished]:
        """Serve all requests; yields them in the order in which they finish."""
        steps = self._steps()
        try:
            while True:
                with torch.inference_mode(), own_precision():  # off in the consumer's code
                    one = next(steps, None)
                if one is None:
                    return
                yield one
        finally:
            steps.close()
            del self.arrivals  # which refer to this server, whose memory the next stream could not have

    def _steps(self) -> Generator[Finished, None, None]:
        if isinstance(self.executor, Pipelined):
            self.scheduler = self.executor.scheduler(self.composition, len(self.places), self.rows)
        elif isinstance(self.executor, Ahead):
            self.scheduler = AheadScheduler(
                self.composition, None if self.settings.capacity is None else self.rows
            )
        else:
            self.scheduler = Scheduler(InlineWorker(self.composition))
        try:
            while True:
                yield from self._deal()
                for place in self.places:
                    if place.waiting and not place.micro_batch:
                        draft_request = yield from self._admit(place)
                        if draft_request is not None and place.micro_batch:
                            self.scheduler.go_on(place.micro_batch, draft_request, self.limits)
                if self.scheduler.running:
                    yield from self._round()
                elif self.arrivals.over:
                    return
                else:
                    self._wait()
        finally:
            self.scheduler.stop()

    # -- arrivals ------------------------------------------------------------------------------------------------------

    def _deal(self) -> Iterator[Finished]:
        """Assign requests that are due, as many as there is room for, each to the micro-batch with the fewest rows.

        No micro-batch gets more than its share of the limit. Requests that were cancelled, or are refused, are yielded at once.
        """
        while sum(place.load for place in self.places) < self.settings.limit:
            dealt = (ready.due.number for place in self.places for ready in place.waiting)
            due = self.arrivals.take({*self.open, *dealt})
            if due is None:
                return
            try:
                if due.request.cancelled is not None and outside(due.request.cancelled):
                    yield self._unserved(due, "cancelled")
                    continue
                ready = Ready(due, *self._prepared(due.number, due.request))
            except Exception as error:
                if self.settings.errors == "raise":
                    raise
                yield self._unserved(due, "error", error)
                continue
            place = min(self.places, key=lambda place: (place.load, place.number in self.scheduler.running))
            place.waiting.append(ready)

    def _unserved(self, due: Due, finish: str, error: Exception | None = None) -> Finished:
        """The result of a request that never joined."""
        now = self.time
        times: Any = {"arrived": due.arrived, "started": now, "first_token": now, "finished": now}
        text = "" if self.tokenizer else None
        if error is not None:
            let_go(error)
        return Finished(due.request, due.number, [], text, finish, Stats(), **times, error=error)

    def _wait(self) -> None:
        """Wait, with no row in flight, until the next request is due, or until the source is asked again."""
        if self.arrivals.waiting:  # all that joined ended at once
            return
        due = self.arrivals.early
        if due is None:
            sleep(POLL)
        elif self.settings.clock == "rounds":
            self.rounds = max(self.rounds, Fraction(float(due.arrived)))
        else:
            sleep(min(max(due.arrived - self.time, 0), 3600))  # no machine sleeps for any time at once
        self.scheduler.clock = perf_counter()

    def _admit(self, place: Place) -> Generator[Finished, None, DraftRequest | None]:
        """Prefill waiting requests as a micro-batch, and let it join the running one; returns the request to the drafts."""
        arrived, place.waiting = place.waiting, []
        started = self.time
        due, contexts, own = zip(*arrived)
        for ready in arrived:
            index, request, _ = ready.due
            one = self.open[index] = Open.of(ready, started, self.tokenizer, self.settings.errors == "yield")
            if request.cancelled is not None or request.on_chunk is not None or self._fails_alone:
                self.limits.cancelled[index] = one.ends
        try:
            micro_batch, draft_request = self._prefilled(place, contexts, Philox(torch.cat(own)))
        except MemoryError as error:
            if self.settings.errors == "raise":
                raise
            large = max(arrived, key=lambda ready: ready.context.tokens.shape[1])
            for ready in arrived:
                if ready is not large:
                    self.open.pop(ready.due.number)
            self._close(large.due.number)
            self.limits.reasons.pop(large.due.number, None)
            yield self._unserved(large.due, "error", error)
            place.waiting = [ready for ready in arrived if ready is not large]
            return (yield from self._admit(place)) if place.waiting else None
        for index, _, _ in due:
            self.open[index].first_token = self.time
        self._count(draft_request.round)
        if micro_batch:
            self._join(place, micro_batch)
        yield from self._finished(draft_request.round)
        return draft_request if micro_batch else None

    def _prefilled(
        self, place: Place, contexts: Sequence[Context], rng: Philox
    ) -> tuple[MicroBatch, DraftRequest]:
        """A micro-batch of new rows after its prefill.

        Raises:
            MemoryError: their cache, or their pages, do not fit; nothing else has changed.
        """
        micro_batch = MicroBatch(
            self.composition, joined(contexts, self.settings.capacity), rng, self.selection
        )
        running: Any = next((cache for cache in self._caches(place) if cache is not None), None)
        if isinstance(running, PooledCache):  # joining pages later copies nothing
            micro_batch.cache = running.beside(
                len(contexts), max(context.tokens.shape[1] for context in contexts)
            )
        return micro_batch, self.scheduler.prefill(place.number, micro_batch, self.limits)

    def _caches(self, place: Place) -> Iterator[Any]:
        """The target's caches, that of ``place`` first."""
        for one in (place, *self.places):
            yield one.micro_batch.cache if one.micro_batch else one.spare

    def _prepared(self, index: int, request: Request) -> tuple[Context, Tensor]:
        """A context of one row, and its seed.

        Raises:
            ValueError: the request cannot be served; the message has its number.
        """
        settings, eos, strings = self.settings, request.eos_token_id, request.stop_strings
        try:
            if isinstance(request.prompt, Sized) and not len(request.prompt):
                raise ValueError("its prompt is empty: give at least one token")
            rows = rows_of(self.composition.target, request.prompt)
            if len(rows) > 1:
                raise ValueError(f"prompt holds {len(rows)} prompts: make a Request of each")
            context, limits = prepared(
                self.composition,
                rows,
                [request.max_new_tokens],
                settings.eos_token_id if eos is None else eos,
                settings.stop_strings if strings is None else strings,
                (),
            )
            context = replace(context, request=torch.tensor([index]))
            for sampling in self._by_request:
                sampling.check_requests(index)
            seed = self._seed(index, request)
            if request.sampling is not None:
                if not self._tables:
                    raise ValueError("it has a sampling: give serve(..., own_sampling=True)")
                parts = self.composition
                request.sampling.probe(parts.target.vocab_size, parts.device or "cpu", self.tokenizer)
                if isinstance(self.executor, Ahead):
                    self.executor.check_own(request.sampling)
        except (TypeError, ValueError) as error:
            what = (
                str(error)
                .replace("prompt 0", "its prompt")
                .replace(" for row 0", "")
                .replace(", in a list,", "")
            )
            raise type(error)(f"request {index}: {what}") from error
        need = context.tokens.shape[1]
        if settings.capacity is not None and need > settings.capacity:
            raise ValueError(
                f"request {index}: {len(rows[0])} tokens, a budget of {request.max_new_tokens} and a draft's block need {need} slots and "
                f"capacity is {settings.capacity}: raise it, or leave it out so that rows grow"
            )
        known = self.limits.max_length
        while index >= len(known):
            known = torch.cat([known, torch.zeros_like(known)])
        known[index] = limits.max_length[0]
        if known is not self.limits.max_length:
            self.limits = replace(self.limits, max_length=known)
        if eos is not None or strings is not None:
            self.limits.own[index] = limits
        if request.sampling is not None:
            for name, value in request.sampling.settings.items():
                self._tables[name].own[index] = value
        if "grammar" in self.composition.sampling.own:
            self.limits.end_at(index, self.composition.sampling.end_ids(index))
        return context, seed

    def _seed(self, index: int, request: Request) -> Tensor:
        """``[1]``: the seed of ``generate(prompt, seed=request.seed)``, or of row ``index`` of a batch with the stream's seed."""
        if request.seed is not None or self.settings.seed is None:
            return seeds(request.seed, 1)
        if index >= len(self.seeds):
            self.seeds = seeds(self.settings.seed, max(64, 2 * index))
        return self.seeds[index : index + 1]

    def _join(self, place: Place, micro_batch: MicroBatch) -> None:
        """Append the rows of ``micro_batch`` to those that run."""
        running = place.micro_batch
        if running is None:
            if place.spare is not None:
                micro_batch.cache, place.spare = place.spare.join(micro_batch.cache), None
            place.micro_batch = micro_batch
            return
        running.cache = running.cache.join(micro_batch.cache)
        running.context = joined([running.context, micro_batch.context])
        running.rng = Philox(torch.cat([running.rng.seed, micro_batch.rng.seed]))  # type: ignore[attr-defined]
        if running.next_arms is not None:  # arms are chosen a round ahead, for new rows too
            micro_batch.choose(ahead=True)
            assert micro_batch.next_arms is not None
            running.next_arms = Choice._make(map(torch.cat, zip(running.next_arms, micro_batch.next_arms)))

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _round(self) -> Iterator[Finished]:
        """Verify the next proposal, let waiting requests join its micro-batch, and ask for its next proposal."""
        running = len(self.scheduler.running)
        micro_batch, draft_request = self.scheduler.verify(self.limits)
        place = self.places[draft_request.micro_batch]
        self.rounds += Fraction(1, running)
        self._count(draft_request.round)
        if not micro_batch:
            place.micro_batch = None
            if self.settings.capacity is not None:
                place.spare = micro_batch.cache.select(torch.arange(0))
        yield from self._finished(draft_request.round)
        yield from self._deal()
        joins = None
        if micro_batch and place.waiting and self.scheduler.take_rows(micro_batch):
            joins = yield from self._admit(place)
        self.scheduler.go_on(micro_batch, draft_request, self.limits, joins)

    def _count(self, round: Round) -> None:
        """Add a round to its requests, and show what it brought."""
        record, tokens, ended = Record.of(round), round.verdict.tokens.tolist(), round.finished.tolist()
        new = [ids[:count] for ids, count in zip(tokens, record.committed)]
        for b, index in enumerate(record.request):
            one, committed = self.open[index], len(new[b])
            new[b] = one.add(new[b], self._failures.pop(index, ()), ended[b])
            if len(new[b]) < committed:
                record.committed[b], record.truncated[b] = len(new[b]), True
            if new[b]:
                one.stats._add(record, b)
            if round.number == 0 and round.scores.found:
                one.cached = round.scores.found[b]
        if self.settings.on_round is not None:
            with torch.inference_mode(False):
                self.settings.on_round(round)
        for b, index in enumerate(record.request):
            self.open[index].show(new[b], self.limits.reasons[index] if ended[b] else None)

    def _close(self, index: int) -> Open:
        """Forget a request that was admitted, and what was kept for it."""
        self.limits.cancelled.pop(index, None)
        self.limits.own.pop(index, None)
        for table in self._tables.values():
            table.own.pop(index, None)
        one = self.open.pop(index)
        if one.failed is not None and one.error is None:
            one.error = one.failed.error
            let_go(one.error)
        return one

    def _finished(self, round: Round) -> Iterator[Finished]:
        time = self.time
        for index in sorted(round.context.request[round.finished].tolist()):
            one, finish = self._close(index), self.limits.reasons.pop(index)
            yield Finished(
                request=one.due.request,
                index=index,
                ids=one.ids,
                text=added(self.tokenizer, one.prompt, one.ids) if self.tokenizer else None,
                finish=finish if one.error is None else "error",
                stats=one.stats,
                arrived=one.due.arrived,
                started=one.started,
                first_token=one.first_token,
                finished=time,
                error=one.error,
                prompt_ids=one.prompt,
                cached=one.cached,
            )
        self.scheduler.clock = perf_counter()  # the consumer's time belongs to no round


def joined(contexts: Sequence[Context], capacity: int | None = None) -> Context:
    """One context of all rows, in order, with a buffer for the longest (or for ``capacity`` tokens)."""
    wide = max(capacity or 0, *(context.tokens.shape[1] for context in contexts))
    pad = torch.nn.functional.pad
    return Context(
        torch.cat([pad(context.tokens, (0, wide - context.tokens.shape[1])) for context in contexts]),
        torch.cat([context.length for context in contexts]),
        torch.cat([context.prompt_length for context in contexts]),
        torch.cat([context.request for context in contexts]),
    )
