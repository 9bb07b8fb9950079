"""Continuous batching: requests join a running batch as they arrive and leave it as they finish (Orca, Yu et al., OSDI 2022).

New rows are prefilled as a lane of their own, which then joins the running one. A row's decisions are keyed by its own seed and length,
so that what it says does not depend on who else is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from specdec.executors.lane import Drafting, Lane
from specdec.executors.serial import Serial
from specdec.limits import Limits
from specdec.requests import Finished, Request
from specdec.rng import Philox, seeds
from specdec.stats import Record, Stats
from specdec.types import Context, Round

if TYPE_CHECKING:
    from specdec.decoder import Decoder

CLOCKS = ("wall", "rounds")


@dataclass(frozen=True, eq=False)
class Settings:
    """What ``Decoder.serve`` was asked for."""

    limit: int = 16
    seed: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] = ()
    clock: Literal["wall", "rounds"] = "wall"
    capacity: int | None = None
    on_round: Callable[[Round], None] | None = None


def check(decoder: Decoder, settings: Settings) -> None:
    """Refuse what cannot be served, before anything is done.

    Raises:
        ValueError: a limit or a capacity below 1, another clock, an executor that is not ``Serial``, or a part whose state cannot take
            in new rows.
    """
    if settings.limit < 1:
        raise ValueError(f"limit is {settings.limit}: rows in flight, at least 1")
    if settings.clock not in CLOCKS:
        raise ValueError(f"clock is {settings.clock!r}: 'wall' (seconds) or 'rounds'")
    if settings.capacity is not None and settings.capacity < 1:
        raise ValueError(f"capacity is {settings.capacity}: tokens of a row, or None to grow as needed")
    if not isinstance(decoder.executor, Serial):
        raise ValueError(
            f"serve runs its rows in one lane and the executor is {decoder.executor}: build with Serial()"
        )
    for draft in getattr(decoder.draft, "drafts", (decoder.draft,)):
        name = getattr(draft, "name", type(draft).__name__)
        model = getattr(draft, "model", None)
        if not hasattr(draft, "join") or not (model is None or hasattr(model.cache(1, 1), "join")):
            raise ValueError(
                f"draft {name!r} cannot take in rows on the way (there is no join): use drafts.Model, NGram or a function, or "
                "generate() a fixed batch"
            )
    if not hasattr(decoder.target.cache(1, 1), "join"):
        raise ValueError(
            f"the target {decoder.target!r} cannot take in rows on the way (its cache has no join): use a plain HFModel"
        )


@dataclass(eq=False)
class _Open:
    """A request in flight."""

    request: Request
    started: float
    ids: list[int]
    stats: Stats
    first_token: float = 0.0


class Server:
    """The running lane, and the requests in it.

    Attributes:
        lane, drafting: the two halves of the rows in flight. time: of the stream's clock.
    """

    def __init__(self, decoder: Decoder, requests: Iterable[Request], settings: Settings):
        self.decoder, self.settings, self.selection = decoder, settings, decoder.begin(settings.limit)
        self.source = enumerate(requests)
        self.next: tuple[int, Request] | None = None
        self.lane: Lane | None = None
        self.drafting = Drafting(decoder)
        self.limits = Limits(torch.zeros(64, dtype=torch.long))
        self.open: dict[int, _Open] = {}
        self.seeds, self.rounds, self.began = torch.zeros(0, dtype=torch.long), 0.0, perf_counter()
        self.spare: Any = None  # the target's cache for `limit` rows, while nobody is in it
        if settings.capacity is not None:
            whole = decoder.target.cache(settings.limit, settings.capacity)
            self.spare = whole.select(torch.arange(0))

    @property
    def time(self) -> float:
        return self.rounds if self.settings.clock == "rounds" else perf_counter() - self.began

    @torch.inference_mode()  # as a decorator it is off between the steps, in the consumer's code
    def run(self) -> Iterator[Finished]:
        """Everything, in the order in which requests finish."""
        while True:
            arrived = self._arrived()
            if arrived:
                yield from self._admit(arrived)
            if self.lane:
                yield from self._round(self.lane)
            elif self._peek() is None:
                return
            elif not arrived:
                self._wait()

    # -- arrivals ------------------------------------------------------------------------------------------------------

    def _peek(self) -> tuple[int, Request] | None:
        """The next request; no more than one is taken ahead."""
        if self.next is None:
            self.next = next(self.source, None)
            if self.next is not None and not isinstance(self.next[1], Request):
                index, wrong = self.next
                raise TypeError(f"request {index} is a {type(wrong).__name__}: give Request(prompt, ...)")
        return self.next

    def _arrived(self) -> list[tuple[int, Request]]:
        """Requests that are due, as many as there is room for; one that is listed before an earlier one holds it up."""
        out: list[tuple[int, Request]] = []
        while len(self.open) + len(out) < self.settings.limit:
            one = self._peek()
            if one is None or one[1].arrival > self.time:
                break
            out.append(one)
            self.next = None
        return out

    def _wait(self) -> None:
        """Nobody is in flight: until the next request is due."""
        assert self.next is not None
        arrival = self.next[1].arrival
        if self.settings.clock == "rounds":
            self.rounds = arrival
        else:
            sleep(max(arrival - self.time, 0))

    def _admit(self, arrived: list[tuple[int, Request]]) -> Iterator[Finished]:
        """Prefill new rows as a lane of their own, and let it join the running one."""
        started, began = self.time, perf_counter()
        contexts, own = zip(*(self._prepared(index, request) for index, request in arrived))
        for index, request in arrived:
            self.open[index] = _Open(request, started, [], Stats())
        lane = Lane(
            self.decoder, joined(contexts, self.settings.capacity), Philox(torch.cat(own)), self.selection
        )
        running = self.lane.cache if self.lane else self.spare
        if hasattr(running, "beside"):  # pages: joining them later copies nothing
            lane.cache = running.beside(len(contexts), max(context.tokens.shape[1] for context in contexts))
        drafting = Drafting(self.decoder)
        round = lane.prefill(self.limits)
        drafting.start(lane.context, lane.cache)
        round.seconds["prefill"] = perf_counter() - began  # type: ignore[index]
        drafting.observe(round)
        self._settle(lane, drafting, round, began)
        for index, _ in arrived:
            self.open[index].first_token = self.time
        if lane:
            self._join(lane, drafting)
        yield from self._finished(round)

    def _prepared(self, index: int, request: Request) -> tuple[Context, Tensor]:
        """A row of its own and its seed.

        Raises:
            ValueError: a request that cannot be served, with its number.
        """
        decoder, settings = self.decoder, self.settings
        try:
            rows = decoder._rows(request.prompt)
            if len(rows) > 1:
                raise ValueError(f"prompt holds {len(rows)} prompts: make a Request of each")
            context, limits = decoder._prepare(
                rows, [request.max_new_tokens], settings.eos_token_id, settings.stop_strings, ()
            )
        except (TypeError, ValueError) as error:
            what = str(error).replace("prompt 0", "its prompt").replace(" for row 0", "")
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
        self.limits = replace(limits, max_length=known, reasons=self.limits.reasons)
        return replace(context, request=torch.tensor([index])), self._seed(index, request)

    def _seed(self, index: int, request: Request) -> Tensor:
        """``[1]``: that of ``generate(prompt, seed=request.seed)``, or of row ``index`` of a batch with the stream's seed."""
        if request.seed is not None or self.settings.seed is None:
            return seeds(request.seed, 1)
        if index >= len(self.seeds):
            self.seeds = seeds(self.settings.seed, max(64, 2 * index))
        return self.seeds[index : index + 1]

    def _join(self, lane: Lane, drafting: Drafting) -> None:
        """The rows of ``lane`` go on with the running ones, after them."""
        if not self.lane:
            if self.spare is not None:
                lane.cache, self.spare = self.spare.join(lane.cache), None
            self.lane, self.drafting = lane, drafting
        else:
            running, draft = self.lane, self.drafting.draft
            running.context = joined([running.context, lane.context])
            running.rng = Philox(torch.cat([running.rng.seed, lane.rng.seed]))  # type: ignore[attr-defined]
            running.cache = running.cache.join(lane.cache)
            self.drafting.state = draft.join(self.drafting.state, drafting.state)  # type: ignore[attr-defined]
        if hasattr(self.drafting.draft, "follow"):
            self.drafting.state = self.drafting.draft.follow(self.drafting.state, self.lane.cache)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _round(self, lane: Lane) -> Iterator[Finished]:
        """One round of the rows in flight, as the serial executor runs it."""
        began = perf_counter()
        lane.choose()
        budget = lane.budget(self.limits)
        arm = None if lane.choice is None else lane.choice.arm
        drafted = self.drafting.propose(lane.context, budget, lane.rng, arm)
        round = lane.verify(self.limits, drafted, budget)
        self.drafting.observe(round)
        self.rounds += 1
        self._settle(lane, self.drafting, round, began)
        if not lane:
            self.lane = None
            if self.settings.capacity is not None:
                self.spare = lane.cache.select(torch.arange(0))
        yield from self._finished(round)

    def _settle(self, lane: Lane, drafting: Drafting, round: Round, began: float) -> None:
        stay = lane.settle(round)
        if stay is not None and lane:
            drafting.select(stay, lane.cache)
        round.seconds["total"] = perf_counter() - began  # type: ignore[index]
        record, new = Record.of(round), round.verdict.tokens.tolist()
        for b, index in enumerate(record.request):
            one = self.open[index]
            one.ids += new[b][: record.kept[b]]
            one.stats._add(record, b)
        if self.settings.on_round is not None:
            self.settings.on_round(round)

    def _finished(self, round: Round) -> Iterator[Finished]:
        time, tokenizer = self.time, getattr(self.decoder.target, "tokenizer", None)
        for index in sorted(round.context.request[round.finished].tolist()):
            one = self.open.pop(index)
            yield Finished(
                request=one.request,
                index=index,
                ids=one.ids,
                text=tokenizer.decode(one.ids, skip_special_tokens=True) if tokenizer else None,
                finish=self.limits.reasons.pop(index),
                stats=one.stats,
                arrived=one.request.arrival,
                started=one.started,
                first_token=one.first_token,
                finished=time,
            )


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
